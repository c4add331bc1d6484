//! Connects two sides as the device allows: by a handshake, or, on iWARP, by the connection manager.

use std::net::{IpAddr, SocketAddr};
use std::ops::{Deref, DerefMut};
use std::sync::LazyLock;
use std::time::Instant;

use ibverbs::channel::ChannelClosed;
use ibverbs::rdmacm::{ConnectionControl, Listener, Route};
use ibverbs::{Channel, PreparedChannel, PreparedQueuePair, QueuePair};

use crate::device::{self, NAME};
use crate::vm::PATIENCE;

/// Both sides are on the device.
pub(crate) static DEVICES: LazyLock<[&'static str; 2]> = LazyLock::new(|| [*NAME; 2]);

/// An end of a connection, with the control that keeps it connected.
pub(crate) struct Link<Q> {
    end: Q,
    control: Option<ConnectionControl>,
}

impl<Q> Deref for Link<Q> {
    type Target = Q;

    fn deref(&self) -> &Q {
        &self.end
    }
}

impl<Q> DerefMut for Link<Q> {
    fn deref_mut(&mut self) -> &mut Q {
        &mut self.end
    }
}

/// The first address of this machine, of those that `script/check-device` lists, that the connection manager finds on
/// this device.
pub(crate) fn address() -> Option<IpAddr> {
    let all = std::env::var("IBVERBS_CHECK_ADDRESSES").unwrap_or_default();
    all.split_whitespace().map(|address| address.parse().expect("an address")).find(|&address| {
        let route = Route::resolve(SocketAddr::new(address, 1), Instant::now() + PATIENCE);
        route.is_ok_and(|route| route.device_name().as_deref() == Some(*NAME))
    })
}

/// Connects `one` to `two`, which are two channels or two queue pairs.
macro_rules! connect {
    ($one:ident, $two:ident) => {{
        if device::is_iwarp(&device::open()) {
            let address =
                address().expect("the connection manager finds an address of this device");
            let mut listener = Listener::bind(SocketAddr::new(address, 0)).unwrap();
            let route =
                Route::resolve(listener.local_addr().unwrap(), Instant::now() + PATIENCE).unwrap();
            let one = route.prepare($one).unwrap_or_else(|(.., error)| panic!("{error}"));
            let one = one.start(b"").unwrap();
            let request = listener.next_until(Instant::now() + PATIENCE).unwrap();
            let two = request.prepare($two).unwrap_or_else(|(.., error)| panic!("{error}"));
            let two = two.start(b"").unwrap();
            let ends = (
                one.finish(Instant::now() + PATIENCE).unwrap(),
                two.finish(Instant::now() + PATIENCE).unwrap(),
            );
            let [one, two] = [ends.0.into_parts(), ends.1.into_parts()];
            let link = |(end, control)| Link { end, control: Some(control) };
            (link(one), link(two))
        } else {
            let (to_one, to_two) = ($one.endpoint(), $two.endpoint());
            let ends = ($one.handshake(to_two).unwrap(), $two.handshake(to_one).unwrap());
            (Link { end: ends.0, control: None }, Link { end: ends.1, control: None })
        }
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
    drop(link.control);
    let prepared = link.end.reset().unwrap();
    crate::vm::time_wait();
    prepared
}

pub(crate) fn close(link: Link<Channel<'_>>) -> ChannelClosed {
    let _control = link.control;
    link.end.close().unwrap()
}

/// Other programs may use the device, so only this process counts. librdmacm keeps a device open.
pub(crate) fn nothing_is_left() {
    let left = ibverbs::device::process_resources().unwrap();
    assert_eq!((left.queue_pairs, left.shared_receive_queues), (0, 0), "{left:?}");
    assert_eq!((left.completion_queues, left.memory_regions), (0, 0), "{left:?}");
    assert_eq!((left.protection_domains, left.contexts), (0, 0), "{left:?}");
}
