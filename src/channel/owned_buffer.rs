//! A post moves the buffer into its operation's slot. When the operation has ended, it goes to the caller or is
//! dropped. Nothing allocates: an [`AnyBuffer`] has room for any [`OwnedBuffer`], and a pointer to a table for its
//! type.

use std::any::TypeId;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr::NonNull;
use std::{fmt, ptr};

use crate::verbs::completion::WorkSuccess;
use crate::verbs::memory::{GatherBuffer, InMemory, KeptLength, MemoryRange, Peers, ScatterBuffer};

/// Registered memory that an operation can own while it is in flight: see
/// [`Loop::post`](crate::Loop::post).
///
/// | type | what it is |
/// |---|---|
/// | [`PooledBuffer`](crate::PooledBuffer) | a chunk of a [`BufferPool`](crate::BufferPool) |
/// | [`DatagramBuffer`](crate::pool::DatagramBuffer) | the same, with what precedes a datagram |
/// | [`SharedMemoryRange`](crate::memory::SharedMemoryRange) | a range of an `Arc<SharedMemoryRegion<'static, T>>` |
/// | [`RawMemoryRange`](crate::memory::RawMemoryRange) | a range of an `Arc<RawMemoryRegion<'static>>`: other libraries' memory, dma-bufs |
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

// SAFETY: it keeps the region, which borrows nothing, and is `Send` and `Sync`.
unsafe impl<M: InMemory + Peers + Send + Sync + 'static> OwnedBuffer for MemoryRange<M> {}

const WORDS: usize = 4;

struct BufferType {
    id: fn() -> TypeId,
    /// # Safety
    ///
    /// The pointer is to a value of this type, which is not used again.
    drop: unsafe fn(*mut ()),
}

/// # Safety
///
/// The pointer is to a `B`, which is not used again.
unsafe fn drop_buffer<B>(buffer: *mut ()) {
    // SAFETY: the caller vouches for it.
    unsafe { buffer.cast::<B>().drop_in_place() }
}

#[cold]
fn is_of_type<B: 'static>(held: &BufferType) -> bool {
    (held.id)() == TypeId::of::<B>()
}

struct TypeOf<B>(B);

impl<B: 'static> TypeOf<B> {
    const BUFFER_TYPE: BufferType = BufferType { id: TypeId::of::<B>, drop: drop_buffer::<B> };
}

/// A buffer of a type that is not known statically, for a [`Loop`](crate::Loop) whose buffers are of several types.
pub struct AnyBuffer {
    /// Holds a value of the type `held`, which is `Send`. A shared reference gives no access to it.
    storage: MaybeUninit<[usize; WORDS]>,
    held: &'static BufferType,
}

impl AnyBuffer {
    #[inline(always)]
    pub(crate) fn new<B: Send + 'static>(buffer: B) -> Self {
        const {
            assert!(size_of::<B>() <= size_of::<[usize; WORDS]>());
            assert!(align_of::<B>() <= align_of::<usize>());
        }
        let mut storage: MaybeUninit<[usize; WORDS]> = MaybeUninit::uninit();
        // SAFETY: there is room for a `B` (the assertions).
        unsafe { storage.as_mut_ptr().cast::<B>().write(buffer) };
        Self { storage, held: &TypeOf::<B>::BUFFER_TYPE }
    }

    /// Returns the buffer if it is of this type, and `self` otherwise.
    ///
    /// # Errors
    ///
    /// The buffer is of another type.
    #[inline]
    pub fn downcast<B: Send + 'static>(self) -> Result<B, Self> {
        // Equal pointers save the call. One type may have several tables.
        if !ptr::eq(self.held, &TypeOf::<B>::BUFFER_TYPE) && !is_of_type::<B>(self.held) {
            return Err(self);
        }
        let whole = ManuallyDrop::new(self);
        // SAFETY: the storage holds a `B`, and is not used again.
        Ok(unsafe { whole.storage.as_ptr().cast::<B>().read() })
    }
}

impl Drop for AnyBuffer {
    fn drop(&mut self) {
        // SAFETY: the storage holds a value of this type, and is not used again.
        unsafe { (self.held.drop)(self.storage.as_mut_ptr().cast()) }
    }
}

impl fmt::Debug for AnyBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyBuffer").finish_non_exhaustive()
    }
}

impl WorkSuccess {
    #[inline(always)]
    pub(super) fn tell_buffer<B: GatherBuffer>(&self, buffer: &mut B) {
        if B::KEEPS_LENGTH
            && let Some(len) = self.message_len()
        {
            buffer.received(len as usize);
        }
    }

    /// # Safety
    ///
    /// The buffer of this length still exists, and nothing else accesses it.
    pub(super) unsafe fn tell(&self, kept: NonNull<KeptLength>) {
        if let Some(len) = self.message_len() {
            // SAFETY: the caller vouches for it.
            unsafe { KeptLength::receive(kept, len as usize) };
        }
    }
}
