//! The data of the requests of a batch.

use std::io::IoSlice;
use std::mem::MaybeUninit;

use super::batch::Batch;
use super::extended_operations::function;
use super::too_long_inline;
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::GatherElement;

/// The data of a request: elements of registered memory (a slice or an array of [`GatherElement`]), or
/// bytes from any memory ([`Inline`], [`InlineList`]).
///
/// The trait is sealed: no other type has it.
pub trait BatchData: private::Data {}

/// Bytes that are copied while the request is added, so they need not be registered memory.
#[derive(Clone, Copy, Debug)]
pub struct Inline<'a>(pub &'a [u8]);

/// Pieces of bytes, sent one after the other, that are copied while the request is added, so they
/// need not be registered memory.
#[derive(Clone, Copy, Debug)]
pub struct InlineList<'a, 'b>(pub &'a [IoSlice<'b>]);

pub(in crate::queue_pair) mod private {
    use crate::error::Result;
    use crate::ffi;
    use crate::queue_pair::work_request::Batch;

    /// The methods for adding data, hidden from users.
    pub trait Data {
        /// The flags of the request.
        const FLAGS: u32;

        /// The function that sets the data.
        fn function(&self) -> u64;

        /// Checks that the queue pair supports this number of elements or bytes.
        fn check(&self, batch: &Batch<'_>) -> Result<()>;

        /// The number of bytes.
        fn length(&self) -> u64;

        /// Sets the data of the request.
        ///
        /// # Safety
        ///
        /// A request was just added to the batch of `raw`, which has the function.
        unsafe fn set(&self, raw: *mut ffi::ibv_qp_ex);
    }
}

#[cold]
fn too_many(count: usize, most: u32) -> Error {
    let what = "the number of elements";
    Error::out_of_range("ibv_wr_set_sge_list", what, count as u64, 0, most.into())
}

#[cold]
fn different_lengths() -> Error {
    let reason = "the provider rxe would take the first element's length for all elements: give them one \
                  length, or use post_send, which is not affected";
    Error::with_reason("ibv_wr_set_sge_list", libc::EOPNOTSUPP, reason)
}

impl private::Data for &[ffi::ibv_sge] {
    const FLAGS: u32 = 0;

    #[inline]
    fn function(&self) -> u64 {
        if self.len() == 1 { function::SET_SGE } else { function::SET_SGE_LIST }
    }

    #[inline]
    fn check(&self, batch: &Batch<'_>) -> Result<()> {
        // `SET_SGE` implies room for one.
        if self.len() > 1 && self.len() > batch.max_sge() as usize {
            return Err(too_many(self.len(), batch.max_sge()));
        }
        if self.len() > 1
            && batch.needs_one_length()
            && self.iter().any(|element| element.length != self[0].length)
        {
            return Err(different_lengths());
        }
        Ok(())
    }

    #[inline]
    fn length(&self) -> u64 {
        self.iter().map(|element| u64::from(element.length)).sum()
    }

    #[inline]
    unsafe fn set(&self, raw: *mut ffi::ibv_qp_ex) {
        // SAFETY: the caller vouches for the queue pair and for the function.
        unsafe {
            if let [one] = self {
                (*raw).wr_set_sge.unwrap_unchecked()(raw, one.lkey, one.addr, one.length);
            } else {
                (*raw).wr_set_sge_list.unwrap_unchecked()(raw, self.len(), self.as_ptr());
            }
        }
    }
}

/// Forwards to the data that a type represents.
macro_rules! data {
    ([$($parameter:tt)*] $type:ty as $as:ty, |$this:ident| $inner:expr) => {
        impl<$($parameter)*> private::Data for $type {
            const FLAGS: u32 = <$as as private::Data>::FLAGS;

            #[inline]
            fn function(&self) -> u64 {
                let $this = self;
                $inner.function()
            }

            #[inline]
            fn check(&self, batch: &Batch<'_>) -> Result<()> {
                let $this = self;
                $inner.check(batch)
            }

            #[inline]
            fn length(&self) -> u64 {
                let $this = self;
                $inner.length()
            }

            #[inline]
            unsafe fn set(&self, raw: *mut ffi::ibv_qp_ex) {
                let $this = self;
                // SAFETY: the caller's guarantees are passed on.
                unsafe { $inner.set(raw) }
            }
        }

        impl<$($parameter)*> BatchData for $type {}
    };
}

data!([] &[GatherElement<'_>] as &[ffi::ibv_sge], |this| GatherElement::raw_list(this));
data!([const N: usize] &[GatherElement<'_>; N] as &[ffi::ibv_sge], |this| GatherElement::raw_list(this.as_slice()));

impl private::Data for Inline<'_> {
    // Most providers ignore it, but rxe needs it.
    const FLAGS: u32 = ffi::ibv_send_flags::IBV_SEND_INLINE.0;

    #[inline]
    fn function(&self) -> u64 {
        function::SET_INLINE
    }

    #[inline]
    fn check(&self, batch: &Batch<'_>) -> Result<()> {
        if self.0.len() > batch.max_inline_data() as usize {
            return Err(too_long_inline(self.0.len() as u64, batch.max_inline_data()));
        }
        Ok(())
    }

    #[inline]
    fn length(&self) -> u64 {
        self.0.len() as u64
    }

    #[inline]
    unsafe fn set(&self, raw: *mut ffi::ibv_qp_ex) {
        let (bytes, length) = (self.0.as_ptr().cast_mut().cast(), self.0.len());
        // SAFETY: the caller vouches for the queue pair and for the function, which only reads.
        unsafe { (*raw).wr_set_inline_data.unwrap_unchecked()(raw, bytes, length) }
    }
}

impl BatchData for Inline<'_> {}

/// Size of the buffer for gathering: more than any provider takes inline.
pub(in crate::queue_pair) const GATHERED: usize = 2048;

impl InlineList<'_, '_> {
    fn check_length(&self, most: u32) -> Result<()> {
        let (length, most) = (private::Data::length(self), most.min(GATHERED as u32));
        if length > most.into() { Err(too_long_inline(length, most)) } else { Ok(()) }
    }

    /// Copies all pieces to the buffer, if they are at most that many bytes.
    pub(in crate::queue_pair) fn gather<'b>(
        &self,
        most: u32,
        buffer: &'b mut [MaybeUninit<u8>; GATHERED],
    ) -> Result<&'b [u8]> {
        self.check_length(most)?;
        let mut length = 0;
        for piece in self.0 {
            for (to, from) in buffer[length..].iter_mut().zip(piece.iter()) {
                to.write(*from);
            }
            length += piece.len();
        }
        // SAFETY: all pieces fit, so `length` bytes were written.
        Ok(unsafe { std::slice::from_raw_parts(buffer.as_ptr().cast(), length) })
    }
}

/// `ibv_wr_set_inline_data_list` is not used: before rdma-core 64, rxe sends nothing with it.
impl private::Data for InlineList<'_, '_> {
    const FLAGS: u32 = ffi::ibv_send_flags::IBV_SEND_INLINE.0;

    #[inline]
    fn function(&self) -> u64 {
        function::SET_INLINE
    }

    fn check(&self, batch: &Batch<'_>) -> Result<()> {
        self.check_length(batch.max_inline_data())
    }

    fn length(&self) -> u64 {
        self.0.iter().fold(0, |sum, piece| sum.saturating_add(piece.len() as u64))
    }

    unsafe fn set(&self, raw: *mut ffi::ibv_qp_ex) {
        let mut buffer = [MaybeUninit::<u8>::uninit(); GATHERED];
        // `check` has found that all pieces fit.
        let Ok(bytes) = self.gather(GATHERED as u32, &mut buffer) else { return };
        // SAFETY: the caller's guarantees are passed on.
        unsafe { Inline(bytes).set(raw) }
    }
}

impl BatchData for InlineList<'_, '_> {}
