//! A ring of packets in memory that two processes share: one writes them, the other reads them.
//!
//! The other process may write anything there, at any time. So each side keeps its own position to itself, checks the
//! position of the other, and the reader copies a packet before it looks at it.

mod mapping;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use ibverbs::provider::{load, store};

pub(super) use self::mapping::Mapping;
use self::mapping::{ROOM, UNIT};
use crate::wire::LONGEST;

/// In place of a length: what follows is at the start of the ring.
const SKIP: u32 = u32::MAX;

/// A writer that finds the ring empty behind this many bytes begins at its start again, so that little of the
/// processor's cache is used.
const NEAR: u32 = 256 << 10;

/// Who has the ring.
const TAKEN: u32 = 1;
const WITHDRAWN: u32 = 2;

/// The bytes that a packet takes up.
fn space(length: usize) -> usize {
    UNIT + length.next_multiple_of(UNIT)
}

impl Mapping {
    /// Gives the ring to one side for good, unless one has it.
    fn decide(&self, owner: u32) -> bool {
        let relaxed = Ordering::Relaxed;
        self.header().owner.0.compare_exchange(0, owner, relaxed, relaxed).is_ok()
    }
}

/// The side that writes.
#[derive(Debug)]
pub(super) struct Writer {
    mapping: Mapping,
    written: u32,
    /// The position that the other side was told of.
    published: u32,
    /// How far the reader was when we last looked.
    read: u32,
}

impl Writer {
    /// Creates a ring, and its file, which the reader needs.
    pub(super) fn create() -> io::Result<(Self, OwnedFd)> {
        let (mapping, file) = Mapping::create(Mapping::RING, true)?;
        Ok((Self { mapping, written: 0, published: 0, read: 0 }, file))
    }

    /// This side's lease of the other's memory.
    pub(super) fn lease(&self) -> &AtomicU64 {
        self.mapping.lease()
    }

    /// Whether its packets have their invariant CRC.
    pub(super) fn is_sealed(&self) -> bool {
        self.mapping.header().sealed.0.load(Ordering::Relaxed) == 1
    }

    /// Says so. All packets of a device are alike.
    pub(super) fn set_sealed(&self, is_sealed: bool) {
        if self.is_sealed() != is_sealed {
            self.mapping.header().sealed.0.store(is_sealed.into(), Ordering::Relaxed);
        }
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

    /// Takes the ring back: a reader that comes later refuses it. False: a reader [has taken](Reader::take) it already.
    pub(super) fn withdraw(&self) -> bool {
        self.mapping.decide(WITHDRAWN)
    }

    /// Lets the reader see what was written. Returns whether it has to be woken.
    pub(super) fn publish(&mut self) -> bool {
        if self.published == self.written {
            return false;
        }
        self.published = self.written;
        let header = self.mapping.header();
        header.front.written.store(self.written, Ordering::Release);
        // Either this sees that the reader sleeps, or the reader sees the packets (`Reader::may_sleep`).
        fence(Ordering::SeqCst);
        let sleeping = &header.front.sleeping;
        sleeping.load(Ordering::Relaxed) != 0 && sleeping.swap(0, Ordering::Relaxed) != 0
    }
}

/// The other process has written what no writer writes.
#[derive(Debug, PartialEq)]
pub(super) struct Broken;

/// The side that reads.
#[derive(Debug)]
pub(super) struct Reader {
    mapping: Arc<Mapping>,
    read: u32,
    /// The other process has written what no writer writes: nothing more is read.
    is_broken: bool,
    /// The packet that was copied last.
    packet: Box<[u8; LONGEST]>,
}

impl Reader {
    /// The ring of a file that another process has sent, unless it is none.
    pub(super) fn new(file: &OwnedFd) -> io::Result<Self> {
        let packet = Box::new([0; LONGEST]);
        let mapping = Arc::new(Mapping::open(file, Mapping::RING, true)?);
        Ok(Self { mapping, read: 0, is_broken: false, packet })
    }

    /// Takes the ring to read it. False: its writer has [withdrawn](Writer::withdraw) it, and sends the packets another way.
    pub(super) fn take(&self) -> bool {
        self.mapping.decide(TAKEN)
    }

    pub(super) fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    pub(super) fn is_empty(&self) -> bool {
        self.is_broken || self.mapping.header().front.written.load(Ordering::Acquire) == self.read
    }

    /// Whether the packets have their invariant CRC, as their writer says.
    pub(super) fn is_sealed(&self) -> bool {
        self.mapping.header().sealed.0.load(Ordering::Relaxed) == 1
    }

    /// Whether the writer was asked to ring, and has not done so.
    pub(super) fn is_rung(&self) -> bool {
        self.is_broken || self.mapping.header().front.sleeping.load(Ordering::Relaxed) == 1
    }

    /// Asks to be woken. Returns false if there are packets already.
    pub(super) fn may_sleep(&self) -> bool {
        self.mapping.header().front.sleeping.store(1, Ordering::Relaxed);
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
        let mut unread = header.front.written.load(Ordering::Acquire).wrapping_sub(self.read);
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
    use crate::random::Random;

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
        let wake_fd = std::sync::mpsc::channel();
        std::thread::scope(|threads| {
            threads.spawn(move || {
                for number in 0..10_000 {
                    while !writer.write(&packet(number)) {
                        std::thread::yield_now();
                    }
                    if writer.publish() {
                        wake_fd.0.send(()).unwrap();
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
                    wake_fd.1.recv().unwrap();
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
                    0 => header.front.written.store(value, Ordering::Relaxed),
                    1 => header.front.written.store(writer.written ^ 4, Ordering::Relaxed),
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
}
