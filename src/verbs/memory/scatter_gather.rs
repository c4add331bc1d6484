use std::marker::PhantomData;
use std::ops::{Bound, Range, RangeBounds};

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::base::{Error, Result, debug, ffi};

/// A type that registered memory may hold: it has no padding, and any bytes are a valid value of it.
///
/// That is because a device writes the bytes that a peer sent. Exactly the types with the `zerocopy` traits
/// have it: integers, floats, arrays of them, and `Copy` structs that derive `FromBytes`, `IntoBytes` and
/// `Immutable`. Not `bool`, `char`, enums, references and types with padding:
///
/// | instead of | use | and read it with |
/// |---|---|---|
/// | `bool` | `u8` | `value != 0` |
/// | `char` | `u32` | `char::from_u32(value)` |
/// | an enum | its `repr` integer | `TryFrom`, or [`zerocopy::TryFromBytes`] on the bytes |
/// | a struct with padding | the struct with explicit fields in the gaps | |
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
/// fn is_element<T: ibverbs::memory::Element>() {}
/// is_element::<Entry>();
/// is_element::<[Entry; 4]>();
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be an element of registered memory, in which a peer may write any bytes",
    label = "not every sequence of bytes is a valid `{Self}`, or it has padding or is not `Copy`",
    note = "instead of `bool`, use `u8` and `value != 0`; instead of `char`, `u32` and `char::from_u32`; \
            instead of an enum, its integer and `TryFrom`, or bytes and `zerocopy::TryFromBytes`",
    note = "a struct is an element if it is `Copy`, derives `FromBytes`, `IntoBytes` and `Immutable` of \
            `zerocopy` 0.8, and has explicit fields where there would be padding"
)]
pub trait Element: FromBytes + IntoBytes + Immutable + Copy + Send + Sync + 'static {}

// Without this, the compiler's message would be about the traits of `zerocopy`.
#[diagnostic::do_not_recommend]
impl<T: FromBytes + IntoBytes + Immutable + Copy + Send + Sync + 'static> Element for T {}

/// The most bytes that a scatter/gather element can name: 4 GiB - 1.
pub const MAX_SGE_LENGTH: usize = u32::MAX as usize;

pub(crate) const PIECE: &str = "the length in bytes";

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

/// A value that is too large, with its maximum.
///
/// Functions of the data path make their error from it themselves: the compiler would check again the result of a
/// function that it does not inline.
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

/// Of a region that requests address from `iova` on.
///
/// Providers access the addresses of elements themselves: to copy inline data, and (mlx5, hns) to deliver short
/// messages and results within the completion. So an element at an address that is not this program's own is
/// `unsafe` to make, and an error here.
#[inline]
pub(super) fn sge_at(address: u64, iova: u64, bytes: usize, lkey: u32) -> Result<ffi::ibv_sge> {
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
    Excess { what: PIECE, value: bytes as u64, most: MAX_SGE_LENGTH as u64 }
}

/// Registered memory that work requests of this program can read: every region and slice.
///
/// The trait is sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not registered memory",
    label = "a region or a slice of one is needed here"
)]
pub trait LocalMemory: private::Sealed {
    /// The scatter/gather element of the elements in `range`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes.
    #[doc(hidden)]
    fn sge(&self, range: impl RangeBounds<usize>) -> Result<ffi::ibv_sge>;
}

/// Registered memory that work requests of this program can also write: for receives and reads.
///
/// [`ReadOnlyMemoryRegion`](crate::memory::ReadOnlyMemoryRegion) and [`MemorySlice`](crate::memory::MemorySlice) do not
/// have it, because some providers copy short messages to their destination without checking the region's
/// access. A [`RawMemoryRegion`](crate::memory::RawMemoryRegion) has its access at run time: without
/// [`LOCAL_WRITE`](crate::AccessFlags::LOCAL_WRITE), requests that would write it are refused (`EINVAL`).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not registered memory that the device can write",
    label = "a region that can be written, or a `MemorySliceMut`, is needed here"
)]
pub trait LocalMemoryMut: LocalMemory {
    /// The scatter/gather element of the elements in `range`, for a request that writes them.
    ///
    /// # Errors
    ///
    /// Those of `sge`, and:
    ///
    ///  - `EINVAL`: the region was registered for reading only.
    #[doc(hidden)]
    #[inline]
    fn sge_mut(&self, range: impl RangeBounds<usize>) -> Result<ffi::ibv_sge> {
        self.sge(range)
    }
}

pub(crate) mod private {
    use crate::base::ffi;

    /// Keeps [`LocalMemory`](super::LocalMemory) to this crate.
    pub trait Sealed {}

    /// A list of elements that is the same at each look.
    pub trait List: AsMut<[ffi::ibv_sge]> {}

    impl<const N: usize> List for [ffi::ibv_sge; N] {}

    /// What is kept of a buffer of type `B`. A post calls this when the device has the request, so programs
    /// cannot implement it.
    pub trait Kept<B> {
        fn keep(buffer: B) -> Self;
    }

    impl<B> Kept<B> for B {
        #[inline(always)]
        fn keep(buffer: B) -> Self {
            buffer
        }
    }
}

/// `struct ibv_sge`: memory that the device reads for a send, a write or an atomic.
///
/// It borrows the memory for `'buf`. It has the layout of the C struct, so a slice of elements is the
/// scatter/gather list of a work request.
#[derive(Clone, Copy)]
#[doc(alias = "ibv_sge")]
#[repr(transparent)]
pub struct GatherElement<'buf>(ffi::ibv_sge, PhantomData<&'buf [u8]>);

/// `struct ibv_sge`: memory that the device writes for a receive, a read or an atomic.
///
/// It borrows the memory exclusively for `'buf`. It has the layout of the C struct, as a [`GatherElement`] has.
///
/// Leave empty elements out of a [`PreparedReceive`](crate::operation::PreparedReceive) and a
/// [`PreparedRequest`](crate::operation::PreparedRequest): some devices (mlx4, mthca) take a length of 0 for 2 GiB, and
/// write beyond the element up to the end of the region. Everything else that posts leaves them out itself.
#[doc(alias = "ibv_sge")]
#[repr(transparent)]
pub struct ScatterElement<'buf>(ffi::ibv_sge, PhantomData<&'buf mut [u8]>);

macro_rules! element_methods {
    ($(#[$conditions:meta])* $element:ident) => {
        impl $element<'_> {
            #[inline]
            pub(crate) fn raw_list(elements: &[Self]) -> &[ffi::ibv_sge] {
                // SAFETY: an element is a transparent wrapper of the C struct.
                unsafe { &*(elements as *const [Self] as *const [ffi::ibv_sge]) }
            }

            #[inline]
            pub(crate) fn new(raw: ffi::ibv_sge) -> Self {
                Self(raw, PhantomData)
            }

            /// An element from its parts.
            ///
            /// # Safety
            ///
            $(#[$conditions])*
            pub unsafe fn from_raw(raw: ffi::ibv_sge) -> Self {
                Self(raw, PhantomData)
            }

            /// The C struct.
            pub fn as_raw(&self) -> &ffi::ibv_sge {
                &self.0
            }

            /// Its length in bytes.
            #[expect(clippy::len_without_is_empty, reason = "an element is a length, not a collection")]
            pub fn len(&self) -> u32 {
                self.0.length
            }
        }

        debug! {
            $element<'_>, self,
            addr: format_args!("{:#x}", self.0.addr), length: self.0.length,
            lkey: format_args!("{:#x}", self.0.lkey)
        }
    };
}

element_methods! {
    /// For `'buf`, `raw` names memory that is registered under its `lkey` and that nothing writes.
    GatherElement
}

element_methods! {
    /// For `'buf`, `raw` names memory that is registered for local writing under its `lkey` and that nothing
    /// else accesses.
    ScatterElement
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
}
