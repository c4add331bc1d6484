//! What a slot keeps for the handle of an operation that owns its buffer, and the list of handles that were dropped.

use std::cell::Cell;
use std::mem;
use std::sync::Arc;

use super::core::Core;
use super::owned_buffer::HeldBuffer;
use super::slot::NO_SLOT;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// The part of a slot that only operations with an owned buffer use.
pub(super) struct Entry {
    pub(super) buffer: HeldBuffer,
    /// The request number of a handle that was dropped, until that was noticed. If it equals the slot's, the result
    /// will not be asked for. Handles may be dropped on any thread.
    dropped: AtomicU64,
    /// Whether the slot is in the list of those whose handles were dropped, and the index of the next one.
    is_listed: AtomicBool,
    next_dropped: AtomicU32,
    /// The reference to the core that a handle of an operation in this slot has. While there is no handle it is
    /// kept here, so that operations do not change the count. `None` before the first.
    reference: Cell<Option<Arc<Core>>>,
}

/// What the operations with an owned buffer of one channel share.
pub(super) struct Owned {
    /// The list of slots whose handles were dropped: the index of the first.
    first_dropped: AtomicU32,
}

/// No request has this number.
const NO_REQUEST: u64 = u64::MAX;

/// Whether the generation of the first number is the later one. They may have wrapped around between the two.
fn is_later(number: u64, than: u64) -> bool {
    let [number, than] = [number, than].map(|number| (number >> 32) as u32);
    number.wrapping_sub(than).cast_signed() > 0
}

impl Entry {
    pub(super) fn new() -> Self {
        Self {
            buffer: HeldBuffer::new(),
            dropped: AtomicU64::new(NO_REQUEST),
            is_listed: AtomicBool::new(false),
            next_dropped: AtomicU32::new(NO_SLOT),
            reference: Cell::new(None),
        }
    }

    /// The reference to the core for the handle of an operation.
    #[inline]
    pub(super) fn take_reference(&self, core: &Arc<Core>) -> Arc<Core> {
        self.reference.take().unwrap_or_else(|| core.clone())
    }

    /// Drops the reference that is kept for handles.
    pub(super) fn drop_reference(&self) {
        self.reference.set(None);
    }

    /// Takes the reference of a handle back, which is given up.
    #[inline]
    pub(super) fn put_reference(&self, core: Option<Arc<Core>>) {
        // There is none: the handle has it.
        mem::forget(self.reference.replace(core));
    }

    /// Whether the handle of the request with this number was dropped since the last call.
    pub(super) fn take_dropped(&self, wr_id: u64) -> bool {
        let dropped = &self.dropped;
        dropped.compare_exchange(wr_id, NO_REQUEST, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

impl Owned {
    pub(super) fn new() -> Self {
        Self { first_dropped: AtomicU32::new(NO_SLOT) }
    }

    /// The handle of the request with this number was dropped, on any thread. `entry` is that of its slot.
    pub(super) fn mark_dropped(&self, entry: &Entry, wr_id: u64) {
        // A late handle of an earlier request of the slot does not hide that of a later one.
        let mut other = entry.dropped.load(Ordering::Acquire);
        while other == NO_REQUEST || is_later(wr_id, other) {
            let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
            match entry.dropped.compare_exchange_weak(other, wr_id, success, failure) {
                Ok(_) => break,
                Err(now) => other = now,
            }
        }
        // The thread that takes it from the list sees the mark, since both exchange this: a load would not do.
        if entry.is_listed.swap(true, Ordering::AcqRel) {
            return;
        }
        let index = wr_id as u32;
        let mut first = self.first_dropped.load(Ordering::Relaxed);
        loop {
            entry.next_dropped.store(first, Ordering::Relaxed);
            let pushed = self.first_dropped.compare_exchange_weak(
                first,
                index,
                Ordering::Release,
                Ordering::Relaxed,
            );
            match pushed {
                Ok(_) => return,
                Err(other) => first = other,
            }
        }
    }

    /// Whether a handle was dropped since `take_dropped` was last called.
    #[inline]
    pub(super) fn any_dropped(&self) -> bool {
        self.first_dropped.load(Ordering::Relaxed) != NO_SLOT
    }

    /// Calls `f` for each slot of which a handle was dropped since the last call. `entry` finds that of an index.
    pub(super) fn take_dropped<'a>(
        &self,
        entry: impl Fn(usize) -> Option<&'a Entry>,
        mut f: impl FnMut(usize),
    ) {
        let mut index = self.first_dropped.swap(NO_SLOT, Ordering::Acquire) as usize;
        while let Some(entry) = entry(index) {
            // Before it may be in the list again.
            let next = entry.next_dropped.load(Ordering::Relaxed);
            entry.is_listed.swap(false, Ordering::AcqRel);
            f(index);
            index = next as usize;
        }
    }
}
