//! Tests of events, waiting, extended polling and asynchronous events on Soft-RoCE. `script/test
//! rxe` runs them in the machine that `script/vm` starts.

mod async_events;
mod extended;
mod settings;
#[path = "../support/vm/mod.rs"]
mod vm;
mod waiting;

use std::time::Duration;

use ibverbs::{
    CompletionQueue, Inline, MemoryRegion, ProtectionDomain, QueuePair, Rc, SendWorkRequest,
    WorkCompletion,
};

const SOON: Duration = Duration::from_millis(50);

/// A reliable queue pair that is connected to itself.
fn loopback<'a>(
    domain: &'a ProtectionDomain<'a>,
    sends: &'a CompletionQueue<'a>,
    receives: &'a CompletionQueue<'a>,
) -> QueuePair<'a> {
    let builder = domain.create_qp(sends, receives, Rc);
    let prepared = builder.max_send_wr(64).max_recv_wr(64).max_inline_data(64).build().unwrap();
    let itself = prepared.endpoint();
    prepared.handshake(itself).unwrap()
}

/// A message to itself; its send completes as `wr_id`, and its receive as `wr_id + 1000`.
fn exchange(pair: &mut QueuePair<'_>, region: &mut MemoryRegion<'_, u8>, wr_id: u64) {
    // SAFETY: the region outlives the queue pair, and is not looked at.
    unsafe {
        pair.post_receive(region, .., wr_id + 1000).unwrap();
        pair.post(SendWorkRequest::new(Inline(&[7; 16])), wr_id).unwrap();
    }
}

fn ids(found: &[WorkCompletion]) -> Vec<u64> {
    found.iter().map(WorkCompletion::wr_id).collect()
}
