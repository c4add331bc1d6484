//! The memory that a request reads or writes. Two traits say in which direction, [`GatherBuffer`] and
//! [`ScatterBuffer`]; a third, [`BorrowedBuffer`], for how long.

#[cfg(doc)]
use super::inline::{Inline, InlineList};
use super::scatter_gather::{Element, GatherElement, ScatterElement, private};
#[cfg(doc)]
use super::shared_slice::SharedMemorySlice;
use super::slice::{MemorySlice, MemorySliceMut};
#[cfg(doc)]
use super::slice_part::MemorySlicePart;
use crate::error::Result;
use crate::ffi;

/// Memory that the device reads for a send or a write: one piece, or several that go out as one message.
///
/// | type | what it is |
/// |---|---|
/// | [`MemorySlice`], [`MemorySliceMut`] | a part of a region, borrowed |
/// | [`MemorySlicePart`] | a part of that, which keeps the rest with it |
/// | [`SharedMemorySlice`] | a part of a region that peers access too |
/// | [`GatherElement`], [`ScatterElement`] | one C `ibv_sge` |
/// | every [`OwnedBuffer`](crate::OwnedBuffer) | memory that the value owns, such as a [`PooledBuffer`](crate::PooledBuffer) |
/// | `&B`, `&mut B` | any of these, lent |
/// | `[B; N]`, `(A, B)` … | several of them, in this order |
/// | `Vec<B>`, `&[B]`, `&mut [B]` | several of them, whose number is known when the program runs |
/// | [`Inline`], [`InlineList`] | bytes of any memory, which the post copies |
/// | `()` | nothing: a message without content |
///
/// The trait is sealed: only types of this crate have it.
///
/// # Safety
///
/// While the value lives (it may be moved) and the program does not access it, the memory that
/// [`gather`](Self::gather) names stays registered, and this program writes it only by atomic accesses. The same
/// holds for the value that [`keep`](Self::keep) returns, unless the post itself copies the memory
/// ([`INLINE`](Self::INLINE)). Then the memory can be read while the value lives.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not registered memory that the device can read",
    label = "a slice of a region is needed here, such as `region.slice(..)?`",
    note = "bytes that are not registered can be sent as `Inline(bytes)`"
)]
pub unsafe trait GatherBuffer: private::Sealed + Sized {
    /// An array of scatter/gather elements.
    #[doc(hidden)]
    type List: AsMut<[ffi::ibv_sge]>;

    /// What an operation in flight keeps, and gives back: the buffer, or `()` if the post copies the bytes.
    type Kept;

    /// Whether the post copies the memory, so that it need not be registered.
    #[doc(hidden)]
    const INLINE: bool = false;

    /// The scatter/gather elements.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: a piece is longer than 4 GiB - 1 bytes.
    #[doc(hidden)]
    fn gather(&self) -> Result<Self::List>;

    /// What an operation in flight keeps.
    #[doc(hidden)]
    fn keep(self) -> Self::Kept;
}

/// Memory that the device writes for a receive, a read or an atomic: one piece, or several that are filled one
/// after the other.
///
/// [`MemorySliceMut`], [`MemorySlicePart`], [`SharedMemorySlice`], [`ScatterElement`], every
/// [`OwnedBuffer`](crate::OwnedBuffer), `&mut` to any of them, and arrays, tuples, vectors and `&mut` slices of them.
///
/// The trait is sealed: only types of this crate have it.
///
/// # Safety
///
/// The conditions of [`GatherBuffer`], for the memory that [`scatter`](Self::scatter) names. As long as they hold,
/// this program also accesses that memory through no references other than this value and references to its
/// atomic form. Any bytes are valid there.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not registered memory that the device can write",
    label = "an exclusive slice of a region is needed here, such as `region.slice_mut(..)?`"
)]
pub unsafe trait ScatterBuffer: GatherBuffer {
    /// Whether peers may be allowed to write the memory, as far as the type tells.
    #[doc(hidden)]
    const PEERS_MAY_WRITE: bool = true;

    /// The scatter/gather elements.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: a piece is longer than 4 GiB - 1 bytes.
    #[doc(hidden)]
    fn scatter(&mut self) -> Result<Self::List>;
}

/// A buffer that can be lent to a [scope](crate::Scope): its memory stays valid for the lifetime of its type, even if
/// the value is dropped or forgotten.
///
/// The trait is sealed: only types of this crate have it.
///
/// # Safety
///
/// What [`GatherBuffer`] and [`ScatterBuffer`] promise while the value lives holds for as long as the lifetime of the
/// type lasts, whatever happens to the value. So the type borrows its memory, and dropping it does not touch that
/// memory.
#[diagnostic::on_unimplemented(
    message = "`{Self}` owns its memory, so it cannot be lent to a scope",
    note = "lend it, `&buffer` or `&mut buffer`; or post it with `Channel::post_owned`"
)]
pub unsafe trait BorrowedBuffer: private::Sealed {}

type One = [ffi::ibv_sge; 1];

/// A list of elements that can be copied: what they name is not in the list itself.
#[cfg(feature = "channel")]
#[diagnostic::on_unimplemented(
    message = "this buffer cannot be in a window",
    label = "an `InlineList` is put together by the post of a single request",
    note = "put the bytes together and use `Inline(bytes)`"
)]
pub trait PlainList: AsMut<[ffi::ibv_sge]> {}

#[cfg(feature = "channel")]
impl<const N: usize> PlainList for [ffi::ibv_sge; N] {}

/// The part of an implementation of [`GatherBuffer`] for a buffer that an operation keeps as it is.
macro_rules! kept_whole {
    () => {
        type Kept = Self;

        #[inline(always)]
        fn keep(self) -> Self {
            self
        }
    };
}

pub(crate) use kept_whole;

impl<T> private::Sealed for MemorySlice<'_, T> {}
impl<T> private::Sealed for MemorySliceMut<'_, T> {}

// SAFETY: the slice borrows, for its lifetime, a region that is registered until it is dropped. While the slice is
// borrowed nobody writes the memory, as an `Element` has no interior mutability.
unsafe impl<T: Element> GatherBuffer for MemorySlice<'_, T> {
    type List = One;

    kept_whole!();

    #[inline]
    fn gather(&self) -> Result<One> {
        Ok([*self.gather_element()?.as_raw()])
    }
}

// SAFETY: as above; the borrow is exclusive, and only this value gives access to the memory.
unsafe impl<T: Element> GatherBuffer for MemorySliceMut<'_, T> {
    type List = One;

    kept_whole!();

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

impl private::Sealed for GatherElement<'_> {}
impl private::Sealed for ScatterElement<'_> {}

// SAFETY: the element borrows registered memory for its lifetime, which this program writes meanwhile by atomic
// accesses only: that of a region or slice, or memory for which the caller of an `unsafe` function vouches. Its address
// is the program's own, or such a caller has said that it need not be.
unsafe impl GatherBuffer for GatherElement<'_> {
    type List = One;

    kept_whole!();

    #[inline]
    fn gather(&self) -> Result<One> {
        Ok([*self.as_raw()])
    }
}

// SAFETY: as above.
unsafe impl GatherBuffer for ScatterElement<'_> {
    type List = One;

    kept_whole!();

    #[inline]
    fn gather(&self) -> Result<One> {
        Ok([*self.as_raw()])
    }
}

// SAFETY: the element borrows memory for its lifetime that nobody else refers to, or accesses by atomic accesses only.
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

impl private::Sealed for () {}

// SAFETY: there is no memory.
unsafe impl GatherBuffer for () {
    type List = [ffi::ibv_sge; 0];

    kept_whole!();

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

impl<B: private::Sealed> private::Sealed for &B {}
impl<B: private::Sealed> private::Sealed for &mut B {}

// SAFETY: for as long as the reference lives, the buffer lives, and the program changes neither it nor its memory
// through another reference.
#[diagnostic::do_not_recommend]
unsafe impl<B: GatherBuffer> GatherBuffer for &B {
    type List = B::List;

    const INLINE: bool = B::INLINE;

    kept_whole!();

    #[inline(always)]
    fn gather(&self) -> Result<B::List> {
        (**self).gather()
    }
}

// SAFETY: as above.
#[diagnostic::do_not_recommend]
unsafe impl<B: GatherBuffer> GatherBuffer for &mut B {
    type List = B::List;

    const INLINE: bool = B::INLINE;

    kept_whole!();

    #[inline(always)]
    fn gather(&self) -> Result<B::List> {
        (**self).gather()
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
}

// SAFETY: the buffer is borrowed for the lifetime of the type: until then it is neither dropped nor changed, whatever
// happens to the reference.
unsafe impl<B: GatherBuffer> BorrowedBuffer for &B {}
// SAFETY: as above.
unsafe impl<B: GatherBuffer> BorrowedBuffer for &mut B {}

impl<B: private::Sealed, const N: usize> private::Sealed for [B; N] {}

// SAFETY: what holds for each piece holds for all. None is `Inline`, of which an operation keeps nothing.
unsafe impl<B: GatherBuffer<List = One, Kept = B>, const N: usize> GatherBuffer for [B; N] {
    type List = [ffi::ibv_sge; N];

    const INLINE: bool = B::INLINE;

    kept_whole!();

    #[inline]
    fn gather(&self) -> Result<Self::List> {
        let mut list = [ffi::ibv_sge::default(); N];
        for (element, piece) in list.iter_mut().zip(self) {
            [*element] = piece.gather()?;
        }
        Ok(list)
    }
}

// SAFETY: what holds for each piece holds for all.
unsafe impl<B: ScatterBuffer<List = One, Kept = B>, const N: usize> ScatterBuffer for [B; N] {
    const PEERS_MAY_WRITE: bool = B::PEERS_MAY_WRITE;

    #[inline]
    fn scatter(&mut self) -> Result<Self::List> {
        let mut list = [ffi::ibv_sge::default(); N];
        for (element, piece) in list.iter_mut().zip(self) {
            [*element] = piece.scatter()?;
        }
        Ok(list)
    }
}

/// A list whose length is known at run time. It allocates only when it is longer than most devices
/// support.
#[doc(hidden)]
#[derive(Debug)]
pub struct ElementList(Elements);

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it lives on the stack, for one post")]
enum Elements {
    Few([ffi::ibv_sge; FEW], usize),
    Many(Vec<ffi::ibv_sge>),
}

/// The number of elements that are stored without an allocation.
const FEW: usize = 32;

impl ElementList {
    fn collect(
        count: usize,
        mut elements: impl Iterator<Item = Result<ffi::ibv_sge>>,
    ) -> Result<Self> {
        if count > FEW {
            return Ok(Self(Elements::Many(elements.collect::<Result<_>>()?)));
        }
        let mut few = [ffi::ibv_sge::default(); FEW];
        for (to, from) in few.iter_mut().zip(&mut elements) {
            *to = from?;
        }
        Ok(Self(Elements::Few(few, count)))
    }
}

impl AsMut<[ffi::ibv_sge]> for ElementList {
    #[inline]
    fn as_mut(&mut self) -> &mut [ffi::ibv_sge] {
        match &mut self.0 {
            Elements::Few(few, count) => &mut few[..*count],
            Elements::Many(many) => many,
        }
    }
}

// The elements name memory outside of the list.
#[cfg(feature = "channel")]
impl PlainList for ElementList {}

fn gather_all<B: GatherBuffer<List = One, Kept = B>>(pieces: &[B]) -> Result<ElementList> {
    ElementList::collect(pieces.len(), pieces.iter().map(|piece| Ok(piece.gather()?[0])))
}

fn scatter_all<B: ScatterBuffer<List = One, Kept = B>>(pieces: &mut [B]) -> Result<ElementList> {
    ElementList::collect(pieces.len(), pieces.iter_mut().map(|piece| Ok(piece.scatter()?[0])))
}

impl<B: private::Sealed> private::Sealed for Vec<B> {}
impl<B: private::Sealed> private::Sealed for &[B] {}
impl<B: private::Sealed> private::Sealed for &mut [B] {}

// SAFETY: what holds for each piece holds for all, and the vector has them all for as long as it lives.
unsafe impl<B: GatherBuffer<List = One, Kept = B>> GatherBuffer for Vec<B> {
    type List = ElementList;

    const INLINE: bool = B::INLINE;

    kept_whole!();

    fn gather(&self) -> Result<ElementList> {
        gather_all(self)
    }
}

// SAFETY: as above.
unsafe impl<B: ScatterBuffer<List = One, Kept = B>> ScatterBuffer for Vec<B> {
    const PEERS_MAY_WRITE: bool = B::PEERS_MAY_WRITE;

    fn scatter(&mut self) -> Result<ElementList> {
        scatter_all(self)
    }
}

// SAFETY: what holds for each piece holds for all, for as long as they are borrowed.
unsafe impl<B: GatherBuffer<List = One, Kept = B>> GatherBuffer for &[B] {
    type List = ElementList;

    const INLINE: bool = B::INLINE;

    kept_whole!();

    fn gather(&self) -> Result<ElementList> {
        gather_all(self)
    }
}

// SAFETY: as above; the pieces are borrowed exclusively.
unsafe impl<B: GatherBuffer<List = One, Kept = B>> GatherBuffer for &mut [B] {
    type List = ElementList;

    const INLINE: bool = B::INLINE;

    kept_whole!();

    fn gather(&self) -> Result<ElementList> {
        gather_all(self)
    }
}

// SAFETY: as above.
unsafe impl<B: ScatterBuffer<List = One, Kept = B>> ScatterBuffer for &mut [B] {
    const PEERS_MAY_WRITE: bool = B::PEERS_MAY_WRITE;

    fn scatter(&mut self) -> Result<ElementList> {
        scatter_all(self)
    }
}

// SAFETY: what holds for each piece holds for all.
unsafe impl<B: BorrowedBuffer, const N: usize> BorrowedBuffer for [B; N] {}
// SAFETY: as above. Dropping the vector frees the list of pieces, and does not touch the memory that they name.
unsafe impl<B: BorrowedBuffer> BorrowedBuffer for Vec<B> {}
// SAFETY: the pieces are borrowed for the lifetime of the type: until then none is dropped or changed.
unsafe impl<B: GatherBuffer> BorrowedBuffer for &[B] {}
// SAFETY: as above.
unsafe impl<B: GatherBuffer> BorrowedBuffer for &mut [B] {}

/// Implements the traits for a tuple of single pieces.
macro_rules! tuple {
    ($count:literal: $($piece:ident $index:tt),+) => {
        impl<$($piece: private::Sealed),+> private::Sealed for ($($piece,)+) {}

        // SAFETY: what holds for each piece holds for all.
        unsafe impl<$($piece: GatherBuffer<List = One, Kept = $piece>),+> GatherBuffer for ($($piece,)+) {
            type List = [ffi::ibv_sge; $count];

            // Each may be inline then: the post copies registered memory as well.
            const INLINE: bool = $($piece::INLINE)||+;

            kept_whole!();

            #[inline]
            fn gather(&self) -> Result<Self::List> {
                Ok([$(self.$index.gather()?[0]),+])
            }
        }

        // SAFETY: what holds for each piece holds for all.
        unsafe impl<$($piece: ScatterBuffer<List = One, Kept = $piece>),+> ScatterBuffer for ($($piece,)+) {
            const PEERS_MAY_WRITE: bool = $($piece::PEERS_MAY_WRITE)&&+;

            #[inline]
            fn scatter(&mut self) -> Result<Self::List> {
                Ok([$(self.$index.scatter()?[0]),+])
            }
        }

        // SAFETY: what holds for each piece holds for all.
        unsafe impl<$($piece: BorrowedBuffer),+> BorrowedBuffer for ($($piece,)+) {}
    };
}

tuple!(1: A 0);
tuple!(2: A 0, B 1);
tuple!(3: A 0, B 1, C 2);
tuple!(4: A 0, B 1, C 2, D 3);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::SharedMemorySlice;

    #[test]
    fn several_pieces_are_one_list() {
        let (mut header, mut body) = ([0_u32; 2], [0_u8; 5]);
        let (at_header, at_body) = (header.as_ptr() as u64, body.as_ptr() as u64);
        let mut both = (MemorySliceMut::new(&mut header, 7), MemorySliceMut::new(&mut body, 8));
        let list = both.scatter().unwrap();
        assert_eq!(list.map(|e| (e.addr, e.length, e.lkey)), [(at_header, 8, 7), (at_body, 5, 8)]);
        assert_eq!(both.gather().unwrap()[1].length, 5);
        let halves = both.1.split_at(2).unwrap();
        assert_eq!([halves.0, halves.1].gather().unwrap().map(|e| e.length), [2, 3]);
        assert!(().gather().unwrap().is_empty());
    }

    #[test]
    fn lists_of_run_time_length_are_one_list() {
        for count in [0, 1, FEW, FEW + 1, 100] {
            let mut data = vec![0_u16; count.max(1)];
            let at = data.as_ptr() as u64;
            let whole = MemorySliceMut::new(&mut data, 7).slice(..count).unwrap();
            let mut pieces: Vec<_> = whole.chunks(1).unwrap().collect();
            let expected: Vec<_> = (0..count as u64).map(|i| (at + 2 * i, 2, 7)).collect();
            let found = |mut list: ElementList| -> Vec<_> {
                list.as_mut().iter().map(|e| (e.addr, e.length, e.lkey)).collect()
            };
            assert_eq!(found(pieces.gather().unwrap()), expected);
            assert_eq!(found(pieces.scatter().unwrap()), expected);
            assert_eq!(found((&pieces[..]).gather().unwrap()), expected);
            assert_eq!(found((&mut pieces[..]).scatter().unwrap()), expected);
        }
    }

    #[test]
    fn buffers_have_nothing_to_drop() {
        assert!(!std::mem::needs_drop::<MemorySlice<'_, u8>>());
        assert!(!std::mem::needs_drop::<MemorySliceMut<'_, u8>>());
        assert!(!std::mem::needs_drop::<(SharedMemorySlice<'_, u8>, [MemorySlice<'_, u8>; 3])>());
    }
}
