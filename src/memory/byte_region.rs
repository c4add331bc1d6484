//! Methods of the regions that are addressed byte by byte.

use super::access::AccessFlags;
use crate::error::{Error, Result};

/// Checks that requests of this program may write a region of this access.
///
/// The device checks it too, but some providers copy short messages to their destination themselves.
#[inline]
pub(super) fn check_writable(access: AccessFlags) -> Result<()> {
    if access.contains(AccessFlags::LOCAL_WRITE) { Ok(()) } else { Err(read_only()) }
}

#[cold]
fn read_only() -> Error {
    Error::invalid(
        "ibv_sge",
        "the region was registered without LOCAL_WRITE: the device only reads it",
    )
}

/// Defines the methods by which requests name a region. The region has the fields `region` (whose
/// `as_ptr` is its `ibv_mr`), `base` (the address by which requests name its first byte), `bytes`,
/// `access` and `domain`.
macro_rules! byte_region {
    ($region:ident) => {
        $crate::memory::accessors::region_accessors!(
            ['pd] $region<'pd>, |this| this.region.as_ptr(), &this.domain
        );
        $crate::memory::accessors::shared_region_accessors!(['pd] $region<'pd>);

        impl<'pd> $region<'pd> {
            /// Its length in bytes.
            #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
            #[inline]
            pub fn len(&self) -> usize {
                self.bytes
            }

            /// The bytes in `range`, for a work request that reads them, whatever address requests use
            /// for the region.
            ///
            /// # Errors
            ///
            ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes.
            ///
            /// # Safety
            ///
            /// Unless requests use the region's own address, the request does not carry its data
            /// inline: the provider would read that data at the address that requests use, as an
            /// address of this program.
            #[inline]
            pub unsafe fn gather_element_by_iova(
                &self,
                range: impl std::ops::RangeBounds<usize>,
            ) -> $crate::error::Result<$crate::memory::GatherElement<'_>> {
                self.sge_by_iova(range).map($crate::memory::GatherElement::new)
            }

            /// The bytes in `range`, for a work request that writes them, whatever address requests use
            /// for the region. Any number of requests may write the same bytes; their contents are then
            /// unspecified.
            ///
            /// # Errors
            ///
            ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes; or the region was
            ///    registered without [`LOCAL_WRITE`](crate::AccessFlags::LOCAL_WRITE).
            ///
            /// # Safety
            ///
            /// Unless requests use the region's own address, the provider does not deliver short
            /// messages, or the results of reads and atomics, by copying them itself: it would write
            /// them to the address that requests use, as an address of this program. mlx5 does copy
            /// unless the environment variable `MLX5_SCATTER_TO_CQE` is 0, and so may hns.
            #[inline]
            pub unsafe fn scatter_element_by_iova(
                &self,
                range: impl std::ops::RangeBounds<usize>,
            ) -> $crate::error::Result<$crate::memory::ScatterElement<'_>> {
                $crate::memory::byte_region::check_writable(self.access)?;
                self.sge_by_iova(range).map($crate::memory::ScatterElement::new)
            }

            #[inline]
            fn sge_by_iova(
                &self,
                range: impl std::ops::RangeBounds<usize>,
            ) -> $crate::error::Result<$crate::ffi::ibv_sge> {
                let range = $crate::memory::resolve(range, self.bytes)?;
                let address = self.base + range.start as u64;
                $crate::memory::sge(address, range.len(), self.lkey())
            }

            /// The address, length and key that a peer needs to access the region: send them over.
            pub fn remote(&self) -> $crate::memory::RemoteMemoryRegion {
                $crate::memory::RemoteMemoryRegion {
                    address: self.base,
                    length: self.bytes as u64,
                    rkey: self.rkey(),
                }
            }

            /// The address, length and key that a peer needs to access the bytes in `range`. Only an
            /// honest peer keeps to the range; the key opens the whole region.
            ///
            /// # Errors
            ///
            ///  - `EINVAL`: the range is out of bounds.
            pub fn remote_range(
                &self,
                range: impl std::ops::RangeBounds<usize>,
            ) -> $crate::error::Result<$crate::memory::RemoteMemoryRegion> {
                let range = $crate::memory::resolve(range, self.bytes)?;
                self.remote().sub_region(range.start as u64, range.len() as u64)
            }

            /// The access that it was registered with.
            pub fn access(&self) -> $crate::memory::AccessFlags {
                self.access
            }
        }

        // Without the keys: a log must not give its readers access to the memory.
        impl std::fmt::Debug for $region<'_> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($region))
                    .field("base", &format_args!("{:#x}", self.base))
                    .field("bytes", &self.bytes)
                    .field("access", &self.access)
                    .finish_non_exhaustive()
            }
        }
    };
}

pub(super) use byte_region;
