//! A ring of packets in memory that two processes share: one writes them, the other reads them.
//!
//! The other process may write anything there, at any time. So each side keeps its own position to itself, checks the
//! position of the other, and the reader copies a packet before it looks at it.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use ibverbs::provider::{load, store};

use super::check;
use crate::link::receive::LONGEST;

/// The bytes of the ring. Positions count all bytes that have passed, modulo 2^32, which this divides.
const ROOM: u32 = 4 << 20;

/// The bytes in front of the ring.
const HEADER: usize = 4096;

/// Each packet has its length in front of it, and begins at a multiple of this.
const UNIT: usize = 8;

/// In place of a length: what follows is at the start of the ring.
const SKIP: u32 = u32::MAX;

/// A writer that finds the ring empty behind this many bytes begins at its start again, so that little of the
/// processor's cache is used.
const NEAR: u32 = 256 << 10;

/// A file of this size stays as it is: a shorter one would end the processes that use the memory.
const SEALS: c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// Nobody can make the file a program; some systems insist on it. Missing in some C libraries' headers.
const MFD_NOEXEC_SEAL: u32 = 8;

/// What the reader and the writer change often is on cache lines of their own.
#[repr(C, align(64))]
struct Line(AtomicU32);

#[repr(C)]
struct Header {
    /// How far the writer is; changed by the writer.
    written: Line,
    /// How far the reader is; changed by the reader.
    read: Line,
    /// 1 if the reader wants to be woken; set by the reader, cleared by the sender that wakes it.
    sleeping: Line,
}

/// The memory, mapped into this process.
#[derive(Debug)]
struct Mapping(NonNull<u8>);

// SAFETY: the memory may be used from any thread; what several use at a time is atomic.
unsafe impl Send for Mapping {}

impl Mapping {
    const LENGTH: usize = HEADER + ROOM as usize;

    /// Maps a file of this length, which cannot become shorter.
    fn new(file: &OwnedFd) -> io::Result<Self> {
        // SAFETY: a new mapping, where the system finds room.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                Self::LENGTH,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(start.cast()).map(Self).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping is longer, aligned to a page, and lives as long as this; its integers are atomic, and
        // any value of theirs is valid.
        unsafe { self.0.cast().as_ref() }
    }

    /// `length` bytes of the ring, from `offset` on.
    fn bytes(&self, offset: usize, length: usize) -> *mut u8 {
        assert!(offset <= ROOM as usize && length <= ROOM as usize - offset);
        // SAFETY: this is within the mapping.
        unsafe { self.0.as_ptr().add(HEADER + offset) }
    }

    fn length_at(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: within the mapping, which lives as long as this; each packet begins at a multiple of eight bytes,
        // and is not the end of the ring. The other process may write there at any time: it is atomic.
        unsafe { &*self.bytes(offset, UNIT).cast::<AtomicU32>() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the whole mapping; nothing that was borrowed from it is left.
        unsafe { libc::munmap(self.0.as_ptr().cast::<c_void>(), Self::LENGTH) };
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

/// The bytes that a packet takes up.
fn space(length: usize) -> usize {
    UNIT + length.next_multiple_of(UNIT)
}

/// The side that writes.
#[derive(Debug)]
pub(super) struct Writer {
    mapping: Mapping,
    written: u32,
    /// What the other side was told of.
    published: u32,
    /// How far the reader was when we last looked.
    read: u32,
}

impl Writer {
    /// Creates a ring, and its file, which the reader needs.
    pub(super) fn create() -> io::Result<(Self, OwnedFd)> {
        let file = memory_file(Mapping::LENGTH, SEALS)?;
        let mapping = Mapping::new(&file)?;
        Ok((Self { mapping, written: 0, published: 0, read: 0 }, file))
    }

    /// Looks how far the reader is. What cannot be true is a ring that stays full.
    fn look(&mut self) {
        let read = self.mapping.header().read.0.load(Ordering::Acquire);
        let unread = self.written.wrapping_sub(read);
        self.read = if unread <= ROOM { read } else { self.written.wrapping_sub(ROOM) };
    }

    /// Whether the reader has read everything.
    pub(super) fn is_empty(&mut self) -> bool {
        if self.read != self.written {
            self.look();
        }
        self.read == self.written
    }

    /// Copies a packet into the ring. Returns false if there is no room.
    pub(super) fn write(&mut self, packet: &[u8]) -> bool {
        if packet.len() > LONGEST {
            return false;
        }
        let (needed, offset) = (space(packet.len()), self.written % ROOM);
        let left = ROOM - offset;
        // A packet is in one piece.
        let again = needed > left as usize
            || offset >= NEAR && self.published == self.written && self.is_empty();
        let skipped = if again { left } else { 0 };
        let total = skipped + needed as u32;
        if ROOM - self.written.wrapping_sub(self.read) < total {
            self.look();
            if ROOM - self.written.wrapping_sub(self.read) < total {
                return false;
            }
        }
        if again {
            self.mapping.length_at(offset as usize).store(SKIP, Ordering::Relaxed);
            self.written = self.written.wrapping_add(skipped);
        }
        let offset = (self.written % ROOM) as usize;
        self.mapping.length_at(offset).store(packet.len() as u32, Ordering::Relaxed);
        let to = self.mapping.bytes(offset + UNIT, packet.len());
        // SAFETY: `to` has room for it. The other process may read and write there at any time: the copy may race.
        unsafe { store(packet.as_ptr(), to, packet.len()) };
        self.written = self.written.wrapping_add(needed as u32);
        true
    }

    /// Lets the reader see what was written. Returns whether it has to be woken.
    pub(super) fn publish(&mut self) -> bool {
        if self.published == self.written {
            return false;
        }
        self.published = self.written;
        let header = self.mapping.header();
        header.written.0.store(self.written, Ordering::Release);
        // Either this sees that the reader sleeps, or the reader sees the packets (`Reader::may_sleep`).
        fence(Ordering::SeqCst);
        let sleeping = &header.sleeping.0;
        sleeping.load(Ordering::Relaxed) != 0 && sleeping.swap(0, Ordering::Relaxed) != 0
    }
}

/// The other process has written what no writer writes.
#[derive(Debug, PartialEq)]
pub(super) struct Broken;

/// The side that reads.
#[derive(Debug)]
pub(super) struct Reader {
    mapping: Mapping,
    read: u32,
    /// The other process has written what no writer writes: nothing more is read.
    is_broken: bool,
    /// The packet that was copied last.
    packet: Box<[u8; LONGEST]>,
}

impl Reader {
    /// The ring of a file that another process has sent, unless it is none.
    pub(super) fn new(file: &OwnedFd) -> io::Result<Self> {
        // SAFETY: plain system calls for a descriptor of ours; `stat` is filled in where the call succeeds.
        let (seals, size) = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            check(libc::fstat(file.as_raw_fd(), &mut stat) as _)?;
            (check(libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) as _)? as c_int, stat.st_size)
        };
        if seals & SEALS != SEALS || usize::try_from(size) != Ok(Mapping::LENGTH) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let packet = Box::new([0; LONGEST]);
        Ok(Self { mapping: Mapping::new(file)?, read: 0, is_broken: false, packet })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.is_broken || self.mapping.header().written.0.load(Ordering::Acquire) == self.read
    }

    /// Asks to be woken. Returns false if there are packets already.
    pub(super) fn may_sleep(&self) -> bool {
        self.mapping.header().sleeping.0.store(1, Ordering::Relaxed);
        // See `Writer::publish`.
        fence(Ordering::SeqCst);
        self.is_empty()
    }

    /// Reads packets, at most `most`; returns their number.
    pub(super) fn read(&mut self, most: usize, each: impl FnMut(&[u8])) -> Result<usize, Broken> {
        if self.is_broken {
            return Err(Broken);
        }
        let result = self.read_some(most, each);
        self.is_broken = result.is_err();
        result
    }

    fn read_some(&mut self, most: usize, mut each: impl FnMut(&[u8])) -> Result<usize, Broken> {
        let header = self.mapping.header();
        let mut unread = header.written.0.load(Ordering::Acquire).wrapping_sub(self.read);
        let mut count = 0;
        while unread > 0 && count < most {
            let offset = self.read % ROOM;
            let left = (ROOM - offset).min(unread) as usize;
            if left < UNIT || unread > ROOM {
                return Err(Broken);
            }
            let length = self.mapping.length_at(offset as usize).load(Ordering::Relaxed);
            let passed = if length == SKIP {
                ROOM - offset
            } else {
                let length = length as usize;
                if length > LONGEST || space(length) > left {
                    return Err(Broken);
                }
                let from = self.mapping.bytes(offset as usize + UNIT, length);
                // SAFETY: this is within the mapping, and within the packet's own buffer. The other process may write
                // there at any time: the copy may race, and any bytes are a packet.
                unsafe { load(from, self.packet.as_mut_ptr(), length) };
                each(&self.packet[..length]);
                count += 1;
                space(length) as u32
            };
            unread = unread.checked_sub(passed).ok_or(Broken)?;
            self.read = self.read.wrapping_add(passed);
            header.read.0.store(self.read, Ordering::Release);
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::Random;

    fn ring() -> (Writer, Reader) {
        let (writer, file) = Writer::create().unwrap();
        (writer, Reader::new(&file).unwrap())
    }

    /// The bytes of the packet with this number.
    fn packet(number: u32) -> Vec<u8> {
        let length = number.wrapping_mul(2_654_435_761) as usize % (LONGEST + 1);
        vec![number as u8; length]
    }

    fn read_all(reader: &mut Reader) -> Vec<Vec<u8>> {
        let mut packets = Vec::new();
        while reader.read(10, |packet| packets.push(packet.to_vec())).unwrap() > 0 {}
        packets
    }

    #[test]
    fn packets_arrive_whole_and_in_order_also_behind_the_end_of_the_ring() {
        let (mut writer, mut reader) = ring();
        let mut next = 0;
        // More than three times the ring, and never empty in between.
        for number in 0..8_000 {
            assert!(writer.write(&packet(number)));
            writer.publish();
            if number % 100 == 99 {
                let most = if number == 7_999 { usize::MAX } else { 99 };
                let read = |bytes: &[u8]| {
                    assert!(bytes == packet(next), "packet {next}");
                    next += 1;
                };
                reader.read(most, read).unwrap();
            }
        }
        assert!(next == 8_000 && writer.is_empty() && reader.is_empty());
    }

    #[test]
    fn a_full_ring_takes_no_more_and_loses_nothing_that_it_took() {
        let (mut writer, mut reader) = ring();
        let bytes = vec![7; LONGEST];
        let mut count = 0;
        while writer.write(&bytes) {
            count += 1;
        }
        assert_eq!(count, ROOM as usize / space(LONGEST));
        assert!(reader.is_empty(), "not published yet");
        writer.publish();
        assert!(!writer.write(&bytes) && !writer.write(&vec![0; LONGEST + 1]));
        assert!(writer.write(&[1; 8]), "a short one fits");
        writer.publish();
        let packets = read_all(&mut reader);
        assert!(packets.len() == count + 1 && packets[..count].iter().all(|it| *it == bytes));
        assert!(writer.write(&bytes));
    }

    #[test]
    fn a_ring_that_is_read_at_once_stays_near_its_start() {
        let (mut writer, mut reader) = ring();
        for number in 0..5_000 {
            writer.write(&packet(number));
            writer.publish();
            assert!(read_all(&mut reader) == [packet(number)]);
            assert!(writer.written % ROOM <= NEAR + 2 * space(LONGEST) as u32);
        }
    }

    #[test]
    fn a_reader_is_woken_once_and_only_if_it_sleeps() {
        let (mut writer, mut reader) = ring();
        assert!(!writer.publish(), "nothing new");
        writer.write(&[1]);
        assert!(!writer.publish() && !reader.may_sleep());
        assert_eq!(read_all(&mut reader).len(), 1);
        assert!(reader.may_sleep());
        writer.write(&[2]);
        assert!(writer.publish());
        writer.write(&[3]);
        assert!(!writer.publish());
    }

    #[test]
    fn one_thread_writes_while_another_reads_and_sleeps() {
        let (mut writer, mut reader) = ring();
        let bell = std::sync::mpsc::channel();
        std::thread::scope(|threads| {
            threads.spawn(move || {
                for number in 0..10_000 {
                    while !writer.write(&packet(number)) {
                        std::thread::yield_now();
                    }
                    if writer.publish() {
                        bell.0.send(()).unwrap();
                    }
                }
            });
            let mut next = 0;
            while next < 10_000 {
                let read = |bytes: &[u8]| {
                    assert!(bytes == packet(next), "packet {next}");
                    next += 1;
                };
                if reader.read(64, read).unwrap() == 0 && reader.may_sleep() {
                    bell.1.recv().unwrap();
                }
            }
        });
    }

    /// The other process writes anything anywhere: nothing is read that is not in the ring, and it ends.
    #[test]
    fn a_hostile_writer_is_noticed() {
        let mut random = Random::new(7);
        let mut broken = 0;
        for _ in 0..300 {
            let (mut writer, mut reader) = ring();
            for number in 0..random.below(20) as u32 {
                writer.write(&packet(number));
            }
            writer.publish();
            let end = u64::from(writer.written) + 64;
            for _ in 0..=random.below(3) {
                let any = [random.below(1 << 32) as u32, SKIP, ROOM, LONGEST as u32 + 1, 0, 4096];
                let value = any[random.below(any.len() as u64) as usize];
                let header = writer.mapping.header();
                match random.below(4) {
                    0 => header.written.0.store(value, Ordering::Relaxed),
                    1 => header.written.0.store(writer.written ^ 4, Ordering::Relaxed),
                    _ => {
                        let at = random.below(end / UNIT as u64) as usize * UNIT;
                        writer.mapping.length_at(at).store(value, Ordering::Relaxed);
                    }
                }
            }
            let mut bytes = 0;
            let mut count = |packet: &[u8]| bytes += space(packet.len());
            let result = loop {
                match reader.read(64, &mut count) {
                    Ok(64) => {}
                    result => break result,
                }
            };
            assert!(bytes <= ROOM as usize);
            if result.is_err() {
                broken += 1;
                assert_eq!(reader.read(1, |_| ()), Err(Broken), "it stays so");
                assert!(reader.is_empty() && reader.may_sleep());
            }
        }
        assert!(broken > 100, "{broken}");
    }

    /// The other process says that it has read what is not there.
    #[test]
    fn a_hostile_reader_fills_the_ring() {
        let (mut writer, _reader) = ring();
        writer.write(&[0; 64]);
        for read in [1, 1 << 31, u32::MAX, writer.written + 8] {
            writer.mapping.header().read.0.store(read, Ordering::Relaxed);
            while writer.write(&[0; LONGEST]) {}
            assert!(!writer.is_empty());
        }
    }

    /// The limit is of a process: its own tests of it are in a child, which ends.
    #[test]
    fn a_limit_on_files_is_an_error_and_no_signal() {
        // SAFETY: the child makes system calls only, and ends.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let limit = libc::rlimit { rlim_cur: 4096, rlim_max: 4096 };
            // SAFETY: a live structure.
            let limited = unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) } == 0;
            let error = memory_file(Mapping::LENGTH, SEALS).map_err(|e| e.raw_os_error()).err();
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
        let (_writer, file) = Writer::create().unwrap();
        assert!(Reader::new(&file).is_ok());
        let shorter = memory_file(Mapping::LENGTH - 1, SEALS).unwrap();
        let open = memory_file(Mapping::LENGTH, 0).unwrap();
        let grows = memory_file(Mapping::LENGTH, libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL).unwrap();
        let other: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
        for file in [shorter, open, grows, other] {
            assert!(Reader::new(&file).is_err());
        }
    }
}
