//! How the objects of a random program end.

use std::mem::forget;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestCaseError;

use super::Bed;
use super::family::Member;
use super::operations::{How, What};
use super::world::{End, Outcome, State, World};

impl<B: Bed> World<'_, B> {
    /// Ends a shared object in one of several ways. It is closed only if this is the last owner. Returns whether
    /// it is held without end.
    fn end_shared<T>(
        &mut self,
        it: Arc<T>,
        member: Member,
        how: How,
        verb: &str,
        close: impl FnOnce(T) -> ibverbs::Result<()>,
    ) -> Result<bool, TestCaseError> {
        let leaked = self.family.is_leaked(member);
        match how {
            How::Forget => {
                forget(it);
                return Ok(true);
            }
            How::Close | How::Fail => {
                let Some(it) = Arc::into_inner(it) else { return Ok(false) };
                let fails = how == How::Fail && self.bed.can_fail() && !leaked;
                if fails {
                    self.bed.disturb(verb, 1);
                }
                let closed = close(it);
                self.bed.calm();
                prop_assert_eq!(closed.is_err(), fails || leaked, "{}: {:?}", verb, closed);
                if fails {
                    self.family.leak(member);
                }
            }
            How::Drop => drop(it),
        }
        Ok(false)
    }
}

impl<B: Bed> World<'_, B> {
    /// Requests that must complete do, and the others are flushed: none stays without completion.
    pub(crate) fn settle(&mut self) -> Outcome {
        self.drain("due, and did not come", |world, at| {
            let (end, peer) = (&world.ends[at], &world.ends[at ^ 1]);
            end.connected && !end.troubled && end.books.is_due(&peer.books)
        })?;
        (0..self.ends.len()).try_for_each(|end| self.fail(end))?;
        self.drain("not flushed", |world, at| {
            let End { pair, books, .. } = &world.ends[at];
            let open = books.receives.posted.iter().chain(&books.sends.posted);
            matches!(pair, Some(State::Connected(_))) && open.into_iter().any(|p| p.signaled)
        })
    }

    /// Ends the objects of one kind that `which` picks.
    pub(crate) fn end_any(&mut self, what: What, which: &Index, how: How) -> Outcome {
        let count = match what {
            What::Context => self.contexts.len(),
            What::Domain => self.domains.len(),
            What::Queue => self.queues.len(),
            What::Region => self.regions.len(),
            What::QueuePair => self.ends.len(),
        };
        if count == 0 { Ok(()) } else { self.end_one(what, which.index(count), how) }
    }

    fn end_one(&mut self, what: What, at: usize, how: How) -> Outcome {
        let (forgotten, member) = match what {
            What::Context => {
                let gone = self.contexts.swap_remove(at);
                // A context that cannot be closed is not a case: libibverbs frees it whatever the kernel says.
                let how = if how == How::Fail { How::Close } else { how };
                let close = ibverbs::Context::close;
                (self.end_shared(gone.it, gone.member, how, "free_context", close)?, gone.member)
            }
            What::Domain => {
                let gone = self.domains.swap_remove(at);
                let close = ibverbs::ProtectionDomain::close;
                (self.end_shared(gone.it, gone.member, how, "dealloc_pd", close)?, gone.member)
            }
            What::Queue => {
                let gone = self.queues.swap_remove(at);
                let close = ibverbs::CompletionQueue::close;
                (self.end_shared(gone.it, gone.member, how, "destroy_cq", close)?, gone.member)
            }
            What::Region => {
                let region = &mut self.regions[at];
                // Ending a region that is in flight would break the contract of posting; forgetting it does
                // not.
                if region.is_busy() && how != How::Forget {
                    return Ok(());
                }
                let member = region.member;
                let fails = how == How::Fail && self.bed.can_fail();
                match (region.memory.take(), how) {
                    (None, _) => return Ok(()),
                    (Some(memory), How::Forget) => forget(memory),
                    (Some(memory), How::Close | How::Fail) => {
                        if fails {
                            self.bed.disturb("dereg_mr", 1);
                        }
                        prop_assert_eq!(memory.close().is_err(), fails);
                        self.bed.calm();
                    }
                    (Some(memory), How::Drop) => drop(memory),
                }
                if fails {
                    self.family.leak(member);
                }
                (how == How::Forget, member)
            }
            What::QueuePair => return self.end_pair(at, how),
        };
        if !forgotten {
            self.family.let_go(member);
        }
        Ok(())
    }

    fn end_pair(&mut self, at: usize, how: How) -> Outcome {
        let end = &mut self.ends[at];
        let Some(pair) = end.pair.take() else { return Ok(()) };
        if how == How::Forget {
            // The queue pair still exists, and its requests complete.
            forget((pair, end.target.take()));
            return Ok(());
        }
        let members = end.members;
        if how == How::Fail && self.bed.can_fail() {
            // The queue pair still exists, and its requests may complete: its memory is never touched again.
            self.bed.disturb("destroy_qp", 1);
            let closed = match pair {
                State::Prepared(pair) => pair.close(),
                State::Connected(pair) => pair.close(),
            };
            self.bed.calm();
            prop_assert!(closed.is_err());
            forget(end.target.take());
            self.family.leak(members[0]);
            return Ok(());
        }
        match (pair, how) {
            (State::Prepared(pair), How::Close | How::Fail) => {
                prop_assert!(pair.into_queue_pair().close().is_ok());
            }
            (State::Connected(pair), How::Close | How::Fail) => prop_assert!(pair.close().is_ok()),
            (pair, _) => drop(pair),
        }
        self.lose(at);
        self.ends[at].target = None;
        members.into_iter().for_each(|member| self.family.let_go(member));
        Ok(())
    }

    /// Ends all remaining objects, in any order, and checks what is live then.
    pub(crate) fn end(mut self, ends: &[(Index, How)]) -> Outcome {
        let kinds = [What::QueuePair, What::Region, What::Queue, What::Domain, What::Context];
        for (number, (which, how)) in ends.iter().enumerate() {
            self.end_any(kinds[(which.index(usize::MAX) + number) % kinds.len()], which, *how)?;
            self.bed.check(&self.family.live())?;
        }
        for at in 0..self.ends.len() {
            self.end_pair(at, How::Drop)?;
        }
        for at in 0..self.regions.len() {
            // A region that is still busy is in flight on a queue pair that was forgotten.
            let how = if self.regions[at].is_busy() { How::Forget } else { How::Drop };
            self.end_one(What::Region, at, how)?;
        }
        while !self.contexts.is_empty() {
            self.end_one(What::Context, 0, How::Close)?;
        }
        while !self.domains.is_empty() {
            self.end_one(What::Domain, 0, How::Close)?;
        }
        while !self.queues.is_empty() {
            self.end_one(What::Queue, 0, How::Close)?;
        }
        self.bed.run();
        self.bed.check_end(&self.family.live())
    }
}
