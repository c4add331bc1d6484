//! Queue pairs on Soft-RoCE: every supported operation, on every transport, with every method to post it, and
//! every state. To be run by `script/test rxe`, in the machine of `script/vm`. Those tests that also pass on Soft-iWARP
//! are in `support/reliable/queue_pairs.rs`.

mod batches;
#[path = "../support/reliable/queue_pairs.rs"]
mod on_any_device;
mod operations;
mod states;
#[path = "../support/reliable/by_handshake.rs"]
mod transport;
#[path = "../support/vm/mod.rs"]
mod vm;

use ibverbs::queue_pair::Transport;
use ibverbs::queue_pair::marker::Connected;
use ibverbs::settings::MaxRnrRetries;
use ibverbs::*;
use vm::{completions, gid_index, has_address_handles, success, with_rxe0};

fn builder<'a, T: Transport>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
    kind: T,
) -> QueuePairBuilder<'a, T> {
    let everything =
        AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    domain
        .create_qp(queue, queue, kind)
        .max_send_wr(32)
        .max_recv_wr(32)
        .max_send_sge(4)
        .max_recv_sge(4)
        .max_inline_data(64)
        .access(everything)
}

/// A queue pair of type RC, which retries for as long as it takes.
fn reliable<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> QueuePairBuilder<'a> {
    builder(domain, queue, Rc).max_rnr_retries(MaxRnrRetries::UNLIMITED)
}

/// Two queue pairs that are connected to each other.
fn pair<'a, T: Connected>(
    new: impl Fn() -> QueuePairBuilder<'a, T>,
) -> (QueuePair<'a, T>, QueuePair<'a, T>) {
    let (one, two) = (new().build().unwrap(), new().build().unwrap());
    let (here, there) = (one.endpoint(), two.endpoint());
    (one.handshake(there).unwrap(), two.handshake(here).unwrap())
}

fn shared<'a>(domain: &'a ProtectionDomain<'a>) -> SharedMemoryRegion<'a, u64> {
    let all = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    domain.allocate_shared(16, all).unwrap()
}

fn words(region: &SharedMemoryRegion<'_, u64>) -> [u64; 16] {
    let mut words = [0; 16];
    region.read(0, &mut words).unwrap();
    words
}
