//! Memory that processes share: that of a ring, and the table of `direct_access`.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::super::check;

/// The bytes of the ring. Positions count all bytes that have passed, modulo 2^32, which this divides.
pub(super) const ROOM: u32 = 4 << 20;

/// The bytes in front of the ring.
const HEADER: usize = 4096;

/// Each packet has its length in front of it, and begins at a multiple of this.
pub(super) const UNIT: usize = 8;

/// A file of this size stays as it is: a shorter one would end the processes that use the memory.
const SEALS: c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// Later mappings of the file can only read it. Known since Linux 5.1; missing in some C libraries' headers.
const F_SEAL_FUTURE_WRITE: c_int = 0x10;

/// The file can never be executed; some systems insist on it. Missing in some C libraries' headers.
const MFD_NOEXEC_SEAL: u32 = 8;

/// Fields that the reader or the writer changes often are on cache lines of their own.
#[repr(C, align(64))]
pub(super) struct Line(pub(super) AtomicU32);

/// A writer that has written looks whether the reader sleeps, and a reader that goes to sleep looks whether something was written: both
/// fields are on one cache line.
#[repr(C, align(64))]
pub(super) struct Front {
    /// How far the writer is; changed by the writer.
    pub(super) written: AtomicU32,
    /// 1 if the reader wants to be woken; set by the reader, cleared by the sender that wakes it.
    pub(super) sleeping: AtomicU32,
}

#[repr(C)]
pub(super) struct Header {
    pub(super) front: Front,
    /// How far the reader is; changed by the reader.
    pub(super) read: Line,
    /// 1 if the packets have their invariant CRC; set by the writer.
    pub(super) sealed: Line,
    /// The writer's present lease of the reader's memory, or 0 (`direct_access`); set by the writer.
    pub(super) lease: Lease,
    /// 0 until the reader takes the ring or the writer withdraws it, whichever comes first.
    pub(super) owner: Line,
}

/// Aligned as [`Line`].
#[repr(C, align(64))]
pub(super) struct Lease(AtomicU64);

/// The memory, mapped into this process.
#[derive(Debug)]
pub(in super::super) struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the memory may be used from any thread, and by several at a time: it is given out as atomic integers, or as
// pointers.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// The length of a ring's.
    pub(in super::super) const RING: usize = HEADER + ROOM as usize;

    /// New memory of this length, all zeros, and its file, by which the other process can read it, and write to it if
    /// `is_shared`.
    pub(in super::super) fn create(length: usize, is_shared: bool) -> io::Result<(Self, OwnedFd)> {
        let file = memory_file(length, 0)?;
        let mapping = Self::new(&file, length, true)?;
        let seals = SEALS | if is_shared { 0 } else { F_SEAL_FUTURE_WRITE };
        // SAFETY: no memory is involved.
        check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } as _)?;
        Ok((mapping, file))
    }

    /// The memory of a file that another process has sent, to read it, and to write to it if `is_shared`. An error, if the file
    /// has another length or could be made shorter.
    pub(in super::super) fn open(
        file: &OwnedFd,
        length: usize,
        is_shared: bool,
    ) -> io::Result<Self> {
        // Only a file in memory has seals. To ask another one for its size may wait.
        // SAFETY: plain system calls for a descriptor of ours; `stat` is filled in where the call succeeds.
        let (seals, size) = unsafe {
            let seals = check(libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) as _)? as c_int;
            let mut stat: libc::stat = std::mem::zeroed();
            check(libc::fstat(file.as_raw_fd(), &mut stat) as _)?;
            (seals, stat.st_size)
        };
        if seals & SEALS != SEALS || usize::try_from(size) != Ok(length) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Self::new(file, length, is_shared)
    }

    /// Maps a file of this length, which cannot become shorter, or has not been handed over.
    fn new(file: &OwnedFd, length: usize, writes: bool) -> io::Result<Self> {
        let protection = libc::PROT_READ | if writes { libc::PROT_WRITE } else { 0 };
        // SAFETY: a new mapping, where the system finds room.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { start, length })
    }

    /// The writer's lease of the reader's memory.
    pub(in super::super) fn lease(&self) -> &AtomicU64 {
        &self.header().lease.0
    }

    /// An integer of the memory, which is only read if that was opened to be read.
    pub(in super::super) fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.length / size_of::<u64>());
        // SAFETY: within the mapping, which is aligned to a page and lives as long as this. The other process may write there at
        // any time: it is atomic.
        unsafe { &*self.start.as_ptr().cast::<AtomicU64>().add(index) }
    }

    /// Returns the ring's header.
    pub(super) fn header(&self) -> &Header {
        assert!(self.length == Self::RING);
        // SAFETY: the mapping is longer, aligned to a page, and lives as long as this; its integers are atomic, and
        // any value of theirs is valid.
        unsafe { self.start.cast().as_ref() }
    }

    /// `length` bytes of the ring, from `offset` on.
    pub(super) fn bytes(&self, offset: usize, length: usize) -> *mut u8 {
        assert!(
            offset <= ROOM as usize
                && length <= ROOM as usize - offset
                && self.length == Self::RING
        );
        // SAFETY: this is within the mapping.
        unsafe { self.start.as_ptr().add(HEADER + offset) }
    }

    pub(super) fn length_at(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: within the mapping, which lives as long as this; each packet begins at a multiple of eight bytes,
        // and is not the end of the ring. The other process may write there at any time: it is atomic.
        unsafe { &*self.bytes(offset, UNIT).cast::<AtomicU32>() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the whole mapping; nothing that was borrowed from it is left.
        unsafe { libc::munmap(self.start.as_ptr().cast::<c_void>(), self.length) };
    }
}

/// A new file in memory.
fn memory_file(size: usize, seals: c_int) -> io::Result<OwnedFd> {
    // SAFETY: the name is a string, the limit a live structure; what `create` returns is a new descriptor, ours alone.
    unsafe {
        // Beyond this limit there is no error, but a signal that ends the program.
        let mut limit: libc::rlimit = std::mem::zeroed();
        check(libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) as _)?;
        if limit.rlim_cur < size as libc::rlim_t {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        let create = |more| {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | more;
            check(libc::memfd_create(c"ibverbs-software".as_ptr(), flags) as _)
        };
        // Before Linux 6.3 that is not known.
        let fd = create(MFD_NOEXEC_SEAL).or_else(|_| create(0))? as c_int;
        let file = OwnedFd::from_raw_fd(fd);
        check(libc::ftruncate(fd, size as _) as _)?;
        check(libc::fcntl(fd, libc::F_ADD_SEALS, seals) as _)?;
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    /// The limit is of a process: its own tests of it are in a child, which ends.
    #[test]
    fn a_limit_on_files_is_an_error_and_no_signal() {
        let _alone = crate::link::process_starts();
        // SAFETY: the child makes system calls only, and ends.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let limit = libc::rlimit { rlim_cur: 4096, rlim_max: 4096 };
            // SAFETY: a live structure.
            let limited = unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) } == 0;
            let error = memory_file(Mapping::RING, SEALS).map_err(|e| e.raw_os_error()).err();
            let is_good = limited && error == Some(Some(libc::EFBIG));
            // SAFETY: it ends the process at once.
            unsafe { libc::_exit(if is_good { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: a live variable; the child is ours.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    }

    #[test]
    fn only_a_sealed_file_of_the_right_size_is_a_ring() {
        let (_mapping, file) = Mapping::create(Mapping::RING, true).unwrap();
        assert!(Mapping::open(&file, Mapping::RING, true).is_ok());
        let (mapping, file) = Mapping::create(4096, false).unwrap();
        mapping.word(7).store(9, Ordering::Relaxed);
        assert!(Mapping::open(&file, 4096, true).is_err(), "others read it alone");
        assert_eq!(Mapping::open(&file, 4096, false).unwrap().word(7).load(Ordering::Relaxed), 9);
        let shorter = memory_file(Mapping::RING - 1, SEALS).unwrap();
        let open = memory_file(Mapping::RING, 0).unwrap();
        let grows = memory_file(Mapping::RING, libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL).unwrap();
        let other: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
        for file in [shorter, open, grows, other] {
            assert!(Mapping::open(&file, Mapping::RING, true).is_err());
        }
    }
}
