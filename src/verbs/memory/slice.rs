use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range, RangeBounds};
use std::ptr::NonNull;

use super::scatter_gather::{
    Element, GatherElement, LocalMemory, LocalMemoryMut, ScatterElement, resolve, sge,
};
use crate::base::{Error, Result, debug, ffi};

/// A part of a region, borrowed: a `&[T]` together with the region's key.
///
/// It derefs to `[T]`.
#[derive(Clone, Copy)]
pub struct MemorySlice<'buf, T> {
    data: &'buf [T],
    lkey: u32,
}

/// A part of a region, borrowed exclusively: a `&mut [T]` together with the region's key.
///
/// It derefs to `[T]`. Split, its parts can be used independently, each by the work request that holds it.
pub struct MemorySliceMut<'buf, T> {
    /// Not a reference, which would assert at each move that nothing else accesses the memory, even while the
    /// device writes it.
    data: NonNull<[T]>,
    lkey: u32,
    borrow: PhantomData<&'buf mut [T]>,
}

// SAFETY: it stands for `&mut [T]`, which is `Send` if `T` is.
unsafe impl<T: Send> Send for MemorySliceMut<'_, T> {}
// SAFETY: as above; a shared one only gives out `&[T]`.
unsafe impl<T: Sync> Sync for MemorySliceMut<'_, T> {}

impl<'buf, T: Element> MemorySlice<'buf, T> {
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
    ///  - `EINVAL`: there are fewer than `mid` elements.
    #[inline]
    pub fn split_at(self, mid: usize) -> Result<(Self, Self)> {
        Ok((self.slice(..mid)?, self.slice(mid..)?))
    }

    /// The local key of the region.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The whole slice, for a work request.
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
        // SAFETY: the elements are borrowed exclusively for the lifetime.
        unsafe { Self::from_raw(NonNull::from(data), lkey) }
    }

    /// # Safety
    ///
    /// For `'buf` the elements are valid, and nothing else in this program accesses them.
    pub(super) unsafe fn from_raw(data: NonNull<[T]>, lkey: u32) -> Self {
        Self { data, lkey, borrow: PhantomData }
    }

    /// `range` is within bounds.
    #[inline]
    pub(super) fn pointer(&self, range: Range<usize>) -> NonNull<[T]> {
        debug_assert!(range.start <= range.end && range.end <= self.data.len());
        // SAFETY: the range is within the slice, as the caller has checked.
        let start = unsafe { self.data.cast::<T>().add(range.start) };
        NonNull::slice_from_raw_parts(start, range.len())
    }

    /// `range` is within bounds.
    ///
    /// # Safety
    ///
    /// For `'buf`, nothing else uses these elements: the caller gives `self` up, or uses only others of it.
    #[inline]
    pub(super) unsafe fn subslice(&self, range: Range<usize>) -> Self {
        // SAFETY: the elements are part of this slice, and the caller vouches that they are used once.
        unsafe { Self::from_raw(self.pointer(range), self.lkey) }
    }

    /// Borrows the part for a shorter time.
    #[inline]
    pub fn reborrow(&mut self) -> MemorySliceMut<'_, T> {
        // SAFETY: `self` cannot be used while the new slice lives.
        unsafe { MemorySliceMut::from_raw(self.data, self.lkey) }
    }

    /// Borrows the part to read only.
    pub fn as_slice(&self) -> MemorySlice<'_, T> {
        MemorySlice { data: self, lkey: self.lkey }
    }

    /// The elements in `range`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    #[inline]
    pub fn slice(self, range: impl RangeBounds<usize>) -> Result<Self> {
        let range = resolve(range, self.data.len())?;
        // SAFETY: `self` is given up.
        Ok(unsafe { self.subslice(range) })
    }

    /// The first `mid` elements, and the rest.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there are fewer than `mid` elements.
    #[inline]
    pub fn split_at(self, mid: usize) -> Result<(Self, Self)> {
        let len = self.data.len();
        let mid = resolve(..mid, len)?.end;
        // SAFETY: `self` is given up, and the halves do not overlap.
        Ok(unsafe { (self.subslice(0..mid), self.subslice(mid..len)) })
    }

    /// Parts of `len` elements each; the last one may be shorter.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `len` is 0.
    pub fn chunks(self, len: usize) -> Result<impl ExactSizeIterator<Item = Self> + use<'buf, T>> {
        Error::invalid_if(len == 0, "ibv_sge", "the length of a chunk is 0")?;
        let end = self.data.len();
        Ok((0..end.div_ceil(len)).map(move |n| {
            let start = n * len;
            // SAFETY: the iterator owns `self`, and no two chunks overlap.
            unsafe { self.subslice(start..end.min(start.saturating_add(len))) }
        }))
    }

    /// The local key of the region.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The whole slice, for a work request that reads it.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: it is longer than 4 GiB - 1 bytes.
    #[inline]
    pub fn gather_element(&self) -> Result<GatherElement<'_>> {
        LocalMemory::sge(self, ..).map(GatherElement::new)
    }

    /// The whole slice, for a work request that writes it.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: it is longer than 4 GiB - 1 bytes.
    #[inline]
    pub fn scatter_element(&mut self) -> Result<ScatterElement<'_>> {
        LocalMemory::sge(self, ..).map(ScatterElement::new)
    }

    /// [`scatter_element`](Self::scatter_element), for as long as the region is borrowed.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: it is longer than 4 GiB - 1 bytes.
    #[inline]
    pub fn into_scatter_element(self) -> Result<ScatterElement<'buf>> {
        LocalMemory::sge(&self, ..).map(ScatterElement::new)
    }
}

impl<T: Element> LocalMemory for MemorySlice<'_, T> {
    #[inline]
    fn sge(&self, range: impl RangeBounds<usize>) -> Result<ffi::ibv_sge> {
        let data = &self.data[resolve(range, self.data.len())?];
        sge(data.as_ptr() as u64, size_of_val(data), self.lkey)
    }
}

impl<T: Element> LocalMemory for MemorySliceMut<'_, T> {
    #[inline]
    fn sge(&self, range: impl RangeBounds<usize>) -> Result<ffi::ibv_sge> {
        let data = self.pointer(resolve(range, self.data.len())?);
        sge(data.cast::<T>().as_ptr() as u64, data.len() * size_of::<T>(), self.lkey)
    }
}

impl<T: Element> LocalMemoryMut for MemorySliceMut<'_, T> {}

impl<T> Deref for MemorySlice<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.data
    }
}

impl<T> Deref for MemorySliceMut<'_, T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: the elements are valid, and borrowed exclusively for longer than `self` is.
        unsafe { self.data.as_ref() }
    }
}

impl<T> DerefMut for MemorySliceMut<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { self.data.as_mut() }
    }
}

debug! { impl[T] MemorySlice<'_, T>, self, len: self.data.len(), .. }

debug! { impl[T] MemorySliceMut<'_, T>, self, len: self.data.len(), .. }

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
