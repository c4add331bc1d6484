//! An engine that copies blocks of a cache to many peers, on RC or, where the device is one of EFA, on SRD:
//! `cargo run -p ibverbs-transfer --example engine`.
//!
//! The cache is in memory of somebody else, a memfd. Blocks are registered when they are asked for. Each copy is several
//! writes with an immediate, which the peer counts. All sides are threads of one process here.

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
use ibverbs::operation::DatagramDestination;
use ibverbs::queue_pair::{ConnectionSettings, SrdOptions};
use ibverbs::settings::MaxRnrRetries;
use ibverbs::*;
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
    start: *const u8, // of the cache
    registrations: RegistrationCache,
    peers: Vec<Peer>,
    copies: HashMap<u64, (usize, u64, usize)>, // by token: peer, number, writes that are left
}

struct Peer {
    channel: ChannelId,
    to: Option<DatagramDestination>, // on SRD, where all peers have one channel
    memory: RemoteMemoryRegion,
    outgoing: Outgoing,
    confirmed: mpsc::Receiver<u64>, // in another process, messages
}

impl Engine {
    /// Begins a copy to a peer, whose program learns its number as the tag when all blocks are there.
    fn copy(&mut self, peer: usize, copy: usize) -> Result {
        let Peer { channel, to, memory, ref mut outgoing, ref confirmed } = self.peers[peer];
        let number = loop {
            if let Some(number) = outgoing.begin() {
                break number;
            }
            assert!(outgoing.confirm(confirmed.recv_timeout(PATIENCE)?));
        };
        let token = (copy * PEERS + peer) as u64;
        self.copies.insert(token, (peer, number, PIECES));
        for index in 0..PIECES {
            let mark = Mark::new(number, copy as u16).piece(index as u16, index + 1 == PIECES);
            let immediate = mark.ok_or("a copy has 512 blocks at most")?.to_immediate();
            let at = memory.sub_region(place_of(copy, index) as u64, BLOCK as u64)?;
            let block = self.start.wrapping_add(block_of(copy, index) * BLOCK);
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
        let ended = ended.ok_or("no peer answers")?;
        ended.result()?;
        let (peer, number, left) = self.copies.get_mut(&ended.token).ok_or("no such copy")?;
        *left -= 1;
        if *left == 0 {
            self.peers[*peer].outgoing.ended(*number, false);
            self.copies.remove(&ended.token);
        }
        Ok(())
    }
}

/// The side that gets blocks.
fn receive(
    mut event_loop: Loop<'static, ()>,
    channel: ChannelId,
    memory: &SharedMemoryRegion<'static, u8>,
    told: &mpsc::Sender<u64>,
) -> Result {
    let (mut incoming, mut done) = (Incoming::new(), 0);
    while done < COPIES {
        let ended = event_loop.wait_ended_until(Instant::now() + PATIENCE)?;
        let ended = ended.ok_or("no block comes")?;
        let immediate = ended.result()?.immediate().ok_or("a write without a mark")?;
        event_loop.post(channel, ReceiveWorkRequest::new(()), 0)?;
        let mark = Mark::from_immediate(immediate);
        if incoming.arrived(mark).ok_or("a mark of no copy")? {
            let copy = usize::from(mark.tag());
            for index in 0..PIECES {
                let found = memory.read_one(place_of(copy, index))?;
                assert_eq!(usize::from(found), block_of(copy, index), "copy {copy}");
            }
            incoming.taken();
            incoming.confirm().map(|below| told.send(below));
            done += 1;
        }
    }
    Ok(())
}

/// The blocks that a copy has.
const fn block_of(copy: usize, index: usize) -> usize {
    (copy * 7 + index * 31) % BLOCKS
}

/// Where a block goes at the peer.
const fn place_of(copy: usize, index: usize) -> usize {
    (copy % SLOTS * PIECES + index) * BLOCK
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
    let pinned = BLOCKS * BLOCK / 4;
    let mut registrations = RegistrationCache::new(&domain, AccessFlags::empty(), pinned);
    registrations.set_granule(BLOCK);
    registrations.add(&cache)?;

    // One end of SRD for all peers.
    let rnr =
        ConnectionSettings { max_rnr_retries: MaxRnrRetries::UNLIMITED, ..Default::default() };
    let srd = || DatagramsBuilder::new(&domain).srd(SrdOptions::default()).connection_settings(rnr);
    let mut event_loop = Loop::new(domain.context_parent(), 256)?;
    let own = is_efa.then(|| event_loop.add_datagrams(srd().max_send_wr(96))).transpose()?;
    let (mut peers, mut receivers) = (Vec::new(), Vec::new());
    for _ in 0..PEERS {
        let mut their_loop = Loop::new(domain.context_parent(), 256)?;
        let (channel, theirs, to) = if let Some(own) = own {
            let theirs = their_loop.add_datagrams(srd().max_recv_wr(64))?;
            let endpoint = their_loop.endpoint(theirs).ok_or("it is there")?; // peers send it
            (own, theirs, Some(event_loop.destination(own, &endpoint)?))
        } else {
            let here = event_loop.create_channel(&domain).max_rnr_retries(rnr.max_rnr_retries);
            let here = here.max_send_wr(32).build()?;
            let there = their_loop.create_channel(&domain).max_recv_wr(64);
            let there = there.allow_remote_rw().build()?;
            let (to_here, to_there) = (here.endpoint(), there.endpoint());
            let here = event_loop.add(here.handshake(to_there)?)?;
            (here, their_loop.add(there.handshake(to_here)?)?, None)
        };
        let region = place_of(SLOTS - 1, PIECES);
        let region = SharedMemoryRegion::new(&domain, region, AccessFlags::REMOTE_WRITE)?;
        for _ in 0..64 {
            their_loop.post(theirs, ReceiveWorkRequest::new(()), 0)?;
        }
        let (told, confirmed) = mpsc::channel();
        let (memory, outgoing) = (region.remote(), Outgoing::new());
        peers.push(Peer { channel, to, memory, outgoing, confirmed });
        receivers.push(move || receive(their_loop, theirs, &region, &told));
    }

    let (start, copies) = (cache.as_ptr().cast_const(), HashMap::new());
    let mut engine = Engine { event_loop, start, registrations, peers, copies };
    thread::scope(|threads| {
        let receivers: Vec<_> = receivers.into_iter().map(|run| threads.spawn(run)).collect();
        for copy in 0..COPIES {
            (0..PEERS).try_for_each(|peer| engine.copy(peer, copy))?;
        }
        while !engine.copies.is_empty() {
            engine.settle()?;
        }
        receivers.into_iter().try_for_each(|one| one.join().map_err(|_| "a peer has panicked")?)
    })?;
    println!("SRD: {is_efa}, {COPIES} copies, {} registrations", engine.registrations.registered());
    Ok(())
}
