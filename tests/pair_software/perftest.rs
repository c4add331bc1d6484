//! The peer of perftest's `ib_send_bw`, `ib_write_bw`, `ib_read_bw` and `ib_atomic_bw`.
//!
//! Their buffer has random bytes: those of C's `rand`, with the time of their start as its seed. So what they send,
//! write, or are read from is known here, and checked byte by byte.

use std::time::{SystemTime, UNIX_EPOCH};

use ibverbs::{
    AccessFlags, CompletionQueue, Context, FetchAddWorkRequest, QueuePair, Rc, RemoteMemoryRegion,
    settings::{MaxAckRetries, MaxRnrRetries, MaximumTransferUnit, PacketSequenceNumber},
};

use crate::exchange::{Address, Exchange, Keys};
use crate::memory::{Memory, Messages, Result, compare, next};

/// The version of the exchange that we say, with room for 15 characters and a null.
const VERSION: &[u8; 16] = b"6.06\0\0\0\0\0\0\0\0\0\0\0\0";

/// The versions of Debian 12 and 13, which exchange the same.
const VERSIONS: [&str; 2] = ["6.06", "6.24"];

/// perftest's unit of buffers, its distance of atomic operations in it, and what it adds.
const CYCLE: usize = 4096;
const STRIDE: usize = 64;
const ADDED: u64 = 1;

/// Reads and atomics under way.
const READS: u8 = 16;

/// Requests of ours under way.
const WINDOW: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Test {
    Send,
    Write,
    Read,
    FetchAdd,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    pub(crate) test: Test,
    pub(crate) size: usize,
    pub(crate) count: usize,
}

/// The bytes of a buffer of perftest, from its start.
struct RandomBytes(Vec<u8>);

impl RandomBytes {
    /// Finds the buffer of which `sample` are the bytes from `offset` on, by the times at which its program
    /// may have started.
    fn find(sample: &[u8], offset: usize, length: usize) -> Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        let sample = &sample[..sample.len().min(64)];
        for time in (now - 300..=now + 2).rev() {
            // SAFETY: `srand` and `rand` of the C library; no other thread of this program calls them.
            let mut bytes = unsafe {
                libc::srand(time as u32);
                std::iter::repeat_with(|| libc::rand() as u8)
            };
            let mut all: Vec<u8> = bytes.by_ref().take(offset + sample.len()).collect();
            if all[offset..] == *sample {
                all.extend(bytes.take(length - all.len().min(length)));
                return Ok(Self(all));
            }
        }
        Err(format!("the bytes {sample:02x?} are not of perftest's buffer").into())
    }
}

struct Session<'a> {
    transfer: Transfer,
    queue: &'a CompletionQueue<'a>,
    memory: Memory<'a>,
    messages: Messages,
    queue_pair: QueuePair<'a>,
    remote: Keys,
}

impl Transfer {
    pub(crate) fn program(&self) -> &'static str {
        match self.test {
            Test::Send => "ib_send_bw",
            Test::Write => "ib_write_bw",
            Test::Read => "ib_read_bw",
            Test::FetchAdd => "ib_atomic_bw",
        }
    }

    pub(crate) fn arguments(&self) -> String {
        let kind = match self.test {
            Test::FetchAdd => "-A FETCH_AND_ADD".into(),
            _ => format!("-s {}", self.size),
        };
        format!("-F {kind} -n {} -Q 1", self.count)
    }

    /// The peer's unit of buffers: it sends from the first, and lends out the second.
    fn unit(&self) -> usize {
        self.size.max(CYCLE)
    }

    pub(crate) fn play(
        &self,
        context: &Context<'_>,
        gid_index: u8,
        mut peer: Exchange,
        finish: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let version = peer.swap(VERSION)?;
        let version = String::from_utf8_lossy(&version);
        let version = version.trim_end_matches('\0');
        if !VERSIONS.contains(&version) {
            return Err(format!("perftest speaks version {version}, none of {VERSIONS:?}").into());
        }
        peer.swap(&(CYCLE as u32).to_be_bytes())?;
        peer.swap(&(STRIDE as u32).to_be_bytes())?;
        let mtu = peer.swap(b"3\0")?;
        if mtu != b"3\0" {
            return Err(format!("{mtu:?} instead of the MTU of 1024 bytes").into());
        }

        let domain = context.alloc_pd()?;
        let queue = context.create_cq(2 * WINDOW as u32)?;
        let memory = Memory::new(&domain, WINDOW * self.unit())?;
        let access =
            AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        let prepared = domain
            .create_qp(&queue, &queue, Rc)
            .max_send_wr(WINDOW as u32)
            .max_recv_wr(WINDOW as u32)
            .gid_index(gid_index)
            .access(access)
            .path_mtu(MaximumTransferUnit::Mtu1024)
            .max_dest_rd_atomic(READS)
            .send_psn(PacketSequenceNumber::new(0xff_fff8)?)
            .max_ack_retries(MaxAckRetries::new(7)?)
            .max_rnr_retries(MaxRnrRetries::UNLIMITED);
        // The other side tells how many reads it answers, only after the queue pair has its number.
        let prepared = prepared.max_rd_atomic(READS).build()?;
        let endpoint = prepared.endpoint();
        let local = Keys {
            address: Address {
                number: endpoint.num(),
                psn: prepared.send_psn(),
                gid: endpoint.gid(),
            },
            reads: READS,
            rkey: memory.region.rkey(),
            start: memory.region.as_ptr() as u64,
        };
        let wire = local.to_perftest();
        let remote = Keys::from_perftest(&peer.swap(&wire)?)?;
        let prepared = prepared.receive_psn(remote.address.psn);
        let endpoint = remote.address.endpoint()?.with_max_dest_rd_atomic(remote.reads.min(READS));
        let queue_pair = prepared.handshake(endpoint).map_err(|e| e.error)?;
        let queue = &queue;
        let messages = Messages::new(self.size);
        let mut session = Session { transfer: *self, queue, memory, messages, queue_pair, remote };
        for _ in 0..2 {
            peer.swap(&wire)?;
        }

        // The receiver of sends is ready before this, the requester of anything else has finished.
        let sends = self.test == Test::Send;
        if sends {
            if !peer.is_client() {
                session.post_receives()?;
            }
            peer.swap(&wire)?;
        }
        match (peer.is_client(), sends) {
            (true, _) => session.request()?,
            (false, true) => session.receive()?,
            (false, false) => {}
        }
        if !sends {
            peer.swap(&wire)?;
            // Size, iterations, and three figures of speed.
            for _ in 0..5 {
                peer.swap(&[0; 8])?;
            }
        }
        if !peer.is_client() {
            session.check_memory()?;
        }
        peer.swap(&wire)?;
        peer.say_done()?;
        finish()
    }
}

impl Session<'_> {
    fn slot(&self, number: usize) -> std::ops::Range<usize> {
        let start = number % WINDOW * self.transfer.unit();
        start..start + self.transfer.size
    }

    /// Makes all requests, with a window of them under way, and checks what they fetch.
    fn request(&mut self) -> Result<()> {
        let Transfer { test, size, count } = self.transfer;
        let mut expected = None;
        let (mut posted, mut complete) = (0, 0);
        while complete < count {
            while posted < count && posted < complete + WINDOW {
                self.post(posted)?;
                posted += 1;
            }
            let completion = next(self.queue)?;
            completion.result()?;
            if completion.wr_id() != complete as u64 {
                return Err(format!("request {} instead of {complete}", completion.wr_id()).into());
            }
            let bytes = self.memory.read(self.slot(complete));
            if matches!(test, Test::Read | Test::FetchAdd) && expected.is_none() {
                let unit = self.transfer.unit();
                expected = Some(RandomBytes::find(&bytes, unit, unit + size)?.0.split_off(unit));
            }
            let what = format!("request {complete}");
            match (test, &expected) {
                (Test::Read, Some(expected)) => compare(&what, &bytes, expected)?,
                (Test::FetchAdd, Some(expected)) => {
                    let first = u64::from_ne_bytes(expected[..8].try_into()?);
                    let right = first.wrapping_add(ADDED * complete as u64).to_ne_bytes();
                    compare(&what, &bytes, &right)?;
                }
                _ => {}
            }
            complete += 1;
        }
        Ok(())
    }

    fn post(&mut self, number: usize) -> Result<()> {
        let Transfer { test, size, .. } = self.transfer;
        let (range, id) = (self.slot(number), number as u64);
        match test {
            Test::Send | Test::Write => self.memory.write(range.start, self.messages.get(id)),
            Test::Read | Test::FetchAdd => self.memory.write(range.start, &vec![0xee; size]),
        }
        let remote = RemoteMemoryRegion::new(self.remote.start, size as u64, self.remote.rkey)?;
        let (region, queue_pair) = (&mut self.memory.region, &mut self.queue_pair);
        // SAFETY: a place of the memory is used again only when the completion of its last request was polled,
        // and the memory outlives the queue pair.
        unsafe {
            match test {
                Test::Send => queue_pair.post_send(region, range, id)?,
                Test::Write => queue_pair.post_write(region, range, remote, id)?,
                Test::Read => queue_pair.post_read(region, range, remote, id)?,
                Test::FetchAdd => {
                    let result = region.scatter_element(range)?;
                    queue_pair.post(FetchAddWorkRequest::new(result, remote, ADDED), id)?;
                }
            }
        }
        Ok(())
    }

    fn post_receive(&mut self, number: usize) -> Result<()> {
        let range = self.slot(number);
        self.memory.write(range.start, &vec![0xee; range.len()]);
        // SAFETY: as in `post`.
        unsafe { self.queue_pair.post_receive(&mut self.memory.region, range, number as u64)? };
        Ok(())
    }

    fn post_receives(&mut self) -> Result<()> {
        (0..WINDOW).try_for_each(|number| self.post_receive(number))
    }

    fn receive(&mut self) -> Result<()> {
        let Transfer { size, count, .. } = self.transfer;
        let mut expected = None;
        for number in 0..count {
            let completion = next(self.queue)?;
            let received = completion.result()?;
            if (completion.wr_id(), received.byte_len() as usize) != (number as u64, size) {
                return Err(format!("receive {number}: {received:?}").into());
            }
            let bytes = self.memory.read(self.slot(number));
            if expected.is_none() {
                expected = Some(RandomBytes::find(&bytes, 0, size)?);
            }
            if let Some(RandomBytes(expected)) = &expected {
                compare(&format!("message {number}"), &bytes, expected)?;
            }
            self.post_receive(number + WINDOW)?;
        }
        Ok(())
    }

    /// Checks what the peer has done to the memory.
    fn check_memory(&self) -> Result<()> {
        let Transfer { test, size, count } = self.transfer;
        let bytes = self.memory.read(0..self.transfer.unit());
        match test {
            Test::Write => {
                let RandomBytes(expected) = RandomBytes::find(&bytes, 0, size)?;
                compare("written", &bytes[..size], &expected)
            }
            Test::FetchAdd => {
                let (places, rest) = bytes.as_chunks::<8>();
                let sum: u64 = places.iter().map(|place| u64::from_ne_bytes(*place)).sum();
                let used = places.iter().step_by(STRIDE / 8).any(|place| *place != [0; 8]);
                if sum != ADDED * count as u64 || !used || !rest.is_empty() {
                    return Err(format!("{sum} was added, not {}", ADDED * count as u64).into());
                }
                Ok(())
            }
            Test::Send | Test::Read => Ok(()),
        }
    }
}
