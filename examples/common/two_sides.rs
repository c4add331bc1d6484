//! Two sides in one process, so that a page of the cookbook is one program: the code for another machine
//! runs on another thread. `examples/channel.rs` shows two processes.

#![allow(dead_code, reason = "each page uses a part of it")]

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, Channel, ChannelBuilder, Context,
    settings::{AckTimeout, MaxRnrRetries, MinRnrTimer},
};

pub(crate) type Result<T = (), E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

/// The access that peers get to shared regions, and over a channel.
pub(crate) const ALL: AccessFlags =
    AccessFlags::REMOTE_READ.union(AccessFlags::REMOTE_WRITE).union(AccessFlags::REMOTE_ATOMIC);

/// Runs a page on the two devices that the command line names; on the first device if it names none.
pub(crate) fn main(page: fn(&Context<'_>, &Context<'_>) -> Result) -> Result {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let open = |name: Option<&String>| name.map_or_else(ibverbs::open_first, |n| ibverbs::open(n));
    page(&open(names.first())?, &open(names.get(1).or(names.first()))?)
}

/// The time at which to give up waiting for the other side.
pub(crate) fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Connects two sides. Two processes would send each other their endpoints, for example over TCP.
pub(crate) fn connect<'one, 'other>(
    one: ChannelBuilder<'one>,
    other: ChannelBuilder<'other>,
) -> Result<(Channel<'one>, Channel<'other>)> {
    let (one, other) = (patient(one).build()?, patient(other).build()?);
    let (to_one, to_other) = (one.endpoint(), other.endpoint());
    Ok((one.handshake(to_other)?, other.handshake(to_one)?))
}

/// Settings for slow peers, such as software devices on a busy machine.
fn patient(builder: ChannelBuilder<'_>) -> ChannelBuilder<'_> {
    builder
        .access(ALL)
        // A message that arrives before its receive is posted is retried soon, and without limit.
        .min_rnr_timer(MinRnrTimer::SHORTEST)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        // The peer has one second for each answer.
        .ack_timeout(AckTimeout::new(18).expect("at most 31"))
}

/// Runs both sides at the same time, and returns the first error.
pub(crate) fn both(one: impl FnOnce() -> Result + Send, other: impl FnOnce() -> Result) -> Result {
    thread::scope(|threads| {
        let one = threads.spawn(one);
        let other = other();
        one.join().map_err(|_| "the other side has panicked")?.and(other)
    })
}
