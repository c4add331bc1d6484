//! One process works on the memory of another, which does nothing meanwhile: start `remote_memory` on one
//! machine and `remote_memory HOST` on another.
//!
//! The server lends out a region that starts with a lock and a counter, and then only waits on its TCP
//! connection. The client takes the lock, writes, reads back what it wrote, counts, and releases the lock:
//! compare-and-swap, write, read, fetch-and-add. At the end the server checks its memory.

#[path = "common/broken_pipe.rs"]
mod broken_pipe;
mod common;

use common::{Options, Result, deadline, pattern};
use ibverbs::{
    AccessFlags, Channel, CompareSwapWorkRequest, FetchAddWorkRequest, RemoteMemoryRegion,
};

/// Numbers in the region: a lock, a counter, and data.
const LENGTH: usize = 1 << 14;
const LOCK: usize = 0;
const COUNTER: usize = 1;
const DATA: usize = 2;

fn main() -> Result<()> {
    broken_pipe::end_quietly();
    let options = Options::read(10)?;
    let context = options.open()?;
    let domain = context.alloc_pd()?;
    let everything =
        AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;

    let prepared = common::patient(Channel::builder(&domain)).access(everything).build()?;
    if options.server.is_none() {
        let region = domain.allocate_shared::<u64>(LENGTH, everything)?;
        let (channel, told) = options.connect(prepared, &region.remote().to_bytes())?;
        let rounds = u64::from_be_bytes(told[..].try_into()?);
        // This process only waits until the client has finished, and has closed its channel.
        if !channel.wait_until_peer_is_gone(deadline())? {
            return Err("the client takes too long".into());
        }
        // The client is gone, but the region still only allows reading it by copies, not by reference.
        let memory = region.to_vec();
        let right = memory[DATA..].iter().enumerate().all(|(i, &n)| n == pattern(rounds - 1, i));
        if (memory[LOCK], memory[COUNTER], right) != (0, rounds, true) {
            return Err("the client has left something else than it should".into());
        }
        println!("{rounds} rounds have left what they should");
        drop(channel);
    } else {
        let (mut channel, told) = options.connect(prepared, &options.count.to_be_bytes())?;
        let memory = RemoteMemoryRegion::from_bytes(&told)?;
        work(&mut channel, &domain, memory, options.count)?;
    }
    Ok(())
}

fn work(
    channel: &mut Channel<'_>,
    domain: &ibverbs::ProtectionDomain<'_>,
    memory: RemoteMemoryRegion,
    rounds: u64,
) -> Result<()> {
    let word = |index: usize| memory.sub_region(8 * index as u64, 8);
    let (lock, counter) = (word(LOCK)?, word(COUNTER)?);
    let data = memory.sub_region(8 * DATA as u64, memory.length() - 8 * DATA as u64)?;
    let mut ours = domain.allocate::<u64>(data.length() as usize / 8)?;
    let mut old = domain.allocate::<u64>(1)?;
    let mut old = old.slice_mut(..)?;
    let me = u64::from(channel.number());
    for round in 0..rounds {
        channel.until(deadline()).run(CompareSwapWorkRequest::new(&mut old, lock, 0, me))?;
        if old[0] != 0 {
            return Err(format!("the lock is {}'s", old[0]).into());
        }
        for (index, number) in ours.iter_mut().enumerate() {
            *number = pattern(round, index);
        }
        channel.until(deadline()).write(ours.slice(..)?, data)?;
        ours.fill(0);
        channel.until(deadline()).read(&mut ours.slice_mut(..)?, data)?;
        if let Some(index) = (0..ours.len()).find(|&i| ours[i] != pattern(round, i)) {
            return Err(format!("number {index} of round {round} is not right").into());
        }
        channel.until(deadline()).run(FetchAddWorkRequest::new(&mut old, counter, 1))?;
        if old[0] != round {
            return Err(format!("the counter was {} in round {round}", old[0]).into());
        }
        channel.until(deadline()).run(CompareSwapWorkRequest::new(&mut old, lock, me, 0))?;
        if old[0] != me {
            return Err("somebody else has taken the lock".into());
        }
    }
    println!("{rounds} rounds of write and read, {} bytes each way", data.length());
    Ok(())
}
