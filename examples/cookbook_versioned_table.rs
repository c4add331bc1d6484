//! Cookbook: publishing a table by RDMA read.
//!
//! A publisher changes a table in its own memory; readers fetch it by RDMA read, without any action of the
//! publisher. A version shows a reader whether it has read the table in the middle of a change: the version
//! is odd during a change. A reader reads the version, the table, and the version again, one after the
//! other. If both versions are the same even number, the table is consistent; otherwise the reader tries
//! again.

#[path = "common/two_sides.rs"]
mod two_sides;

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread;
use std::time::Duration;

use ibverbs::{
    AccessFlags, Channel, Context, ProtectionDomain, RemoteMemoryRegion, SharedMemoryRegion,
};

use two_sides::{Result, both, connect, deadline};

/// Numbers in the table. The version comes before them.
const ROWS: usize = 512;
const READS: u64 = 50;

#[allow(dead_code, reason = "a test calls run")]
fn main() -> Result {
    two_sides::main(run)
}

pub(crate) fn run(reader: &Context<'_>, publisher: &Context<'_>) -> Result {
    let (reader, publisher) = (reader.alloc_pd()?, publisher.alloc_pd()?);
    let (mut to_publisher, _to_reader) =
        connect(reader.create_channel(), publisher.create_channel())?;
    let memory = publisher.allocate_shared::<u64>(1 + ROWS, AccessFlags::REMOTE_READ)?;
    let (remote, done) = (memory.remote(), AtomicBool::new(false));
    both(
        || publish(&memory, &done),
        || {
            let result = read_tables(&reader, remote, &mut to_publisher);
            done.store(true, Ordering::Relaxed);
            result
        },
    )
}

/// Changes all rows repeatedly. All rows of one table have the same number.
fn publish(memory: &SharedMemoryRegion<'_, u64>, done: &AtomicBool) -> Result {
    let version = memory.atomic(0)?;
    let mut number = 0_u64;
    while !done.load(Ordering::Relaxed) {
        version.fetch_add(1, Ordering::Relaxed); // odd: the table is being changed
        fence(Ordering::SeqCst); // readers see that before they see a changed row
        number += 1;
        memory.write(1, &[number; ROWS])?;
        version.fetch_add(1, Ordering::Release); // even, after the rows
        thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn read_tables(
    domain: &ProtectionDomain<'_>,
    memory: RemoteMemoryRegion,
    channel: &mut Channel<'_>,
) -> Result {
    let version = memory.sub_region(0, 8)?;
    let rows = memory.sub_region(8, memory.length() - 8)?;
    let mut versions = domain.allocate::<u64>(2)?;
    let mut table = domain.allocate::<u64>(ROWS)?;
    let (mut tables, mut torn) = (0, 0);
    while tables < READS {
        // Each read is complete before the next begins: the peer's memory may be read in any order by reads
        // that are in flight together.
        channel.until(deadline()).read(&mut versions.slice_mut(..1)?, version)?;
        channel.until(deadline()).read(&mut table.slice_mut(..)?, rows)?;
        channel.until(deadline()).read(&mut versions.slice_mut(1..)?, version)?;
        if versions[0] % 2 == 1 || versions[0] != versions[1] {
            torn += 1;
            continue;
        }
        if table.iter().any(|row| *row != versions[0] / 2) {
            return Err(format!("version {}: the table is of several versions", versions[0]).into());
        }
        tables += 1;
    }
    println!("{tables} whole tables were read; {torn} times the table was being changed");
    Ok(())
}
