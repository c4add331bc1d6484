//! Borrowed parts of a region: a slice together with the region's key.

use std::fmt;
use std::ops::{Deref, DerefMut, RangeBounds};

use super::scatter_gather::{Element, GatherElement, ScatterElement, resolve, sge};
use crate::error::{Error, Result};

/// A part of a region, borrowed: what `&[T]` is to a vector, together with the region's key.
///
/// It derefs to `[T]`.
#[derive(Clone, Copy)]
pub struct MemorySlice<'buf, T> {
    data: &'buf [T],
    lkey: u32,
}

/// A part of a region, borrowed exclusively: what `&mut [T]` is to a vector, together with the
/// region's key.
///
/// It derefs to `[T]`. Parts can be split further and used independently, each by the work request
/// that holds it.
pub struct MemorySliceMut<'buf, T> {
    data: &'buf mut [T],
    lkey: u32,
}

impl<'buf, T: Element> MemorySlice<'buf, T> {
    #[inline]
    pub(super) fn new(data: &'buf [T], lkey: u32) -> Self {
        Self { data, lkey }
    }

    /// The elements in `range`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    #[inline]
    pub fn slice(self, range: impl RangeBounds<usize>) -> Result<Self> {
        let range = resolve(range, self.data.len())?;
        Ok(Self { data: &self.data[range], ..self })
    }

    /// The first `mid` elements, and the rest.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there are fewer than that.
    #[inline]
    pub fn split_at(self, mid: usize) -> Result<(Self, Self)> {
        Ok((self.slice(..mid)?, self.slice(mid..)?))
    }

    /// The local key of the region.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// All of it, for a work request.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: it is longer than 4 GiB - 1 bytes.
    #[inline]
    pub fn gather_element(&self) -> Result<GatherElement<'buf>> {
        sge(self.data.as_ptr() as u64, size_of_val(self.data), self.lkey).map(GatherElement::new)
    }
}

impl<'buf, T: Element> MemorySliceMut<'buf, T> {
    #[inline]
    pub(super) fn new(data: &'buf mut [T], lkey: u32) -> Self {
        Self { data, lkey }
    }

    /// The same part, borrowed for a shorter time.
    #[inline]
    pub fn reborrow(&mut self) -> MemorySliceMut<'_, T> {
        MemorySliceMut { data: self.data, lkey: self.lkey }
    }

    /// The same part, to read only.
    #[inline]
    pub fn as_slice(&self) -> MemorySlice<'_, T> {
        MemorySlice { data: self.data, lkey: self.lkey }
    }

    /// The elements in `range`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    #[inline]
    pub fn slice(self, range: impl RangeBounds<usize>) -> Result<Self> {
        let range = resolve(range, self.data.len())?;
        Ok(Self { data: &mut self.data[range], lkey: self.lkey })
    }

    /// The first `mid` elements, and the rest.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there are fewer than that.
    #[inline]
    pub fn split_at(self, mid: usize) -> Result<(Self, Self)> {
        let mid = resolve(..mid, self.data.len())?.end;
        let (head, tail) = self.data.split_at_mut(mid);
        Ok((Self { data: head, lkey: self.lkey }, Self { data: tail, lkey: self.lkey }))
    }

    /// Parts of `len` elements each, which do not overlap; the last one may be shorter.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `len` is 0.
    pub fn chunks(self, len: usize) -> Result<impl ExactSizeIterator<Item = Self> + use<'buf, T>> {
        if len == 0 {
            return Err(Error::invalid("ibv_sge", "the length of a chunk is 0"));
        }
        let lkey = self.lkey;
        Ok(self.data.chunks_mut(len).map(move |data| Self { data, lkey }))
    }

    /// The local key of the region.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// All of it, for a work request that reads it.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: it is longer than 4 GiB - 1 bytes.
    #[inline]
    pub fn gather_element(&self) -> Result<GatherElement<'_>> {
        sge(self.data.as_ptr() as u64, size_of_val(self.data), self.lkey).map(GatherElement::new)
    }

    /// All of it, for a work request that writes it.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: it is longer than 4 GiB - 1 bytes.
    #[inline]
    pub fn scatter_element(&mut self) -> Result<ScatterElement<'_>> {
        let bytes = size_of_val(self.data);
        sge(self.data.as_mut_ptr() as u64, bytes, self.lkey).map(ScatterElement::new)
    }

    /// All of it, for a work request that writes it for as long as the region is borrowed.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: it is longer than 4 GiB - 1 bytes.
    #[inline]
    pub fn into_scatter_element(self) -> Result<ScatterElement<'buf>> {
        let bytes = size_of_val(self.data);
        sge(self.data.as_mut_ptr() as u64, bytes, self.lkey).map(ScatterElement::new)
    }
}

impl<T> Deref for MemorySlice<'_, T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        self.data
    }
}

impl<T> Deref for MemorySliceMut<'_, T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        self.data
    }
}

impl<T> DerefMut for MemorySliceMut<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        self.data
    }
}

impl<T> fmt::Debug for MemorySlice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemorySlice").field("len", &self.data.len()).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for MemorySliceMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemorySliceMut").field("len", &self.data.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_split_without_overlap() {
        let mut data = [0_u16; 10];
        let whole = MemorySliceMut::new(&mut data, 7);
        let (mut head, mut tail) = whole.split_at(4).unwrap();
        head.fill(1);
        tail.fill(2);
        let element = tail.scatter_element().unwrap();
        assert_eq!((element.len(), element.as_raw().lkey), (12, 7));
        assert!(head.split_at(5).is_err());
        let lengths: Vec<_> = tail.chunks(4).unwrap().map(|c| c.len()).collect();
        assert_eq!((lengths, data), (vec![4, 2], [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]));
        assert!(MemorySliceMut::new(&mut data, 7).chunks(0).is_err());
    }
}
