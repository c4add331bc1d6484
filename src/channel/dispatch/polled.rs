//! What the last poll of a channel has found.

use std::cell::Cell;
use std::ffi::c_int;
use std::ptr::NonNull;

use crate::base::ffi;
use crate::channel::error::{TransportError, TransportResult};

pub(in crate::channel) struct CqPoller {
    pub(super) batch: Polled,
    pub(super) poll_cq: PollCq,
    pub(super) queue: *mut ffi::ibv_cq,
    /// The last poll's value, if a [shortcut](super::fast_path) left it to [`Core::settle_rest`](crate::channel::core::Core::settle_rest). Otherwise 0.
    pub(super) rest: Cell<c_int>,
}

impl CqPoller {
    /// With `of_loop`, it polls nothing.
    ///
    /// # Safety
    ///
    /// The completion queue is live.
    pub(in crate::channel) unsafe fn new(queue: *mut ffi::ibv_cq, of_loop: bool) -> Self {
        // SAFETY: the queue is live, by the caller's contract.
        let poll_cq = if of_loop { poll_nothing } else { unsafe { poll_cq_of(queue) } };
        Self { batch: Polled::new(), poll_cq, queue, rest: Cell::new(0) }
    }

    #[inline]
    pub(in crate::channel) fn is_empty(&self) -> bool {
        self.batch.is_empty()
    }

    /// Returns true also if the last poll has failed.
    #[inline]
    pub(in crate::channel) fn has_rest(&self) -> bool {
        self.rest.get() != 0 || !self.is_empty()
    }
}

pub(crate) const BATCH: usize = 16;

/// `poll_cq` in `struct ibv_context_ops`.
pub(crate) type PollCq = unsafe extern "C" fn(*mut ffi::ibv_cq, c_int, *mut ffi::ibv_wc) -> c_int;

/// The last poll's completions.
///
/// A provider may leave fields unwritten, so all entries are initialised at the start. No reference to one exists while
/// a poll writes.
pub(crate) struct Polled {
    /// `BATCH` entries, which it owns.
    entries: NonNull<ffi::ibv_wc>,
    /// The first that was not taken, or `end`.
    next: Cell<NonNull<ffi::ibv_wc>>,
    end: Cell<NonNull<ffi::ibv_wc>>,
}

impl Polled {
    pub(crate) fn new() -> Self {
        let entries = Box::new([ffi::ibv_wc::default(); BATCH]);
        let entries = NonNull::from(Box::leak(entries)).cast();
        Self { entries, next: Cell::new(entries), end: Cell::new(entries) }
    }

    pub(crate) fn entries(&self) -> *mut ffi::ibv_wc {
        self.entries.as_ptr()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.next.get() == self.end.get()
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        // SAFETY: both point into the entries or to their end, and `next` is never behind `end`.
        unsafe { self.end.get().offset_from_unsigned(self.next.get()) }
    }

    pub(crate) fn head(&self) -> *const ffi::ibv_wc {
        self.next.get().as_ptr()
    }

    /// Returns the completions that were not taken.
    ///
    /// # Safety
    ///
    /// Nothing writes to the entries while the reference exists.
    #[inline]
    pub(in crate::channel) unsafe fn rest(&self) -> &[ffi::ibv_wc] {
        // SAFETY: the entries from `next` to `end` are initialised. The caller guarantees that nothing writes to them.
        unsafe { std::slice::from_raw_parts(self.head(), self.len()) }
    }

    /// Takes completions.
    ///
    /// # Safety
    ///
    /// The batch has as many.
    #[inline]
    pub(crate) unsafe fn advance_by(&self, count: usize) {
        // SAFETY: the caller guarantees that the batch has as many, so this is at most `end`.
        self.next.set(unsafe { self.next.get().add(count) });
    }

    /// Keeps these entries, which a poll has written.
    #[inline]
    pub(crate) fn keep(&self, first: usize, end: usize) {
        assert!(first <= end && end <= BATCH);
        // SAFETY: both are at most `BATCH`, as asserted.
        unsafe {
            self.next.set(self.entries.add(first));
            self.end.set(self.entries.add(end));
        }
    }

    /// Overwrites the first entry, which was taken.
    pub(in crate::channel) fn set_first(&self, completion: ffi::ibv_wc) {
        debug_assert!(self.is_empty() || self.next.get() != self.entries);
        // SAFETY: it points to an entry, and no reference to one exists.
        unsafe { self.entries().write(completion) };
    }
}

impl Drop for Polled {
    fn drop(&mut self) {
        // SAFETY: `new` made it from a box of this type, and nothing uses the entries any more.
        drop(unsafe { Box::from_raw(self.entries.as_ptr().cast::<[ffi::ibv_wc; BATCH]>()) });
    }
}

// SAFETY: the batch owns the entries, and nothing in them is tied to a thread.
unsafe impl Send for Polled {}

/// Returns the provider's `poll_cq`.
///
/// # Safety
///
/// The completion queue is live.
pub(crate) unsafe fn poll_cq_of(queue: *mut ffi::ibv_cq) -> PollCq {
    // SAFETY: the queue is live, by the caller's contract, and so is its context.
    let poll_cq = unsafe { (*(*queue).context).ops.poll_cq };
    // libibverbs sets every operation before it returns the context.
    poll_cq.expect("libibverbs sets it")
}

/// Leaves polling to the [`Loop`](crate::Loop).
unsafe extern "C" fn poll_nothing(_: *mut ffi::ibv_cq, _: c_int, _: *mut ffi::ibv_wc) -> c_int {
    0
}

#[inline]
pub(crate) fn count(found: c_int) -> TransportResult<usize> {
    match usize::try_from(found) {
        Ok(found) if found <= BATCH => Ok(found),
        _ => Err(poll_failed(found)),
    }
}

#[cold]
fn poll_failed(found: c_int) -> TransportError {
    // A provider that returns more than there is room for is broken.
    let found = if found > 0 { -libc::EIO } else { found };
    ffi::failed("ibv_poll_cq", found).into()
}
