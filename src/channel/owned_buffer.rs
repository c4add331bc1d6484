//! Buffers that an operation owns while it is in flight, and the room for them.
//!
//! A buffer is moved into the entry of its operation's slot when it is posted. It leaves the entry when
//! the operation has ended: to the caller, or by being dropped. No allocation: an entry has room for
//! any type that [`OwnedBuffer`] admits, with a pointer to a table that knows the type.

use std::any::TypeId;
use std::cell::{Cell, UnsafeCell};
use std::mem::MaybeUninit;
use std::{fmt, ptr};

use crate::memory::ScatterBuffer;

/// Registered memory that an operation can own while it is in flight: see
/// [`Channel::post_owned`](crate::Channel::post_owned).
///
/// | type | what it is |
/// |---|---|
/// | [`PooledBuffer`](crate::PooledBuffer) | a chunk of a [`BufferPool`](crate::BufferPool) |
/// | [`SharedMemoryRange`](crate::pool::SharedMemoryRange) | a range of an `Arc<SharedMemoryRegion<'static, T>>` |
/// | `Box<MemoryRegion<'static, T>>` | all of a region |
/// | `()` | no bytes |
///
/// # Safety
///
/// What [`GatherBuffer`](crate::memory::GatherBuffer) and [`ScatterBuffer`] promise while the value lives holds on every thread,
/// and for any time. So nothing but a drop of the value ends it, neither a lifetime nor a thread. It has at most four
/// words.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a buffer that an operation can own",
    label = "a buffer without borrowed parts is needed here, such as a `PooledBuffer`",
    note = "a `Loop<AnyBuffer>` keeps owned buffers of every type",
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
fn is_of_type<B: Send + 'static>(held: &BufferType) -> bool {
    (held.id)() == TypeId::of::<B>()
}

struct TypeOf<B>(B);

impl<B: Send + 'static> TypeOf<B> {
    const BUFFER_TYPE: BufferType = BufferType { id: TypeId::of::<B>, drop: drop_buffer::<B> };
}

impl HeldBuffer {
    pub(super) fn new() -> Self {
        Self { storage: UnsafeCell::new(MaybeUninit::uninit()), held: Cell::new(None) }
    }

    /// Stores a buffer. One that is there already is leaked.
    #[inline]
    pub(super) fn put<B: Send + 'static>(&self, buffer: B) {
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
    pub(super) fn holds<B: Send + 'static>(&self) -> bool {
        // The same pointer: the same type, without a call. Another pointer may be of the same type too.
        let held = self.held.get();
        held.map_or(ptr::null(), ptr::from_ref) == ptr::from_ref(&TypeOf::<B>::BUFFER_TYPE)
            || held.is_some_and(is_of_type::<B>)
    }

    /// Takes the buffer out, if there is one of this type.
    #[inline]
    pub(super) fn take<B: Send + 'static>(&self) -> Option<B> {
        // SAFETY: it holds a `B`.
        self.holds::<B>().then(|| unsafe { self.take_unchecked() })
    }

    /// Takes the buffer out.
    ///
    /// # Safety
    ///
    /// It [holds](Self::holds) a buffer of this type.
    #[inline]
    pub(super) unsafe fn take_unchecked<B: Send + 'static>(&self) -> B {
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

// SAFETY: what it holds is `Send`: see `put`.
unsafe impl Send for HeldBuffer {}

/// A buffer of a type that is not known statically, for a [`Loop`](crate::Loop) whose buffers are of several types.
pub struct AnyBuffer(HeldBuffer);

// SAFETY: a shared reference gives access to nothing: the buffer is taken out and dropped by value.
unsafe impl Sync for AnyBuffer {}

impl AnyBuffer {
    #[inline(always)]
    pub(super) fn new<B: Send + 'static>(buffer: B) -> Self {
        let held = HeldBuffer::new();
        held.put(buffer);
        Self(held)
    }

    /// Returns the buffer, or the [window](crate::channel::PreparedWindow), if it is of this type, and `self` otherwise.
    ///
    /// # Errors
    ///
    /// The buffer is of another type.
    pub fn downcast<B: Send + 'static>(self) -> Result<B, Self> {
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
