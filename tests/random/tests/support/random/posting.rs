//! Posting to queue pairs, and the outcomes.

use ibverbs::{
    ErrorKind, QueuePair, ReadWorkRequest, RemoteMemoryRegion, SendWorkRequest, WorkCompletion,
    WriteWorkRequest,
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::Bed;
use super::books::{Kind, Posted};
use super::world::{BLOCK, LEN, Outcome, State, World};

impl<B: Bed> World<'_, B> {
    /// Posts by `post`. Returns whether that succeeded, as it must if the connection works.
    fn post(
        &mut self,
        end: usize,
        region: usize,
        kind: Kind,
        signaled: bool,
        post: impl FnOnce(
            &mut QueuePair<'static>,
            &mut ibverbs::MemoryRegion<'static, u8>,
            u64,
        ) -> ibverbs::Result<()>,
    ) -> Result<bool, TestCaseError> {
        let wr_id = self.next;
        self.next += 1;
        let at = &mut self.ends[end];
        let memory = self.regions[region].memory.as_mut().expect("it is there");
        let Some(State::Connected(pair)) = &mut at.pair else { unreachable!("it is connected") };
        let receive = matches!(kind, Kind::Receive { .. });
        let depth = if receive { pair.max_recv_wr() } else { pair.max_send_wr() };
        let result = post(pair, memory, wr_id);
        let queue = if receive { &mut at.books.receives } else { &mut at.books.sends };
        if let Err(error) = result {
            let full = error.kind() == ErrorKind::QueueFull && queue.posted.len() >= depth as usize;
            prop_assert!(full || at.troubled, "{error}");
            return Ok(false);
        }
        let region_at = &mut self.regions[region];
        match kind {
            Kind::Send { .. } | Kind::Write => region_at.readers += 1,
            Kind::Receive { .. } | Kind::Read { .. } => region_at.written = true,
        }
        queue.posted.push_back(Posted { wr_id, signaled, region, kind });
        self.owners.insert(wr_id, (end, receive));
        Ok(true)
    }

    pub(crate) fn receive(&mut self, end: usize, region: usize, short: bool) -> Outcome {
        let len = if short { LEN / 8 } else { LEN };
        let kind = Kind::Receive { nth: self.ends[end].books.posted_receives };
        // SAFETY: the region is neither touched nor dropped until the books say that the request has ended.
        let post = |pair: &mut QueuePair<'_>, memory: &mut _, wr_id| unsafe {
            pair.post_receive(memory, ..len, wr_id)
        };
        if self.post(end, region, kind, true, post)? {
            self.ends[end].books.posted_receives += 1;
            if short {
                // Long enough for any message, or not.
                self.trouble(end);
            }
        }
        Ok(())
    }

    /// New bytes for a region that is sent from, unless it is in flight.
    fn refill(&mut self, region: usize) {
        let seed = self.next as u8;
        let region = &mut self.regions[region];
        if !region.is_busy() {
            let memory = region.memory.as_mut().expect("it is there");
            for (at, byte) in (0_u8..).zip(memory.iter_mut()) {
                *byte = seed.wrapping_mul(37).wrapping_add(at);
            }
            region.content.copy_from_slice(memory);
        }
    }

    pub(crate) fn send(
        &mut self,
        end: usize,
        region: usize,
        len: usize,
        signaled: bool,
    ) -> Outcome {
        self.refill(region);
        let message = self.regions[region].content[..len].to_vec();
        let kind = Kind::Send { nth: self.ends[end].books.sent };
        let posted = self.post(end, region, kind, signaled, |pair, memory, wr_id| {
            let elements = [memory.gather_element(..len)?];
            let request = SendWorkRequest::new(&elements);
            let request = if signaled { request } else { request.unsignaled() };
            // SAFETY: the region is neither written nor dropped until the books say that the request has
            // ended.
            unsafe { pair.post(request, wr_id) }
        })?;
        if posted {
            self.ends[end].books.sent += 1;
            if self.ends[end ^ 1].connected {
                self.ends[end ^ 1].books.incoming.push_back(message);
            }
        }
        Ok(())
    }

    /// A block of the peer's memory. If it was deregistered, the device notices.
    fn block(&self, end: usize, block: usize) -> Option<RemoteMemoryRegion> {
        let target = self.ends[end ^ 1].target.as_ref()?;
        Some(target.remote_range(block * BLOCK..(block + 1) * BLOCK).unwrap())
    }

    pub(crate) fn write(
        &mut self,
        end: usize,
        region: usize,
        block: usize,
        signaled: bool,
    ) -> Outcome {
        let Some(remote) = self.block(end, block) else { return Ok(()) };
        self.refill(region);
        let bytes = self.regions[region].content[..BLOCK].to_vec();
        let posted = self.post(end, region, Kind::Write, signaled, |pair, memory, wr_id| {
            let elements = [memory.gather_element(..BLOCK)?];
            let request = WriteWorkRequest::new(&elements, remote);
            let request = if signaled { request } else { request.unsignaled() };
            // SAFETY: as in `send`.
            unsafe { pair.post(request, wr_id) }
        })?;
        if posted {
            self.ends[end ^ 1].written[block] = Some(bytes);
        }
        Ok(())
    }

    pub(crate) fn read(&mut self, end: usize, region: usize, block: usize) -> Outcome {
        let Some(remote) = self.block(end, block) else { return Ok(()) };
        // The device executes the read after all writes that were posted before it.
        let kind = Kind::Read { expected: self.ends[end ^ 1].written[block].clone() };
        self.post(end, region, kind, true, |pair, memory, wr_id| {
            let mut elements = [memory.scatter_element(..BLOCK)?];
            let request = ReadWorkRequest::new(&mut elements, remote);
            // SAFETY: as in `receive`.
            unsafe { pair.post(request, wr_id) }
        })?;
        Ok(())
    }

    /// Checks a completion: it belongs to a request, comes in order, and has the right content.
    pub(crate) fn complete(&mut self, completion: &WorkCompletion) -> Outcome {
        let wr_id = completion.wr_id();
        let Some((end, receive)) = self.owners.remove(&wr_id) else {
            // A completion that a reset has left in the queue, as some devices do. Each comes once.
            prop_assert!(self.lost.remove(&wr_id), "{completion:?} is of nothing");
            return Ok(());
        };
        let at = &mut self.ends[end];
        prop_assert_eq!(completion.queue_pair_number(), at.number);
        let queue = if receive { &mut at.books.receives } else { &mut at.books.sends };
        let ended = queue.end(completion, at.troubled)?;
        if !ended.success {
            // The failure does not tell which of the writes took effect.
            self.ends[end ^ 1].written = Default::default();
        }
        for posted in &ended.requests {
            if posted.wr_id != wr_id {
                self.owners.remove(&posted.wr_id);
            }
        }
        let last = ended.requests.len() - 1;
        for (number, posted) in ended.requests.iter().enumerate() {
            let expected = match &posted.kind {
                _ if number == last && !ended.success => None,
                Kind::Receive { .. } => {
                    let message = self.ends[end].books.incoming.pop_front();
                    prop_assert!(message.is_some(), "{completion:?} of nothing that was sent");
                    let bytes = completion.result().unwrap().byte_len() as usize;
                    prop_assert_eq!(Some(bytes), message.as_ref().map(Vec::len));
                    message
                }
                Kind::Read { expected } => expected.clone(),
                Kind::Send { .. } | Kind::Write => None,
            };
            self.release(posted, expected)?;
        }
        Ok(())
    }

    /// The memory is the program's again. If a request had to write it, `expected` is how it must begin, and
    /// the rest must be unchanged.
    fn release(&mut self, posted: &Posted, expected: Option<Vec<u8>>) -> Outcome {
        let region = &mut self.regions[posted.region];
        match posted.kind {
            Kind::Send { .. } | Kind::Write => region.readers -= 1,
            Kind::Receive { .. } | Kind::Read { .. } => region.written = false,
        }
        let Some(memory) = &region.memory else { return Ok(()) };
        if let Some(bytes) = expected {
            region.content[..bytes.len()].copy_from_slice(&bytes);
            prop_assert_eq!(&region.content[..], &memory[..]);
        } else if !region.is_busy() {
            if matches!(posted.kind, Kind::Send { .. } | Kind::Write) {
                prop_assert_eq!(&region.content[..], &memory[..], "the device wrote what it sent");
            }
            region.content.copy_from_slice(memory);
        }
        Ok(())
    }

    /// The queue pair was reset or destroyed: none of its requests is in flight.
    pub(crate) fn lose(&mut self, end: usize) {
        self.trouble(end);
        let at = &mut self.ends[end];
        at.connected = false;
        let books = std::mem::take(&mut at.books);
        self.ends[end ^ 1].written = Default::default();
        for posted in books.sends.posted.iter().chain(&books.receives.posted) {
            self.owners.remove(&posted.wr_id);
            self.lost.insert(posted.wr_id);
            self.release(posted, None).expect("nothing is expected");
        }
    }
}
