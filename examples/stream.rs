//! A stream of messages from one process to another, with a window of them in flight: start `stream`
//! on one machine and `stream HOST` on another. `-n` is the number of MiB.
//!
//! Each side has one scope, in which it reuses the same buffers. Every number that arrives is checked.

#[path = "common/broken_pipe.rs"]
mod broken_pipe;
mod common;

use std::collections::VecDeque;
use std::time::Instant;

use common::{Options, Result, deadline, pattern};
use ibverbs::{Channel, TransportError, memory::MemorySliceMut};

/// Numbers in a message: 64 KiB.
const LENGTH: usize = 8192;
/// Messages in flight.
const WINDOW: usize = 16;

fn main() -> Result<()> {
    broken_pipe::end_quietly();
    let options = Options::read(64)?;
    let context = options.open()?;
    let domain = context.alloc_pd()?;
    let mut region = domain.allocate::<u64>(WINDOW * LENGTH)?;
    let buffers = region.slice_mut(..)?.chunks(LENGTH)?;

    let prepared = common::patient(Channel::builder(&domain))
        .max_send_wr(WINDOW as u32)
        .max_recv_wr(WINDOW as u32)
        .build()?;
    let (mut channel, told) = options.connect(prepared, &options.count.to_be_bytes())?;

    let sends = options.server.is_some();
    let mebibytes = if sends { options.count } else { u64::from_be_bytes(told[..].try_into()?) };
    let messages = mebibytes * ((1 << 20) / (LENGTH * size_of::<u64>()) as u64);
    let start = Instant::now();
    let transferred = match sends {
        true => send(&mut channel, buffers, messages),
        false => receive(&mut channel, buffers, messages),
    };
    transferred?;
    let seconds = start.elapsed().as_secs_f64();
    if !sends {
        // Our device may not have acknowledged the last message to the peer's device yet.
        channel.wait_until_peer_is_gone(deadline())?;
    }
    let what = if sends { "sent" } else { "received and checked" };
    println!("{what} {mebibytes} MiB in {seconds:.2} s: {:.0} MiB/s", mebibytes as f64 / seconds);
    Ok(())
}

fn send<'buf>(
    channel: &mut Channel<'_>,
    buffers: impl Iterator<Item = MemorySliceMut<'buf, u64>>,
    messages: u64,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut idle: VecDeque<_> = buffers.collect();
    let sent = channel.manual_scope(|scope| {
        let mut flying = VecDeque::with_capacity(WINDOW);
        for message in 0..messages {
            let mut buffer = match idle.pop_front() {
                Some(buffer) => buffer,
                // All are in flight: the oldest comes back first.
                None => next(&mut flying)?,
            };
            for (index, number) in buffer.iter_mut().enumerate() {
                *number = pattern(message, index);
            }
            flying.push_back(scope.post_send(buffer)?);
        }
        while !flying.is_empty() {
            next(&mut flying)?;
        }
        Ok::<(), TransportError>(())
    });
    Ok(sent?)
}

/// Waits for the oldest operation in flight.
fn next<'buf>(
    flying: &mut VecDeque<ibverbs::channel::ScopedPendingWork<'_, MemorySliceMut<'buf, u64>>>,
) -> Result<MemorySliceMut<'buf, u64>, TransportError> {
    let oldest = flying.pop_front().expect("there is one");
    Ok(oldest.wait_until(deadline())?.0)
}

fn receive<'buf>(
    channel: &mut Channel<'_>,
    buffers: impl Iterator<Item = MemorySliceMut<'buf, u64>>,
    messages: u64,
) -> Result<()> {
    channel.manual_scope(|scope| {
        let mut flying = VecDeque::with_capacity(WINDOW);
        let window = messages.min(WINDOW as u64);
        for buffer in buffers.take(window as usize) {
            flying.push_back(scope.post_receive(buffer)?);
        }
        for message in 0..messages {
            let buffer = next(&mut flying)?;
            if let Some(index) = (0..LENGTH).find(|&i| buffer[i] != pattern(message, i)) {
                return Err(format!("number {index} of message {message} is not right").into());
            }
            if message + window < messages {
                flying.push_back(scope.post_receive(buffer)?);
            }
        }
        Ok(())
    })
}
