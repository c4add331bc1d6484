//! Connects two sides by exchanging their endpoints, on Soft-RoCE.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use ibverbs::channel::ChannelClosed;
use ibverbs::{Channel, PreparedChannel, PreparedQueuePair, QueuePair};

use crate::vm;

pub(crate) const DEVICES: [&str; 2] = ["rxe0", "rxe1"];

/// A connected channel or queue pair, which needs nothing else to stay connected.
pub(crate) type Link<Q> = Q;

pub(crate) fn channels<'res>(
    one: PreparedChannel<'res>,
    two: PreparedChannel<'res>,
) -> (Link<Channel<'res>>, Link<Channel<'res>>) {
    vm::channels::handshake(one, two)
}

pub(crate) fn queue_pairs<'res>(
    one: PreparedQueuePair<'res>,
    two: PreparedQueuePair<'res>,
) -> (Link<QueuePair<'res>>, Link<QueuePair<'res>>) {
    let (here, there) = (one.endpoint(), two.endpoint());
    (one.handshake(there).unwrap(), two.handshake(here).unwrap())
}

/// The channel, ready to be connected again.
pub(crate) fn reset(link: Link<Channel<'_>>) -> PreparedChannel<'_> {
    link.reset().unwrap()
}

pub(crate) fn close(link: Link<Channel<'_>>) -> ChannelClosed {
    link.close().unwrap()
}

pub(crate) fn nothing_is_left() {
    DEVICES.into_iter().for_each(vm::assert_nothing_left);
}
