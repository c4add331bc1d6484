use std::ops::{Deref, DerefMut, Range, RangeBounds};

use super::buffer::{BorrowedBuffer, GatherBuffer, ScatterBuffer};
use super::scatter_gather::{Element, private, resolve, sge};
use super::slice::MemorySliceMut;
use crate::base::{Result, debug, ffi};

/// A part of a [`MemorySliceMut`] that is posted alone, and keeps the rest of the slice with it.
///
/// It derefs to the part's elements. Use it for a buffer that is used again for messages of different lengths: the
/// operation gives the whole buffer back. A plain [`slice`](MemorySliceMut::slice) comes back as short as it was posted.
///
/// ```
/// use ibverbs::{Scope, TransportError, memory::MemorySliceMut};
///
/// /// Sends a text, which has to fit, from a buffer, which can then be used for the next one.
/// fn send<'buf>(
///     scope: &Scope<'buf, '_>,
///     mut buffer: MemorySliceMut<'buf, u8>,
///     text: &str,
/// ) -> Result<MemorySliceMut<'buf, u8>, TransportError> {
///     buffer[..text.len()].copy_from_slice(text.as_bytes());
///     let (sent, _) = scope.post_send(buffer.part(..text.len())?)?.wait()?;
///     Ok(sent.into_whole())
/// }
/// ```
pub struct MemorySlicePart<'buf, T> {
    whole: MemorySliceMut<'buf, T>,
    /// Within the whole slice.
    range: Range<usize>,
}

impl<'buf, T: Element> MemorySliceMut<'buf, T> {
    /// Selects the elements in `range` to be posted alone; the rest comes back with them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    #[inline]
    pub fn part(self, range: impl RangeBounds<usize>) -> Result<MemorySlicePart<'buf, T>> {
        let range = resolve(range, self.len())?;
        Ok(MemorySlicePart { whole: self, range })
    }
}

impl<'buf, T> MemorySlicePart<'buf, T> {
    /// The whole slice that this is a part of.
    pub fn into_whole(self) -> MemorySliceMut<'buf, T> {
        self.whole
    }

    /// The range of the part within the whole slice.
    #[inline]
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

impl<T> private::Sealed for MemorySlicePart<'_, T> {}

// SAFETY: the contained slice borrows its region exclusively for its lifetime.
unsafe impl<T: Element> GatherBuffer for MemorySlicePart<'_, T> {
    type List = [ffi::ibv_sge; 1];
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<Self::List> {
        let data = self.whole.pointer(self.range());
        let bytes = data.len() * size_of::<T>();
        Ok([sge(data.cast::<T>().as_ptr() as u64, bytes, self.whole.lkey())?])
    }
}

// SAFETY: as above; any bytes are a valid `Element`.
unsafe impl<T: Element> ScatterBuffer for MemorySlicePart<'_, T> {
    const PEERS_MAY_WRITE: bool = false;

    #[inline]
    fn scatter(&mut self) -> Result<Self::List> {
        self.gather()
    }
}

// SAFETY: the borrow of the region lasts for the lifetime of the type, and dropping the value does nothing.
unsafe impl<T> BorrowedBuffer for MemorySlicePart<'_, T> {}

impl<T> Deref for MemorySlicePart<'_, T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        &self.whole[self.range()]
    }
}

impl<T> DerefMut for MemorySlicePart<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        let range = self.range();
        &mut self.whole[range]
    }
}

debug! { impl[T] MemorySlicePart<'_, T>, self, range: self.range, of: self.whole.len(), .. }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_names_its_elements_alone_and_keeps_the_rest() {
        let mut data = [0_u16, 1, 2, 3, 4, 5];
        let address = data.as_ptr() as u64;
        let mut part = MemorySliceMut::new(&mut data, 7).part(2..5).unwrap();
        let found = |list: [ffi::ibv_sge; 1]| list.map(|e| (e.addr, e.length, e.lkey));
        assert_eq!(found(part.gather().unwrap()), [(address + 4, 6, 7)]);
        assert_eq!(found(part.scatter().unwrap()), [(address + 4, 6, 7)]);
        assert_eq!((part.range(), &part[..]), (2..5, &[2, 3, 4][..]));
        part.fill(9);
        let whole = part.into_whole();
        assert_eq!((&whole[..], whole.lkey()), (&[0, 1, 9, 9, 9, 5][..], 7));
        let part = whole.part(6..).unwrap();
        assert_eq!((part.len(), part.gather().unwrap()[0].length), (0, 0));
        assert!(part.into_whole().part(..7).is_err());
    }
}
