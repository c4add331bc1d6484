//! The victim, and the process that checks the memory it leaves.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::Duration;
use std::{process, ptr, slice, thread};

use ibverbs::memory::RawMemoryRegion;
use ibverbs::{
    AccessFlags, QueuePairEndpoint, Rc, SharedMemoryRegion, WorkCompletion, settings::MinRnrTimer,
};

use crate::two_machines::{Peer, pattern};
use crate::{ACK_RETRIES, ACK_TIMEOUT, ENOUGH, LENGTH, RECEIVES, SLOTS};

/// The received messages stay in this file when the process is gone.
const RECEIVED: &str = "/dev/shm/received";
const BYTES: usize = LENGTH * size_of::<u64>();

/// The file with the received messages, mapped for the life of the process.
fn received() -> *mut u8 {
    let file = File::options().read(true).write(true).create(true).truncate(false).open(RECEIVED);
    let file = file.unwrap();
    file.set_len((SLOTS * BYTES) as u64).unwrap();
    // SAFETY: new memory, where the kernel likes it.
    let address = unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(ptr::null_mut(), SLOTS * BYTES, access, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    assert_ne!(address, libc::MAP_FAILED);
    address.cast()
}

/// Receives messages, and lets the peer read, until the process is killed: by itself once it has enough, or
/// from outside.
pub(crate) fn receive(dies: bool) {
    let context = ibverbs::open("rxe1").unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(RECEIVES as u32).unwrap();
    let readable = SharedMemoryRegion::<u64>::new(
        &domain,
        SLOTS * LENGTH,
        AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ,
    )
    .unwrap();
    for slot in 0..SLOTS {
        let numbers: Vec<_> = (0..LENGTH).map(|index| !pattern(slot as u64, index)).collect();
        readable.write(slot * LENGTH, &numbers).unwrap();
    }
    // SAFETY: the mapping stays, and nothing refers to it.
    let mut room = unsafe {
        RawMemoryRegion::new(&domain, received(), SLOTS * BYTES, AccessFlags::LOCAL_WRITE).unwrap()
    };
    let prepared = domain
        .create_qp(&queue, &queue, Rc)
        .max_recv_wr(RECEIVES as u32)
        .access(AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ)
        .min_rnr_timer(MinRnrTimer::SHORTEST)
        .ack_timeout(ACK_TIMEOUT)
        .max_ack_retries(ACK_RETRIES)
        .build()
        .unwrap();
    let mut peer = Peer::meet(18515);
    let ours = (prepared.endpoint(), readable.remote());
    let remote: QueuePairEndpoint = peer.exchange(ours);
    let mut pair = prepared.handshake(remote).unwrap();
    let slot = |message: usize| message % SLOTS * BYTES..(message % SLOTS + 1) * BYTES;
    let mut posted = 0;
    let mut arrived = 0;
    let mut completions = [WorkCompletion::default(); RECEIVES];
    loop {
        while posted < arrived + RECEIVES {
            // SAFETY: the region outlives the queue pair, and nobody looks at it.
            unsafe { pair.post_receive(&mut room, slot(posted), posted as u64).unwrap() };
            posted += 1;
        }
        for completion in queue.poll(&mut completions).unwrap() {
            assert_eq!(completion.result().unwrap().byte_len() as usize, BYTES);
            assert_eq!(completion.wr_id(), arrived as u64);
            arrived += 1;
            if dies && arrived == ENOUGH {
                // SAFETY: no memory is involved.
                unsafe { libc::kill(process::id() as i32, libc::SIGKILL) };
            }
        }
        thread::sleep(Duration::from_micros(50));
    }
}

/// Tells the survivor whether all acknowledged messages are there.
pub(crate) fn bear_witness() {
    let mut peer = Peer::meet(18516);
    let messages: usize = peer.exchange(());
    assert!((1..=SLOTS).contains(&messages));
    // SAFETY: the mapping stays, and nobody writes to it any more: the one who did is dead.
    let numbers = unsafe { slice::from_raw_parts(received().cast::<u64>(), messages * LENGTH) };
    let intact = (0..messages).all(|message| {
        let numbers = &numbers[message * LENGTH..][..LENGTH];
        (0..LENGTH).all(|index| numbers[index] == pattern(message as u64, index))
    });
    let () = peer.exchange(intact);
}
