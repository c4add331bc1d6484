//! Streams that are wrong about what they did, and panic.

use std::io::{self, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use std::{error, fmt};

use ibverbs::future::Locked;
use ibverbs::tcp::{AsyncStream, DeadlineStream};
use ibverbs::{Channel, PooledBuffer, ProtectionDomain, Reactor};

use crate::by_hand::poll;
use crate::software::Software;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    ReadsMore,
    WritesMore,
    ReadsNonsense,
    PanicsInRead,
    PanicsInWrite,
    PanicsInDeadline,
    /// The error of the stream panics where it is dropped.
    ThrowsBombs,
}

const MOODS: [Mood; 7] = [
    Mood::ReadsMore,
    Mood::WritesMore,
    Mood::ReadsNonsense,
    Mood::PanicsInRead,
    Mood::PanicsInWrite,
    Mood::PanicsInDeadline,
    Mood::ThrowsBombs,
];

/// A payload, or an error, that panics when it is dropped.
#[derive(Debug)]
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("dropped");
    }
}

impl fmt::Display for Bomb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a bomb")
    }
}

impl error::Error for Bomb {}

struct Hostile(Mood);

impl Hostile {
    fn read_some(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self.0 {
            Mood::ReadsMore => Ok(bytes.len() + 1),
            Mood::PanicsInRead => panic_any("read"),
            Mood::ReadsNonsense => {
                bytes.fill(0xff);
                Ok(bytes.len())
            }
            _ => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn write_some(&self, bytes: &[u8]) -> io::Result<usize> {
        match self.0 {
            Mood::WritesMore => Ok(usize::MAX),
            Mood::PanicsInWrite => panic_any("write"),
            _ => Ok(bytes.len()),
        }
    }
}

impl Read for Hostile {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.read_some(bytes)
    }
}

impl Write for Hostile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_some(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl DeadlineStream for Hostile {
    fn set_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        match (self.0, deadline) {
            // Also while a read of it has panicked.
            (Mood::PanicsInRead | Mood::PanicsInWrite | Mood::PanicsInDeadline, None) => {
                panic_any("deadline")
            }
            (Mood::ThrowsBombs, None) => Err(io::Error::other(Bomb)),
            _ => Ok(()),
        }
    }
}

impl AsyncStream for Hostile {
    fn poll_read(&mut self, _: &mut Context<'_>, bytes: &mut [u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(self.read_some(bytes))
    }

    fn poll_write(&mut self, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(self.write_some(bytes))
    }
}

/// Every one fails, or panics with its own panic, and the channel can be connected afterwards.
#[test]
fn a_hostile_stream_ends_an_exchange_and_nothing_else() {
    let device = Software::new();
    let domain = Arc::new(ProtectionDomain::new(Arc::new(device.context())).unwrap());
    for mood in MOODS {
        let prepared = Channel::builder(&domain).build().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let connected = catch_unwind(AssertUnwindSafe(|| {
            prepared.connect_over(&mut Hostile(mood), b"", deadline).map(drop).map_err(drop)
        }));
        match (mood, connected) {
            (Mood::PanicsInRead, Err(thrown)) => assert_eq!(thrown.downcast_ref(), Some(&"read")),
            (Mood::PanicsInWrite, Err(thrown)) => assert_eq!(thrown.downcast_ref(), Some(&"write")),
            (_, Ok(Err(()))) => {}
            (_, other) => panic!("{mood:?}: {other:?}"),
        }
    }
    drop(domain);
    device.assert_clean();
}

#[test]
fn a_hostile_asynchronous_stream_ends_an_exchange_and_nothing_else() {
    let device = Software::new();
    let domain = Arc::new(ProtectionDomain::new(Arc::new(device.context())).unwrap());
    let reactor = Reactor::<Locked<PooledBuffer>>::new(domain.context_parent(), 64).unwrap();
    for mood in MOODS {
        let prepared =
            reactor.prepare(Channel::builder(&domain).max_send_wr(2).max_recv_wr(2)).unwrap();
        let mut stream = Hostile(mood);
        let ended = catch_unwind(AssertUnwindSafe(|| {
            poll(&mut Box::pin(prepared.connect(&mut stream, b"")))
                .expect("it does not wait")
                .map(drop)
                .map_err(drop)
        }));
        assert_eq!(
            ended.is_err(),
            matches!(mood, Mood::PanicsInRead | Mood::PanicsInWrite),
            "{mood:?}"
        );
        assert!(ended.is_err() || ended.unwrap().is_err(), "{mood:?}");
    }
    // None has kept its place.
    assert_eq!(reactor.capacity(), (64, 64));
    drop((reactor, domain));
    device.assert_clean();
}
