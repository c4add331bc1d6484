//! Registered memory that a peer may use too, and completions.

use std::error::Error;
use std::ops::Range;
use std::time::Instant;

use ibverbs::memory::RawMemoryRegion;
use ibverbs::{AccessFlags, CompletionQueue, ProtectionDomain, WorkCompletion};

use crate::two_machines::PATIENCE;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The region is dropped before the bytes. They are touched only through copies, and only when no request
/// that is known to be under way uses them.
pub(crate) struct Memory<'pd> {
    pub(crate) region: RawMemoryRegion<'pd>,
    length: usize,
    _words: Vec<u64>,
}

impl<'pd> Memory<'pd> {
    pub(crate) fn new(domain: &'pd ProtectionDomain<'pd>, length: usize) -> Result<Self> {
        let access = AccessFlags::LOCAL_WRITE
            | AccessFlags::REMOTE_READ
            | AccessFlags::REMOTE_WRITE
            | AccessFlags::REMOTE_ATOMIC;
        let mut words = vec![0_u64; length.div_ceil(8)];
        // SAFETY: the vector is neither dropped nor resized before the region is dropped, and no reference to
        // its elements exists.
        let region =
            unsafe { RawMemoryRegion::new(domain, words.as_mut_ptr().cast(), length, access)? };
        Ok(Self { region, length, _words: words })
    }

    pub(crate) fn read(&self, range: Range<usize>) -> Vec<u8> {
        assert!(range.start <= range.end && range.end <= self.length);
        let mut bytes = vec![0; range.len()];
        // SAFETY: the range is within the memory, and no request uses it now.
        unsafe {
            self.region
                .as_ptr()
                .add(range.start)
                .copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len());
        }
        bytes
    }

    pub(crate) fn write(&mut self, start: usize, bytes: &[u8]) {
        assert!(start + bytes.len() <= self.length);
        // SAFETY: as above.
        unsafe {
            self.region.as_ptr().add(start).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }
}

/// The error of a wait for a completion that did not come.
pub(crate) const SILENCE: &str = "nothing heard from the peer";

/// Waits for the next completion, of success or failure.
pub(crate) fn next(queue: &CompletionQueue<'_>) -> Result<WorkCompletion> {
    let start = Instant::now();
    let mut room = [WorkCompletion::default()];
    loop {
        if let [completion] = queue.poll(&mut room)? {
            return Ok(*completion);
        }
        if start.elapsed() > PATIENCE / 4 {
            return Err(SILENCE.into());
        }
    }
}

/// Messages of random bytes, each different from the others, except for a zero at the start of each page.
pub(crate) struct Messages {
    template: Vec<u8>,
    message: Vec<u8>,
}

/// All page sizes are multiples of this.
pub(crate) const PAGE: usize = 4096;

impl Messages {
    /// The number of different messages, after which the sequence repeats.
    const PERIOD: usize = 251;

    pub(crate) fn new(size: usize) -> Self {
        let byte = |index: u64| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
        let template = (1..=(size + Self::PERIOD) as u64).map(byte).collect();
        Self { template, message: vec![0; size] }
    }

    pub(crate) fn get(&mut self, number: u64) -> &[u8] {
        let (start, size) = ((number % Self::PERIOD as u64) as usize, self.message.len());
        self.message.copy_from_slice(&self.template[start..start + size]);
        self.message.iter_mut().step_by(PAGE).for_each(|byte| *byte = 0);
        &self.message
    }
}

/// Says which byte is the first wrong one.
pub(crate) fn compare(what: &str, bytes: &[u8], right: &[u8]) -> Result<()> {
    if bytes == right {
        return Ok(());
    }
    let differs = |&(_, (byte, right)): &(usize, (&u8, &u8))| byte != right;
    Err(match bytes.iter().zip(right).enumerate().find(differs) {
        Some((index, (byte, right))) => {
            format!("{what}: byte {index} is {byte:#04x}, not {right:#04x}")
        }
        None => format!("{what}: {} bytes, not {}", bytes.len(), right.len()),
    }
    .into())
}
