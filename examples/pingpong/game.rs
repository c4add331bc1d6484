//! The rounds of the game, and the order of sending.

use std::ops::{Range, RangeBounds};
use std::time::{Duration, Instant};

use ibverbs::{
    CompletionQueue, ErrorKind, MemoryRegion, QueuePair, SendWorkRequest, WorkCompletion,
};

use super::messages::{Messages, compare};
use super::options::Options;
use super::{PATIENCE, Result};

/// The `wr_id` of sends; a receive's is the number of its slot in `target`.
const SEND: u64 = u64::MAX;

pub(crate) struct Game<'a, 'res> {
    pub(crate) options: &'a Options,
    pub(crate) queue: &'a CompletionQueue<'res>,
    pub(crate) source: &'a mut MemoryRegion<'res, u8>,
    pub(crate) target: &'a mut MemoryRegion<'res, u8>,
    pub(crate) queue_pair: QueuePair<'res>,
    pub(crate) messages: Messages,
}

impl Game<'_, '_> {
    /// Plays all rounds; returns how long that took.
    pub(crate) fn play(&mut self) -> Result<Duration> {
        let (rounds, serves) = (self.options.iterations, self.options.server.is_none());
        let (mut posted, mut sent, mut received) = (0, 0, 0);
        // The server sends each message back from where it was received.
        let (mut to_return, mut returning) = (None, None);
        let mut completions = [WorkCompletion::default(); 2];

        let start = Instant::now();
        while sent < rounds || received < rounds {
            if posted == sent {
                // The last send is complete, so its memory may be used again.
                if let Some(slot) = returning.take() {
                    self.post_receive(slot)?;
                }
                if let Some(slot) = to_return.take() {
                    self.post_return(slot)?;
                    returning = Some(slot);
                    posted += 1;
                } else if !serves && posted == received && posted < rounds {
                    self.post_message(posted)?;
                    posted += 1;
                }
            }
            for completion in self.next(&mut completions)? {
                let success = completion.result()?;
                if completion.wr_id() == SEND {
                    sent += 1;
                    continue;
                }
                let slot = usize::try_from(completion.wr_id())?;
                if success.byte_len() as usize != self.options.size {
                    return Err(format!("a message of {} bytes came", success.byte_len()).into());
                }
                self.check(slot, received)?;
                received += 1;
                if !serves {
                    self.post_receive(slot)?;
                } else if to_return.replace(slot).is_some() {
                    return Err("the client does not wait for its messages to come back".into());
                }
            }
        }
        Ok(start.elapsed())
    }

    /// Polls, or sleeps, until something has completed.
    fn next<'c>(&self, room: &'c mut [WorkCompletion]) -> Result<&'c [WorkCompletion]> {
        let silence = || format!("nothing heard from the peer for {PATIENCE:?}").into();
        if self.options.events {
            return self.queue.wait_until(room, Instant::now() + PATIENCE).map_err(|error| {
                match error.kind() {
                    ErrorKind::TimedOut => silence(),
                    _ => error.into(),
                }
            });
        }
        let start = Instant::now();
        loop {
            let found = self.queue.poll(room)?.len();
            if found > 0 {
                return Ok(&room[..found]);
            }
            if start.elapsed() > PATIENCE {
                return Err(silence());
            }
            std::hint::spin_loop();
        }
    }

    fn range(&self, slot: usize) -> Range<usize> {
        slot * self.options.size..(slot + 1) * self.options.size
    }

    pub(crate) fn post_receive(&mut self, slot: usize) -> Result<()> {
        let range = self.range(slot);
        if self.options.check {
            // Clear the slot, so that old bytes cannot pass for a new message.
            self.target.slice_mut(range.clone())?.fill(0);
        }
        // SAFETY: a slot is used again only when its completion was polled; the memory outlives the
        // queue pair.
        unsafe { self.queue_pair.post_receive(self.target, range, slot as u64)? };
        Ok(())
    }

    /// Sends the client's message of this round.
    fn post_message(&mut self, round: u64) -> Result<()> {
        if self.options.check {
            self.source.copy_from_slice(self.messages.of_round(round));
        }
        // SAFETY: the next message is written only when this one's completion was polled; the
        // memory outlives the queue pair.
        unsafe { post_send(&mut self.queue_pair, self.source, .., self.options.new_send)? };
        Ok(())
    }

    /// Sends a message back.
    fn post_return(&mut self, slot: usize) -> Result<()> {
        let range = self.range(slot);
        // SAFETY: the slot is posted for a receive only when this send's completion was polled; the
        // memory outlives the queue pair.
        unsafe { post_send(&mut self.queue_pair, self.target, range, self.options.new_send)? };
        Ok(())
    }

    fn check(&mut self, slot: usize, round: u64) -> Result<()> {
        if self.options.check {
            let message = self.target.slice(self.range(slot))?;
            let checked = match self.options.server {
                Some(_) => compare(&message, self.messages.of_round(round)),
                None => self.messages.check_client(&message, round),
            };
            checked.map_err(|error| format!("message {round}: {error}"))?;
        }
        Ok(())
    }
}

/// Posts a send by the plain or the extended interface.
///
/// # Safety
///
/// That of [`QueuePair::post_send`].
unsafe fn post_send(
    queue_pair: &mut QueuePair<'_>,
    region: &MemoryRegion<'_, u8>,
    range: impl RangeBounds<usize>,
    new_send: bool,
) -> ibverbs::Result<()> {
    if !new_send {
        // SAFETY: the caller keeps the contract.
        return unsafe { queue_pair.post_send(region, range, SEND) };
    }
    let data = region.gather_element(range)?;
    // SAFETY: the caller keeps the contract.
    unsafe { queue_pair.batch(|batch| batch.add(SendWorkRequest::new(&[data]), SEND)) }
}
