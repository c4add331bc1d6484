//! Bytes that a post copies, in one piece or several.

use std::io::IoSlice;
use std::mem::MaybeUninit;

use super::buffer::{BorrowedBuffer, GatherBuffer};
use super::scatter_gather::{private, sge};
use crate::base::{Error, Result, ffi};

/// Bytes that the post copies: they need not be registered, and can be used again at once.
///
/// A request has room for `max_inline_data` bytes: see
/// [`QueuePairBuilder::max_inline_data`](crate::QueuePairBuilder::max_inline_data), and the same method of the builder
/// of channels.
#[derive(Clone, Copy, Debug)]
pub struct Inline<'a>(pub &'a [u8]);

/// [`Inline`] bytes in several pieces, sent one after the other: at most 2048 bytes together.
#[derive(Clone, Copy, Debug)]
pub struct InlineList<'a, 'b>(pub &'a [IoSlice<'b>]);

// SAFETY: the bytes are borrowed, so they can be read while the value lives.
unsafe impl GatherBuffer for Inline<'_> {
    type List = [ffi::ibv_sge; 1];
    type Kept = ();

    const INLINE: bool = true;

    #[inline(always)]
    fn gather(&self) -> Result<Self::List> {
        Ok([sge(self.0.as_ptr() as u64, self.0.len(), 0)?])
    }
}

impl private::Kept<Inline<'_>> for () {
    #[inline(always)]
    fn keep(_: Inline<'_>) {}
}

// SAFETY: the bytes are borrowed for the lifetime of the type.
unsafe impl BorrowedBuffer for Inline<'_> {}

/// In bytes: more than any provider takes inline.
const GATHERED: usize = 2048;

/// Pieces that were gathered, as one element.
#[doc(hidden)]
#[derive(Debug)]
pub struct Gathered {
    bytes: [MaybeUninit<u8>; GATHERED],
    element: ffi::ibv_sge,
}

impl Gathered {
    /// # Errors
    ///
    ///  - `EINVAL`: the pieces are more than fit.
    pub(crate) fn new<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Result<Self> {
        let mut bytes = [MaybeUninit::uninit(); GATHERED];
        let mut length = 0_usize;
        for piece in pieces {
            let end = length.saturating_add(piece.len());
            // The rest is only counted, for the error.
            for (to, from) in bytes.iter_mut().skip(length).zip(piece) {
                to.write(*from);
            }
            length = end;
        }
        if length > GATHERED {
            let about = &["ibv_post_send", "the length of inline data"];
            return Err(Error::beyond(about, length as u64, GATHERED as u64));
        }
        Ok(Self { bytes, element: ffi::ibv_sge { addr: 0, length: length as u32, lkey: 0 } })
    }
}

impl AsMut<[ffi::ibv_sge]> for Gathered {
    /// Valid until `self` is moved.
    fn as_mut(&mut self) -> &mut [ffi::ibv_sge] {
        self.element.addr = self.bytes.as_ptr() as u64;
        std::slice::from_mut(&mut self.element)
    }
}

impl private::List for Gathered {}

// SAFETY: the list itself has a copy of the bytes.
unsafe impl GatherBuffer for InlineList<'_, '_> {
    type List = Gathered;
    type Kept = ();

    const INLINE: bool = true;

    fn gather(&self) -> Result<Gathered> {
        Gathered::new(self.0.iter().map(|piece| &**piece))
    }
}

impl private::Kept<InlineList<'_, '_>> for () {
    fn keep(_: InlineList<'_, '_>) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_gathered_up_to_the_limit() {
        let pieces = [IoSlice::new(b"head"), IoSlice::new(b""), IoSlice::new(b"body")];
        let mut list = InlineList(&pieces).gather().unwrap();
        let element = list.as_mut()[0];
        assert_eq!((element.length, element.lkey), (8, 0));
        // SAFETY: as many bytes were written, and `list` was not moved.
        let bytes = unsafe { std::slice::from_raw_parts(list.bytes.as_ptr().cast::<u8>(), 8) };
        assert_eq!(bytes, b"headbody");
        let most = [0; GATHERED];
        assert_eq!(InlineList(&[IoSlice::new(&most)]).gather().unwrap().as_mut()[0].length, 2048);
        let error = InlineList(&[IoSlice::new(&most), IoSlice::new(b"!")]).gather().unwrap_err();
        assert!(
            error.to_string().contains("inline data is 2049, and must be within 0..=2048"),
            "{error}"
        );
    }
}
