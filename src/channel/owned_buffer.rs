//! Buffers that an operation owns while it is in flight, and the room for them.
//!
//! A buffer is moved into the entry of its operation's slot when it is posted. It leaves the entry when
//! the operation has ended: to the caller, or by being dropped. No allocation: an entry has room for
//! any type that [`OwnedBuffer`] admits, with a pointer to a table that knows the type.

use std::any::TypeId;
use std::cell::{Cell, UnsafeCell};
use std::fmt;
use std::mem::{self, MaybeUninit};
use std::ptr;
use std::sync::Arc;

use super::core::Core;
use super::slot::NO_SLOT;
use crate::memory::ScatterBuffer;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Registered memory that an operation can own while it is in flight: see
/// [`Channel::post_owned`](crate::Channel::post_owned).
///
/// | type | what it is |
/// |---|---|
/// | [`PooledBuffer`](crate::PooledBuffer) | a chunk of a [`BufferPool`](crate::BufferPool) |
/// | [`SharedMemoryRange`](crate::SharedMemoryRange) | a range of an `Arc<SharedMemoryRegion<'static, T>>` |
/// | `Box<MemoryRegion<'static, T>>` | all of a region |
/// | `()` | no bytes |
///
/// The trait is sealed: only types of this crate have it.
///
/// # Safety
///
/// What [`GatherBuffer`](crate::GatherBuffer) and [`ScatterBuffer`] promise while the value lives holds on every thread,
/// and for any time. So nothing but a drop of the value ends it, neither a lifetime nor a thread. It has at most four
/// words.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a buffer that an operation can own",
    label = "a buffer without borrowed parts is needed here, such as a `PooledBuffer`",
    note = "in a scope, operations borrow their buffers: `channel.scope(|scope| scope.post(..))`"
)]
pub unsafe trait OwnedBuffer: ScatterBuffer<Kept = Self> + Send + 'static {}

// SAFETY: there is no memory.
unsafe impl OwnedBuffer for () {}

/// The most words that a buffer may have.
const WORDS: usize = 4;

/// A buffer of any type, or none.
pub(super) struct HeldBuffer {
    storage: UnsafeCell<MaybeUninit<[usize; WORDS]>>,
    /// `Some`: the storage holds a buffer of this type.
    held: Cell<Option<&'static BufferType>>,
}

struct BufferType {
    id: fn() -> TypeId,
    /// # Safety
    ///
    /// The pointer is to a value of this type, which is not used any more.
    drop: unsafe fn(*mut ()),
}

/// # Safety
///
/// The pointer is to a `B`, which is not used any more.
unsafe fn drop_buffer<B>(buffer: *mut ()) {
    // SAFETY: the caller vouches for it.
    unsafe { buffer.cast::<B>().drop_in_place() }
}

#[cold]
fn is_of_type<B: OwnedBuffer>(held: &BufferType) -> bool {
    (held.id)() == TypeId::of::<B>()
}

struct TypeOf<B>(B);

impl<B: OwnedBuffer> TypeOf<B> {
    const BUFFER_TYPE: BufferType = BufferType { id: TypeId::of::<B>, drop: drop_buffer::<B> };
}

impl HeldBuffer {
    pub(super) fn new() -> Self {
        Self { storage: UnsafeCell::new(MaybeUninit::uninit()), held: Cell::new(None) }
    }

    /// Stores a buffer. One that is there already is leaked.
    #[inline]
    pub(super) fn put<B: OwnedBuffer>(&self, buffer: B) {
        const {
            assert!(size_of::<B>() <= size_of::<[usize; WORDS]>());
            assert!(align_of::<B>() <= align_of::<usize>());
        }
        debug_assert!(self.held.get().is_none());
        // SAFETY: there is room for a `B`, as checked above, and nothing else is there.
        unsafe { self.storage.get().cast::<B>().write(buffer) };
        self.held.set(Some(&TypeOf::<B>::BUFFER_TYPE));
    }

    /// Whether it holds a buffer of this type.
    #[inline]
    pub(super) fn holds<B: OwnedBuffer>(&self) -> bool {
        // The same pointer: the same type, without a call. Another pointer may be of the same type too.
        let held = self.held.get();
        held.map_or(ptr::null(), ptr::from_ref) == ptr::from_ref(&TypeOf::<B>::BUFFER_TYPE)
            || held.is_some_and(is_of_type::<B>)
    }

    /// Takes the buffer out, if there is one of this type.
    #[inline]
    pub(super) fn take<B: OwnedBuffer>(&self) -> Option<B> {
        // SAFETY: it holds a `B`.
        self.holds::<B>().then(|| unsafe { self.take_unchecked() })
    }

    /// Takes the buffer out.
    ///
    /// # Safety
    ///
    /// It [holds](Self::holds) a buffer of this type.
    #[inline]
    pub(super) unsafe fn take_unchecked<B: OwnedBuffer>(&self) -> B {
        debug_assert!(self.holds::<B>());
        self.held.set(None);
        // SAFETY: the storage held a `B` until now, as the caller vouches.
        unsafe { self.storage.get().cast::<B>().read() }
    }

    /// Drops the buffer, if there is one.
    #[cold]
    pub(super) fn clear(&self) {
        if let Some(held) = self.held.take() {
            // SAFETY: the storage holds a value of this type, and from now on it no longer does.
            unsafe { (held.drop)(self.storage.get().cast()) };
        }
    }

    /// Leaks the buffer, if there is one.
    pub(super) fn leak(&self) {
        self.held.set(None);
    }
}

impl Drop for HeldBuffer {
    fn drop(&mut self) {
        self.clear();
    }
}

// SAFETY: what it holds is an `OwnedBuffer`, which is `Send`.
unsafe impl Send for HeldBuffer {}

/// A buffer of a type that is not known statically, for a [`Loop`](crate::Loop) whose buffers are of several types.
pub struct AnyBuffer(HeldBuffer);

// SAFETY: a shared reference gives access to nothing: the buffer is taken out and dropped by value.
unsafe impl Sync for AnyBuffer {}

impl AnyBuffer {
    #[inline(always)]
    pub(super) fn new<B: OwnedBuffer>(buffer: B) -> Self {
        let held = HeldBuffer::new();
        held.put(buffer);
        Self(held)
    }

    /// Returns the buffer if it is of this type, and `self` otherwise.
    ///
    /// # Errors
    ///
    /// The buffer is of another type.
    pub fn downcast<B: OwnedBuffer>(self) -> Result<B, Self> {
        match self.0.take() {
            Some(buffer) => Ok(buffer),
            None => Err(self),
        }
    }
}

impl fmt::Debug for AnyBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyBuffer").finish_non_exhaustive()
    }
}

/// The part of a slot that only operations with an owned buffer use.
pub(super) struct Entry {
    pub(super) buffer: HeldBuffer,
    /// The request number of a handle that was dropped, until that was noticed. If it equals the slot's, nobody will ask
    /// for the result any more. Handles may be dropped on any thread.
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

    /// To be called, on any thread, when the handle of the request with this number is dropped. The entry is that of its
    /// slot.
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
        // Whoever takes it from the list sees the mark, since both exchange this: a load would not do.
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
