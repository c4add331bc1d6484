//! Cookbook: a lock in remote memory.
//!
//! A number in the memory of a server is 0 while the lock is free, and otherwise the number of the client
//! that holds it. Clients take and release the lock by compare-and-swap. They read and write the protected
//! data by RDMA; the server's processor does nothing. (For a mere counter, one fetch-and-add is enough.)

#[path = "common/two_sides.rs"]
mod two_sides;

use std::thread;
use std::time::Duration;

use ibverbs::{Channel, CompareSwapWorkRequest, Context, ProtectionDomain, RemoteMemoryRegion};

use two_sides::{ALL, Result, connect, deadline};

const CLIENTS: u64 = 3;
const ROUNDS: u64 = 20;

#[allow(dead_code, reason = "a test calls run")]
fn main() -> Result {
    two_sides::main(run)
}

pub(crate) fn run(client: &Context<'_>, server: &Context<'_>) -> Result {
    let (client, server) = (client.alloc_pd()?, server.alloc_pd()?);
    // The lock, and a number that it protects.
    let memory = server.allocate_shared::<u64>(2, ALL)?;
    let remote = memory.remote();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..CLIENTS {
        let (one, other) = connect(client.create_channel(), server.create_channel())?;
        ours.push(one);
        theirs.push(other); // it only has to exist
    }
    thread::scope(|threads| {
        let clients = ours.iter_mut().zip(1..).map(|(channel, name)| {
            let client = &client;
            threads.spawn(move || work(client, channel, remote, name))
        });
        let clients: Vec<_> = clients.collect();
        clients.into_iter().try_for_each(|one| one.join().map_err(|_| "a client has panicked")?)
    })?;
    // The clients have ended, but the region still only allows reading it by copies, not by reference.
    match memory.to_vec()[..] {
        [0, total] if total == CLIENTS * ROUNDS => {
            println!("{CLIENTS} clients have counted to {total}");
            Ok(())
        }
        ref other => Err(format!("the lock and the number are {other:?}").into()),
    }
}

fn work(
    domain: &ProtectionDomain<'_>,
    channel: &mut Channel<'_>,
    memory: RemoteMemoryRegion,
    name: u64,
) -> Result {
    let (lock, number) = (memory.sub_region(0, 8)?, memory.sub_region(8, 8)?);
    // The previous value of the lock, and a copy of the number.
    let mut before = domain.allocate::<u64>(1)?;
    let mut copy = domain.allocate::<u64>(1)?;
    for _ in 0..ROUNDS {
        let mut pause = Duration::from_micros(10);
        loop {
            channel.until(deadline()).run(CompareSwapWorkRequest::new(
                &mut before.slice_mut(..)?,
                lock,
                0,
                name,
            ))?;
            if before[0] == 0 {
                break;
            }
            // Another client holds the lock. Retrying without a pause would slow that client down.
            thread::sleep(pause);
            pause = (2 * pause).min(Duration::from_millis(5));
        }
        channel.until(deadline()).read(&mut copy.slice_mut(..)?, number)?;
        copy[0] += 1;
        channel.until(deadline()).write(copy.slice(..)?, number)?;
        // The write is complete, so the next holder of the lock sees it.
        channel.until(deadline()).run(CompareSwapWorkRequest::new(
            &mut before.slice_mut(..)?,
            lock,
            name,
            0,
        ))?;
        if before[0] != name {
            return Err(format!("client {} has taken the lock of client {name}", before[0]).into());
        }
    }
    Ok(())
}
