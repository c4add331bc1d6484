//! Connecting over TCP and other streams, on a device of software: either both sides are ready, or both
//! get an error; also with peers that violate the protocol.

mod hostile;
#[path = "../support/rig.rs"]
mod rig;
#[path = "../support/software.rs"]
mod software;
mod steps;
mod streams;
mod tcp;

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::tcp::ExchangeError;
use ibverbs::{Channel, Inline, MemoryRegion};
use rig::{Rig, error, listener, recorded, soon, tcp_pair};

impl Rig {
    /// Sends one message each way.
    fn talk(&self, one: &mut Channel<'_>, two: &mut Channel<'_>) {
        self.tell(one, two);
        self.tell(two, one);
    }

    fn tell(&self, from: &mut Channel<'_>, to: &mut Channel<'_>) {
        let mut inbox = MemoryRegion::<u8>::new(&self.domain, 16).unwrap();
        thread::scope(|threads| {
            threads.spawn(|| from.until(soon()).send(Inline(b"hello")).unwrap());
            let done = to.until(soon()).receive(inbox.slice_mut(..).unwrap()).unwrap();
            assert_eq!(done.byte_len(), 5);
        });
        assert_eq!(&inbox[..5], b"hello");
    }
}

/// Short, for what cannot succeed.
fn at_once() -> Instant {
    Instant::now() + Duration::from_millis(100)
}
