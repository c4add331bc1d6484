//! Queue pairs on a device made of functions: the arguments that the provider receives for every state change
//! and every request, and the handling of its answers.

mod agreement;
mod batches;
mod building;
mod contract;
mod long_messages;
mod refusals;
mod requests;
mod states;

use ibverbs::completion::WorkResult;
use ibverbs::queue_pair::Transport;
use ibverbs::queue_pair::marker::Connected;
use ibverbs::*;
use ibverbs_function_device::FunctionDevice;

/// A queue pair as most tests need it: room for a few requests, some of it inline, and a peer that
/// may do everything.
fn builder<'a, T: Transport>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
    kind: T,
) -> QueuePairBuilder<'a, T> {
    let everything =
        AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    domain
        .create_qp(queue, queue, kind)
        .max_send_wr(16)
        .max_recv_wr(16)
        .max_send_sge(4)
        .max_recv_sge(4)
        .max_inline_data(64)
        .access(everything)
}

/// A queue pair that is connected to itself.
fn to_itself<'a, T: Connected>(builder: QueuePairBuilder<'a, T>) -> QueuePair<'a, T> {
    let prepared = builder.build().unwrap();
    let endpoint = prepared.endpoint();
    prepared.handshake(endpoint).unwrap()
}

/// Polls until the queue is empty. Returns the numbers and statuses.
fn completions(queue: &CompletionQueue<'_>) -> Vec<(u64, WorkResult)> {
    let mut found = Vec::new();
    let mut slice = [WorkCompletion::default(); 8];
    loop {
        let done = queue.poll(&mut slice).unwrap();
        if done.is_empty() {
            return found;
        }
        found.extend(done.iter().map(|completion| (completion.wr_id(), completion.result())));
    }
}

/// The numbers of the executed requests.
#[track_caller]
fn successes(queue: &CompletionQueue<'_>) -> Vec<u64> {
    completions(queue)
        .into_iter()
        .map(|(wr_id, result)| {
            result.unwrap_or_else(|error| panic!("{wr_id}: {error}"));
            wr_id
        })
        .collect()
}

/// Memory that the peer may access, on our side too.
fn remote(region: &SharedMemoryRegion<'_, u64>) -> RemoteMemoryRegion {
    region.remote()
}
