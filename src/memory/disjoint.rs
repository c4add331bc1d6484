//! Several pieces of one region in one request that writes them.

use std::ops::{Range, RangeBounds};

use super::region::{Local, Region, Writable};
use super::scatter_gather::{Element, LocalMemoryMut, ScatterElement, resolve};
use super::slice::MemorySliceMut;
use crate::error::{Error, Result};

/// Resolves the ranges within `len` elements, and checks that no two overlap.
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

/// The elements of a request that writes the ranges, which do not overlap.
fn elements<'buf, const N: usize>(
    memory: &'buf impl LocalMemoryMut,
    ranges: [Range<usize>; N],
) -> Result<[ScatterElement<'buf>; N]> {
    let mut raw = [crate::ffi::ibv_sge::default(); N];
    for (to, range) in raw.iter_mut().zip(ranges) {
        *to = memory.sge_mut(range)?;
    }
    Ok(raw.map(ScatterElement::new))
}

impl<M: Local + Writable> Region<'_, M> {
    /// The elements in each of the ranges, for one work request that writes them all: a message is
    /// spread over them, in this order.
    ///
    /// ```
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// # fn f(region: &mut ibverbs::MemoryRegion<'_, u8>) -> ibverbs::Result<()> {
    /// let elements = region.scatter_elements([0..4, 32..36])?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: a range is out of bounds, or longer than 4 GiB - 1 bytes, or two overlap.
    pub fn scatter_elements<const N: usize>(
        &mut self,
        ranges: [impl RangeBounds<usize>; N],
    ) -> Result<[ScatterElement<'_>; N]> {
        elements(self, disjoint(ranges, self.len())?)
    }

    /// The elements in each of the ranges, exclusively. An array of slices is one buffer of a
    /// channel's operation: a message that is received into it is spread over them, in this order.
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
    /// The elements in each of the ranges, for one work request that writes them all: a message is
    /// spread over them, in this order.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: a range is out of bounds, or longer than 4 GiB - 1 bytes, or two overlap.
    pub fn scatter_elements<const N: usize>(
        &mut self,
        ranges: [impl RangeBounds<usize>; N],
    ) -> Result<[ScatterElement<'_>; N]> {
        elements(self, disjoint(ranges, self.len())?)
    }

    /// The elements in each of the ranges. An array of slices is one buffer of a channel's operation.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: a range is out of bounds, or two overlap.
    pub fn slices<const N: usize>(self, ranges: [impl RangeBounds<usize>; N]) -> Result<[Self; N]> {
        let ranges = disjoint(ranges, self.len())?;
        // SAFETY: `self` is given up, and the ranges do not overlap.
        Ok(ranges.map(|range| unsafe { self.subslice(range) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_one_slice_do_not_overlap() {
        let mut data = [0_u16; 10];
        let mut whole = MemorySliceMut::new(&mut data, 7);
        let [a, b] = whole.scatter_elements([6..8, 0..2]).unwrap();
        assert_eq!((a.len(), b.len()), (4, 4));
        assert_eq!(a.as_raw().addr, b.as_raw().addr + 12);
        assert_eq!((a.as_raw().lkey, b.as_raw().lkey), (7, 7));
        let error = whole.scatter_elements([0..4, 8..10, 3..5]).unwrap_err();
        assert!(error.to_string().contains("two of the ranges overlap"), "{error}");
        assert!(whole.scatter_elements([0..4, 8..11]).is_err());
        // An empty range overlaps nothing.
        assert!(whole.scatter_elements([0..4, 2..2, 4..10]).is_ok());
        assert!(whole.reborrow().slices([0..1, 0..1]).is_err());
        let [mut head, mut tail] = whole.slices([0..=3, 4..=9]).unwrap();
        head.fill(1);
        tail.fill(2);
        assert_eq!(data, [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
    }
}
