//! The memory that a request reads or writes. Two traits say in which direction, [`GatherBuffer`] and
//! [`ScatterBuffer`]; a third, [`BorrowedBuffer`], for how long.

use std::ptr::NonNull;

use super::kept_length::KeptLength;
use super::scatter_gather::{Element, GatherElement, ScatterElement, private};
use super::slice::{MemorySlice, MemorySliceMut};
use crate::error::Result;
use crate::ffi;

/// Memory that the device reads for a send or a write: one piece, or several that go out as one message.
///
/// | type | what it is |
/// |---|---|
/// | [`MemorySlice`], [`MemorySliceMut`] | a part of a region, borrowed |
/// | [`MemorySlicePart`](crate::memory::MemorySlicePart) | a part of that, which keeps the rest with it |
/// | [`SharedMemorySlice`](crate::SharedMemorySlice) | a part of a region that peers access too |
/// | [`MemoryRegion`](crate::MemoryRegion), [`SharedMemoryRegion`](crate::SharedMemoryRegion) | all of a region: a request takes `&region` |
/// | [`GatherElement`], [`ScatterElement`] | one C `ibv_sge` |
/// | every [`OwnedBuffer`](crate::channel::OwnedBuffer) | memory that the value owns, such as a [`PooledBuffer`](crate::PooledBuffer) |
/// | `&B`, `&mut B` | any of these, lent |
/// | `[B; N]`, `(A, B)` … | several of them, in this order |
/// | `Vec<B>`, `&[B]`, `&mut [B]` | several of them, whose number is known when the program runs |
/// | [`Inline`](crate::Inline), [`InlineList`](crate::memory::InlineList) | bytes of any memory, which the post copies |
/// | `()` | nothing: a message without content |
///
/// A program may implement it for memory of its own, such as what it has registered as a
/// [`RawMemoryRegion`](crate::memory::RawMemoryRegion). For a receive, a read or an atomic, it implements [`ScatterBuffer`] too; for a
/// loop or futures, [`OwnedBuffer`](crate::channel::OwnedBuffer).
///
/// # Safety
///
/// While the value lives (it may be moved) and the program does not access it,
///
///  - the memory that [`gather`](Self::gather) names stays valid and registered under its `lkey`, and its addresses are those
///    of this program: providers read short messages themselves;
///  - this program writes that memory only by atomic accesses;
///  - `gather` names the same memory, until the program changes the value; what the value dereferences to
///    ([`DerefMut`](std::ops::DerefMut)) does not change it.
///
/// If the post copies the memory ([`INLINE`](Self::INLINE)), it need not be registered: it can be read while the value lives.
///
/// `gather` and `scatter` return the elements and do nothing else: they are called while a channel, a loop or a reactor is in
/// use, so one that uses the same may wait for ever. If one panics, the value is leaked.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not registered memory that the device can read",
    label = "a slice of a region is needed here, such as `region.slice(..)?`",
    note = "bytes that are not registered can be sent as `Inline(bytes)`"
)]
pub unsafe trait GatherBuffer: Sized {
    /// The scatter/gather elements: `[ffi::ibv_sge; N]`.
    type List: private::List;

    /// What an operation in flight keeps, and gives back: `Self`, or `()` if it is [`Inline`](crate::Inline).
    type Kept: private::Kept<Self> + GatherBuffer;

    /// Whether the post copies the memory, so that it need not be registered.
    const INLINE: bool = false;

    /// Whether it keeps a length, or one of its pieces does: only then is [`received`](Self::received) called.
    const KEEPS_LENGTH: bool = false;

    /// The scatter/gather elements.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: a piece is longer than 4 GiB - 1 bytes.
    fn gather(&self) -> Result<Self::List>;

    /// The length that the buffer keeps, if it [keeps one](Self::KEEPS_LENGTH): a receive sets it when the message has come. It stays where it is
    /// while the value lives (it may be moved), and nothing accesses it while the buffer is in an operation.
    #[inline(always)]
    fn kept_length(&mut self) -> Option<NonNull<KeptLength>> {
        None
    }

    /// A receive into the buffer has ended, with a message of `bytes` bytes: sets the length that the buffer keeps. Returns
    /// how many of them the next piece has.
    #[inline(always)]
    fn received(&mut self, bytes: usize) -> usize {
        match self.kept_length() {
            // SAFETY: the buffer exists, and is borrowed exclusively.
            Some(kept) => unsafe { KeptLength::receive(kept, bytes) },
            None => bytes.saturating_sub(bytes_of(self)),
        }
    }
}

/// Memory that the device writes for a receive, a read or an atomic: one piece, or several that are filled one
/// after the other.
///
/// [`MemorySliceMut`], [`MemorySlicePart`](crate::memory::MemorySlicePart), [`SharedMemorySlice`](crate::SharedMemorySlice),
/// [`ScatterElement`], every [`OwnedBuffer`](crate::channel::OwnedBuffer), `&mut` to any of them, and arrays, tuples, vectors
/// and `&mut` slices of them; and what a program implements it for.
///
/// # Safety
///
/// The conditions of [`GatherBuffer`], for the memory that [`scatter`](Self::scatter) names. It is registered for
/// [`LOCAL_WRITE`](crate::AccessFlags::LOCAL_WRITE): providers write short messages themselves. As long as the conditions hold,
/// this program also accesses that memory through no references other than this value and references to its
/// atomic form. Any bytes are valid there.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not registered memory that the device can write",
    label = "needed: `region.slice_mut(..)?` of a `MemoryRegion`, or `region.slice(..)?` of a `SharedMemoryRegion`"
)]
pub unsafe trait ScatterBuffer: GatherBuffer {
    /// Whether peers may be allowed to write the memory, as far as the type tells. If not, no read fills it on iWARP.
    const PEERS_MAY_WRITE: bool = true;

    /// The scatter/gather elements.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: a piece is longer than 4 GiB - 1 bytes.
    fn scatter(&mut self) -> Result<Self::List>;

    /// The elements for a receive: those of [`scatter`](Self::scatter). A buffer that [keeps a
    /// length](GatherBuffer::kept_length) offers all of its capacity.
    ///
    /// # Errors
    ///
    /// Those of [`scatter`](Self::scatter).
    #[inline(always)]
    fn begin_receive(&mut self) -> Result<Self::List> {
        self.scatter()
    }
}

/// The length of all pieces.
fn bytes_of<B: GatherBuffer>(buffer: &B) -> usize {
    let lengths = |mut list: B::List| list.as_mut().iter().map(|piece| piece.length as usize).sum();
    buffer.gather().map_or(0, lengths)
}

/// A buffer that can be lent to a [scope](crate::Scope): its memory stays valid for the lifetime of its type, even if
/// the value is dropped or forgotten.
///
/// # Safety
///
/// What [`GatherBuffer`] and [`ScatterBuffer`] promise while the value lives holds for as long as the lifetime of the
/// type lasts, whatever happens to the value. So the type borrows its memory, and dropping it does not touch that
/// memory.
#[diagnostic::on_unimplemented(
    message = "`{Self}` owns its memory, so it cannot be lent to a scope",
    note = "lend it, `&buffer` or `&mut buffer`; or post it on a `Loop`"
)]
pub unsafe trait BorrowedBuffer {}

/// What an operation in flight keeps of its buffer.
#[inline(always)]
pub(crate) fn keep<B: GatherBuffer>(buffer: B) -> B::Kept {
    private::Kept::keep(buffer)
}

pub(super) type One = [ffi::ibv_sge; 1];

/// A list of elements that can be copied: what they name is not in the list itself.
#[cfg(feature = "channel")]
#[diagnostic::on_unimplemented(
    message = "this buffer cannot be in a window",
    label = "an `InlineList` is put together by the post of a single request",
    note = "put the bytes together and use `Inline(bytes)`"
)]
pub trait PlainList: private::List {}

#[cfg(feature = "channel")]
impl<const N: usize> PlainList for [ffi::ibv_sge; N] {}

impl<T> private::Sealed for MemorySlice<'_, T> {}
impl<T> private::Sealed for MemorySliceMut<'_, T> {}

// SAFETY: the slice borrows, for its lifetime, a region that is registered until it is dropped. While the slice is
// borrowed nothing writes the memory, as an `Element` has no interior mutability.
unsafe impl<T: Element> GatherBuffer for MemorySlice<'_, T> {
    type List = One;
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<One> {
        Ok([*self.gather_element()?.as_raw()])
    }
}

// SAFETY: as above; the borrow is exclusive, and only this value gives access to the memory.
unsafe impl<T: Element> GatherBuffer for MemorySliceMut<'_, T> {
    type List = One;
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<One> {
        Ok([*self.gather_element()?.as_raw()])
    }
}

// SAFETY: the slice borrows the region exclusively for its lifetime; any bytes are a valid
// `Element`.
unsafe impl<T: Element> ScatterBuffer for MemorySliceMut<'_, T> {
    const PEERS_MAY_WRITE: bool = false;

    #[inline]
    fn scatter(&mut self) -> Result<One> {
        Ok([*self.scatter_element()?.as_raw()])
    }
}

// SAFETY: the borrow of the region lasts for the lifetime of the type, and dropping a slice does nothing.
unsafe impl<T> BorrowedBuffer for MemorySlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T> BorrowedBuffer for MemorySliceMut<'_, T> {}

// SAFETY: the element borrows registered memory for its lifetime, which this program writes meanwhile by atomic
// accesses only: that of a region or slice, or memory for which the caller of an `unsafe` function vouches. Its address
// is the program's own, or such a caller has said that it need not be.
unsafe impl GatherBuffer for GatherElement<'_> {
    type List = One;
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<One> {
        Ok([*self.as_raw()])
    }
}

// SAFETY: as above.
unsafe impl GatherBuffer for ScatterElement<'_> {
    type List = One;
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<One> {
        Ok([*self.as_raw()])
    }
}

// SAFETY: the element borrows memory for its lifetime that nothing else refers to, or accesses by atomic accesses only.
// It is of elements for which any bytes are valid.
unsafe impl ScatterBuffer for ScatterElement<'_> {
    #[inline]
    fn scatter(&mut self) -> Result<One> {
        Ok([*self.as_raw()])
    }
}

// SAFETY: an element is plain numbers, and borrows the memory for its lifetime.
unsafe impl BorrowedBuffer for GatherElement<'_> {}
// SAFETY: as above.
unsafe impl BorrowedBuffer for ScatterElement<'_> {}

// SAFETY: there is no memory.
unsafe impl GatherBuffer for () {
    type List = [ffi::ibv_sge; 0];
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<Self::List> {
        Ok([])
    }
}

// SAFETY: there is no memory.
unsafe impl ScatterBuffer for () {
    #[inline]
    fn scatter(&mut self) -> Result<Self::List> {
        Ok([])
    }
}

// SAFETY: there is no memory.
unsafe impl BorrowedBuffer for () {}

// SAFETY: for as long as the reference lives, the buffer lives, and the program changes neither it nor its memory
// through another reference.
#[diagnostic::do_not_recommend]
unsafe impl<B: GatherBuffer> GatherBuffer for &B {
    type List = B::List;
    type Kept = Self;

    const INLINE: bool = B::INLINE;

    #[inline(always)]
    fn gather(&self) -> Result<B::List> {
        (**self).gather()
    }
}

// SAFETY: as above.
#[diagnostic::do_not_recommend]
unsafe impl<B: GatherBuffer> GatherBuffer for &mut B {
    type List = B::List;
    type Kept = Self;

    const INLINE: bool = B::INLINE;
    const KEEPS_LENGTH: bool = B::KEEPS_LENGTH;

    #[inline(always)]
    fn gather(&self) -> Result<B::List> {
        (**self).gather()
    }

    #[inline(always)]
    fn kept_length(&mut self) -> Option<NonNull<KeptLength>> {
        (**self).kept_length()
    }

    #[inline(always)]
    fn received(&mut self, bytes: usize) -> usize {
        (**self).received(bytes)
    }
}

// SAFETY: as above; and nothing else accesses the buffer, which is borrowed exclusively.
#[diagnostic::do_not_recommend]
unsafe impl<B: ScatterBuffer> ScatterBuffer for &mut B {
    const PEERS_MAY_WRITE: bool = B::PEERS_MAY_WRITE;

    #[inline(always)]
    fn scatter(&mut self) -> Result<B::List> {
        (**self).scatter()
    }

    #[inline(always)]
    fn begin_receive(&mut self) -> Result<B::List> {
        (**self).begin_receive()
    }
}

// SAFETY: the buffer is borrowed for the lifetime of the type: until then it is neither dropped nor changed, whatever
// happens to the reference.
unsafe impl<B: GatherBuffer> BorrowedBuffer for &B {}
// SAFETY: as above.
unsafe impl<B: GatherBuffer> BorrowedBuffer for &mut B {}
