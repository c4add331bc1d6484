use std::marker::PhantomData;
use std::ops::{Index, RangeBounds};
use std::ptr::NonNull;

use super::buffer::{BorrowedBuffer, GatherBuffer, ScatterBuffer};
use super::remote_region::RemoteMemoryRegion;
use super::scatter_gather::{
    Element, GatherElement, LocalMemory, LocalMemoryMut, ScatterElement, private, resolve, sge_at,
};
use super::shared_copy::{fill, load, store};
use crate::base::{Error, Result, debug, ffi, getters};

/// A part of a [`SharedMemoryRegion`](crate::SharedMemoryRegion), borrowed.
///
/// It is `Copy`, and never a reference to the elements, because a peer may write them at any time. It copies
/// elements out ([`read`](Self::read)) and in ([`write`](Self::write)), accesses integers in place by [atomic
/// operations](Self::atomic), and names the elements in work requests.
///
/// # What a copy sees of a concurrent write
///
/// A copy takes the elements in no particular order: some that are written meanwhile it may see new, others
/// old. It sees an aligned element of 1, 2, 4 or 8 bytes whole, old or new, if the writer writes it in one
/// access. A CPU and RDMA atomics do; RDMA writes do not promise it. It may see larger elements half-written.
///
/// The protocol must tell when data is complete: after a completion, or after an atomic access to a flag that
/// was written last. Most devices write in order, without
/// [`RELAXED_ORDERING`](crate::AccessFlags::RELAXED_ORDERING).
///
/// Threads of this program may read and write the same elements at the same time, with the same effect.
pub struct SharedMemorySlice<'buf, T> {
    data: NonNull<T>,
    len: usize,
    base: u64,
    lkey: u32,
    rkey: u32,
    memory: PhantomData<&'buf T>,
}

/// No type indexes shared memory. The trait exists for the compiler's message.
#[diagnostic::on_unimplemented(
    message = "shared memory cannot be indexed: a peer may write it at any time",
    label = "copy the elements out: `slice.read_one(index)`, or `slice.read(index, &mut elements)`",
    note = "`slice.write(index, &elements)` copies in, and `slice.atomic(index)` accesses an integer in place; a region's \
            `slice(..)` is the slice"
)]
pub trait Indexes {
    fn never(&self) -> !;
}

#[doc(hidden)]
impl<T, I: Indexes> Index<I> for SharedMemorySlice<'_, T> {
    type Output = T;

    fn index(&self, index: I) -> &T {
        index.never()
    }
}

impl<T> Clone for SharedMemorySlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SharedMemorySlice<'_, T> {}

// SAFETY: it names shared memory, which is accessed atomically, and whose elements are `Send`.
unsafe impl<T: Send + Sync> Send for SharedMemorySlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for SharedMemorySlice<'_, T> {}

impl<'buf, T: Element> SharedMemorySlice<'buf, T> {
    /// Requests name the part from `base` on.
    ///
    /// # Safety
    ///
    /// For `'buf`, `data` is valid for reads and writes of `len` initialised elements, aligned to the element and
    /// to its integer type's atomic form, and accessed only by atomic operations of the unit of `T` and from
    /// outside of the program.
    #[inline]
    pub(super) unsafe fn new(
        data: NonNull<T>,
        len: usize,
        base: u64,
        lkey: u32,
        rkey: u32,
    ) -> Self {
        Self { data, len, base, lkey, rkey, memory: PhantomData }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements in `range`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    #[inline]
    pub fn slice(self, range: impl RangeBounds<usize>) -> Result<Self> {
        let range = resolve(range, self.len)?;
        // SAFETY: the range is within the slice.
        let data = unsafe { self.data.add(range.start) };
        let base = self.base + (range.start * size_of::<T>()) as u64;
        Ok(Self { data, len: range.len(), base, ..self })
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

    /// Parts of `len` elements each; the last one may be shorter.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `len` is 0.
    pub fn chunks(self, len: usize) -> Result<impl ExactSizeIterator<Item = Self> + use<'buf, T>> {
        Error::invalid_if(len == 0, "ibv_sge", "the length of a chunk is 0")?;
        Ok((0..self.len.div_ceil(len)).map(move |chunk| {
            let start = chunk * len;
            let part = len.min(self.len - start);
            // SAFETY: the part is within the slice.
            let data = unsafe { self.data.add(start) };
            Self { data, len: part, base: self.base + (start * size_of::<T>()) as u64, ..self }
        }))
    }

    /// Copies the elements from `index` on to `to`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the slice ends before that many elements.
    #[inline]
    pub fn read(&self, index: usize, to: &mut [T]) -> Result<()> {
        let range = resolve(index..index.saturating_add(to.len()), self.len)?;
        // SAFETY: the elements are within the slice, for which the caller of `new` vouches; `to` is exclusive and
        // takes any bytes.
        unsafe { load(self.data.as_ptr().add(range.start), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Copies the element at `index`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `index` is out of bounds.
    #[inline]
    pub fn read_one(&self, index: usize) -> Result<T> {
        let mut value = T::new_zeroed();
        self.read(index, std::slice::from_mut(&mut value))?;
        Ok(value)
    }

    /// Copies all elements.
    pub fn to_vec(&self) -> Vec<T> {
        let mut copy = Vec::with_capacity(self.len);
        // SAFETY: the caller of `new` vouches for the elements; the vector has room for them, and any bytes are
        // valid.
        unsafe {
            load(self.data.as_ptr(), copy.as_mut_ptr(), self.len);
            copy.set_len(self.len);
        }
        copy
    }

    /// Copies `from` to the elements from `index` on.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the slice ends before that many elements.
    #[inline]
    pub fn write(&self, index: usize, from: &[T]) -> Result<()> {
        let range = resolve(index..index.saturating_add(from.len()), self.len)?;
        // SAFETY: the elements are within the slice, which `new` vouches for.
        unsafe { store(from.as_ptr(), self.data.as_ptr().add(range.start), from.len()) };
        Ok(())
    }

    /// Writes the element at `index`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `index` is out of bounds.
    #[inline]
    pub fn write_one(&self, index: usize, value: T) -> Result<()> {
        self.write(index, std::slice::from_ref(&value))
    }

    /// Writes `value` to all elements.
    pub fn fill(&self, value: T) {
        // SAFETY: the elements are within the slice, which `new` vouches for.
        unsafe { fill(value, self.data.as_ptr(), self.len) };
    }

    /// Sets all bytes to zero.
    pub fn zero(&self) {
        self.fill(T::new_zeroed());
    }

    /// The whole slice, for a work request that reads it.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: it is longer than 4 GiB - 1 bytes, or its region has an
    ///    [`iova`](crate::RegionOptions::iova) of its own.
    #[inline]
    pub fn gather_element(&self) -> Result<GatherElement<'buf>> {
        self.sge(..).map(GatherElement::new)
    }

    /// The whole slice, for a work request that writes it.
    ///
    /// Any number of requests may write the same elements; their contents are then unspecified.
    ///
    /// # Errors
    ///
    /// Those of [`gather_element`](Self::gather_element).
    #[inline]
    pub fn scatter_element(&self) -> Result<ScatterElement<'buf>> {
        self.sge(..).map(ScatterElement::new)
    }

    /// The address, length and key that a peer needs to access it.
    #[inline]
    pub fn remote(&self) -> RemoteMemoryRegion {
        RemoteMemoryRegion {
            address: self.base,
            length: (self.len * size_of::<T>()) as u64,
            rkey: self.rkey,
        }
    }

    getters! { self,
        /// The local key of the region.
        #[inline]
        lkey: u32 => self.lkey;

        /// The remote key of the region.
        #[inline]
        rkey: u32 => self.rkey;

        /// The address of the first element. Accesses through it must be atomic or volatile: others are
        /// unsound.
        #[inline]
        as_ptr: *mut T => self.data.as_ptr();
    }
}

impl<T: Element> private::Sealed for SharedMemorySlice<'_, T> {}

impl<T: Element> LocalMemoryMut for SharedMemorySlice<'_, T> {}

impl<T: Element> LocalMemory for SharedMemorySlice<'_, T> {
    #[inline]
    fn sge(&self, range: impl RangeBounds<usize>) -> Result<ffi::ibv_sge> {
        let range = resolve(range, self.len)?;
        let offset = (range.start * size_of::<T>()) as u64;
        let (address, iova) = (self.data.as_ptr() as u64 + offset, self.base + offset);
        sge_at(address, iova, range.len() * size_of::<T>(), self.lkey)
    }
}

// SAFETY: the slice borrows a region that is registered until it is dropped. This program accesses it atomically
// only.
unsafe impl<T: Element> GatherBuffer for SharedMemorySlice<'_, T> {
    type List = [ffi::ibv_sge; 1];
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<Self::List> {
        Ok([self.sge(..)?])
    }
}

// SAFETY: as above; any bytes are a valid `Element`.
unsafe impl<T: Element> ScatterBuffer for SharedMemorySlice<'_, T> {
    #[inline]
    fn scatter(&mut self) -> Result<Self::List> {
        Ok([self.sge(..)?])
    }
}

// SAFETY: the borrow of the region lasts for the lifetime of the type, and dropping the value does nothing.
unsafe impl<T: Element> BorrowedBuffer for SharedMemorySlice<'_, T> {}

debug! { impl[T] SharedMemorySlice<'_, T>, self, len: self.len, .. }

#[cfg(test)]
mod tests {
    use std::cell::UnsafeCell;

    use super::*;

    fn slice<T: Element>(memory: &[UnsafeCell<T>]) -> SharedMemorySlice<'_, T> {
        slice_at(memory, memory.as_ptr() as u64)
    }

    fn slice_at<T: Element>(memory: &[UnsafeCell<T>], base: u64) -> SharedMemorySlice<'_, T> {
        let data = NonNull::new(memory.as_ptr().cast::<T>().cast_mut()).unwrap();
        // SAFETY: the cells are borrowed for as long, aligned, and accessed through slices only.
        unsafe { SharedMemorySlice::new(data, memory.len(), base, 7, 8) }
    }

    fn cells<T: Element>(len: usize) -> Vec<UnsafeCell<T>> {
        (0..len).map(|_| UnsafeCell::new(T::new_zeroed())).collect()
    }

    #[test]
    fn copies_are_bounded() {
        let memory = cells::<u16>(10);
        let all = slice(&memory);
        all.write(2, &[1, 2, 3]).unwrap();
        let mut back = [0; 3];
        all.read(3, &mut back).unwrap();
        assert_eq!(back, [2, 3, 0]);
        assert!(all.read(8, &mut back).is_err() && all.write(8, &back).is_err());
        assert!(all.read(usize::MAX, &mut back).is_err());
        all.read(10, &mut []).unwrap();
        assert!(all.read(11, &mut []).is_err());
        all.write_one(9, 7).unwrap();
        assert_eq!(all.read_one(9), Ok(7));
        assert!(all.read_one(10).is_err() && all.write_one(10, 0).is_err());
        assert_eq!(all.to_vec(), [0, 0, 1, 2, 3, 0, 0, 0, 0, 7]);
        all.zero();
        assert_eq!(all.to_vec(), [0; 10]);
    }

    #[test]
    fn parts_know_where_they_are() {
        let memory = cells::<u32>(100);
        let all = slice(&memory);
        let (head, tail) = all.split_at(30).unwrap();
        head.fill(1);
        tail.fill(2);
        assert!(all.split_at(101).is_err() && all.slice(..101).is_err());
        assert_eq!(all.slice(29..31).unwrap().to_vec(), [1, 2]);
        let part = tail.slice(5..7).unwrap();
        let at = |index: u64| memory.as_ptr() as u64 + index * 4;
        let remote = part.remote();
        assert_eq!((remote.address(), remote.length(), remote.rkey()), (at(35), 8, 8));
        let element = *part.gather_element().unwrap().as_raw();
        assert_eq!((element.addr, element.length, element.lkey), (at(35), 8, 7));
        let element = *tail.scatter_element().unwrap().as_raw();
        assert_eq!((element.addr, element.length), (at(30), 280));
        let element = tail.sge(1..).unwrap();
        assert_eq!((element.addr, element.length), (at(31), 276));
        let chunks: Vec<_> = tail.chunks(33).unwrap().collect();
        assert_eq!(chunks.iter().map(|c| c.len()).collect::<Vec<_>>(), [33, 33, 4]);
        assert_eq!(chunks[2].remote().address(), at(96));
        assert!(tail.chunks(0).is_err());
        assert!(tail.slice(70..).unwrap().is_empty());
    }

    #[test]
    fn an_iova_is_no_address_of_the_program() {
        let memory = cells::<u32>(10);
        let part = slice_at(&memory, 0).slice(3..5).unwrap();
        assert_eq!(part.remote().address(), 12);
        assert!(part.gather_element().unwrap_err().to_string().contains("by_iova"));
        assert!(part.scatter_element().is_err() && part.sge(..).is_err());
    }

    #[test]
    fn large_elements_are_filled_too() {
        let memory = cells::<[u8; 100]>(70);
        slice(&memory).fill([9; 100]);
        assert!(slice(&memory).to_vec().iter().all(|e| *e == [9; 100]));
        let memory = cells::<u8>(200);
        slice(&memory).slice(1..199).unwrap().fill(9);
        let bytes = slice(&memory).to_vec();
        assert_eq!((bytes[0], bytes[199]), (0, 0));
        assert!(bytes[1..199].iter().all(|&b| b == 9));
    }
}
