//! Cookbook: many threads.
//!
//! All threads can use one context, one domain and one region at the same time. A channel belongs to one
//! thread at a time: each thread has its own channel with its own completion queue, so no thread waits for
//! another one's lock. Threads borrow shared objects within `thread::scope`, or hold them in an `Arc`.

#[path = "common/two_sides.rs"]
mod two_sides;

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use ibverbs::{Channel, Context, ProtectionDomain};

use two_sides::{Result, connect, deadline};

const THREADS: usize = 4;
const MESSAGES: u64 = 20;

#[allow(dead_code, reason = "a test calls run")]
fn main() -> Result {
    two_sides::main(run)
}

pub(crate) fn run(one: &Context<'_>, other: &Context<'_>) -> Result {
    let (one, other) = (one.alloc_pd()?, other.alloc_pd()?);
    let (mut senders, mut receivers) = (Vec::new(), Vec::new());
    for _ in 0..THREADS {
        let (sender, receiver) = connect(one.create_channel(), other.create_channel())?;
        senders.push(sender);
        receivers.push(receiver);
    }
    // Channels outlive the threads: if a queue pair is destroyed right after its last message has arrived,
    // the sender may not get an acknowledgement.
    let total = AtomicU64::new(0);
    thread::scope(|threads| {
        let mut all = Vec::new();
        for (thread, channel) in senders.iter_mut().enumerate() {
            let domain = &one;
            all.push(threads.spawn(move || send(domain, channel, thread as u64)));
        }
        for channel in &mut receivers {
            let (domain, total) = (&other, &total);
            all.push(threads.spawn(move || receive(domain, channel, total)));
        }
        all.into_iter().try_for_each(|one| one.join().map_err(|_| "a thread has panicked")?)
    })?;
    let expected: u64 = (0..THREADS as u64).map(|thread| thread * MESSAGES).sum();
    let total = total.into_inner();
    if total != expected {
        return Err(format!("the sum of all messages is {total}, not {expected}").into());
    }
    println!("{THREADS} threads sent {MESSAGES} messages each, {THREADS} others received them");
    Ok(())
}

fn send(domain: &ProtectionDomain<'_>, channel: &mut Channel<'_>, thread: u64) -> Result {
    let mut message = domain.allocate::<u64>(1)?;
    message[0] = thread;
    for _ in 0..MESSAGES {
        channel.until(deadline()).send(message.slice(..)?)?;
    }
    Ok(())
}

fn receive(domain: &ProtectionDomain<'_>, channel: &mut Channel<'_>, total: &AtomicU64) -> Result {
    let mut message = domain.allocate::<u64>(1)?;
    for _ in 0..MESSAGES {
        channel.until(deadline()).receive(&mut message.slice_mut(..)?)?;
        total.fetch_add(message[0], Ordering::Relaxed);
    }
    Ok(())
}
