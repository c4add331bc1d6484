//! Random programs on two channels: scopes that wait for what they post or do not, fail or panic;
//! work outside of scopes; and channels that are reset, dropped, closed or forgotten in between.

use ibverbs::{ReceiveWorkRequest, SendWorkRequest};
use std::mem::forget;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs::channel::{PendingWork, ScopeError};
use ibverbs::{
    Channel, MemoryRegion, PreparedChannel, ProtectionDomain, TransportError,
    completion::WorkSuccess,
    settings::{AckTimeout, MaxRnrRetries, MinRnrTimer},
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::Bed;
use super::episodes::{Episode, Exit};
use super::operations::How;
use super::scoped::{Hand, SLOT, SLOTS, Step};
use super::world::Outcome;

/// The record of both ends: the operations since they were connected.
#[derive(Debug, Default)]
pub(crate) struct Books {
    /// The messages that each side has sent, in order.
    pub(crate) sent: [Vec<Vec<u8>>; 2],
    /// The number of receives that each side has posted.
    pub(crate) receives: [usize; 2],
    /// The channel was stopped: operations in flight may fail.
    pub(crate) troubled: bool,
    pub(crate) next: u8,
}

/// A request of one side, by its number among those of its kind.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ask {
    Send(usize),
    Receive(usize),
}

impl Books {
    /// Whether it ends without any further operation.
    pub(crate) fn is_due(&self, side: usize, ask: Ask) -> bool {
        match ask {
            Ask::Send(nth) => nth < self.receives[1 - side],
            Ask::Receive(nth) => nth < self.sent[1 - side].len(),
        }
    }

    /// Writes the next message of a side to the beginning of `buffer`.
    pub(crate) fn message(&mut self, side: usize, buffer: &mut [u8]) -> Ask {
        self.next = self.next.wrapping_add(41);
        for (at, byte) in (0_u8..).zip(buffer.iter_mut()) {
            *byte = self.next.wrapping_add(at.wrapping_mul(3));
        }
        self.sent[side].push(buffer.to_vec());
        Ask::Send(self.sent[side].len() - 1)
    }

    pub(crate) fn receive(&mut self, side: usize) -> Ask {
        self.receives[side] += 1;
        Ask::Receive(self.receives[side] - 1)
    }

    /// Checks the result of a request. `bytes` is the buffer of a receive.
    pub(crate) fn ended(
        &mut self,
        side: usize,
        ask: Ask,
        result: Result<WorkSuccess, TransportError>,
        bytes: &[u8],
    ) -> Outcome {
        match (result, ask) {
            (Ok(success), Ask::Receive(nth)) => {
                let message = &self.sent[1 - side].get(nth);
                prop_assert!(message.is_some(), "{success:?} of nothing that was sent");
                let message = &message.expect("it is there")[..];
                prop_assert_eq!(success.byte_len() as usize, message.len());
                prop_assert_eq!(&bytes[..message.len()], message);
            }
            (Ok(success), Ask::Send(_)) => {
                prop_assert!(self.is_due(side, ask), "{success:?} without a receive");
            }
            (Err(TransportError::TimedOut), _) => {
                prop_assert!(self.troubled || !self.is_due(side, ask), "{ask:?} was due");
                self.troubled = true;
            }
            (Err(error), _) => prop_assert!(self.troubled, "{ask:?}: {error}"),
        }
        Ok(())
    }
}

struct Side {
    /// The channel comes before the memory, so that it is dropped first.
    channel: Option<Channel<'static>>,
    pending: Vec<(PendingWork, Ask, usize)>,
    /// Work of earlier connections and channels, which can have no results any more.
    past: Vec<PendingWork>,
    /// Memory for scopes; between scopes, none of it is in flight.
    scoped: MemoryRegion<'static, u8>,
    /// Memory for what is posted outside of scopes: a slot is in use until its work was seen to end.
    loose: MemoryRegion<'static, u8>,
    used: [bool; SLOTS],
    domain: Arc<ProtectionDomain<'static>>,
}

/// Posts what the other side waits for, as far as there is room.
fn balance<'a: 'one + 'two, 'one, 'two>(
    left: &mut Hand<'one, '_, 'a>,
    right: &mut Hand<'two, '_, 'a>,
    books: &mut Books,
) -> Outcome {
    for _ in 0..2 * SLOTS {
        if books.sent[0].len() > books.receives[1] {
            right.step(Step::Receive, books)?;
        }
        if books.sent[1].len() > books.receives[0] {
            left.step(Step::Receive, books)?;
        }
        if books.receives[0] > books.sent[1].len() {
            right.step(Step::Send, books)?;
        }
        if books.receives[1] > books.sent[0].len() {
            left.step(Step::Send, books)?;
        }
    }
    Ok(())
}

/// How long a test waits for what does not come.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_millis(3)
}

/// How long it waits for what does.
pub(crate) fn late() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// The content of a scope's memory between scopes.
const QUIET: u8 = 0xee;

fn prepare(domain: &Arc<ProtectionDomain<'static>>) -> PreparedChannel<'static> {
    Channel::builder(domain)
        .max_send_wr(4)
        .max_recv_wr(4)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .min_rnr_timer(MinRnrTimer::SHORTEST)
        .ack_timeout(AckTimeout::new(16).unwrap())
        .build()
        .unwrap()
}

struct World<'bed, B> {
    sides: [Side; 2],
    /// The number of channels of each side that were forgotten or could not be destroyed, how many regions
    /// were forgotten with them, and how many of them had a queue pair, which may have
    /// been destroyed.
    forgotten: [(u32, u32, u32); 2],
    books: Books,
    bed: &'bed B,
}

/// Runs the whole program.
pub(crate) fn run(episodes: &[Episode], ends: &[How; 2], bed: &impl Bed) -> Outcome {
    let sides = [0, 1].map(|side| {
        let domain = Arc::new(ProtectionDomain::new(Arc::new(bed.open(side))).unwrap());
        let mut scoped = MemoryRegion::new(&domain, SLOT * SLOTS).unwrap();
        scoped.fill(QUIET);
        let loose = MemoryRegion::new(&domain, SLOT * SLOTS).unwrap();
        let (channel, pending) = (None, vec![]);
        Side { channel, pending, past: vec![], scoped, loose, used: [false; SLOTS], domain }
    });
    let mut world = World { sides, forgotten: [(0, 0, 0); 2], books: Books::default(), bed };
    world.connect([0, 1].map(|side| prepare(&world.sides[side].domain)));
    for episode in episodes {
        world.play(episode)?;
        world.the_past_is_past()?;
        for side in &world.sides {
            bed.run();
            prop_assert!(side.scoped.iter().all(|&byte| byte == QUIET), "written after the scope");
        }
    }
    world.end(*ends)
}

impl<B: Bed> World<'_, B> {
    fn connect(&mut self, prepared: [PreparedChannel<'static>; 2]) {
        if self.bed.is_slow() {
            // The numbers of the earlier connection's packets could be those of this one.
            std::thread::sleep(Duration::from_millis(20));
        }
        let endpoints = [1, 0].map(|other: usize| prepared[other].endpoint());
        for ((side, prepared), remote) in self.sides.iter_mut().zip(prepared).zip(endpoints) {
            side.channel = Some(prepared.handshake(remote).unwrap());
        }
        self.books = Books { next: self.books.next, ..Books::default() };
    }

    fn play(&mut self, episode: &Episode) -> Outcome {
        match episode {
            Episode::Scope { steps, exit } => {
                self.scope(steps, *exit)?;
                self.bed.calm();
                self.only_loose_work_is_in_flight()?;
                // The device would be seen to use memory that is freed.
                self.sides.iter_mut().for_each(|side| side.scoped.fill(QUIET));
                Ok(())
            }
            Episode::Send { side, slot } => self.send(*side, *slot),
            Episode::Receive { side, slot } => self.receive(*side, *slot),
            Episode::Poll { side, which } => self.poll(*side, which),
            Episode::Wait { side, which } => self.wait(*side, which),
            Episode::Abandon { side, which } => {
                let pending = &mut self.sides[*side].pending;
                if !pending.is_empty() {
                    // The operation continues, and its slot stays in use.
                    drop(pending.swap_remove(which.index(pending.len())));
                }
                Ok(())
            }
            Episode::Reset => {
                let again = [0, 1].map(|side| {
                    // The queue pair may have been destroyed, if nothing else ended the operation.
                    let channel = self.channel(side);
                    let closed = channel.as_raw().is_null();
                    let again = channel.reset();
                    assert_eq!(again.is_err(), closed, "{again:?}");
                    again.unwrap_or_else(|_| prepare(&self.sides[side].domain))
                });
                self.all_is_free();
                self.connect(again);
                Ok(())
            }
            Episode::Replace { how } => {
                self.part(*how)?;
                let prepared = [0, 1].map(|side| prepare(&self.sides[side].domain));
                self.connect(prepared);
                Ok(())
            }
        }
    }

    fn channel(&mut self, side: usize) -> Channel<'static> {
        self.sides[side].channel.take().expect("it is there between episodes")
    }

    /// No channel exists that could use any memory.
    fn all_is_free(&mut self) {
        for side in &mut self.sides {
            side.past.extend(side.pending.drain(..).map(|(work, ..)| work));
            side.used = [false; SLOTS];
        }
    }

    /// Earlier work does not take results of later work.
    fn the_past_is_past(&mut self) -> Outcome {
        for side in &mut self.sides {
            let channel = side.channel.as_mut().expect("it is there between episodes");
            for work in &mut side.past {
                let result = work.poll(channel);
                let gone = matches!(
                    result,
                    Some(Err(TransportError::Stopped | TransportError::UnknownWork))
                );
                prop_assert!(gone, "{result:?} of {work:?}");
            }
        }
        Ok(())
    }

    /// Checks that the operations of a scope have ended with the scope.
    fn only_loose_work_is_in_flight(&self) -> Outcome {
        for side in &self.sides {
            let channel = side.channel.as_ref().expect("it is there between episodes");
            if channel.as_raw().is_null() {
                continue; // nothing is left that could be in flight
            }
            if let Some(count) = self.bed.in_flight(channel.number()) {
                let loose = side.used.iter().filter(|&&used| used).count();
                prop_assert!(
                    count as usize <= loose,
                    "{count} in flight, and {loose} not of a scope"
                );
            }
        }
        Ok(())
    }

    /// Two nested scopes, one for each channel.
    fn scope(&mut self, steps: &[(usize, Step)], exit: Exit) -> Outcome {
        let Self { sides: [one, two], books, bed, .. } = self;
        let slots = [&mut one.scoped, &mut two.scoped]
            .map(|region| region.slice_mut(..).unwrap().chunks(SLOT).unwrap());
        let [slots_of_one, slots_of_two] = slots;
        let channels = [&mut one.channel, &mut two.channel];
        let [one, two] = channels.map(|channel| channel.as_mut().expect("it is there"));
        let (mut outcome, mut gave_up) = (Ok(()), false);
        let ended = catch_unwind(AssertUnwindSafe(|| {
            one.scope_until(late(), |s| {
                let mut left = Hand::new(0, s, slots_of_one);
                let inner = two.scope_until(late(), |s| {
                    let mut right = Hand::new(1, s, slots_of_two);
                    for (side, step) in steps {
                        outcome = if let Step::Disturb { poll, times } = step {
                            bed.disturb(if *poll { "poll_cq" } else { "modify_qp" }, *times);
                            books.troubled = true;
                            Ok(())
                        } else if *side == 0 {
                            left.step(*step, books)
                        } else {
                            right.step(*step, books)
                        };
                        if outcome.is_err() {
                            return Err(TransportError::Stopped);
                        }
                    }
                    match exit {
                        Exit::Success | Exit::Manual => {
                            outcome = balance(&mut left, &mut right, books);
                            if matches!(exit, Exit::Manual) && outcome.is_ok() {
                                outcome = left.finish(books).and_then(|()| right.finish(books));
                            }
                            if left.all_due(books) && right.all_due(books) {
                                return Ok(());
                            }
                            // The scope would wait for what never comes.
                            gave_up = true;
                            books.troubled |= !(left.is_empty() && right.is_empty());
                            Err(TransportError::QueueFull)
                        }
                        Exit::Failure => {
                            books.troubled |= !(left.is_empty() && right.is_empty());
                            Err(TransportError::QueueFull)
                        }
                        Exit::Panic => {
                            books.troubled |= !(left.is_empty() && right.is_empty());
                            // `resume_unwind` does not print the text that `panic!` does.
                            resume_unwind(Box::new("oh"))
                        }
                    }
                });
                inner.map_err(|error| match error {
                    ScopeError::Closure(error) => error,
                    ScopeError::Exit(error) => error,
                })
            })
        }));
        outcome?;
        let exit = if gave_up { Exit::Failure } else { exit };
        match (ended, exit) {
            (Err(panic), Exit::Panic) => prop_assert_eq!(panic.downcast_ref(), Some(&"oh")),
            (Ok(Err(ScopeError::Closure(error))), Exit::Failure) => {
                prop_assert_eq!(error, TransportError::QueueFull);
            }
            (Ok(Ok(())), Exit::Success | Exit::Manual) => {}
            (Ok(Err(error)), Exit::Success | Exit::Manual) => {
                prop_assert!(self.books.troubled, "{error:?}");
            }
            (ended, exit) => return Err(TestCaseError::fail(format!("{ended:?}, {exit:?}"))),
        }
        Ok(())
    }

    fn slot(&mut self, side: usize, slot: usize) -> Option<std::ops::Range<usize>> {
        (!self.sides[side].used[slot]).then_some(slot * SLOT..(slot + 1) * SLOT)
    }

    fn send(&mut self, side: usize, slot: usize) -> Outcome {
        let Some(range) = self.slot(side, slot) else { return Ok(()) };
        let at = &mut self.sides[side];
        let ask = self.books.message(side, &mut at.loose[range.clone()]);
        let slice = at.loose.slice(range).unwrap();
        // SAFETY: the slot is not touched before the work, or the channel, has ended.
        match unsafe { at.channel.as_mut().unwrap().post_unpolled(SendWorkRequest::new(slice)) } {
            Ok(work) => {
                at.used[slot] = true;
                at.pending.push((work, ask, slot));
            }
            Err(error) => {
                drop(self.books.sent[side].pop());
                let full = error == TransportError::QueueFull;
                prop_assert!(full || self.books.troubled, "{error}");
            }
        }
        Ok(())
    }

    fn receive(&mut self, side: usize, slot: usize) -> Outcome {
        let Some(range) = self.slot(side, slot) else { return Ok(()) };
        let at = &mut self.sides[side];
        let mut slice = at.loose.slice_mut(range).unwrap();
        // SAFETY: as in `send`.
        match unsafe {
            at.channel.as_mut().unwrap().post_unpolled(ReceiveWorkRequest::new(&mut slice))
        } {
            Ok(work) => {
                at.used[slot] = true;
                at.pending.push((work, self.books.receive(side), slot));
            }
            Err(error) => {
                let full = error == TransportError::QueueFull;
                prop_assert!(full || self.books.troubled, "{error}");
            }
        }
        Ok(())
    }

    fn poll(&mut self, side: usize, which: &prop::sample::Index) -> Outcome {
        let at = &mut self.sides[side];
        if at.pending.is_empty() {
            return Ok(());
        }
        let number = which.index(at.pending.len());
        let (work, ask, slot) = &mut at.pending[number];
        let (ask, slot) = (*ask, *slot);
        let Some(result) = work.poll(at.channel.as_mut().unwrap()) else { return Ok(()) };
        drop(at.pending.swap_remove(number));
        at.used[slot] = false;
        self.books.ended(side, ask, result, &at.loose[slot * SLOT..(slot + 1) * SLOT])
    }

    fn wait(&mut self, side: usize, which: &prop::sample::Index) -> Outcome {
        let at = &mut self.sides[side];
        if at.pending.is_empty() {
            return Ok(());
        }
        let (work, ask, slot) = at.pending.swap_remove(which.index(at.pending.len()));
        let due = self.books.is_due(side, ask) && !self.books.troubled;
        let deadline = if due { late() } else { soon() };
        let result = work.wait_until(at.channel.as_mut().unwrap(), deadline);
        at.used[slot] = false;
        self.books.ended(side, ask, result, &at.loose[slot * SLOT..(slot + 1) * SLOT])
    }

    /// Both channels end.
    fn part(&mut self, how: [How; 2]) -> Outcome {
        for (side, how) in how.into_iter().enumerate() {
            let channel = self.channel(side);
            match how {
                How::Drop => drop(channel),
                // A queue pair that had to be destroyed is not destroyed again.
                How::Fail if self.bed.can_fail() && !channel.as_raw().is_null() => {
                    self.bed.disturb("destroy_qp", 1);
                    prop_assert!(channel.close().is_err());
                    self.bed.calm();
                    self.forgotten[side].0 += 1;
                    self.forgotten[side].2 += 1;
                }
                How::Close | How::Fail => prop_assert!(channel.close().is_ok()),
                How::Forget => {
                    self.forgotten[side].0 += 1;
                    self.forgotten[side].1 += 1;
                    self.forgotten[side].2 += u32::from(!channel.as_raw().is_null());
                    forget(channel);
                    // The operations of a forgotten channel stay in flight without end.
                    let at = &mut self.sides[side];
                    let other = MemoryRegion::new(&at.domain, SLOT * SLOTS).unwrap();
                    forget(std::mem::replace(&mut at.loose, other));
                }
            }
        }
        self.all_is_free();
        Ok(())
    }

    fn end(mut self, how: [How; 2]) -> Outcome {
        self.part(how)?;
        self.bed.run();
        let Self { sides, forgotten, bed, .. } = self;
        drop(sides);
        // Each has a completion queue, took a region with it, and keeps its parents.
        bed.check_end(&forgotten.map(|(channels, regions, pairs)| {
            [channels.min(1), channels.min(1), channels, regions, pairs]
        }))
    }
}
