use std::ops::{Bound, RangeBounds};

use super::scatter_gather::Element;
use crate::base::{Error, Result, debug, getters};

/// Memory of a peer, as RDMA reads, writes and atomics name it: an address, a length in bytes and the rkey.
///
/// It is plain data; the peer may have freed the memory since. The owner makes it by
/// [`SharedMemoryRegion::remote`](crate::SharedMemoryRegion::remote) and sends it over.
/// [`sub_region`](Self::sub_region) picks the part for a request.
///
/// With feature `serde` it serialises as a struct of `address`, `length` and `rkey`; that form is stable.
/// Deserialising fails if the end is beyond the address space.
///
/// ```
/// use ibverbs::RemoteMemoryRegion;
///
/// let region = RemoteMemoryRegion::new(0x7f00_0000_0000, 4096, 0x1234)?;
/// let page = region.sub_region(1024, 512)?;
/// assert_eq!((page.address(), page.length()), (0x7f00_0000_0400, 512));
/// assert!(page.sub_region(0, 513).is_err());
/// # Ok::<(), ibverbs::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "Wire"))]
pub struct RemoteMemoryRegion {
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) rkey: u32,
}

/// Before it was checked.
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
#[serde(rename = "RemoteMemoryRegion")]
struct Wire {
    address: u64,
    length: u64,
    rkey: u32,
}

#[cfg(feature = "serde")]
impl TryFrom<Wire> for RemoteMemoryRegion {
    type Error = Error;

    fn try_from(wire: Wire) -> Result<Self> {
        Self::new(wire.address, wire.length, wire.rkey)
    }
}

impl RemoteMemoryRegion {
    /// Makes a region from parts that the peer has sent in a format of its own.
    ///
    /// `address` is an address of the peer's, or an offset if its region is zero-based; `length` is in bytes.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the end, `address + length`, is more than 64 bits hold.
    pub const fn new(address: u64, length: u64, rkey: u32) -> Result<Self> {
        let room = u64::MAX - address;
        if length > room {
            return Err(Error::out_of_range("ibv_send_wr", "the region's length", length, 0, room));
        }
        Ok(Self { address, length, rkey })
    }

    /// The region as 20 bytes: address, length and rkey, in network order.
    ///
    /// They serve to send it without feature `serde`, such as in the private data of a connection.
    pub fn to_bytes(&self) -> [u8; 20] {
        let mut bytes = [0; 20];
        bytes[..8].copy_from_slice(&self.address.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.length.to_be_bytes());
        bytes[16..].copy_from_slice(&self.rkey.to_be_bytes());
        bytes
    }

    /// Reads the bytes of [`to_bytes`](Self::to_bytes).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there are not exactly 20 bytes, or the end of the region is more than 64 bits hold.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let parts = || {
            let (address, rest) = bytes.split_first_chunk()?;
            let (length, rkey) = rest.split_first_chunk()?;
            Some((address, length, rkey.try_into().ok()?))
        };
        let Some((address, length, rkey)) = parts() else {
            return Err(Error::invalid("ibv_send_wr", "a remote region is 20 bytes long"));
        };
        let (address, length) = (u64::from_be_bytes(*address), u64::from_be_bytes(*length));
        Self::new(address, length, u32::from_be_bytes(rkey))
    }

    getters! { const self,
        /// The address of its first byte, in the peer's address space.
        #[inline]
        address: u64 => self.address;

        /// Its length in bytes.
        #[inline]
        length: u64 => self.length;

        /// The key by which requests name it.
        #[inline]
        rkey: u32 => self.rkey;
    }

    /// The `length` bytes that begin `offset` bytes into it.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the bytes are not all within the region.
    #[inline]
    pub const fn sub_region(&self, offset: u64, length: u64) -> Result<Self> {
        if offset > self.length {
            return Err(Error::beyond(START, offset, self.length));
        }
        if length > self.length - offset {
            let about = &["ibv_send_wr", "the length of the part of the remote region"];
            return Err(Error::beyond(about, length, self.length - offset));
        }
        Ok(Self { address: self.address + offset, length, rkey: self.rkey })
    }

    /// The bytes in `range`: `slice(64..128)` is `sub_region(64, 64)`.
    ///
    /// # Errors
    ///
    /// Those of [`sub_region`](Self::sub_region).
    pub fn slice(&self, range: impl RangeBounds<u64>) -> Result<Self> {
        let start = match range.start_bound() {
            Bound::Included(&start) => start,
            Bound::Excluded(&start) => start.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&end) => end.saturating_add(1),
            Bound::Excluded(&end) => end,
            Bound::Unbounded => self.length,
        };
        match end.checked_sub(start) {
            Some(length) => self.sub_region(start, length),
            None => Err(Error::beyond(START, start, end)),
        }
    }

    /// The element at `index`, if the region consists of elements of type `T`.
    ///
    /// ```
    /// # use ibverbs::RemoteMemoryRegion;
    /// let counters = RemoteMemoryRegion::new(0x7f00_0000_0000, 64, 0x1234)?;
    /// let third = counters.element::<u64>(2)?;
    /// assert_eq!((third.address(), third.length()), (0x7f00_0000_0010, 8));
    /// assert!(counters.element::<u64>(8).is_err());
    /// # Ok::<(), ibverbs::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the element is not within the region.
    pub const fn element<T: Element>(&self, index: u64) -> Result<Self> {
        let size = size_of::<T>() as u64;
        match index.checked_mul(size) {
            Some(offset) => self.sub_region(offset, size),
            None => {
                let about = &["ibv_send_wr", "the index of an element of the remote region"];
                Err(Error::beyond(about, index, self.length))
            }
        }
    }
}

const START: &[&str; 2] = &["ibv_send_wr", "the start of the part of the remote region"];

debug! {
    RemoteMemoryRegion, self,
    address: format_args!("{:#x}", self.address), length: self.length,
    rkey: format_args!("{:#x}", self.rkey)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twenty_bytes_are_a_region() {
        let region = RemoteMemoryRegion::new(0x1122_3344_5566_7788, 0x99, 0xaabb_ccdd).unwrap();
        let bytes = region.to_bytes();
        assert_eq!(bytes[..8], [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88]);
        assert_eq!(bytes[8..], [0, 0, 0, 0, 0, 0, 0, 0x99, 0xaa, 0xbb, 0xcc, 0xdd]);
        assert_eq!(RemoteMemoryRegion::from_bytes(&bytes), Ok(region));
        for len in (0..20).chain([21, 40]) {
            assert!(RemoteMemoryRegion::from_bytes(&[1; 40][..len]).is_err(), "{len} bytes");
        }
        assert!(RemoteMemoryRegion::from_bytes(&[0xff; 20]).is_err());
    }

    #[test]
    fn sub_regions_stay_inside() {
        let region = RemoteMemoryRegion::new(0x1000, 100, 7).unwrap();
        let part = region.sub_region(40, 60).unwrap();
        assert_eq!((part.address(), part.length(), part.rkey()), (0x1028, 60, 7));
        assert_eq!(region.sub_region(0, 100), Ok(region));
        assert_eq!(region.sub_region(100, 0).unwrap().address(), 0x1064);
        for (offset, length) in [(0, 101), (1, 100), (101, 0), (u64::MAX, 2), (2, u64::MAX)] {
            assert!(region.sub_region(offset, length).is_err(), "{offset} {length}");
        }
        let error = part.sub_region(10, 51).unwrap_err();
        assert!(error.to_string().contains("is 51, and must be within 0..=50"), "{error}");
    }

    #[test]
    fn ranges_and_elements_stay_inside() {
        let region = RemoteMemoryRegion::new(0x1000, 100, 7).unwrap();
        assert_eq!(region.slice(..), Ok(region));
        assert_eq!(region.slice(40..), region.sub_region(40, 60));
        assert_eq!(region.slice(4..=7), region.sub_region(4, 4));
        assert_eq!(region.slice(100..).unwrap().length(), 0);
        #[expect(clippy::reversed_empty_ranges, reason = "that is the bad input")]
        let reversed = region.slice(7..4);
        assert!(reversed.is_err());
        assert!(region.slice(..101).is_err() && region.slice(0..=u64::MAX).is_err());
        assert_eq!(region.element::<[u8; 10]>(9), region.sub_region(90, 10));
        assert!(region.element::<[u8; 10]>(10).is_err());
        assert!(region.element::<u64>(u64::MAX).is_err());
    }

    #[test]
    fn its_end_is_an_address() {
        assert!(RemoteMemoryRegion::new(u64::MAX - 8, 8, 1).is_ok());
        assert!(RemoteMemoryRegion::new(u64::MAX - 8, 9, 1).is_err());
        assert!(RemoteMemoryRegion::new(0, u64::MAX, 1).is_ok());
    }

    #[cfg(feature = "serde")]
    #[test]
    fn serde_is_stable_and_checked() {
        let config = bincode::config::legacy();
        let region = RemoteMemoryRegion::new(0x0102_0304, 0x10, 0x0a0b_0c0d).unwrap();
        let bytes = bincode::serde::encode_to_vec(region, config).unwrap();
        assert_eq!(bytes, [4, 3, 2, 1, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 13, 12, 11, 10]);
        let back: (RemoteMemoryRegion, usize) =
            bincode::serde::decode_from_slice(&bytes, config).unwrap();
        assert_eq!(back, (region, 20));
        let beyond = [[0xff; 8].as_slice(), &[1, 0, 0, 0, 0, 0, 0, 0], &[0; 4]].concat();
        let bad = bincode::serde::decode_from_slice::<RemoteMemoryRegion, _>(&beyond, config);
        assert!(bad.is_err());
    }
}
