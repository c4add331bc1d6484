//! Connects two sides by the connection manager, on Soft-iWARP. Both are on `siw0`, because the kernel reaches an
//! address of its own machine through the device that has it.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use ibverbs::channel::ChannelClosed;
use ibverbs::rdmacm::{Connection, Route};
use ibverbs::{Channel, PreparedChannel, PreparedQueuePair, QueuePair};
use std::time::Instant;

use crate::managed::{self, TIME, listen};

pub(crate) const DEVICES: [&str; 2] = ["siw0", "siw0"];

/// A connected channel or queue pair, with the identifier that keeps it connected.
pub(crate) type Link<Q> = Connection<Q>;

/// Connects `one` to `two`, which are two channels or two queue pairs.
macro_rules! connect {
    ($one:ident, $two:ident) => {{
        let (mut listener, address) = listen();
        let route = Route::resolve(address, Instant::now() + TIME).unwrap();
        let one = route.prepare($one).unwrap_or_else(|(.., error)| panic!("{error}"));
        let one = one.start(b"").unwrap();
        let request = listener.next_until(Instant::now() + TIME).unwrap();
        let two = request.prepare($two).unwrap_or_else(|(.., error)| panic!("{error}"));
        let two = two.start(b"").unwrap();
        (one.finish(Instant::now() + TIME).unwrap(), two.finish(Instant::now() + TIME).unwrap())
    }};
}

pub(crate) fn channels<'res>(
    one: PreparedChannel<'res>,
    two: PreparedChannel<'res>,
) -> (Link<Channel<'res>>, Link<Channel<'res>>) {
    connect!(one, two)
}

pub(crate) fn queue_pairs<'res>(
    one: PreparedQueuePair<'res>,
    two: PreparedQueuePair<'res>,
) -> (Link<QueuePair<'res>>, Link<QueuePair<'res>>) {
    connect!(one, two)
}

/// The channel, ready to be connected again.
pub(crate) fn reset(link: Link<Channel<'_>>) -> PreparedChannel<'_> {
    let (channel, control) = link.into_parts();
    drop(control);
    channel.reset().unwrap()
}

pub(crate) fn close(link: Link<Channel<'_>>) -> ChannelClosed {
    let (channel, _control) = link.into_parts();
    channel.close().unwrap()
}

pub(crate) fn nothing_is_left() {
    managed::nothing_is_left();
}
