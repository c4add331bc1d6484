use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fmt, panic, ptr, thread};

use crate::base::{Error, Result, panics};

#[derive(Debug)]
pub(super) struct Allocation {
    data: NonNull<u8>,
    source: Source,
}

enum Source {
    Heap(Layout),
    Pages {
        mapped: usize,
    },
    /// Pages of a file, which others may access.
    File {
        mapped: usize,
    },
    /// Memory of another owner, which keeps it until it is dropped.
    Foreign(Option<Box<dyn Any + Send + Sync>>),
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Heap(_) => "Heap",
            Self::Pages { .. } => "Pages",
            Self::File { .. } => "File",
            Self::Foreign(_) => "Foreign",
        })
    }
}

impl Drop for Allocation {
    /// Registered contents must not reach other allocations of this program. The kernel clears pages itself.
    fn drop(&mut self) {
        match &mut self.source {
            // SAFETY: the memory was allocated with this layout, and nothing uses it any more.
            Source::Heap(layout) => unsafe {
                // The compiler may drop plain writes to memory that is about to be freed.
                if cfg!(miri) {
                    self.data.write_bytes(0, layout.size()); // Miri has no explicit_bzero
                } else {
                    crate::base::linux::explicit_bzero(self.data.as_ptr().cast(), layout.size());
                }
                dealloc(self.data.as_ptr(), *layout);
            },
            // SAFETY: the pages were mapped by us, and nothing uses them any more.
            Source::Pages { mapped } | Source::File { mapped } => unsafe {
                libc::munmap(self.data.as_ptr().cast(), *mapped);
            },
            // No drop of this crate panics.
            Source::Foreign(owner) => drop(panics::catch(|| drop(owner.take()))),
        }
    }
}

// SAFETY: the memory is owned; nothing of it is tied to a thread.
unsafe impl Send for Allocation {}
// SAFETY: as above; a shared reference gives out only the address.
unsafe impl Sync for Allocation {}

/// The size from which on the kernel gives pages: zero without being touched, and cleared when they are freed.
const PAGES_FROM: usize = 1 << 20;

impl Allocation {
    /// `layout.size()` is not 0. With `whole_pages`, no other allocation shares their pages.
    pub(super) fn zeroed(
        verb: &'static str,
        layout: Layout,
        whole_pages: bool,
        huge_pages: Option<HugePages>,
    ) -> Result<Self> {
        if whole_pages || huge_pages.is_some() || layout.size() >= PAGES_FROM {
            return Self::pages(verb, layout, huge_pages);
        }
        // SAFETY: the layout has a size.
        match NonNull::new(unsafe { alloc_zeroed(layout) }) {
            Some(data) => Ok(Self { data, source: Source::Heap(layout) }),
            None => Err(Error::with_reason(verb, libc::ENOMEM, NO_MEMORY)),
        }
    }

    fn pages(verb: &'static str, layout: Layout, huge_pages: Option<HugePages>) -> Result<Self> {
        let page = match huge_pages {
            Some(HugePages::Transparent) | None => page_size(),
            Some(huge) => huge.bytes(),
        };
        let align = match huge_pages {
            Some(HugePages::Transparent) => layout.align().max(HugePages::Transparent.bytes()),
            _ => layout.align(),
        };
        // A mapping is aligned to a page. For a larger alignment, map more and unmap the surplus.
        let slack = align.saturating_sub(page);
        let too_long = Error::invalid(verb, "the region is longer than memory can be");
        let mapped = layout.size().checked_next_multiple_of(page).ok_or(too_long)?;
        let length = mapped.checked_add(slack).ok_or(too_long)?;
        let mut flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        if let Some(huge @ (HugePages::Size2MiB | HugePages::Size1GiB)) = huge_pages {
            flags |= crate::base::linux::MAP_HUGETLB
                | (huge.shift() << crate::base::linux::MAP_HUGE_SHIFT) as i32;
        }
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, at a place that the kernel chooses, touches nothing that exists.
        let start = unsafe { libc::mmap(ptr::null_mut(), length, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(no_pages(verb, huge_pages));
        }
        let start = start.cast::<u8>();
        let lead = start.align_offset(align);
        // SAFETY: all parts lie within the mapping; nothing uses the surplus, which is whole pages.
        let data = unsafe {
            let data = start.add(lead);
            if lead > 0 {
                libc::munmap(start.cast(), lead);
            }
            if slack > lead {
                libc::munmap(data.add(mapped).cast(), slack - lead);
            }
            NonNull::new_unchecked(data)
        };
        let pages = Self { data, source: Source::Pages { mapped } };
        if huge_pages == Some(HugePages::Transparent) {
            // SAFETY: the mapping is ours, and the advice changes no contents.
            let returned = unsafe {
                libc::madvise(data.as_ptr().cast(), mapped, crate::base::linux::MADV_HUGEPAGE)
            };
            Error::unsupported_if(returned != 0, verb, "the kernel has no transparent huge pages")?;
        }
        Ok(pages)
    }

    /// Maps a part of a file, shared with all that map it.
    pub(super) fn file(
        verb: &'static str,
        file: BorrowedFd<'_>,
        offset: u64,
        len: usize,
    ) -> Result<Self> {
        let page = page_size();
        let reason = "the offset is not a multiple of the page size";
        Error::invalid_if(!offset.is_multiple_of(page as u64), verb, reason)?;
        Error::invalid_if(len == 0, verb, "the memory is empty")?;
        let too_long = Error::invalid(verb, "the mapping is longer than memory or the file can be");
        let mapped = len.checked_next_multiple_of(page).ok_or(too_long)?;
        let offset = libc::off_t::try_from(offset).map_err(|_| too_long)?;
        let (access, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
        // SAFETY: a new mapping, at a place that the kernel chooses, touches nothing that exists.
        let start =
            unsafe { libc::mmap(ptr::null_mut(), mapped, access, libc::MAP_SHARED, fd, offset) };
        match NonNull::new(start.cast()) {
            Some(data) if start != libc::MAP_FAILED => {
                Ok(Self { data, source: Source::File { mapped } })
            }
            _ => Err(Error::new(verb, crate::base::ffi::errno())),
        }
    }

    /// Addresses that no other memory has. What is there takes no memory until it is accessed.
    pub(super) fn addresses(verb: &'static str, len: usize) -> Result<Self> {
        let layout = Layout::from_size_align(len, 1);
        let too_long = |_| Error::invalid(verb, "the region is longer than memory can be");
        Self::pages(verb, layout.map_err(too_long)?, None)
    }

    /// The owner is dropped when nothing uses the memory any more.
    pub(super) fn foreign(data: NonNull<u8>, owner: impl Send + Sync + 'static) -> Self {
        Self { data, source: Source::Foreign(Some(Box::new(owner))) }
    }

    /// Whether nothing but this program's own code that has the allocation can access it.
    pub(super) fn is_exclusive(&self) -> bool {
        matches!(self.source, Source::Heap(_) | Source::Pages { .. })
    }

    /// `progress` gets the bytes that are in. An allocation without its own pages is left alone.
    pub(super) fn populate(
        &mut self,
        verb: &'static str,
        threads: usize,
        progress: &(dyn Fn(usize) + Sync),
    ) -> Result<()> {
        /// In bytes: a multiple of all page sizes but 1 GiB, where it does not matter.
        const PART: usize = 64 << 20;
        let Source::Pages { mapped } = self.source else { return Ok(()) };
        let (parts, start) = (mapped.div_ceil(PART), self.data.as_ptr() as usize);
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = || loop {
            let offset = next.fetch_add(1, Ordering::Relaxed) * PART;
            if offset >= mapped {
                return Ok(());
            }
            let len = PART.min(mapped - offset);
            // SAFETY: the part lies within our own pages, which nothing else uses meanwhile.
            if let Err(errno) = unsafe { bring_in((start + offset) as *mut u8, len) } {
                next.store(parts, Ordering::Relaxed); // the other threads stop
                return Err(Error::with_reason(verb, errno, NO_PAGES));
            }
            progress(done.fetch_add(len, Ordering::Relaxed) + len);
        };
        thread::scope(|scope| {
            // Without a thread, the others do its part.
            let spawn = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
            let others: Vec<_> = (1..threads.min(parts)).map_while(spawn).collect();
            let own = work();
            let results = others.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|payload| panic::resume_unwind(payload))
            });
            results.fold(own, Result::and)
        })
    }

    pub(super) fn data(&self) -> NonNull<u8> {
        self.data
    }
}

const NO_MEMORY: &str = "no memory for the region's buffer, of its size and alignment";

const NO_PAGES: &str = "no memory for the region's pages, or not enough huge pages are free";

/// # Safety
///
/// They are whole, writable pages of a mapping, and nothing else uses them meanwhile.
unsafe fn bring_in(start: *mut u8, len: usize) -> std::result::Result<(), i32> {
    // SAFETY: the advice changes no contents.
    if unsafe { libc::madvise(start.cast(), len, crate::base::linux::MADV_POPULATE_WRITE) } == 0 {
        return Ok(());
    }
    match crate::base::ffi::errno() {
        // Before Linux 5.14: a write to each page.
        libc::EINVAL => {
            for page in (0..len).step_by(page_size()) {
                // SAFETY: the byte is within initialised memory that the caller lets us write.
                unsafe {
                    let byte = start.add(page);
                    byte.write_volatile(byte.read_volatile());
                }
            }
            Ok(())
        }
        errno => Err(errno),
    }
}

#[cold]
fn no_pages(verb: &'static str, huge_pages: Option<HugePages>) -> Error {
    let huge = matches!(huge_pages, Some(HugePages::Size2MiB | HugePages::Size1GiB));
    match crate::base::ffi::errno() {
        libc::EINVAL if huge => {
            let reason = "the machine has no huge pages of that size";
            Error::with_reason(verb, libc::EOPNOTSUPP, reason)
        }
        libc::ENOMEM if huge => {
            let reason = "not enough free huge pages of that size were set aside \
                 (see /sys/kernel/mm/hugepages)";
            Error::with_reason(verb, libc::ENOMEM, reason)
        }
        errno => Error::with_reason(verb, errno, NO_MEMORY),
    }
}

pub(super) fn page_size() -> usize {
    // SAFETY: it only asks.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// The huge pages that a region's buffer consists of.
///
/// A device caches few translations of addresses; a large region of huge pages needs few.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum HugePages {
    /// `MADV_HUGEPAGE`: transparent huge pages. The buffer begins on a multiple of 2 MiB, and the kernel backs
    /// it with huge pages as far as it has free ones.
    Transparent,
    /// `MAP_HUGETLB`: pages of 2 MiB, which the administrator has set aside in `/proc/sys/vm/nr_hugepages`.
    Size2MiB,
    /// `MAP_HUGETLB`: pages of 1 GiB, set aside when the machine started (`hugepagesz=1G hugepages=N`).
    Size1GiB,
}

impl HugePages {
    /// The page size in bytes, as a power of 2.
    pub(super) const fn shift(self) -> u32 {
        match self {
            Self::Transparent | Self::Size2MiB => 21,
            Self::Size1GiB => 30,
        }
    }

    /// The size of a page in bytes.
    pub const fn bytes(self) -> usize {
        1 << self.shift()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeroed(size: usize, align: usize, whole_pages: bool) -> Allocation {
        let layout = Layout::from_size_align(size, align).unwrap();
        Allocation::zeroed("ibv_reg_mr", layout, whole_pages, None).unwrap()
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri touches every byte of gigabytes")]
    fn memory_is_zeroed_aligned_and_writable() {
        for (size, align, whole_pages) in [
            (1, 64, false),
            (100, 1 << 16, false),
            (10, 64, true),
            (5 << 20, 64, false),
            ((1 << 20) + 1, 1 << 23, false),
            (1, 1 << 30, true),
        ] {
            let memory = zeroed(size, align, whole_pages);
            assert_eq!(memory.data().as_ptr() as usize % align, 0, "{size} {align}");
            // SAFETY: the memory is of this size, initialised, and ours.
            let bytes = unsafe { std::slice::from_raw_parts_mut(memory.data().as_ptr(), size) };
            assert!(bytes.iter().all(|&b| b == 0), "{size} {align}");
            bytes.fill(0xaa);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no madvise")]
    fn pages_are_brought_in_and_progress_is_told() {
        const SIZE: usize = (192 << 20) + 4096;
        let mut memory = zeroed(SIZE, 64, true);
        let told = std::sync::Mutex::new(Vec::new());
        let resident = |memory: &Allocation| {
            let mut pages = vec![0_u8; SIZE / page_size()];
            // SAFETY: the memory is mapped, and there is a byte for each page.
            let returned = unsafe {
                libc::mincore(memory.data().as_ptr().cast(), SIZE, pages.as_mut_ptr().cast())
            };
            assert_eq!(returned, 0);
            pages.iter().filter(|&&page| page & 1 == 1).count()
        };
        assert_eq!(resident(&memory), 0);
        memory.populate("madvise", 2, &|bytes| told.lock().unwrap().push(bytes)).unwrap();
        // An emulator of another processor brings nothing in.
        if cfg!(target_arch = "x86_64") {
            assert_eq!(resident(&memory), SIZE / page_size());
        }
        let mut told = told.into_inner().unwrap();
        told.sort_unstable();
        assert_eq!((told.len(), told[3]), (4, SIZE));
        // SAFETY: the memory is of this size, and ours.
        let bytes = unsafe { std::slice::from_raw_parts(memory.data().as_ptr(), SIZE) };
        let zeros = [0; 4096];
        assert!(bytes.chunks(4096).all(|page| page == zeros));
        zeroed(100, 64, false).populate("madvise", 2, &|_| panic!()).unwrap();
    }

    #[test]
    fn whole_pages_are_whole_pages() {
        let memory = zeroed(10, 64, true);
        assert_eq!(memory.data().as_ptr() as usize % page_size(), 0);
        assert!(matches!(memory.source, Source::Pages { mapped } if mapped == page_size()));
        assert!(matches!(zeroed(10, 64, false).source, Source::Heap(_)));
        assert!(matches!(zeroed(PAGES_FROM, 64, false).source, Source::Pages { .. }));
    }

    /// On a machine that has less memory.
    #[test]
    #[cfg_attr(miri, ignore = "Miri has no huge pages and no lazy memory")]
    fn large_memory_is_not_touched() {
        let size = 64 << 30;
        let layout = Layout::from_size_align(size, 64).unwrap();
        match Allocation::zeroed("ibv_reg_mr", layout, false, None) {
            Ok(memory) => {
                // SAFETY: the last byte is within the memory.
                assert_eq!(unsafe { memory.data().add(size - 1).read() }, 0);
            }
            // A machine that does not overcommit.
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOMEM)),
        }
        let layout = Layout::from_size_align(isize::MAX as usize / 2, 64).unwrap();
        let error = Allocation::zeroed("ibv_reg_mr", layout, false, None).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri cannot unmap a part of a mapping")]
    fn transparent_huge_pages_begin_on_one() {
        let layout = Layout::from_size_align(3 << 20, 64).unwrap();
        let huge = HugePages::Transparent;
        match Allocation::zeroed("ibv_reg_mr", layout, false, Some(huge)) {
            Ok(memory) => assert_eq!(memory.data().as_ptr() as usize % huge.bytes(), 0),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP)),
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no huge pages and no lazy memory")]
    fn huge_pages_that_nobody_set_aside_are_a_typed_error() {
        // The sum is beyond what mmap takes.
        let layout = Layout::from_size_align(1 << 46, 64).unwrap();
        for huge in [HugePages::Size2MiB, HugePages::Size1GiB] {
            let error = Allocation::zeroed("ibv_reg_mr", layout, false, Some(huge)).unwrap_err();
            assert!(error.to_string().contains("huge pages of that size"), "{error}");
        }
    }
}
