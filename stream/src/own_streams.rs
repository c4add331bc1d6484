//! What a program connects over is dropped where its panics are caught.

use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use ::tokio::io::{DuplexStream, duplex};
use ::tokio::task::yield_now;
use ibverbs_software::Device;

use crate::tokio::Stream;
use crate::{Hub, Role};

/// A program's stream whose drop panics.
struct Own(Box<DuplexStream>);

impl Deref for Own {
    type Target = DuplexStream;

    fn deref(&self) -> &DuplexStream {
        &self.0
    }
}

impl DerefMut for Own {
    fn deref_mut(&mut self) -> &mut DuplexStream {
        &mut self.0
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        panic!("the drop of a stream that panics");
    }
}

/// A thread looks at streams while others drop them.
#[test]
fn whoever_looks_at_a_stream_drops_nothing_of_the_programs() {
    let hub = || {
        let context = Device::new().unwrap().open().unwrap();
        Hub::builder(&Arc::new(context)).max_connections(64).build().unwrap()
    };
    let (hub, peers) = (hub(), hub());
    let runtime = ::tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let streams: Vec<_> = runtime.block_on(async {
        let mut streams = Vec::new();
        for _ in 0..64 {
            let (one, two) = duplex(1024);
            let one = Pin::new(Own(Box::new(one)));
            let (one, two) = ::tokio::join!(
                Stream::over(&hub, one, Role::Connects),
                Stream::over(&peers, two, Role::Accepts)
            );
            streams.push(one.unwrap());
            drop(two.unwrap());
        }
        // The tasks that have read them end, and the hub has the last references.
        while ::tokio::runtime::Handle::current().metrics().num_alive_tasks() > 2 {
            yield_now().await;
        }
        streams
    });
    // A stream that has failed goes at once when it is dropped.
    hub.stop();
    let (place, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    thread::scope(|threads| {
        let looks = threads.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                hub.inner.look_at(&[place.load(Ordering::SeqCst)]);
            }
        });
        for stream in streams {
            place.store(stream.index(), Ordering::SeqCst);
            drop(stream);
        }
        is_over.store(true, Ordering::SeqCst);
        looks.join().unwrap();
    });
}
