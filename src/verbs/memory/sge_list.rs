use std::ops::{Range, RangeBounds};

use super::buffer::{BorrowedBuffer, GatherBuffer, One, ScatterBuffer};
use super::owned_region::Allocated;
use super::region::{Local, Region, Writable};
use super::scatter_gather::{Element, LocalMemory, LocalMemoryMut, private, resolve};
use super::slice::MemorySliceMut;
use crate::base::{Error, Result, ffi};

/// A list whose length is known at run time only, as [`List`](GatherBuffer::List) of a program's own buffer of several
/// pieces. It allocates only when it is longer than most devices support.
///
/// Collect the elements into it: `pieces.iter().map(element).collect()`.
#[derive(Debug)]
pub struct ElementList(Elements);

impl FromIterator<ffi::ibv_sge> for ElementList {
    fn from_iter<I: IntoIterator<Item = ffi::ibv_sge>>(elements: I) -> Self {
        let mut few = [ffi::ibv_sge::default(); FEW];
        let (mut elements, mut count) = (elements.into_iter(), 0);
        for (to, from) in few.iter_mut().zip(&mut elements) {
            *to = from;
            count += 1;
        }
        let rest: Vec<_> = elements.collect();
        Self(match rest.is_empty() {
            true => Elements::Few(few, count),
            false => Elements::Many(few.into_iter().chain(rest).collect()),
        })
    }
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it lives on the stack, for one post")]
enum Elements {
    Few([ffi::ibv_sge; FEW], usize),
    Many(Vec<ffi::ibv_sge>),
}

/// Stored without an allocation.
const FEW: usize = 32;

impl AsMut<[ffi::ibv_sge]> for ElementList {
    #[inline]
    fn as_mut(&mut self) -> &mut [ffi::ibv_sge] {
        match &mut self.0 {
            Elements::Few(few, count) => &mut few[..*count],
            Elements::Many(many) => many,
        }
    }
}

impl private::List for ElementList {}

fn all(pieces: impl Iterator<Item = Result<One>>) -> Result<ElementList> {
    pieces.map(|piece| Ok(piece?[0])).collect()
}

#[inline(always)]
fn each<const N: usize>(pieces: impl Iterator<Item = Result<One>>) -> Result<[ffi::ibv_sge; N]> {
    let mut list = [ffi::ibv_sge::default(); N];
    for (element, piece) in list.iter_mut().zip(pieces) {
        [*element] = piece?;
    }
    Ok(list)
}

// SAFETY: what holds for each piece holds for all, while they are borrowed.
unsafe impl<B: GatherBuffer<List = One, Kept = B>> GatherBuffer for &[B] {
    type List = ElementList;
    type Kept = Self;

    const INLINE: bool = B::INLINE;

    fn gather(&self) -> Result<ElementList> {
        all(self.iter().map(B::gather))
    }

    fn is_in_reach(&self) -> bool {
        self.iter().all(B::is_in_reach)
    }
}

macro_rules! impl_buffer_of_list {
    ($($list:ty: $elements:ty = $collect:ident $([$($number:tt)+])?;)+) => {$(
        // SAFETY: what holds for each piece holds for all. An array or vector has them all while it lives; a slice borrows
        // them exclusively. None is `Inline`, of which an operation keeps nothing.
        unsafe impl<B: GatherBuffer<List = One, Kept = B> $(, $($number)+)?> GatherBuffer for $list {
            type List = $elements;
            type Kept = Self;

            const INLINE: bool = B::INLINE;
            const KEEPS_LENGTH: bool = B::KEEPS_LENGTH;

            #[inline]
            fn gather(&self) -> Result<Self::List> {
                $collect(self.iter().map(B::gather))
            }

            #[inline]
            fn is_in_reach(&self) -> bool {
                self.iter().all(B::is_in_reach)
            }

            #[inline]
            fn received(&mut self, bytes: usize) -> usize {
                self.iter_mut().fold(bytes, |rest, piece| piece.received(rest))
            }
        }

        // SAFETY: as above.
        unsafe impl<B: ScatterBuffer<List = One, Kept = B> $(, $($number)+)?> ScatterBuffer for $list {
            const PEERS_MAY_WRITE: bool = B::PEERS_MAY_WRITE;

            #[inline]
            fn scatter(&mut self) -> Result<Self::List> {
                $collect(self.iter_mut().map(B::scatter))
            }

            #[inline]
            fn begin_receive(&mut self) -> Result<Self::List> {
                $collect(self.iter_mut().map(B::begin_receive))
            }
        }
    )+};
}

impl_buffer_of_list! {
    [B; N]: [ffi::ibv_sge; N] = each [const N: usize];
    Vec<B>: ElementList = all;
    &mut [B]: ElementList = all;
}

// SAFETY: what holds for each piece holds for all.
unsafe impl<B: BorrowedBuffer, const N: usize> BorrowedBuffer for [B; N] {}
// SAFETY: as above. Dropping the vector frees the list of pieces, not the memory that they name.
unsafe impl<B: BorrowedBuffer> BorrowedBuffer for Vec<B> {}
// SAFETY: the pieces are borrowed for the lifetime of the type: until then none is dropped or changed.
unsafe impl<B: GatherBuffer> BorrowedBuffer for &[B] {}
// SAFETY: as above.
unsafe impl<B: GatherBuffer> BorrowedBuffer for &mut [B] {}

macro_rules! impl_buffer_of_tuple {
    ($count:literal: $($piece:ident $index:tt),+) => {
        // SAFETY: what holds for each piece holds for all.
        unsafe impl<$($piece: GatherBuffer<List = One, Kept = $piece>),+> GatherBuffer for ($($piece,)+) {
            type List = [ffi::ibv_sge; $count];
            type Kept = Self;

            // One inline piece makes all inline: the post copies registered memory too.
            const INLINE: bool = $($piece::INLINE)||+;
            const KEEPS_LENGTH: bool = $($piece::KEEPS_LENGTH)||+;

            #[inline]
            fn gather(&self) -> Result<Self::List> {
                Ok([$(self.$index.gather()?[0]),+])
            }

            #[inline]
            fn is_in_reach(&self) -> bool {
                $(self.$index.is_in_reach())&&+
            }

            #[inline]
            fn received(&mut self, bytes: usize) -> usize {
                $(let bytes = self.$index.received(bytes);)+
                bytes
            }
        }

        // SAFETY: what holds for each piece holds for all.
        unsafe impl<$($piece: ScatterBuffer<List = One, Kept = $piece>),+> ScatterBuffer for ($($piece,)+) {
            const PEERS_MAY_WRITE: bool = $($piece::PEERS_MAY_WRITE)&&+;

            #[inline]
            fn scatter(&mut self) -> Result<Self::List> {
                Ok([$(self.$index.scatter()?[0]),+])
            }

            #[inline]
            fn begin_receive(&mut self) -> Result<Self::List> {
                Ok([$(self.$index.begin_receive()?[0]),+])
            }
        }

        // SAFETY: what holds for each piece holds for all.
        unsafe impl<$($piece: BorrowedBuffer),+> BorrowedBuffer for ($($piece,)+) {}
    };
}

impl_buffer_of_tuple!(1: A 0);
impl_buffer_of_tuple!(2: A 0, B 1);
impl_buffer_of_tuple!(3: A 0, B 1, C 2);
impl_buffer_of_tuple!(4: A 0, B 1, C 2, D 3);

// SAFETY: the memory is registered until the region is dropped, at this program's addresses. This program writes it through
// the region only: exclusively, or atomically if it is shared.
unsafe impl<M: Allocated> GatherBuffer for Region<'_, M> {
    type List = One;
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<One> {
        Ok([self.sge(..)?])
    }
}

// SAFETY: as above.
unsafe impl<M: Allocated + Writable> ScatterBuffer for Region<'_, M> {
    const PEERS_MAY_WRITE: bool = M::PEERS;

    #[inline]
    fn scatter(&mut self) -> Result<One> {
        Ok([self.sge_mut(..)?])
    }
}

fn disjoint<const N: usize>(
    ranges: [impl RangeBounds<usize>; N],
    len: usize,
) -> Result<[Range<usize>; N]> {
    let mut resolved = [const { 0..0 }; N];
    for (to, range) in resolved.iter_mut().zip(ranges) {
        *to = resolve(range, len)?;
    }
    for (n, a) in resolved.iter().enumerate() {
        let overlaps = |b: &Range<usize>| a.start.max(b.start) < a.end.min(b.end);
        let reason = "two of the ranges overlap";
        Error::invalid_if(resolved[..n].iter().any(overlaps), "ibv_sge", reason)?;
    }
    Ok(resolved)
}

impl<M: Local + Writable> Region<'_, M> {
    /// The elements in each range, exclusively.
    ///
    /// An array of slices is one buffer of a request: a message received into it fills them in this order.
    ///
    /// ```
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// # fn f(region: &mut ibverbs::MemoryRegion<'_, u8>) -> ibverbs::Result<()> {
    /// let [header, body] = region.slices_mut([0..16, 64..1024])?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: a range is out of bounds, or two overlap.
    pub fn slices_mut<const N: usize>(
        &mut self,
        ranges: [impl RangeBounds<usize>; N],
    ) -> Result<[MemorySliceMut<'_, M::Item>; N]> {
        self.slice_mut(..)?.slices(ranges)
    }
}

impl<T: Element> MemorySliceMut<'_, T> {
    /// The elements in each range, as [`Region::slices_mut`] gives them.
    ///
    /// # Errors
    ///
    /// Those of [`Region::slices_mut`].
    pub fn slices<const N: usize>(self, ranges: [impl RangeBounds<usize>; N]) -> Result<[Self; N]> {
        let ranges = disjoint(ranges, self.len())?;
        // SAFETY: `self` is given up, and the ranges do not overlap.
        Ok(ranges.map(|range| unsafe { self.subslice(range) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::memory::{MemorySlice, MemorySliceMut, SharedMemorySlice};

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
            let elements = pieces.iter().map(|piece| piece.gather().unwrap()[0]);
            assert_eq!(found(elements.collect()), expected);
        }
    }

    #[test]
    fn buffers_have_nothing_to_drop() {
        assert!(!std::mem::needs_drop::<MemorySlice<'_, u8>>());
        assert!(!std::mem::needs_drop::<MemorySliceMut<'_, u8>>());
        assert!(!std::mem::needs_drop::<(SharedMemorySlice<'_, u8>, [MemorySlice<'_, u8>; 3])>());
    }

    #[test]
    fn pieces_of_one_slice_do_not_overlap() {
        let mut data = [0_u16; 10];
        let mut whole = MemorySliceMut::new(&mut data, 7);
        let pieces = whole.reborrow().slices([6..8, 0..2]).unwrap();
        let [a, b] = pieces.map(|piece| piece.into_scatter_element().unwrap());
        assert_eq!((a.len(), b.len()), (4, 4));
        assert_eq!(a.as_raw().addr, b.as_raw().addr + 12);
        assert_eq!((a.as_raw().lkey, b.as_raw().lkey), (7, 7));
        let error = whole.reborrow().slices([0..4, 8..10, 3..5]).unwrap_err();
        assert!(error.to_string().contains("two of the ranges overlap"), "{error}");
        assert!(whole.reborrow().slices([0..4, 8..11]).is_err());
        assert!(whole.reborrow().slices([0..4, 2..2, 4..10]).is_ok());
        assert!(whole.reborrow().slices([0..1, 0..1]).is_err());
        let [mut head, mut tail] = whole.slices([0..=3, 4..=9]).unwrap();
        head.fill(1);
        tail.fill(2);
        assert_eq!(data, [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
    }
}
