//! Buffers that operations own until they end.
//!
//! A post moves the buffer into its operation's slot. When the operation has ended, it goes to the caller or is
//! dropped. Nothing allocates: an [`AnyBuffer`] has room for any [`OwnedBuffer`], and a pointer to a table for its
//! type.

use std::any::TypeId;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr::NonNull;
use std::sync::Arc;
use std::{fmt, ptr};

use crate::base::ffi;
use crate::verbs::completion::WorkSuccess;
use crate::verbs::memory::{
    GatherBuffer, InMemory, KeptLength, MemoryRange, Peers, Region, ScatterBuffer,
};

/// Registered memory that an operation can own while it is in flight: see
/// [`Loop::post`](crate::Loop::post).
///
/// | type | what it is |
/// |---|---|
/// | [`PooledBuffer`](crate::PooledBuffer) | a chunk of a [`BufferPool`](crate::BufferPool) |
/// | [`DatagramBuffer`](crate::pool::DatagramBuffer) | the same, with what precedes a datagram |
/// | [`SharedMemoryRange`](crate::memory::SharedMemoryRange) | a range of an `Arc<SharedMemoryRegion<'static, T>>` |
/// | [`RawMemoryRange`](crate::memory::RawMemoryRange) | a range of an `Arc<RawMemoryRegion<'static>>`: other libraries' memory, dma-bufs |
/// | `Box<MemoryRegion<'static, T>>`, `Arc<SharedMemoryRegion<'static, T>>`, `Arc<RawMemoryRegion<'static>>` | all of a region |
/// | `Vec<B>`, `[B; N]`, `(A, B)` … of these | several, as one message |
/// | `()` | no bytes |
///
/// # Safety
///
/// What [`GatherBuffer`](crate::memory::GatherBuffer) and [`ScatterBuffer`] promise while the value lives holds on every thread,
/// and for any time. So nothing but a drop of the value ends it, neither a lifetime nor a thread. To be kept as an
/// [`AnyBuffer`], it has at most four words.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a buffer that an operation can own",
    label = "a buffer without borrowed parts is needed here, such as a `PooledBuffer`",
    note = "a `Loop<AnyBuffer>` keeps owned buffers of every type",
    note = "several pieces are a `Vec`, an array or a tuple of `PooledBuffer`s or of `MemoryRange`s",
    note = "in a scope, operations borrow their buffers: `channel.scope(|scope| scope.post(..))`"
)]
pub unsafe trait OwnedBuffer: ScatterBuffer<Kept = Self> + Send + 'static {
    /// Whether it is a list of this crate, whose pieces a loop tells their lengths.
    #[doc(hidden)]
    const IS_LIST: bool = false;
}

/// A buffer of this crate that can be in a list. Telling its length runs no code of the program.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be in a list that an operation owns",
    label = "a list of `PooledBuffer`s, of `MemoryRange`s or of whole regions is needed here",
    note = "a type of your own can be a list: it implements `GatherBuffer` with `type List = ElementList`, and `OwnedBuffer`"
)]
pub trait Piece: OwnedBuffer + GatherBuffer<List = [ffi::ibv_sge; 1]> {}

impl<M: InMemory + Peers + Send + Sync + 'static> Piece for MemoryRange<M> {}
impl<M: InMemory + Peers + Send + Sync + 'static> Piece for Arc<Region<'static, M>> {}

// SAFETY: what holds for each piece holds for all. The vector has them until it is dropped.
unsafe impl<B: Piece> OwnedBuffer for Vec<B> {
    const IS_LIST: bool = B::KEEPS_LENGTH;
}

// SAFETY: what holds for each piece holds for all.
unsafe impl<B: Piece, const N: usize> OwnedBuffer for [B; N] {
    const IS_LIST: bool = B::KEEPS_LENGTH;
}

macro_rules! impl_owned_buffer_of_tuples {
    ($($($piece:ident)+;)+) => {$(
        // SAFETY: what holds for each piece holds for all.
        unsafe impl<$($piece: Piece),+> OwnedBuffer for ($($piece,)+) {
            const IS_LIST: bool = $($piece::KEEPS_LENGTH)||+;
        }
    )+};
}

impl_owned_buffer_of_tuples! {
    A;
    A B;
    A B C;
    A B C D;
}

// SAFETY: there is no memory.
unsafe impl OwnedBuffer for () {}

// SAFETY: it keeps the region, which borrows nothing, and is `Send` and `Sync`.
unsafe impl<M: InMemory + Peers + Send + Sync + 'static> OwnedBuffer for MemoryRange<M> {}

// SAFETY: as above.
unsafe impl<M: InMemory + Peers + Send + Sync + 'static> OwnedBuffer for Arc<Region<'static, M>> {}

const WORDS: usize = 4;

struct BufferType {
    id: fn() -> TypeId,
    /// # Safety
    ///
    /// The pointer is to a value of this type, which is not used again.
    drop: unsafe fn(*mut ()),
    /// # Safety
    ///
    /// The pointer is to a value of this type, which nothing else accesses.
    received: unsafe fn(*mut (), usize),
}

/// # Safety
///
/// The pointer is to a `B`, which nothing else accesses.
unsafe fn received<B: OwnedBuffer>(buffer: *mut (), bytes: usize) {
    // SAFETY: the caller vouches for it.
    unsafe { &mut *buffer.cast::<B>() }.received(bytes);
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

impl<B: OwnedBuffer> TypeOf<B> {
    const BUFFER_TYPE: BufferType =
        BufferType { id: TypeId::of::<B>, drop: drop_buffer::<B>, received: received::<B> };
}

/// A buffer of a type that is not known statically, for a [`Loop`](crate::Loop) whose buffers are of several types.
pub struct AnyBuffer {
    /// Holds a value of the type `held`, which is `Send`. A shared reference gives no access to it.
    storage: MaybeUninit<[usize; WORDS]>,
    held: &'static BufferType,
}

impl AnyBuffer {
    #[inline(always)]
    pub(crate) fn new<B: OwnedBuffer>(buffer: B) -> Self {
        const {
            assert!(
                size_of::<B>() <= size_of::<[usize; WORDS]>(),
                "an AnyBuffer has room for four words: put the pieces into a `Vec`"
            );
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
    pub fn downcast<B: OwnedBuffer>(self) -> Result<B, Self> {
        // Equal pointers save the call. One type may have several tables.
        if !ptr::eq(self.held, &TypeOf::<B>::BUFFER_TYPE) && !is_of_type::<B>(self.held) {
            return Err(self);
        }
        let whole = ManuallyDrop::new(self);
        // SAFETY: the storage holds a `B`, and is not used again.
        Ok(unsafe { whole.storage.as_ptr().cast::<B>().read() })
    }

    /// Tells a list the length of the message that it received.
    pub(crate) fn received(&mut self, bytes: usize) {
        // SAFETY: the storage holds a value of this type, and is borrowed exclusively.
        unsafe { (self.held.received)(self.storage.as_mut_ptr().cast(), bytes) }
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
