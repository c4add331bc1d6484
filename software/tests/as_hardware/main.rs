//! The device refuses, reports or leaves open the same as hardware and the kernel's Soft-RoCE: it is no kinder
//! than they are.

mod connections;
mod datagrams;
mod objects;
#[path = "../support/patience.rs"]
mod patience;

use std::ptr::null_mut;
use std::time::Duration;

use ibverbs::device::{AsyncEventKind, AsyncEvents};
use ibverbs::ffi::{self, ibv_access_flags as Access};
use ibverbs::queue_pair::StateTransition;
use ibverbs::{
    AccessFlags, CompletionChannel, CompletionQueue, Context, MemoryRegion, ProtectionDomain,
    QueuePair, QueuePairState, Rc, SendWorkRequest, SharedMemoryRegion, Ud, WorkCompletion,
    WorkStatus, operation::DatagramPeer, queue_pair::AddressVector,
};
use ibverbs_software::{Device, Network, Verb, When};

use patience::{PATIENCE, deadline};

const QKEY: u32 = 7;

/// Two contexts of two devices of a network.
fn contexts(network: &Network) -> [Context<'static>; 2] {
    [(); 2].map(|()| network.device().unwrap().open().unwrap())
}

fn datagrams<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> QueuePair<'a, Ud> {
    let builder = domain.create_qp(queue, queue, Ud);
    let builder = builder.max_send_wr(8).max_recv_wr(8).qkey(QKEY);
    builder.build().unwrap().activate().unwrap()
}

/// Waits for the next completion.
fn next(queue: &CompletionQueue<'_>) -> WorkCompletion {
    let mut room = [WorkCompletion::default()];
    let end = deadline();
    while queue.poll(&mut room).unwrap().is_empty() {
        assert!(std::time::Instant::now() < end, "no completion");
    }
    room[0]
}

fn status(completion: &WorkCompletion) -> WorkStatus {
    completion.result().map_or_else(|error| error.status(), |_| WorkStatus::Success)
}

/// Sends a datagram.
fn send_to(
    one: &mut QueuePair<'_, Ud>,
    domain: &ProtectionDomain<'_>,
    from: &MemoryRegion<'_, u8>,
    length: usize,
    to: &QueuePair<'_, Ud>,
    solicited: bool,
) {
    let path = AddressVector::new(1, 0).global(to.endpoint().gid(), 0);
    let path = domain.create_ah(&path).unwrap();
    let elements = [from.gather_element(..length).unwrap()];
    let request = SendWorkRequest::new(&elements);
    let request = if solicited { request.solicited() } else { request };
    let request = request.to(DatagramPeer { path: &path, number: to.number(), qkey: QKEY });
    // SAFETY: the region is not written before the completion.
    unsafe { one.post(request, 1).unwrap() };
}

/// Two connected queue pairs, of which the second answers two READ requests at a time.
fn pairs<'a>(
    domains: &'a [ProtectionDomain<'a>; 2],
    queues: &'a [CompletionQueue<'a>; 2],
) -> [QueuePair<'a>; 2] {
    let prepare = |i: usize| {
        let builder = domains[i].create_qp(&queues[i], &queues[i], Rc);
        let builder = builder.max_send_wr(8).max_recv_wr(8).access(AccessFlags::REMOTE_READ);
        builder.max_dest_rd_atomic(2).build().unwrap()
    };
    let [one, other] = [0, 1].map(prepare);
    let (to_one, to_other) = (one.endpoint(), other.endpoint());
    [one.handshake(to_other).unwrap(), other.handshake(to_one).unwrap()]
}
