//! An engine that copies blocks of a cache to many peers, on RC or, where the device is one of EFA, on SRD:
//! `cargo run -p ibverbs-transfer --example engine`.
//!
//! The cache is in memory of somebody else: a memfd, as a process with a GPU or a database hands it over. Blocks are
//! registered when they are asked for. Each copy is several writes with an immediate, which the peer counts. All sides
//! are threads of one process here.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::channel::DatagramsBuilder;
use ibverbs::device::EfaCapabilities;
use ibverbs::memory::{SharedMemory, SharedMemoryRange};
use ibverbs::queue_pair::{ConnectionSettings, SrdOptions};
use ibverbs::{
    AccessFlags, ChannelId, Context, DatagramDestination, Loop, MaxRnrRetries, ProtectionDomain,
    ReceiveWorkRequest, RemoteMemoryRegion, SharedMemoryRegion, TransportError, WriteWorkRequest,
};
use ibverbs_software::Device;
use ibverbs_transfer::counted::{Incoming, Mark, Outgoing};
use ibverbs_transfer::{CacheError, RegistrationCache};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const BLOCK: usize = 16 << 10;
const BLOCKS: usize = 128;
const PIECES: usize = 4; // blocks of a copy
const COPIES: usize = 100;
const SLOTS: usize = 64; // a peer has room for more copies than may be open
const PEERS: usize = 3;
const PATIENCE: Duration = Duration::from_secs(60);

/// The side that has the cache.
struct Engine {
    event_loop: Loop<'static, SharedMemoryRange<u8>>,
    registrations: RegistrationCache,
    peers: Vec<Peer>,
    /// Keys are tokens.
    copies: HashMap<u64, Copy>,
    next: u64,
}

struct Peer {
    channel: ChannelId,
    to: Option<DatagramDestination>, // on SRD, where all peers have one channel
    memory: RemoteMemoryRegion,
    outgoing: Outgoing,
    confirmed: mpsc::Receiver<u64>, // in another process, messages
}

struct Copy {
    peer: usize,
    number: u64,
    left: usize, // writes
}

impl Engine {
    /// Begins to copy blocks to a peer, whose program gets the tag when all are there.
    fn copy(&mut self, peer: usize, blocks: &[*const u8], tag: u16) -> Result {
        let slot = usize::from(tag) % SLOTS;
        let Peer { channel, to, memory, ref mut outgoing, ref confirmed } = self.peers[peer];
        let number = loop {
            match outgoing.begin() {
                Some(number) => break number,
                None => assert!(outgoing.confirm(confirmed.recv_timeout(PATIENCE)?)),
            }
        };
        let token = self.next;
        self.next += 1;
        self.copies.insert(token, Copy { peer, number, left: blocks.len() });
        for (index, &block) in blocks.iter().enumerate() {
            let mark = Mark::new(number, tag).piece(index as u16, index + 1 == blocks.len());
            let immediate = mark.ok_or("a copy has 512 blocks at most")?.to_immediate();
            let at = memory.sub_region(((slot * PIECES + index) * BLOCK) as u64, BLOCK as u64)?;
            let block = loop {
                match self.registrations.get(block, BLOCK) {
                    Err(CacheError::InUse { .. }) => self.settle()?,
                    block => break block?,
                }
            };
            let write = || WriteWorkRequest::new(block.clone(), at).immediate(immediate);
            while let Err(refused) = match to {
                None => self.event_loop.post(channel, write(), token),
                Some(to) => self.event_loop.post_to(channel, write(), &to, token),
            } {
                match refused.error {
                    TransportError::QueueFull => self.settle()?,
                    error => return Err(error.into()),
                }
            }
        }
        Ok(())
    }

    /// Waits until one write has ended.
    fn settle(&mut self) -> Result {
        let ended = self.event_loop.wait_ended_until(Instant::now() + PATIENCE)?;
        let token =
            ended.ok_or("no peer answers").map(|ended| ended.result().map(|_| ended.token))??;
        let copy = self.copies.get_mut(&token).ok_or("a write of no copy")?;
        copy.left -= 1;
        if copy.left == 0 {
            self.peers[copy.peer].outgoing.ended(copy.number, false);
            self.copies.remove(&token);
        }
        Ok(())
    }
}

/// The side that gets blocks.
struct Receiver {
    event_loop: Loop<'static, ()>,
    channel: ChannelId,
    memory: Arc<SharedMemoryRegion<'static, u8>>,
    told: mpsc::Sender<u64>,
}

impl Receiver {
    fn run(mut self) -> Result {
        let (mut incoming, mut done) = (Incoming::new(), 0);
        while done < COPIES {
            let ended = self.event_loop.wait_ended_until(Instant::now() + PATIENCE)?;
            let ended = ended.ok_or("no block comes")?;
            let immediate = ended.result()?.immediate().ok_or("a write without a mark")?;
            self.event_loop.post(self.channel, ReceiveWorkRequest::new(()), 0)?;
            let mark = Mark::from_immediate(immediate);
            if incoming.arrived(mark).ok_or("a mark of no copy")? {
                let copy = usize::from(mark.tag());
                for index in 0..PIECES {
                    let found = self.memory.read_one((copy % SLOTS * PIECES + index) * BLOCK)?;
                    assert_eq!(usize::from(found), block_of(copy, index), "copy {copy}");
                }
                incoming.taken();
                incoming.confirm().map(|below| self.told.send(below));
                done += 1;
            }
        }
        Ok(())
    }
}

/// The blocks that a copy has.
const fn block_of(copy: usize, index: usize) -> usize {
    (copy * 7 + index * 31) % BLOCKS
}

/// An end of SRD for all peers.
fn srd(domain: &Arc<ProtectionDomain<'static>>) -> DatagramsBuilder<'static> {
    let settings = ConnectionSettings::new().max_rnr_retries(MaxRnrRetries::UNLIMITED);
    let builder = DatagramsBuilder::new(domain).srd(SrdOptions::new());
    builder.connection_settings(settings).max_send_wr(96).max_recv_wr(64)
}

pub(crate) fn main() -> Result {
    if let Ok(context) = ibverbs::open_first() {
        return run(context);
    }
    run(Device::new()?.open()?)?;
    run(Device::builder().efa(EfaCapabilities::all()).build()?.open()?)
}

fn run(context: Context<'static>) -> Result {
    let is_efa = context.query_efa().is_ok();
    let domain = Arc::new(ProtectionDomain::new(context)?);

    let file = File::from(memfd_create("cache", MemfdFlags::ALLOW_SEALING)?);
    file.set_len((BLOCKS * BLOCK) as u64)?;
    fcntl_add_seals(&file, SealFlags::SHRINK)?;
    for block in 0..BLOCKS {
        file.write_all_at(&[block as u8; BLOCK], (block * BLOCK) as u64)?;
    }
    let cache = SharedMemory::map_memfd(file.as_fd(), 0, BLOCKS * BLOCK)?;
    let (access, pinned) = (AccessFlags::empty(), BLOCKS * BLOCK / 4);
    let mut registrations = RegistrationCache::new(&domain, access, pinned);
    registrations.set_granule(BLOCK);
    registrations.add(&cache)?;

    let mut event_loop = Loop::new(domain.context_parent(), 256)?;
    let own = is_efa.then(|| event_loop.add_datagrams(srd(&domain))).transpose()?;
    let (mut peers, mut receivers) = (Vec::new(), Vec::new());
    for _ in 0..PEERS {
        let mut their_loop = Loop::new(domain.context_parent(), 256)?;
        let (channel, theirs, to) = if let Some(own) = own {
            let theirs = their_loop.add_datagrams(srd(&domain))?;
            let endpoint = their_loop.endpoint(theirs).ok_or("it is there")?; // peers send it
            (own, theirs, Some(event_loop.destination(own, &endpoint)?))
        } else {
            let here = event_loop.create_channel(&domain).max_send_wr(32).build()?;
            let there = their_loop.create_channel(&domain).max_recv_wr(64);
            let there = there.allow_remote_rw().build()?;
            let (to_here, to_there) = (here.endpoint(), there.endpoint());
            let here = event_loop.add(here.handshake(to_there)?)?;
            (here, their_loop.add(there.handshake(to_here)?)?, None)
        };
        let access = AccessFlags::REMOTE_WRITE;
        let memory = Arc::new(SharedMemoryRegion::new(&domain, SLOTS * PIECES * BLOCK, access)?);
        for _ in 0..64 {
            their_loop.post(theirs, ReceiveWorkRequest::new(()), 0)?;
        }
        let (told, confirmed) = mpsc::channel();
        let (at, outgoing) = (memory.remote(), Outgoing::new());
        peers.push(Peer { channel, to, memory: at, outgoing, confirmed });
        receivers.push(Receiver { event_loop: their_loop, channel: theirs, memory, told });
    }

    let mut engine = Engine { event_loop, registrations, peers, copies: HashMap::new(), next: 0 };
    thread::scope(|threads| {
        let spawn = |receiver: Receiver| threads.spawn(|| receiver.run());
        let receivers: Vec<_> = receivers.into_iter().map(spawn).collect();
        for copy in 0..COPIES {
            let block = |index| cache.as_ptr().wrapping_add(block_of(copy, index) * BLOCK);
            let blocks: [*const u8; PIECES] =
                std::array::from_fn(|index| block(index).cast_const());
            for peer in 0..PEERS {
                engine.copy(peer, &blocks, copy as u16)?;
            }
        }
        while !engine.copies.is_empty() {
            engine.settle()?;
        }
        receivers.into_iter().try_for_each(|one| one.join().map_err(|_| "a peer has panicked")?)
    })?;
    println!("SRD: {is_efa}, {COPIES} copies, {} registrations", engine.registrations.registered());
    Ok(())
}
