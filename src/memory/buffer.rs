//! The memory that a channel's operation reads or writes.

use super::scatter_gather::Element;
use super::scatter_gather::private;
#[cfg(doc)]
use super::shared_slice::SharedMemorySlice;
use super::slice::{MemorySlice, MemorySliceMut};
#[cfg(doc)]
use super::slice_part::MemorySlicePart;
use crate::error::Result;
use crate::ffi;

/// Registered memory that the device reads for a send or a write: one piece, or several that go out
/// as one message.
///
/// | type | what it is |
/// |---|---|
/// | [`MemorySlice`] | a part of a region, borrowed |
/// | [`MemorySliceMut`] | a part of a region, borrowed exclusively |
/// | [`MemorySlicePart`] | a part of that, which keeps the rest with it |
/// | [`SharedMemorySlice`] | a part of a region that peers access too |
/// | `[B; N]`, `(A, B)` … | several of them, in this order |
/// | `Vec<B>`, `&[B]`, `&mut [B]` | several of them, whose number is known when the program runs |
/// | `()` | nothing: a message without content |
///
/// The trait is sealed: only types of this crate have it.
///
/// # Safety
///
/// The memory that the elements of [`gather`](Self::gather) name stays registered for as long as the
/// type's own lifetime lasts, and this program writes it only by atomic accesses during that time. This
/// holds even after the value was moved, dropped or forgotten. So the type borrows its memory, and
/// dropping it does not touch that memory.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not registered memory that the device can read",
    label = "a slice of a region is needed here, such as `region.slice(..)?`"
)]
pub unsafe trait GatherBuffer: private::Sealed {
    /// An array of scatter/gather elements.
    #[doc(hidden)]
    type List: AsMut<[ffi::ibv_sge]>;

    /// The scatter/gather elements.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: a piece is longer than 4 GiB - 1 bytes.
    #[doc(hidden)]
    fn gather(&self) -> Result<Self::List>;
}

/// Registered memory that the device writes for a receive, a read or an atomic: one piece, or
/// several that are filled one after the other.
///
/// [`MemorySliceMut`], [`MemorySlicePart`], [`SharedMemorySlice`], and arrays, tuples, vectors and
/// `&mut` slices of them.
///
/// The trait is sealed: only types of this crate have it.
///
/// # Safety
///
/// The conditions of [`GatherBuffer`]. For as long as the type's own lifetime lasts, this program also
/// accesses the memory through no references other than this value and references to its atomic form.
/// Any bytes are valid there.
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

type One = [ffi::ibv_sge; 1];

impl<T> private::Sealed for MemorySlice<'_, T> {}
impl<T> private::Sealed for MemorySliceMut<'_, T> {}

// SAFETY: the slice borrows, for its lifetime, a region that is registered until it is dropped. While
// the slice is borrowed nobody writes it, as an `Element` has no interior mutability. Dropping the
// slice does nothing.
unsafe impl<T: Element> GatherBuffer for MemorySlice<'_, T> {
    type List = One;

    #[inline]
    fn gather(&self) -> Result<One> {
        Ok([*self.gather_element()?.as_raw()])
    }
}

// SAFETY: as above; the borrow is exclusive.
unsafe impl<T: Element> GatherBuffer for MemorySliceMut<'_, T> {
    type List = One;

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

impl private::Sealed for () {}

// SAFETY: there is no memory.
unsafe impl GatherBuffer for () {
    type List = [ffi::ibv_sge; 0];

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

impl<B: private::Sealed, const N: usize> private::Sealed for [B; N] {}

// SAFETY: what holds for each piece holds for all.
unsafe impl<B: GatherBuffer<List = One>, const N: usize> GatherBuffer for [B; N] {
    type List = [ffi::ibv_sge; N];

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
unsafe impl<B: ScatterBuffer<List = One>, const N: usize> ScatterBuffer for [B; N] {
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

fn gather_all<B: GatherBuffer<List = One>>(pieces: &[B]) -> Result<ElementList> {
    ElementList::collect(pieces.len(), pieces.iter().map(|piece| Ok(piece.gather()?[0])))
}

fn scatter_all<B: ScatterBuffer<List = One>>(pieces: &mut [B]) -> Result<ElementList> {
    ElementList::collect(pieces.len(), pieces.iter_mut().map(|piece| Ok(piece.scatter()?[0])))
}

impl<B: private::Sealed> private::Sealed for Vec<B> {}
impl<B: private::Sealed> private::Sealed for &[B] {}
impl<B: private::Sealed> private::Sealed for &mut [B] {}

// SAFETY: what holds for each piece holds for all. Dropping the vector frees the list of pieces, and
// does not touch the memory that they name.
unsafe impl<B: GatherBuffer<List = One>> GatherBuffer for Vec<B> {
    type List = ElementList;

    fn gather(&self) -> Result<ElementList> {
        gather_all(self)
    }
}

// SAFETY: as above.
unsafe impl<B: ScatterBuffer<List = One>> ScatterBuffer for Vec<B> {
    const PEERS_MAY_WRITE: bool = B::PEERS_MAY_WRITE;

    fn scatter(&mut self) -> Result<ElementList> {
        scatter_all(self)
    }
}

// SAFETY: what holds for each piece holds for all, for as long as they are borrowed; that borrow cannot
// outlast their borrow of the memory.
unsafe impl<B: GatherBuffer<List = One>> GatherBuffer for &[B] {
    type List = ElementList;

    fn gather(&self) -> Result<ElementList> {
        gather_all(self)
    }
}

// SAFETY: as above; the pieces are borrowed exclusively.
unsafe impl<B: GatherBuffer<List = One>> GatherBuffer for &mut [B] {
    type List = ElementList;

    fn gather(&self) -> Result<ElementList> {
        gather_all(self)
    }
}

// SAFETY: as above.
unsafe impl<B: ScatterBuffer<List = One>> ScatterBuffer for &mut [B] {
    const PEERS_MAY_WRITE: bool = B::PEERS_MAY_WRITE;

    fn scatter(&mut self) -> Result<ElementList> {
        scatter_all(self)
    }
}

/// Implements the traits for a tuple of single pieces.
macro_rules! tuple {
    ($count:literal: $($piece:ident $index:tt),+) => {
        impl<$($piece: private::Sealed),+> private::Sealed for ($($piece,)+) {}

        // SAFETY: what holds for each piece holds for all.
        unsafe impl<$($piece: GatherBuffer<List = One>),+> GatherBuffer for ($($piece,)+) {
            type List = [ffi::ibv_sge; $count];

            #[inline]
            fn gather(&self) -> Result<Self::List> {
                Ok([$(self.$index.gather()?[0]),+])
            }
        }

        // SAFETY: what holds for each piece holds for all.
        unsafe impl<$($piece: ScatterBuffer<List = One>),+> ScatterBuffer for ($($piece,)+) {
            const PEERS_MAY_WRITE: bool = $($piece::PEERS_MAY_WRITE)&&+;

            #[inline]
            fn scatter(&mut self) -> Result<Self::List> {
                Ok([$(self.$index.scatter()?[0]),+])
            }
        }
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
