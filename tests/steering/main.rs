//! Work queues, flows, and what belongs to them, on a device made of functions: the arguments that the
//! provider receives, the frames that arrive, and the handling of its answers. No provider in software
//! has these verbs.

mod actions;
mod flows;
mod work_queues;

use ibverbs::completion::WorkOpcode;
use ibverbs::queue_pair::{RawPacket, StateTransition};
use ibverbs::*;
use ibverbs_function_device::{FunctionDevice, Kind};

const OUR_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const THEIR_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// An Ethernet frame with IPv4, UDP and a payload.
fn frame(to: [u8; 6], source: [u8; 4], ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    frame.extend(to);
    frame.extend(THEIR_MAC);
    frame.extend(0x0800_u16.to_be_bytes());
    let mut header = [0; 20];
    header[0] = 0x45;
    header[8] = 64;
    header[9] = 17;
    header[12..16].copy_from_slice(&source);
    header[16..20].copy_from_slice(&[10, 0, 0, 1]);
    frame.extend(header);
    frame.extend(ports.0.to_be_bytes());
    frame.extend(ports.1.to_be_bytes());
    frame.extend([0; 4]);
    frame.extend(payload);
    frame
}

/// A raw packet queue pair that can send and receive.
fn raw_packets<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> QueuePair<'a, RawPacket> {
    let builder = domain.create_qp(queue, queue, RawPacket);
    let builder = builder.max_send_wr(16).max_recv_wr(16).max_inline_data(128);
    let mut queue_pair = builder.build().unwrap().into_queue_pair();
    use QueuePairState as S;
    queue_pair.modify(StateTransition::to(S::Init).port(1)).unwrap();
    queue_pair.modify(StateTransition::to(S::ReadyToReceive)).unwrap();
    queue_pair.modify(StateTransition::to(S::ReadyToSend)).unwrap();
    queue_pair
}

/// Sends a frame, and waits for its completion.
fn send(queue_pair: &mut QueuePair<'_, RawPacket>, frame: &[u8]) {
    // SAFETY: inline data is copied.
    unsafe { queue_pair.post(SendWorkRequest::new(Inline(frame)), 0).unwrap() };
}

/// The completions that are there: number, queue and length.
#[track_caller]
fn received(queue: &CompletionQueue<'_>) -> Vec<(u64, u32, u32)> {
    let mut found = Vec::new();
    let mut slice = [WorkCompletion::default(); 8];
    loop {
        let done = queue.poll(&mut slice).unwrap();
        if done.is_empty() {
            return found;
        }
        for completion in done {
            let success = completion.result().unwrap();
            if success.opcode() == WorkOpcode::Receive {
                found.push((
                    completion.wr_id(),
                    completion.queue_pair_number(),
                    success.byte_len(),
                ));
            }
        }
    }
}
