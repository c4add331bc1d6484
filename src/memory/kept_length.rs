//! The length that a buffer keeps beside its memory.

use std::ptr::NonNull;

use crate::debug::debug;

/// How many bytes of a buffer are in use: they are sent, and a receive sets the number when it has ended. A
/// [`PooledBuffer`](crate::PooledBuffer) keeps one, and so may a buffer of the program's own:
/// [`GatherBuffer::kept_length`](crate::memory::GatherBuffer::kept_length).
pub struct KeptLength {
    len: u32,
    capacity: u32,
}

impl KeptLength {
    /// The length of an empty buffer with room for `capacity` bytes.
    pub const fn new(capacity: u32) -> Self {
        Self { len: 0, capacity }
    }

    /// The number of bytes in use.
    #[inline(always)]
    pub fn get(&self) -> u32 {
        self.len
    }

    /// The most that it can be.
    #[inline(always)]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Sets it, to the capacity if `len` is more.
    #[inline(always)]
    pub fn set(&mut self, len: u32) {
        self.len = len;
        if len > self.capacity {
            self.fill();
        }
    }

    /// A branch that is not taken costs less than the smaller of two numbers.
    #[cold]
    #[inline(never)]
    fn fill(&mut self) {
        self.len = self.capacity;
    }

    /// A message of so many bytes has come. Returns how many of them go to the next piece.
    ///
    /// # Safety
    ///
    /// It is that of a buffer that still exists, and nothing else accesses it.
    #[inline(always)]
    pub(crate) unsafe fn receive(this: NonNull<Self>, bytes: usize) -> usize {
        // SAFETY: the caller vouches for it.
        let kept = unsafe { &mut *this.as_ptr() };
        kept.set(u32::try_from(bytes).unwrap_or(u32::MAX));
        bytes - kept.len as usize
    }
}

debug! { KeptLength, self, len: self.len, capacity: self.capacity }
