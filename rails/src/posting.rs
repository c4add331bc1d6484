//! Requests that are posted.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use ibverbs::channel::{AnyBuffer, WorkRequest};
use ibverbs::memory::{RawMemoryRange, RawMemoryRegion, SharedMemoryRange};
use ibverbs::{
    ChannelId, Loop, OperationError, ReadWorkRequest, ReceiveWorkRequest, RemoteMemoryRegion,
    WriteWorkRequest,
};

use crate::control::Frame;
use crate::devices::{Device, SENDS, Work};
use crate::error::RailsError;
use crate::event::{PeerId, TransferId};
use crate::memory::Regions;
use crate::messages::immediate;
use crate::pair::{Pair, State};
use crate::peer::Peer;
use crate::rails::{Failed, Rails, Task};
use crate::transfer::{Active, Kind, Piece, SHORTEST_PIECE};

/// The tokens of requests.
pub(crate) const RECEIVE: u64 = 0;
pub(crate) const SEND: u64 = 1;

/// A range of memory of this process, or of a dma-buf.
pub(crate) type Buffer = AnyBuffer;

/// Work that comes before more pieces are posted.
enum Stop {
    /// The pair is to be closed.
    Refused(usize, OperationError<Buffer>),
    /// The transfer failed before a piece of it was posted.
    Complete(TransferId),
}

impl Rails {
    /// Posts what a peer's messages and transfers have room for.
    pub(crate) fn fill(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.is_ready = false;
        peer.pairs.iter_mut().for_each(|pair| pair.measure(now));
        if !peer.outgoing.abandoned().is_empty() {
            // The pieces of a transfer arrive before the frame that says that no more come.
            let is_failing = self.failed.iter().any(|failed| failed.peer == id)
                || peer.pairs.iter().any(|pair| pair.state == State::Closing);
            if !is_failing {
                for number in std::mem::take(peer.outgoing.abandoned()) {
                    peer.control.send(&Frame::Abandoned { number });
                }
            }
        }
        self.fill_messages(id, now);
        while let Some(stop) = self.fill_transfers(id, now) {
            match stop {
                Stop::Refused(pair, error) => return self.not_posted(id, pair, &error),
                Stop::Complete(transfer) => self.end_transfer(transfer),
            }
        }
    }

    /// Posts pieces of a peer's transfers, until there is no room, or something else is to be done.
    fn fill_transfers(&mut self, id: PeerId, now: Instant) -> Option<Stop> {
        let Self { peers, transfers, devices, .. } = self;
        let peer = peers.get_mut(id)?;
        let rails = peer.pairs_up();
        while let Some(&transfer) = peer.queue.front() {
            let Some((_, Task::Transfer(active))) = transfers.get_mut(transfer) else {
                peer.queue.pop_front();
                continue;
            };
            if active.transfer.tag.is_some() && active.number.is_none() {
                // The peer may not have counted yet what a pair has carried that is closing.
                let is_closing = peer.pairs.iter().any(|pair| pair.state == State::Closing);
                match if is_closing { None } else { peer.outgoing.begin() } {
                    number @ Some(_) => active.number = number,
                    None => return None,
                }
            }
            while active.has_unposted() {
                let pair = peer.choose(SHORTEST_PIECE)?;
                let it = &mut peer.pairs[pair];
                let device = &mut devices[it.ours];
                let channel = device.least_busy(&it.lanes)?;
                let burst = Burst { device, channel, pair: it, transfer, active, rails };
                match burst.post(now) {
                    Ok(()) => {}
                    Err(NotPosted::Refused(error)) => return Some(Stop::Refused(pair, error)),
                    Err(NotPosted::OutOfBounds(error)) => active.fail(pair, error.into()),
                }
            }
            peer.queue.pop_front();
            if active.is_complete() {
                return Some(Stop::Complete(transfer));
            }
        }
        None
    }

    /// Posts messages to a peer, on the first queue pair of the first pair that works.
    fn fill_messages(&mut self, id: PeerId, now: Instant) {
        loop {
            let Self { peers, devices, .. } = self;
            let Some(Peer { pairs, messages: Some(messages), .. }) = peers.get_mut(id) else {
                return;
            };
            if !messages.has_unposted() {
                return;
            }
            // Late writes of a pair that is closing may still change the slots that it has written.
            let is_closing = pairs.iter().any(|pair| pair.state == State::Closing);
            let given = if is_closing { Ok(()) } else { messages.give_slots() };
            if let Err(error) = given {
                return self.lose(id, error);
            }
            let Some(pair) = pairs.iter().position(|pair| pair.state == State::Up) else { return };
            let it = &mut pairs[pair];
            let device = &mut devices[it.ours];
            let Some(&channel) = it.lanes.first() else { return };
            let sends = &mut device.lanes[channel.index()].sends;
            if sends.len() >= SENDS as usize {
                return;
            }
            let Some(message) = messages.begin() else { return };
            let (len, number) = (message.len, message.number);
            // A message is in memory that was allocated.
            let Some(region) = message.memory.region(it.ours) else { return };
            let range = message.start..message.start + len;
            let local = SharedMemoryRange::new(region.clone(), range);
            let remote = message.remote.part(it.theirs, message.remote_start, len);
            let (buffer, remote) = match (local, remote) {
                (Ok(buffer), Ok(remote)) => (buffer, remote),
                (Err(error), _) | (_, Err(error)) => {
                    return self.lose(id, RailsError::range(error));
                }
            };
            let request = WriteWorkRequest::new(buffer, remote).immediate(immediate(number));
            let posted = device.engine.post(channel, request, SEND);
            // Without the buffer, it is in flight.
            if posted.as_ref().err().is_none_or(|error| error.buffer.is_none()) {
                sends.push_back(Work::Message(number));
                it.takes(1, 0, now);
            } else {
                messages.ended(number, false);
            }
            if let Err(error) = posted {
                return self.not_posted(id, pair, &error);
            }
        }
    }

    pub(crate) fn post_receive(
        &mut self,
        device: usize,
        peer: PeerId,
        pair: usize,
        channel: ChannelId,
    ) {
        let Device { scratch, engine, .. } = &mut self.devices[device];
        let Ok(buffer) = SharedMemoryRange::new(scratch.clone(), ..) else { return };
        if let Err(error) = engine.post(channel, ReceiveWorkRequest::new(buffer), RECEIVE) {
            self.not_posted(peer, pair, &error);
        }
    }

    /// A post has failed: the pair is to be closed.
    fn not_posted(&mut self, peer: PeerId, pair: usize, error: &OperationError<Buffer>) {
        let Some(state) = self.peers.get(peer) else { return };
        let (epoch, reason) = (state.pairs[pair].epoch, error.error.to_string());
        self.failed.push(Failed { peer, pair, epoch, reason, is_fault: true });
    }
}

/// Pieces that go over one queue pair, one after the other.
struct Burst<'a> {
    device: &'a mut Device,
    channel: ChannelId,
    pair: &'a mut Pair,
    transfer: TransferId,
    active: &'a mut Active,
    /// How many pairs work.
    rails: usize,
}

enum NotPosted {
    Refused(OperationError<Buffer>),
    /// [`Transfer::check`](crate::Transfer::check) has seen that this cannot be.
    OutOfBounds(ibverbs::Error),
}

impl Burst<'_> {
    /// Posts pieces, one at least.
    fn post(self, now: Instant) -> Result<(), NotPosted> {
        macro_rules! post_as {
            ($request:expr) => {
                self.post_as(now, $request, $request)
            };
        }
        match (self.active.transfer.kind, self.active.mark()) {
            (Kind::Read, _) => post_as!(|buffer, remote, _| ReadWorkRequest::new(buffer, remote)),
            (Kind::Write, None) => {
                post_as!(|buffer, remote, _| WriteWorkRequest::new(buffer, remote))
            }
            (Kind::Write, Some(mark)) => post_as!(|buffer, remote, piece: &Piece| {
                let mark = mark.piece(piece.number, piece.is_last);
                let mark = mark.expect("a notified transfer has MAX_PIECES at most");
                WriteWorkRequest::new(buffer, remote).immediate(mark.to_immediate())
            }),
        }
    }

    /// A loop for each kind of request, in which the compiler keeps more in registers.
    #[inline(always)]
    fn post_as<R, Q>(
        self,
        now: Instant,
        of_shared: impl Fn(SharedMemoryRange<u8>, RemoteMemoryRegion, &Piece) -> R,
        of_dmabuf: impl Fn(RawMemoryRange, RemoteMemoryRegion, &Piece) -> Q,
    ) -> Result<(), NotPosted>
    where
        R: WorkRequest<Kept = SharedMemoryRange<u8>>,
        Q: WorkRequest<Kept = RawMemoryRange>,
    {
        let Self { device, channel, pair, transfer, active, rails } = self;
        let Device { engine, lanes, .. } = device;
        let sends = &mut lanes[channel.index()].sends;
        let share = active.share(rails);
        // One piece at least. No piece is empty.
        let (most, before) = (share.min(pair.room()).max(1), sends.len());
        let longest = Active::longest_piece(share);
        let mut bytes = 0;
        let posted = loop {
            if bytes >= most || sends.len() >= SENDS as usize {
                break Ok(());
            }
            let Some(piece) = active.next_piece(longest) else { break Ok(()) };
            let (local, remote) = &active.transfer.parts[piece.part as usize];
            let len = piece.len as usize;
            // One by one: a pair of results costs a copy of both.
            let remote = match remote.part(pair.theirs, piece.offset, len) {
                Ok(remote) => remote,
                Err(error) => break Err((piece, NotPosted::OutOfBounds(error))),
            };
            let range = local.range(piece.offset, len);
            // Each kind to its end: a buffer of either kind would cost a copy.
            match local.regions() {
                Regions::Shared(_, regions) => {
                    match SharedMemoryRange::new(regions[pair.ours].clone(), range) {
                        Ok(buffer) => {
                            let request = of_shared(buffer, remote, &piece);
                            if let Err(error) = engine.post(channel, request, SEND) {
                                break Err((piece, NotPosted::Refused(error)));
                            }
                        }
                        Err(error) => break Err((piece, NotPosted::OutOfBounds(error))),
                    }
                }
                Regions::DmaBuf(_, regions) => {
                    let (region, request) = (regions[pair.ours].clone(), &of_dmabuf);
                    let request = move |buffer| request(buffer, remote, &piece);
                    if let Err(error) = post_dmabuf(engine, channel, region, range, request) {
                        break Err((piece, error));
                    }
                }
            }
            sends.push_back(Work::Piece(transfer, piece));
            bytes += len;
        };
        let result = posted.map_err(|(piece, error)| {
            match &error {
                NotPosted::OutOfBounds(_) => {}
                NotPosted::Refused(OperationError { buffer: Some(_), .. }) => {
                    active.again.push(piece);
                }
                // Without the buffer, it is in flight.
                NotPosted::Refused(_) => {
                    sends.push_back(Work::Piece(transfer, piece));
                    bytes += piece.len as usize;
                }
            }
            error
        });
        let requests = sends.len() - before;
        active.in_flight += requests;
        pair.takes(requests as u32, bytes, now);
        result
    }
}

/// A call, so that memory of this process has the registers to itself.
#[cold]
#[inline(never)]
fn post_dmabuf<Q: WorkRequest<Kept = RawMemoryRange>>(
    engine: &mut Loop<'static, Buffer>,
    channel: ChannelId,
    region: Arc<RawMemoryRegion<'static>>,
    range: Range<usize>,
    request: impl FnOnce(RawMemoryRange) -> Q,
) -> Result<(), NotPosted> {
    let buffer = RawMemoryRange::new(region, range).map_err(NotPosted::OutOfBounds)?;
    engine.post(channel, request(buffer), SEND).map_err(NotPosted::Refused)
}
