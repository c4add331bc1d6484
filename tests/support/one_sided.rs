//! RDMA operations on queue pairs of one device, by the structures of C.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of it")]

use std::ptr;
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, CompletionQueue, PreparedQueuePair, ProtectionDomain, QueuePair, Rc,
    RemoteMemoryRegion, WorkStatus, ffi,
    memory::{GatherElement, ScatterElement},
};

/// A queue pair that lets its peer do everything.
fn prepared<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> PreparedQueuePair<'a> {
    let everything =
        AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    domain
        .create_qp(queue, queue, Rc)
        .max_send_wr(16)
        .max_recv_wr(16)
        .max_send_sge(4)
        .max_recv_sge(4)
        .access(everything)
        .build()
        .unwrap()
}

/// Connects a queue pair to itself.
pub fn to_itself<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> QueuePair<'a> {
    let prepared = prepared(domain, queue);
    let endpoint = prepared.endpoint();
    prepared.handshake(endpoint).unwrap()
}

/// Connects two queue pairs to each other. Needed for requests that the peer refuses: a queue pair that is
/// connected to itself cannot answer, since it has failed.
pub fn pair<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> [QueuePair<'a>; 2] {
    let (first, second) = (prepared(domain, queue), prepared(domain, queue));
    let endpoints = [first.endpoint(), second.endpoint()];
    [first.handshake(endpoints[1]).unwrap(), second.handshake(endpoints[0]).unwrap()]
}

/// Posts a request with a list, and returns how it ended.
fn carry_out(
    queue_pair: &mut QueuePair<'_>,
    list: &[ffi::ibv_sge],
    opcode: ffi::ibv_wr_opcode,
    target: impl FnOnce(&mut ffi::ibv_send_wr),
) -> WorkStatus {
    let mut list = list.to_vec();
    let mut request = ffi::ibv_send_wr {
        wr_id: 77,
        sg_list: list.as_mut_ptr(),
        num_sge: list.len() as i32,
        opcode,
        send_flags: ffi::ibv_send_flags::IBV_SEND_SIGNALED.0,
        ..Default::default()
    };
    target(&mut request);
    let mut bad = ptr::null_mut();
    // SAFETY: the queue pair is live, the request well-formed, and the callers' elements outlive the
    // completion that is waited for.
    let error = unsafe { ffi::ibv_post_send(queue_pair.as_raw(), &mut request, &mut bad) };
    assert_eq!(error, 0, "ibv_post_send");
    status(queue_pair.send_cq(), 77)
}

/// Waits for the completion of this number, which is the next one.
pub fn status(queue: &CompletionQueue<'_>, wr_id: u64) -> WorkStatus {
    let mut slot = [Default::default()];
    let start = Instant::now();
    loop {
        if let [completion] = queue.poll(&mut slot).unwrap() {
            assert_eq!(completion.wr_id(), wr_id);
            return match completion.result() {
                Ok(_) => WorkStatus::Success,
                Err(error) => error.status(),
            };
        }
        assert!(start.elapsed() < Duration::from_secs(120), "no completion of {wr_id}");
        std::thread::sleep(Duration::from_micros(50));
    }
}

fn at(remote: RemoteMemoryRegion) -> impl FnOnce(&mut ffi::ibv_send_wr) {
    move |request| {
        request.wr.rdma = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
            remote_addr: remote.address(),
            rkey: remote.rkey(),
        }
    }
}

pub fn write(
    queue_pair: &mut QueuePair<'_>,
    from: &[GatherElement<'_>],
    to: RemoteMemoryRegion,
) -> WorkStatus {
    let list: Vec<_> = from.iter().map(|e| *e.as_raw()).collect();
    carry_out(queue_pair, &list, ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE, at(to))
}

pub fn read(
    queue_pair: &mut QueuePair<'_>,
    from: RemoteMemoryRegion,
    to: &[ScatterElement<'_>],
) -> WorkStatus {
    let list: Vec<_> = to.iter().map(|e| *e.as_raw()).collect();
    carry_out(queue_pair, &list, ffi::ibv_wr_opcode::IBV_WR_RDMA_READ, at(from))
}

/// Adds to 8 bytes of the peer; `old` receives the earlier value.
pub fn fetch_add(
    queue_pair: &mut QueuePair<'_>,
    value: u64,
    remote: RemoteMemoryRegion,
    old: ScatterElement<'_>,
) -> WorkStatus {
    let opcode = ffi::ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD;
    carry_out(queue_pair, &[*old.as_raw()], opcode, |request| {
        request.wr.atomic = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
            remote_addr: remote.address(),
            compare_add: value,
            rkey: remote.rkey(),
            ..Default::default()
        }
    })
}

/// Sends from one list to the other.
pub fn send(queue_pair: &mut QueuePair<'_>, from: &[GatherElement<'_>], to: &[ScatterElement<'_>]) {
    let mut list: Vec<_> = to.iter().map(|e| *e.as_raw()).collect();
    let mut receive = ffi::ibv_recv_wr {
        wr_id: 78,
        next: ptr::null_mut(),
        sg_list: list.as_mut_ptr(),
        num_sge: list.len() as i32,
    };
    let mut bad = ptr::null_mut();
    // SAFETY: as in `carry_out`.
    let error = unsafe { ffi::ibv_post_recv(queue_pair.as_raw(), &mut receive, &mut bad) };
    assert_eq!(error, 0, "ibv_post_recv");
    let list: Vec<_> = from.iter().map(|e| *e.as_raw()).collect();
    let mut send = ffi::ibv_send_wr {
        wr_id: 77,
        sg_list: list.as_ptr().cast_mut(),
        num_sge: list.len() as i32,
        opcode: ffi::ibv_wr_opcode::IBV_WR_SEND,
        send_flags: ffi::ibv_send_flags::IBV_SEND_SIGNALED.0,
        ..Default::default()
    };
    let mut bad = ptr::null_mut();
    // SAFETY: as in `carry_out`.
    let error = unsafe { ffi::ibv_post_send(queue_pair.as_raw(), &mut send, &mut bad) };
    assert_eq!(error, 0, "ibv_post_send");
    let mut found = Vec::new();
    let start = Instant::now();
    while found.len() < 2 {
        let mut slots = [Default::default(); 2];
        for completion in queue_pair.send_cq().poll(&mut slots).unwrap() {
            completion.result().unwrap();
            found.push(completion.wr_id());
        }
        assert!(start.elapsed() < Duration::from_secs(120), "{found:?}");
        std::thread::sleep(Duration::from_micros(50));
    }
    found.sort_unstable();
    assert_eq!(found, [77, 78]);
}
