//! A transfer, and how it is cut into pieces.

use std::sync::Arc;

use ibverbs::TransportError;
use ibverbs_transfer::counted::{MAX_PIECES, Mark};

use crate::error::{RailsError, Result};
use crate::memory::{RailSlice, RemoteRailMemory};

/// The shortest piece, unless a part of the transfer is shorter.
pub(crate) const SHORTEST_PIECE: usize = 64 << 10;
/// The longest piece, unless the transfer would have too many of them.
pub(crate) const LONGEST_PIECE: usize = 1 << 20;

/// No piece of a notified transfer is longer, since an RDMA message is not.
const LONGEST_MESSAGE: usize = 1 << 30;

/// An RDMA write or read of any length between memory that is registered on all devices, spread over the rails.
///
/// While it is under way, the memory that it writes may hold any mixture of old and new bytes, and after a rail has
/// failed, bytes may be written twice. When it has ended, all bytes are there.
#[derive(Clone, Debug)]
#[must_use]
pub struct Transfer {
    pub(crate) kind: Kind,
    pub(crate) parts: Arc<[(RailSlice, RemoteRailMemory)]>,
    pub(crate) tag: Option<u16>,
    sums: Sums,
}

/// What all parts of a transfer come to. A transfer that is posted again does not look at them again.
#[derive(Clone, Copy, Debug)]
struct Sums {
    /// The bytes of all parts, if a number holds them.
    length: Option<usize>,
    longest: usize,
    /// The lengths of a part whose two sides differ.
    unequal: Option<(usize, u64)>,
    /// The rails of our memory and the number of the peer's devices, if they are those of each part.
    owners: Option<(u32, usize)>,
}

impl Sums {
    fn of(parts: &[(RailSlice, RemoteRailMemory)]) -> Self {
        let owners =
            |(local, remote): &(RailSlice, RemoteRailMemory)| (local.rails(), remote.devices());
        let first = parts.first().map(owners);
        let mut sums = Self { length: Some(0), longest: 0, unequal: None, owners: first };
        for part in parts {
            let (len, theirs) = (part.0.len(), part.1.len());
            sums.length = sums.length.and_then(|length| length.checked_add(len));
            sums.longest = sums.longest.max(len);
            if len as u64 != theirs {
                sums.unequal.get_or_insert((len, theirs));
            }
            if Some(owners(part)) != first {
                sums.owners = None;
            }
        }
        sums
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Write,
    Read,
}

impl Transfer {
    /// Writes our bytes to the peer's memory. The two are of the same length.
    #[doc(alias = "IBV_WR_RDMA_WRITE")]
    pub fn write(local: RailSlice, remote: RemoteRailMemory) -> Self {
        Self::write_list([(local, remote)])
    }

    /// Reads the peer's bytes to our memory. The two are of the same length.
    #[doc(alias = "IBV_WR_RDMA_READ")]
    pub fn read(local: RailSlice, remote: RemoteRailMemory) -> Self {
        Self::read_list([(local, remote)])
    }

    /// Several writes as one transfer: each part from here to there.
    pub fn write_list(parts: impl IntoIterator<Item = (RailSlice, RemoteRailMemory)>) -> Self {
        Self::new(Kind::Write, parts.into_iter().collect())
    }

    /// Several reads as one transfer: each part from there to here.
    pub fn read_list(parts: impl IntoIterator<Item = (RailSlice, RemoteRailMemory)>) -> Self {
        Self::new(Kind::Read, parts.into_iter().collect())
    }

    fn new(kind: Kind, parts: Arc<[(RailSlice, RemoteRailMemory)]>) -> Self {
        let sums = Sums::of(&parts);
        Self { kind, parts, tag: None, sums }
    }

    /// The peer gets one [`Event::Notified`](crate::Event::Notified) with this number when all bytes of the write have
    /// arrived, on whatever rails. RoCE and InfiniBand can do that, iWARP cannot.
    ///
    /// 48 of them can be under way, or wait for the peer's program to take their events; more begin later.
    #[doc(alias = "IBV_WR_RDMA_WRITE_WITH_IMM")]
    pub fn notify(mut self, tag: u16) -> Self {
        self.tag = Some(tag);
        self
    }

    /// Checks that our memory is of the rails with the number `rails`, and the peer's of a peer with `theirs` devices.
    pub(crate) fn check(&self, rails: u32, theirs: usize) -> Result<()> {
        let invalid = |text: String| Err(RailsError::InvalidInput(text));
        if self.parts.is_empty() {
            return invalid("the transfer has no parts".into());
        }
        if self.tag.is_some() && self.kind == Kind::Read {
            return invalid("a read notifies no one: the peer does not see it".into());
        }
        if u32::try_from(self.parts.len()).is_err() {
            return invalid(format!(
                "a transfer has {} parts at most, not {}",
                u32::MAX,
                self.parts.len()
            ));
        }
        if self.tag.is_some() && self.parts.len() > MAX_PIECES {
            let parts = self.parts.len();
            return invalid(format!(
                "a notified transfer has {MAX_PIECES} parts at most, not {parts}"
            ));
        }
        if let Some((local, remote)) = self.sums.unequal {
            return invalid(format!("{local} bytes of ours are for {remote} of the peer's"));
        }
        if self.sums.owners != Some((rails, theirs)) {
            return invalid("the memory is of other rails, or of a peer with other devices".into());
        }
        let Some(length) = self.sums.length else {
            return invalid(format!("a transfer has {} bytes at most", usize::MAX));
        };
        // The last piece of a part may be short, so there is one more for each part.
        let most = (MAX_PIECES - self.parts.len().min(MAX_PIECES)) * LONGEST_MESSAGE;
        if self.tag.is_some() && length > most && self.sums.longest > LONGEST_MESSAGE {
            let parts = self.parts.len();
            return invalid(format!(
                "a notified transfer of {parts} parts, one of more than {LONGEST_MESSAGE} bytes, has {most} bytes at most, not {length}"
            ));
        }
        Ok(())
    }
}

/// A part of a transfer that one request carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Piece {
    /// The part of the transfer, and where in it the piece begins.
    pub(crate) part: u32,
    pub(crate) len: u32,
    pub(crate) offset: usize,
    /// The pieces of a notified transfer are numbered in the order in which they are cut.
    pub(crate) number: u16,
    pub(crate) is_last: bool,
}

/// A transfer under way.
#[derive(Debug)]
pub(crate) struct Active {
    pub(crate) transfer: Transfer,
    /// The number of a notified transfer that has begun.
    pub(crate) number: Option<u64>,
    /// The part that is not cut yet.
    part: usize,
    offset: usize,
    uncut: usize,
    pieces: usize,
    /// Pieces that a failed rail did not carry.
    pub(crate) again: Vec<Piece>,
    pub(crate) in_flight: usize,
    /// The pair that found the transfer at fault, and how.
    pub(crate) failure: Option<(usize, TransportError)>,
}

impl Active {
    pub(crate) fn new(transfer: Transfer) -> Self {
        let uncut = transfer.sums.length.unwrap_or_default();
        let (number, again, failure) = (None, Vec::new(), None);
        Self {
            transfer,
            number,
            part: 0,
            offset: 0,
            uncut,
            pieces: 0,
            again,
            in_flight: 0,
            failure,
        }
    }

    /// Whether there are pieces that no request carries yet.
    pub(crate) fn has_unposted(&self) -> bool {
        self.uncut > 0 || !self.again.is_empty()
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.in_flight == 0 && !self.has_unposted()
    }

    /// No more pieces are posted.
    pub(crate) fn fail(&mut self, pair: usize, error: TransportError) {
        self.failure.get_or_insert((pair, error));
        self.uncut = 0;
        self.again.clear();
    }

    /// The part that the immediate numbers of its pieces share, if the peer is notified.
    pub(crate) fn mark(&self) -> Option<Mark> {
        Some(Mark::new(self.number?, self.transfer.tag?))
    }

    /// The bytes that may go over one of `rails` rails before the next one is chosen: fewer towards the end, so that all
    /// rails end at the same time.
    pub(crate) fn share(&self, rails: usize) -> usize {
        (self.uncut / (2 * rails.max(1))).max(SHORTEST_PIECE)
    }

    /// The longest piece of a [share](Self::share) of the transfer.
    pub(crate) fn longest_piece(share: usize) -> usize {
        share.next_multiple_of(4096).min(LONGEST_PIECE)
    }

    /// The next piece, no longer than this unless the transfer would have too many of them.
    #[inline(always)]
    pub(crate) fn next_piece(&mut self, longest: usize) -> Option<Piece> {
        // Each field alone is copied. A copy of the whole copies the padding between the fields, too.
        if let Some(Piece { part, len, offset, number, is_last }) = self.again.pop() {
            return Some(Piece { part, len, offset, number, is_last });
        }
        if self.uncut == 0 {
            return None;
        }
        let mut len = longest;
        if self.transfer.tag.is_some() {
            // The parts after this one need a piece each at least.
            let parts_after = self.transfer.parts.len() - self.part - 1;
            let pieces = (MAX_PIECES - 1 - self.pieces).saturating_sub(parts_after).max(1);
            len = len.max(self.uncut.div_ceil(pieces));
        }
        let room = self.transfer.parts[self.part].0.len() - self.offset;
        let len = len.min(room);
        self.uncut -= len;
        let is_last = self.uncut == 0;
        let (part, offset, number) = (self.part as u32, self.offset, self.pieces as u16);
        self.pieces += 1;
        self.offset += len;
        if len == room {
            (self.part, self.offset) = (self.part + 1, 0);
        }
        Some(Piece { part, len: len as u32, offset, number, is_last })
    }
}

#[cfg(test)]
mod tests {
    use ibverbs::{AccessFlags, RemoteMemoryRegion};
    use ibverbs_software::Device;

    use super::*;
    use crate::memory::RailMemory;

    const GIB: usize = 1 << 30;

    fn memory(device: &str) -> (RailMemory, Device) {
        let device = Device::builder().name(device).build().unwrap();
        device.register();
        let rails = crate::Rails::builder().device(device.name()).build().unwrap();
        (rails.allocate(8, AccessFlags::REMOTE_WRITE).unwrap(), device)
    }

    fn write(memory: &RailMemory, lengths: &[usize]) -> Transfer {
        let part = |&len: &usize| {
            let remote = RemoteMemoryRegion::new(0, len as u64, 1).unwrap().to_bytes();
            (RailSlice::of_length(memory, len), RemoteRailMemory::from_bytes(&remote).unwrap())
        };
        Transfer::write_list(lengths.iter().map(part))
    }

    fn check(transfer: &Transfer) -> Result<()> {
        transfer.check(transfer.parts[0].0.rails(), 1)
    }

    #[test]
    fn lengths_that_no_number_has_are_refused() {
        let (memory, _device) = memory("transfer0");
        for lengths in [[usize::MAX, 1, 1], [1, usize::MAX / 2 + 1, usize::MAX / 2 + 1]] {
            for transfer in [write(&memory, &lengths), write(&memory, &lengths).notify(1)] {
                let error = check(&transfer).unwrap_err().to_string();
                assert!(error.contains("bytes at most"), "{error}");
            }
        }
        let ones = |count: usize, first: usize| {
            let mut lengths = vec![1; count];
            lengths[0] = first;
            lengths
        };
        for lengths in [ones(512, 5 * GIB), ones(509, 3 * GIB), ones(1, 511 * GIB + 1)] {
            let error = check(&write(&memory, &lengths).notify(1)).unwrap_err().to_string();
            assert!(error.contains("a notified transfer of"), "{error}");
            check(&write(&memory, &lengths)).unwrap();
        }
    }

    /// A notified transfer that is not refused has at most 512 pieces, none of them longer than an RDMA message.
    #[test]
    fn a_notified_transfer_has_pieces_that_can_be_sent() {
        let (memory, _device) = memory("transfer1");
        let mut random = fastrand::Rng::with_seed(1);
        let mut cases = vec![vec![511 * GIB], vec![GIB; 512], vec![2 * GIB; 256], vec![1; 512]];
        for _ in 0..300 {
            let parts = random.usize(1..=512);
            let longest = 1 << random.usize(0..39);
            cases.push((0..parts).map(|_| random.usize(1..=longest)).collect());
        }
        let mut tried = 0;
        for lengths in cases {
            let transfer = write(&memory, &lengths).notify(1);
            if check(&transfer).is_err() {
                continue;
            }
            tried += 1;
            let (mut active, mut cut, mut pieces) =
                (Active::new(transfer), vec![0; lengths.len()], 0);
            let mut is_last = false;
            while let Some(piece) =
                active.next_piece(Active::longest_piece(active.share(random.usize(1..=8))))
            {
                assert!(!is_last && piece.len > 0 && piece.len as usize <= GIB, "{piece:?}");
                assert_eq!((piece.offset, piece.number), (cut[piece.part as usize], pieces));
                cut[piece.part as usize] += piece.len as usize;
                (pieces, is_last) = (pieces + 1, piece.is_last);
            }
            assert!(is_last && pieces <= 512 && cut == lengths, "{pieces}");
        }
        assert!(tried > 100, "{tried}");
    }
}
