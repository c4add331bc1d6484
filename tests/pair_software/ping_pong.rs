//! The peer of `ibv_rc_pingpong`, `ibv_uc_pingpong`, `ibv_ud_pingpong` and `ibv_srq_pingpong`.
//!
//! Those programs have one buffer for what they receive and what they send, so with one queue pair each message
//! from them has the bytes of our last one: all are checked.

use ibverbs::{
    AddressHandle, CompletionQueue, Context, Gid, ProtectionDomain, QueuePair, QueuePairType,
    SendWorkRequest, SharedReceiveQueue, WorkCompletion,
    operation::DatagramPeer,
    queue_pair::AddressVector,
    settings::{
        AckTimeout, MaxAckRetries, MaxRnrRetries, MaximumTransferUnit, PacketSequenceNumber,
    },
};

use crate::exchange::{Address, Exchange};
use crate::memory::{Memory, Messages, PAGE, Result, compare, next};

const QKEY: u32 = 0x1111_1111;

/// The bytes before a datagram in its receive.
const ROUTE: usize = 40;

/// `ibv_srq_pingpong` always exchanges this number of addresses.
const SHARED_ADDRESSES: usize = 256;

/// The bit of a `wr_id` that tells sends from receives; the rest is the number of the queue pair or of the slot.
const SEND: u64 = 1 << 32;

#[derive(Clone, Copy, Debug)]
pub(crate) struct PingPong {
    pub(crate) kind: QueuePairType,
    /// The number of queue pairs with a shared receive queue; 0: one, without.
    pub(crate) shared: usize,
    pub(crate) size: usize,
    pub(crate) rounds: usize,
}

/// The state of one queue pair.
struct Player<'a> {
    queue_pair: QueuePair<'a, QueuePairType>,
    /// The destination of datagrams.
    destination: Option<(AddressHandle<'a>, u32)>,
    sent: u64,
    received: u64,
    sending: bool,
    /// Nothing has arrived since the last message was sent.
    waiting: bool,
}

struct Game<'a> {
    rules: PingPong,
    client: bool,
    queue: &'a CompletionQueue<'a>,
    shared: Option<&'a SharedReceiveQueue<'a>>,
    memory: Memory<'a>,
    /// With several players all send the first: their peers share one buffer.
    messages: Messages,
    players: Vec<Player<'a>>,
}

impl PingPong {
    pub(crate) fn program(&self) -> &'static str {
        match (self.kind, self.shared) {
            (_, 1..) => "ibv_srq_pingpong",
            (QueuePairType::UnreliableConnected, _) => "ibv_uc_pingpong",
            (QueuePairType::UnreliableDatagram, _) => "ibv_ud_pingpong",
            _ => "ibv_rc_pingpong",
        }
    }

    pub(crate) fn arguments(&self) -> String {
        let queues = if self.shared > 0 { format!(" -q {}", self.shared) } else { String::new() };
        let mtu = if self.is_datagram() { "" } else { " -m 1024" };
        format!("-c -s {} -n {} -r 64{mtu}{queues}", self.size, self.rounds)
    }

    fn is_datagram(&self) -> bool {
        self.kind == QueuePairType::UnreliableDatagram
    }

    fn players(&self) -> usize {
        self.shared.max(1)
    }

    fn header(&self) -> usize {
        if self.is_datagram() { ROUTE } else { 0 }
    }

    fn slot(&self, slot: usize) -> std::ops::Range<usize> {
        let start = self.players() * self.size + slot * (self.header() + self.size);
        start..start + self.header() + self.size
    }

    /// Plays until all rounds are over. The peer's program must succeed too: `finish` waits for its end, before
    /// which the queue pairs here still answer it.
    pub(crate) fn play(
        &self,
        context: &Context<'_>,
        gid_index: u8,
        mut peer: Exchange,
        finish: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let domain = context.alloc_pd()?;
        let players = self.players();
        let slots = 2 * players;
        let queue = context.create_cq((slots + players) as u32)?;
        let shared = match self.shared {
            0 => None,
            _ => Some(domain.create_srq(slots as u32, 1)?),
        };
        let memory = Memory::new(&domain, self.slot(slots).start)?;
        let (players, addresses) =
            self.connect(&domain, &queue, shared.as_ref(), gid_index, &mut peer)?;
        let client = peer.is_client();
        let shared = shared.as_ref();
        let messages = Messages::new(self.size);
        let queue = &queue;
        let mut game = Game { rules: *self, client, queue, shared, memory, messages, players };
        for slot in 0..slots {
            game.post_receive(slot, 0)?;
        }
        if client {
            peer.say_done()?;
        } else {
            peer.send(&addresses)?;
            peer.hear_done()?;
        }
        game.play()?;
        finish()
    }

    fn connect<'a>(
        &self,
        domain: &'a ProtectionDomain<'a>,
        queue: &'a CompletionQueue<'a>,
        shared: Option<&'a SharedReceiveQueue<'a>>,
        gid_index: u8,
        peer: &mut Exchange,
    ) -> Result<(Vec<Player<'a>>, Vec<u8>)> {
        let mut prepared = Vec::new();
        for i in 0..self.players() as u32 {
            let builder = domain
                .create_qp(queue, queue, self.kind)
                .max_send_wr(1)
                .max_recv_wr(2)
                .gid_index(gid_index)
                .qkey(QKEY)
                .send_psn(PacketSequenceNumber::new(0xff_fff0 + i % 16)?)
                .max_ack_retries(MaxAckRetries::new(7)?)
                .max_rnr_retries(MaxRnrRetries::UNLIMITED);
            let builder = match self.shared {
                0 | 1 => builder,
                // Sixteen of them keep the emulated machine busy, for about a second if their messages are large, and its
                // programs, which poll all the time, leave Soft-RoCE little of its processor.
                _ => {
                    builder.ack_timeout(AckTimeout::new(if self.size > 1 << 15 { 18 } else { 16 })?)
                }
            };
            let builder = if self.is_datagram() {
                builder
            } else {
                builder.path_mtu(MaximumTransferUnit::Mtu1024)
            };
            prepared.push(match shared {
                Some(shared) => builder.srq(shared).build()?,
                None => builder.build()?,
            });
        }
        let local = prepared.iter().map(|prepared| Address {
            number: prepared.endpoint().num(),
            psn: prepared.send_psn(),
            gid: prepared.endpoint().gid(),
        });
        let count = if self.shared > 0 { SHARED_ADDRESSES } else { 1 };
        let mut wire: Vec<u8> = local.flat_map(Address::to_ping_pong).collect();
        wire.resize(count * Address::LENGTH, b'0');
        for unused in wire.chunks_mut(Address::LENGTH).skip(self.players()) {
            let address = Address {
                number: 0,
                psn: PacketSequenceNumber::default(),
                gid: Gid::from_bytes([0; 16]),
            };
            unused.copy_from_slice(&address.to_ping_pong());
        }
        if peer.is_client() {
            peer.send(&wire)?;
        }
        let remote = peer.receive(wire.len())?;
        let mut players = Vec::new();
        for (prepared, remote) in prepared.into_iter().zip(remote.chunks(Address::LENGTH)) {
            let remote = Address::from_ping_pong(remote)?;
            let (queue_pair, destination) = if self.is_datagram() {
                let path = AddressVector::new(1, 0).global(remote.gid, gid_index);
                let handle = domain.create_ah(&path)?;
                (prepared.activate().map_err(|e| e.error)?, Some((handle, remote.number)))
            } else {
                let prepared = prepared.receive_psn(remote.psn);
                (prepared.handshake(remote.endpoint()?).map_err(|e| e.error)?, None)
            };
            let (sent, received, sending, waiting) = (0, 0, false, true);
            players.push(Player { queue_pair, destination, sent, received, sending, waiting });
        }
        Ok((players, wire))
    }
}

impl Game<'_> {
    fn post_receive(&mut self, slot: usize, player: usize) -> Result<()> {
        let range = self.rules.slot(slot);
        // Old bytes cannot pass for a new message.
        self.memory.write(range.start, &vec![0xee; range.len()]);
        let region = &mut self.memory.region;
        // SAFETY: a slot is used again only when its completion was polled, and the memory outlives the queue pair.
        unsafe {
            match self.shared {
                Some(shared) => shared.post_receive(region, range, slot as u64)?,
                None => self.players[player].queue_pair.post_receive(region, range, slot as u64)?,
            }
        }
        Ok(())
    }

    fn post_send(&mut self, number: usize) -> Result<()> {
        let (size, id) = (self.rules.size, SEND | number as u64);
        let round = self.players[number].sent;
        let round = if self.players.len() == 1 { round } else { 0 };
        self.memory.write(number * size, self.messages.get(round));
        let player = &mut self.players[number];
        let range = number * size..(number + 1) * size;
        // SAFETY: the place of the message is written again only when this send's completion was polled; memory
        // and address handle outlive the queue pair.
        unsafe {
            match &player.destination {
                Some((path, number)) => {
                    let message = self.memory.region.gather_element(range)?;
                    let peer = DatagramPeer { path, number: *number, qkey: QKEY };
                    player.queue_pair.post(SendWorkRequest::new(message).to(peer), id)?;
                }
                None => player.queue_pair.post_send(&self.memory.region, range, id)?,
            }
        }
        player.sent += 1;
        (player.sending, player.waiting) = (true, true);
        Ok(())
    }

    /// Checks a message that a player has received.
    fn check(&mut self, player: usize, completion: &WorkCompletion, slot: usize) -> Result<()> {
        let received = completion.result()?;
        let range = self.rules.slot(slot);
        let (what, bytes) =
            (format!("message {}", self.players[player].received), self.memory.read(range));
        if received.byte_len() as usize != bytes.len() {
            return Err(format!("{what} has {} bytes", received.byte_len()).into());
        }
        let message = &bytes[self.rules.header()..];
        if self.players.len() > 1 {
            // Before our first message has reached it, the peer's buffer is all zeros.
            let right = self.messages.get(0);
            let right = message.iter().zip(right).map(|(&byte, &r)| if byte == 0 { 0 } else { r });
            return compare(&what, message, &right.collect::<Vec<u8>>());
        }
        // A client's first message is its own, all others are our last one.
        match (self.client, self.players[player].received) {
            (false, 0) => {
                let filling = if self.shared.is_some() { 0 } else { 0x7b };
                let mut right = vec![filling; message.len()];
                right.iter_mut().step_by(PAGE).for_each(|byte| *byte = 0);
                compare(&what, message, &right)
            }
            _ => compare(&what, message, self.messages.get(self.players[player].sent - 1)),
        }
    }

    /// The rules are those of the C programs, which count over all queue pairs.
    fn play(&mut self) -> Result<()> {
        let (mut sent, mut received) = (0, 0);
        if self.client {
            for player in 0..self.players.len() {
                self.post_send(player)?;
            }
        }
        while sent < self.rules.rounds || received < self.rules.rounds {
            let completion = next(self.queue)?;
            let id = completion.wr_id();
            let player = if id & SEND != 0 {
                let player = (id & !SEND) as usize;
                // When the peer has all that it wants, it ends; our last sends may miss its answer then.
                if received < self.rules.rounds {
                    completion.result()?;
                }
                sent += 1;
                self.players[player].sending = false;
                player
            } else {
                let number = completion.queue_pair_number();
                let mut players = self.players.iter();
                let player = players.position(|player| player.queue_pair.number() == number);
                let player = player.ok_or("a completion of no queue pair")?;
                self.check(player, &completion, id as usize)?;
                received += 1;
                self.players[player].received += 1;
                self.players[player].waiting = false;
                self.post_receive(id as usize, player)?;
                player
            };
            let state = &self.players[player];
            if sent < self.rules.rounds && !state.sending && !state.waiting {
                self.post_send(player)?;
            }
        }
        Ok(())
    }
}
