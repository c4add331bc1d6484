//! The completions that a channel polled last.

use std::cell::Cell;
use std::ffi::c_int;
use std::ptr::NonNull;

use crate::ffi;

/// The most completions that are polled at a time.
pub(in crate::channel) const BATCH: usize = 16;

/// `poll_cq` in `struct ibv_context_ops`.
pub(in crate::channel) type PollCq =
    unsafe extern "C" fn(*mut ffi::ibv_cq, c_int, *mut ffi::ibv_wc) -> c_int;

/// See the [module](self).
///
/// The entries are initialised once, because a provider need not write the fields that a completion
/// leaves undefined. They are only accessed through pointers and short-lived references, none of which
/// is held while a poll writes to them.
pub(in crate::channel) struct Polled {
    /// Owned: `BATCH` completions.
    entries: NonNull<ffi::ibv_wc>,
    /// The first completion that was not taken yet. It points to an entry, or is `end`.
    next: Cell<NonNull<ffi::ibv_wc>>,
    /// The end of the completions that were polled and are not taken. It points to an entry or to the end of the
    /// entries.
    end: Cell<NonNull<ffi::ibv_wc>>,
}

impl Polled {
    pub(in crate::channel) fn new() -> Self {
        let entries = Box::new([ffi::ibv_wc::default(); BATCH]);
        let entries = NonNull::from(Box::leak(entries)).cast();
        Self { entries, next: Cell::new(entries), end: Cell::new(entries) }
    }

    /// A pointer to the first of the `BATCH` entries.
    #[inline]
    pub(in crate::channel) fn entries(&self) -> *mut ffi::ibv_wc {
        self.entries.as_ptr()
    }

    /// Whether all completions were taken.
    #[inline]
    pub(in crate::channel) fn is_empty(&self) -> bool {
        self.next.get() == self.end.get()
    }

    /// How many completions were not taken yet.
    #[inline]
    pub(in crate::channel) fn len(&self) -> usize {
        // SAFETY: both point to entries, or to their end, and `next` is not behind `end`.
        unsafe { self.end.get().offset_from_unsigned(self.next.get()) }
    }

    /// A pointer to the first completion that was not taken yet, if the batch is not empty. In any case
    /// it points into the entries or to their end.
    #[inline]
    pub(in crate::channel) fn head(&self) -> *const ffi::ibv_wc {
        self.next.get().as_ptr()
    }

    /// The completions that were not taken yet.
    ///
    /// # Safety
    ///
    /// Nothing writes to the entries while the reference exists.
    #[inline]
    pub(in crate::channel) unsafe fn rest(&self) -> &[ffi::ibv_wc] {
        // SAFETY: from `next` to `end` there are initialised entries; the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts(self.head(), self.len()) }
    }

    /// Marks this number of completions as taken.
    ///
    /// # Safety
    ///
    /// The batch has as many.
    #[inline]
    pub(in crate::channel) unsafe fn advance_by(&self, count: usize) {
        // SAFETY: the caller vouches for it.
        self.next.set(unsafe { self.next.get().add(count) });
    }

    /// From now on, the entries from `first` to `end`, which a poll has written, are those that were not taken.
    #[inline]
    pub(in crate::channel) fn keep(&self, first: usize, end: usize) {
        assert!(first <= end && end <= BATCH);
        // SAFETY: both are at most the number of entries.
        unsafe {
            self.next.set(self.entries.add(first));
            self.end.set(self.entries.add(end));
        }
    }

    /// Overwrites the first entry, which was taken.
    pub(in crate::channel) fn set_first(&self, completion: ffi::ibv_wc) {
        debug_assert!(self.is_empty() || self.next.get() != self.entries);
        // SAFETY: it points to an entry, and no reference to one is held.
        unsafe { self.entries().write(completion) };
    }
}

impl Drop for Polled {
    fn drop(&mut self) {
        // SAFETY: it came from a box of this type, in `new`, and nothing uses the entries any more.
        drop(unsafe { Box::from_raw(self.entries.as_ptr().cast::<[ffi::ibv_wc; BATCH]>()) });
    }
}

// SAFETY: the entries are owned, and nothing in them is tied to a thread.
unsafe impl Send for Polled {}
