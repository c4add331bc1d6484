//! The pieces of registered memory that a work request names.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, Deref, DerefMut, Range, RangeBounds};

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::error::{Error, Result};
use crate::ffi;

/// What registered memory may hold: a type without padding for which any bytes are a valid value,
/// since a device writes what a peer sent.
///
/// It is implemented for every type that has the `zerocopy` traits, and cannot be implemented
/// otherwise: integers, floats, arrays of them, and `Copy` structs that derive `FromBytes`,
/// `IntoBytes` and `Immutable`. `bool`, `char`, references and anything with padding do not have them.
///
/// For a struct of yours, add [`zerocopy`] to your crate (`cargo add zerocopy@0.8 --features derive`):
///
/// ```
/// use zerocopy::{FromBytes, Immutable, IntoBytes};
///
/// #[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
/// #[repr(C)]
/// struct Entry {
///     key: u64,
///     length: u32,
///     checksum: u32,
///     value: [u8; 48],
/// }
///
/// fn is_element<T: ibverbs::Element>() {}
/// is_element::<Entry>();
/// is_element::<[Entry; 4]>();
/// ```
pub trait Element: FromBytes + IntoBytes + Immutable + Copy + Send + Sync + 'static {}

impl<T: FromBytes + IntoBytes + Immutable + Copy + Send + Sync + 'static> Element for T {}

/// The longest piece of memory that a scatter/gather element can name: 4 GiB - 1 bytes.
pub const MAX_SGE_LENGTH: usize = u32::MAX as usize;

/// The elements of `len` that `range` names.
#[inline]
pub(crate) fn resolve(range: impl RangeBounds<usize>, len: usize) -> Result<Range<usize>> {
    let start = match range.start_bound() {
        Bound::Included(&start) => Some(start),
        Bound::Excluded(&start) => start.checked_add(1),
        Bound::Unbounded => Some(0),
    };
    let end = match range.end_bound() {
        Bound::Included(&end) => end.checked_add(1),
        Bound::Excluded(&end) => Some(end),
        Bound::Unbounded => Some(len),
    };
    match (start, end) {
        (Some(start), Some(end)) if start <= end && end <= len => Ok(start..end),
        _ => {
            let Excess { what, value, most } = out_of_bounds(start, end, len);
            Err(Error::out_of_range("ibv_sge", what, value, 0, most))
        }
    }
}

/// What is too large, and what it may be.
///
/// Errors of the data path are put together from it where they are returned, so that the compiler sees
/// that they are errors: what it gets from a function that it does not inline, it looks at again.
struct Excess {
    what: &'static str,
    value: u64,
    most: u64,
}

#[cold]
#[inline(never)]
fn out_of_bounds(start: Option<usize>, end: Option<usize>, len: usize) -> Excess {
    let (start, end) = (start.unwrap_or(usize::MAX) as u64, end.unwrap_or(usize::MAX) as u64);
    if end > len as u64 {
        Excess { what: "the end of the range", value: end, most: len as u64 }
    } else {
        Excess { what: "the start of the range", value: start, most: end }
    }
}

/// The C struct for `bytes` bytes at `address`.
#[inline]
pub(crate) fn sge(address: u64, bytes: usize, lkey: u32) -> Result<ffi::ibv_sge> {
    match u32::try_from(bytes) {
        Ok(length) => Ok(ffi::ibv_sge { addr: address, length, lkey }),
        Err(_) => {
            let Excess { what, value, most } = too_long(bytes);
            Err(Error::out_of_range("ibv_sge", what, value, 0, most))
        }
    }
}

/// The C struct for `bytes` bytes at `address`, of a region that requests see at `iova`.
///
/// Providers follow the addresses of elements without asking the device: to copy what is sent inline,
/// and (mlx5, hns) to deliver short messages and results, which arrive within the completion. So an
/// element whose address is not this program's own is not for everyone to use.
#[inline]
pub(crate) fn sge_at(address: u64, iova: u64, bytes: usize, lkey: u32) -> Result<ffi::ibv_sge> {
    if address != iova {
        return Err(Error::invalid("ibv_sge", by_iova()));
    }
    sge(address, bytes, lkey)
}

#[cold]
#[inline(never)]
fn by_iova() -> &'static str {
    "requests do not see the region at its own address: see gather_element_by_iova"
}

#[cold]
#[inline(never)]
fn too_long(bytes: usize) -> Excess {
    Excess { what: "the length in bytes", value: bytes as u64, most: MAX_SGE_LENGTH as u64 }
}

/// Registered memory that work requests of this program can name.
///
/// The trait is sealed: only regions of this crate have it.
pub trait LocalMemory: private::Sealed {
    /// The scatter/gather element of the elements in `range`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes.
    #[doc(hidden)]
    fn sge(&self, range: impl RangeBounds<usize>) -> Result<ffi::ibv_sge>;
}

pub(crate) mod private {
    /// Keeps [`LocalMemory`](super::LocalMemory) to this crate.
    pub trait Sealed {}
}

/// `struct ibv_sge`: memory that the device reads for a send, a write or an atomic.
///
/// It borrows the memory for `'buf`. It is laid out as the C struct, so a slice of them is the
/// scatter/gather list of a work request as it stands.
#[derive(Clone, Copy)]
#[doc(alias = "ibv_sge")]
#[repr(transparent)]
pub struct GatherElement<'buf>(ffi::ibv_sge, PhantomData<&'buf [u8]>);

/// `struct ibv_sge`: memory that the device writes for a receive, a read or an atomic.
///
/// It borrows the memory exclusively for `'buf`. It is laid out as the C struct, so a slice of them
/// is the scatter/gather list of a work request as it stands.
///
/// Leave empty ones out of requests: some devices (mlx4, mthca) take a length of 0 for 2 GiB, and write
/// beyond the element as far as the region goes. A [`Channel`](crate::Channel) does so by itself.
#[doc(alias = "ibv_sge")]
#[repr(transparent)]
pub struct ScatterElement<'buf>(ffi::ibv_sge, PhantomData<&'buf mut [u8]>);

impl<'buf> GatherElement<'buf> {
    #[inline]
    pub(crate) fn new(raw: ffi::ibv_sge) -> Self {
        Self(raw, PhantomData)
    }

    /// An element from its parts.
    ///
    /// # Safety
    ///
    /// For `'buf`, `raw` names memory that is registered under its `lkey` and that nobody writes.
    pub unsafe fn from_raw(raw: ffi::ibv_sge) -> Self {
        Self(raw, PhantomData)
    }

    /// The C struct.
    #[inline]
    pub fn as_raw(&self) -> &ffi::ibv_sge {
        &self.0
    }

    /// Its length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "an element is a length, not a collection")]
    #[inline]
    pub fn len(&self) -> u32 {
        self.0.length
    }
}

impl<'buf> ScatterElement<'buf> {
    #[inline]
    pub(crate) fn new(raw: ffi::ibv_sge) -> Self {
        Self(raw, PhantomData)
    }

    /// An element from its parts.
    ///
    /// # Safety
    ///
    /// For `'buf`, `raw` names memory that is registered for local writing under its `lkey` and that
    /// nobody else accesses.
    pub unsafe fn from_raw(raw: ffi::ibv_sge) -> Self {
        Self(raw, PhantomData)
    }

    /// The C struct.
    #[inline]
    pub fn as_raw(&self) -> &ffi::ibv_sge {
        &self.0
    }

    /// Its length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "an element is a length, not a collection")]
    #[inline]
    pub fn len(&self) -> u32 {
        self.0.length
    }
}

fn debug(name: &str, raw: &ffi::ibv_sge, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.debug_struct(name)
        .field("addr", &format_args!("{:#x}", raw.addr))
        .field("length", &raw.length)
        .field("lkey", &format_args!("{:#x}", raw.lkey))
        .finish()
}

impl fmt::Debug for GatherElement<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug("GatherElement", &self.0, f)
    }
}

impl fmt::Debug for ScatterElement<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug("ScatterElement", &self.0, f)
    }
}

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
    pub(crate) fn new(data: &'buf [T], lkey: u32) -> Self {
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
    pub(crate) fn new(data: &'buf mut [T], lkey: u32) -> Self {
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
    fn elements_are_laid_out_as_in_c() {
        assert_eq!(size_of::<GatherElement<'_>>(), size_of::<ffi::ibv_sge>());
        assert_eq!(align_of::<ScatterElement<'_>>(), align_of::<ffi::ibv_sge>());
    }

    #[test]
    fn ranges_are_checked() {
        assert_eq!(resolve(.., 4), Ok(0..4));
        assert_eq!(resolve(1..=3, 4), Ok(1..4));
        assert_eq!(resolve(4.., 4), Ok(4..4));
        assert!(resolve(0..5, 4).is_err() && resolve(5.., 4).is_err());
        assert!(resolve(0..=usize::MAX, 4).is_err());
        assert!(resolve((Bound::Excluded(usize::MAX), Bound::Unbounded), 4).is_err());
        #[expect(clippy::reversed_empty_ranges, reason = "that is the bad input")]
        let reversed = resolve(3..1, 4).unwrap_err();
        assert!(reversed.to_string().contains("start of the range is 3"), "{reversed}");
    }

    #[test]
    fn an_element_is_at_most_4_gib_minus_1() {
        assert_eq!(sge(0, MAX_SGE_LENGTH, 7).unwrap().length, u32::MAX);
        let error = sge(0, MAX_SGE_LENGTH + 1, 7).unwrap_err();
        assert!(error.to_string().contains("4294967296"), "{error}");
    }

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
