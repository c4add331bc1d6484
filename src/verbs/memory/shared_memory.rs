use std::ops::{Range, RangeBounds};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::allocation::Allocation;
use super::options::RegionOptions;
use super::region::Region;
use super::region_buffer::RegionBuffer;
use super::scatter_gather::resolve;
use super::shared_region::{Shared, SharedMemoryRegion};
use crate::base::{Error, Result, debug, linux};
use crate::verbs::domain::DomainRef;

/// Memory that is registered in parts, on any devices, when it is needed: an arena, a cache, a file.
///
/// | from | by |
/// |---|---|
/// | anonymous memory, also of [huge pages](RegionOptions::huge_pages) | `From<RegionBuffer<u8>>` |
/// | a memfd, which other processes map too | [`map_memfd`](Self::map_memfd) |
/// | a file, of hugetlbfs too | [`map_file`](Self::map_file), `unsafe` |
/// | another library's memory | [`from_raw`](Self::from_raw), `unsafe` |
///
/// A clone is the same memory. It is freed, unmapped or given back to its owner when the last clone and the last region
/// of it are dropped. There is never a reference into it: a [region](Self::register) copies bytes in and out.
///
/// ```
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// use std::sync::Arc;
///
/// use ibverbs::memory::{RegionBuffer, SharedMemory};
/// use ibverbs::{AccessFlags, ProtectionDomain, RegionOptions};
///
/// # fn main() -> ibverbs::Result<()> {
/// let arena = SharedMemory::from(RegionBuffer::new(1 << 20, RegionOptions::new().page_aligned())?);
/// let domain = Arc::new(ProtectionDomain::new(ibverbs::open("rxe0")?)?);
/// let block = arena.register(&domain, 8192..12288, AccessFlags::REMOTE_READ)?;
/// block.write(0, b"a block of a cache")?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct SharedMemory(Arc<RegionBuffer<u8>>);

impl From<RegionBuffer<u8>> for SharedMemory {
    fn from(buffer: RegionBuffer<u8>) -> Self {
        Self(Arc::new(buffer))
    }
}

const MAP: &str = "mmap";

impl SharedMemory {
    /// `mmap`: maps `len` bytes of a memfd, from `offset` on, shared with the processes that map it too.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the file is not sealed with `F_SEAL_SHRINK`, so that it may be cut off under the mapping; or it is of
    ///    huge pages, which others can take out of it in spite of the seal (see [`map_file`](Self::map_file)); `len` is
    ///    0; the offset is not a multiple of the page size; or the file has fewer bytes.
    ///  - `EACCES`, `EPERM`: the file is not open for reading and writing, or sealed against writing.
    ///  - `ENOMEM`: the address space has no room.
    #[doc(alias = "memfd_create")]
    pub fn map_memfd(memfd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Self> {
        let reason = "the file may be shrunk under the mapping: seal it with F_SEAL_SHRINK";
        Error::invalid_if(!linux::is_sealed_against_shrinking(memfd), MAP, reason)?;
        let reason = "huge pages can be taken out of a file in spite of its seal: see SharedMemory::map_file";
        Error::invalid_if(linux::is_of_huge_pages(memfd), MAP, reason)?;
        // SAFETY: a sealed file never gets shorter, and memory of a memfd that is not of huge pages is there whenever it
        // is accessed, or the kernel ends a process for want of memory, as with any memory.
        unsafe { Self::map_file(memfd, offset, len) }
    }

    /// `mmap`: maps `len` bytes of any file, from `offset` on, shared with the processes that map it too.
    ///
    /// Devices can pin files of hugetlbfs and tmpfs, and not those of most file systems on disks (`EFAULT`, or
    /// `EOPNOTSUPP`, when it is registered).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `len` is 0; the offset is not a multiple of the page size; or the file has fewer bytes.
    ///  - `EACCES`: the file is not open for reading and writing.
    ///  - `ENODEV`: the file cannot be mapped.
    ///  - `ENOMEM`: the address space has no room, or not enough huge pages are free.
    ///
    /// # Safety
    ///
    /// Until the memory is unmapped, nobody shrinks the file, or punches holes in a file of huge pages: an access would
    /// end this process (`SIGBUS`).
    #[doc(alias = "mmap")]
    pub unsafe fn map_file(file: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Self> {
        let end = offset.checked_add(len as u64);
        let reason = "the file ends before that many bytes";
        let is_short = end.is_none_or(|end| end > linux::file_len(file));
        Error::invalid_if(is_short, MAP, reason)?;
        let memory = Allocation::file(MAP, file, offset, len)?;
        Ok(Self(Arc::new(RegionBuffer::of(memory, len))))
    }

    /// `len` bytes at `address` that `owner` keeps: another library's arena, a mapping of the program's own, a pool of
    /// pinned memory. `owner` is dropped when nothing uses the memory any more; `()` if it lives as long as the process.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `len` is 0, or the memory ends beyond the last address.
    ///
    /// # Safety
    ///
    /// Until `owner` is dropped (never, if a clone or a region is forgotten):
    ///
    ///  - The memory is initialised, and is not unmapped, freed, made shorter (`SIGBUS`) or given to another owner.
    ///  - This program, its devices and peers may read it and write any bytes to it at any time. Other code of this
    ///    program accesses bytes that are being written, or writes those being accessed, by atomic operations on bytes
    ///    only, and has no references to them.
    pub unsafe fn from_raw(
        address: NonNull<u8>,
        len: usize,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        const VERB: &str = "ibv_reg_mr";
        Error::invalid_if(len == 0, VERB, "the memory is empty")?;
        let end = (address.as_ptr() as usize).checked_add(len);
        Error::invalid_if(end.is_none(), VERB, "the memory ends beyond the last address")?;
        Ok(Self(Arc::new(RegionBuffer::of(Allocation::foreign(address, owner), len))))
    }

    /// `ibv_reg_mr`: registers the bytes in `range`, with the access and the iova of `options`.
    ///
    /// A part may be registered several times, and overlap others.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is empty, out of bounds or longer than the device allows, or the options contradict each
    ///    other or the address.
    ///  - `EOPNOTSUPP`: the device does not have that access.
    ///  - `EFAULT`, `EOPNOTSUPP`: the memory cannot be pinned, such as that of a file on a disk.
    ///  - `ENOMEM`: no region left on the device, or `RLIMIT_MEMLOCK` is too low.
    #[doc(alias = "ibv_reg_mr")]
    pub fn register<'pd>(
        &self,
        domain: impl Into<DomainRef<'pd>>,
        range: impl RangeBounds<usize>,
        options: impl Into<RegionOptions>,
    ) -> Result<SharedMemoryRegion<'pd, u8>> {
        let range = resolve(range, self.len())?;
        Error::invalid_if(range.is_empty(), "ibv_reg_mr", "the region is empty")?;
        let part = (self.as_ptr().wrapping_add(range.start), range.len());
        // SAFETY: the part is within the memory, and bytes are always aligned.
        unsafe {
            Region::register_part(domain.into(), Shared(self.0.clone()), part, options.into())
        }
    }

    /// Its length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.0.raw_parts().1
    }

    /// The address of the first byte. Accesses through it must be atomic or volatile: others are unsound.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.raw_parts().0
    }

    /// The addresses of its bytes, to find out whether a pointer is into it.
    pub fn addresses(&self) -> Range<usize> {
        let start = self.as_ptr() as usize;
        start..start + self.len()
    }
}

debug! { SharedMemory, self, len: self.len(), .. }
