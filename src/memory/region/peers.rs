//! What peers need to know of a region that they access, and requests that name it by the addresses that they use.

use std::ops::RangeBounds;

use super::{Backing, Peers, Region, check_writable};
use crate::error::Result;
use crate::memory::remote_region::RemoteMemoryRegion;
use crate::memory::scatter_gather::{GatherElement, ScatterElement, resolve};

impl<M: Backing> Region<'_, M> {
    /// The key by which peers name the region. A peer that knows it, and has a connection into
    /// this protection domain, can do what the region's access flags allow.
    #[inline]
    pub fn rkey(&self) -> u32
    where
        M: Peers,
    {
        // SAFETY: the region is live.
        unsafe { (*self.as_raw()).rkey }
    }

    /// The kernel's number of the region, by which a process that shares the device's file
    /// descriptor [imports](crate::memory::RawMemoryRegion::import) it.
    pub fn handle(&self) -> u32
    where
        M: Peers,
    {
        // SAFETY: the region is live.
        unsafe { (*self.as_raw()).handle }
    }

    /// The address, length and key that a peer needs to access the region: send them over.
    pub fn remote(&self) -> RemoteMemoryRegion
    where
        M: Peers,
    {
        let length = (self.len * size_of::<M::Item>()) as u64;
        RemoteMemoryRegion { address: self.base, length, rkey: self.rkey() }
    }

    /// The address, length and key that a peer needs to access the elements in `range`.
    ///
    /// Only an honest peer keeps to that range; the key opens the whole region. To confine a peer to
    /// the range, use a [`MemoryWindow`](crate::memory::MemoryWindow).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    pub fn remote_range(&self, range: impl RangeBounds<usize>) -> Result<RemoteMemoryRegion>
    where
        M: Peers,
    {
        let range = resolve(range, self.len)?;
        let of = |elements: usize| (elements * size_of::<M::Item>()) as u64;
        self.remote().sub_region(of(range.start), of(range.len()))
    }
}

impl<M: Peers> Region<'_, M> {
    /// The elements in `range`, for a work request that reads them, whatever address requests use
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
        range: impl RangeBounds<usize>,
    ) -> Result<GatherElement<'_>> {
        self.sge_by_iova(range).map(GatherElement::new)
    }

    /// The elements in `range`, for a work request that writes them, whatever address requests use
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
        range: impl RangeBounds<usize>,
    ) -> Result<ScatterElement<'_>> {
        check_writable(self.access)?;
        self.sge_by_iova(range).map(ScatterElement::new)
    }
}
