//! The actions of a random program within a scope.

use std::mem::forget;

use ibverbs::channel::ScopedPendingWork;
use ibverbs::{Scope, TransportError, memory::MemorySliceMut};
use proptest::prelude::*;

use super::channels::{Ask, Books, late, soon};
use super::world::Outcome;

/// The size of a buffer, and the number of buffers.
pub(crate) const SLOT: usize = 16;
pub(crate) const SLOTS: usize = 6;

/// One step. Its operation is picked among those in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Send,
    Receive,
    Poll(prop::sample::Index),
    SpinPoll(prop::sample::Index),
    Wait(prop::sample::Index),
    Drop(prop::sample::Index),
    Forget(prop::sample::Index),
    /// Polls or state changes fail, so that the scope has to stop the channel.
    Disturb {
        poll: bool,
        times: u32,
    },
}

type Work<'scope, 'buf> = ScopedPendingWork<'scope, MemorySliceMut<'buf, u8>>;

/// One side of the scope.
pub(crate) struct Hand<'scope, 'env, 'buf> {
    side: usize,
    scope: &'scope Scope<'scope, 'env>,
    free: Vec<MemorySliceMut<'buf, u8>>,
    /// Operations in flight, and whether their results were seen.
    flying: Vec<(Work<'scope, 'buf>, Ask, bool)>,
    /// Operations in flight whose results nobody will ask for.
    left: Vec<Ask>,
}

impl<'scope, 'env, 'buf: 'scope> Hand<'scope, 'env, 'buf> {
    pub(crate) fn new(
        side: usize,
        scope: &'scope Scope<'scope, 'env>,
        free: impl Iterator<Item = MemorySliceMut<'buf, u8>>,
    ) -> Self {
        Self { side, scope, free: free.collect(), flying: vec![], left: vec![] }
    }

    /// Whether nothing is in flight, as far as the program can know.
    pub(crate) fn is_empty(&self) -> bool {
        self.flying.is_empty() && self.left.is_empty()
    }

    /// Whether the scope can end without stopping the channel.
    pub(crate) fn all_due(&self, books: &Books) -> bool {
        let flying = self.flying.iter().map(|(_, ask, _)| ask);
        !books.troubled && flying.chain(&self.left).all(|&ask| books.is_due(self.side, ask))
    }

    /// Waits for everything that was not abandoned.
    pub(crate) fn finish(&mut self, books: &mut Books) -> Outcome {
        while !self.flying.is_empty() {
            self.wait(0, books)?;
        }
        Ok(())
    }

    pub(crate) fn step(&mut self, step: Step, books: &mut Books) -> Outcome {
        let count = self.flying.len();
        match step {
            Step::Send => self.send(books),
            Step::Receive => self.receive(books),
            Step::Disturb { .. } => unreachable!("that is up to the device"),
            _ if count == 0 => Ok(()),
            Step::Poll(at) => self.poll(at.index(count), books),
            Step::SpinPoll(at) => self.spin_poll(at.index(count), books),
            Step::Wait(at) => self.wait(at.index(count), books),
            Step::Drop(at) => {
                let (work, ask, _) = self.flying.swap_remove(at.index(count));
                self.left.push(ask);
                drop(work);
                Ok(())
            }
            Step::Forget(at) => {
                let (work, ask, _) = self.flying.swap_remove(at.index(count));
                self.left.push(ask);
                forget(work);
                Ok(())
            }
        }
    }

    /// If nothing could be posted, the buffer is not available until the scope ends.
    fn refused(&self, error: TransportError, room: bool, books: &Books) -> Outcome {
        let full = error == TransportError::QueueFull;
        prop_assert!(if full { !room } else { books.troubled }, "{error}");
        Ok(())
    }

    fn send(&mut self, books: &mut Books) -> Outcome {
        let Some(mut buffer) = self.free.pop() else { return Ok(()) };
        let ask = books.message(self.side, &mut buffer);
        let room = self.scope.can_post_send();
        match self.scope.post_send(buffer) {
            Ok(work) => {
                prop_assert!(room);
                self.flying.push((work, ask, false));
                Ok(())
            }
            Err(error) => {
                drop(books.sent[self.side].pop());
                self.refused(error, room, books)
            }
        }
    }

    fn receive(&mut self, books: &mut Books) -> Outcome {
        let Some(buffer) = self.free.pop() else { return Ok(()) };
        let room = self.scope.can_post_receive();
        match self.scope.post_receive(buffer) {
            Ok(work) => {
                prop_assert!(room);
                self.flying.push((work, books.receive(self.side), false));
                Ok(())
            }
            Err(error) => self.refused(error, room, books),
        }
    }

    fn poll(&mut self, at: usize, books: &mut Books) -> Outcome {
        let (work, ask, seen) = &mut self.flying[at];
        match work.poll() {
            None => prop_assert!(!*seen, "{ask:?} had ended"),
            // Its buffer is compared when it is waited for.
            Some(Ok(_)) => *seen = true,
            Some(Err(error)) => prop_assert!(books.troubled, "{ask:?}: {error}"),
        }
        Ok(())
    }

    fn spin_poll(&mut self, at: usize, books: &mut Books) -> Outcome {
        let (work, ask, seen) = &mut self.flying[at];
        // An operation that may never end stops the channel, which this avoids.
        if !books.is_due(self.side, *ask) || books.troubled {
            return Ok(());
        }
        prop_assert!(work.spin_poll().is_ok(), "{ask:?} was due");
        *seen = true;
        Ok(())
    }

    fn wait(&mut self, at: usize, books: &mut Books) -> Outcome {
        let (work, ask, seen) = self.flying.swap_remove(at);
        let due = seen || (books.is_due(self.side, ask) && !books.troubled);
        let deadline = if due { late() } else { soon() };
        match work.wait_until(deadline) {
            Ok((buffer, success)) => {
                books.ended(self.side, ask, Ok(success), &buffer)?;
                self.free.push(buffer);
                Ok(())
            }
            Err(error) => {
                prop_assert!(!seen, "{ask:?} had ended: {error}");
                books.ended(self.side, ask, Err(error), &[])
            }
        }
    }
}
