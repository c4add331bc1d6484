//! Connecting over streams other than TCP.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Condvar;

use ibverbs::tcp::DeadlineStream;

use super::*;

/// Connects over two ends of a stream, and sends a message each way.
fn connects_over<S: DeadlineStream + Send>(rig: &Rig, mut one: S, mut two: S) -> (S, S) {
    let (here, there) = (rig.prepared(), rig.prepared());
    let (mut here, mut there) = thread::scope(|threads| {
        let client = threads.spawn(|| here.connect_over(&mut one, &[1; 8000], soon()));
        let (there, told) = there.accept_over(&mut two, &[2; 8000], soon()).unwrap();
        assert_eq!(told, [1; 8000]);
        let (here, told) = client.join().unwrap().unwrap();
        assert_eq!(told, [2; 8000]);
        (here, there)
    });
    rig.talk(&mut here, &mut there);
    // The stream stays with the caller.
    assert!(here.stream().is_none() && here.peer_is_gone().is_err());
    (one, two)
}

#[test]
fn unix_sockets_and_tcp_streams_wait_as_before_afterwards() {
    let rig = Rig::new();
    let (one, two) = UnixStream::pair().unwrap();
    let (mut one, mut two) = connects_over(&rig, one, two);
    assert_eq!((one.read_timeout().unwrap(), one.write_timeout().unwrap()), (None, None));
    // Bytes that follow on the stream are the program's own.
    one.write_all(b"next").unwrap();
    let mut next = [0; 4];
    two.read_exact(&mut next).unwrap();
    assert_eq!(&next, b"next");
    drop((one, two));
    let (one, two) = tcp_pair();
    drop(connects_over(&rig, one, two));
    // Streams that do not block work as well.
    let (one, two) = tcp_pair();
    one.set_nonblocking(true).unwrap();
    drop(connects_over(&rig, one, two));
    rig.assert_nothing_left();
}

#[test]
fn references_and_boxes_of_streams_are_streams() {
    let rig = Rig::new();
    let (mut one, mut two) = UnixStream::pair().unwrap();
    connects_over(&rig, &mut one, &mut two);
    let boxed = |stream| Box::new(stream) as Box<dyn DeadlineStream + Send>;
    drop(connects_over(&rig, boxed(one), boxed(two)));
    rig.assert_nothing_left();
}

/// The smallest pipe there can be: each call moves one byte.
#[derive(Default)]
struct Pipe {
    bytes: Mutex<(VecDeque<u8>, bool)>,
    changed: Condvar,
}

struct Narrow {
    from: Arc<Pipe>,
    to: Arc<Pipe>,
    deadline: Option<Instant>,
    calls: usize,
}

impl Narrow {
    fn pair() -> (Self, Self) {
        let (up, down) = (Arc::new(Pipe::default()), Arc::new(Pipe::default()));
        let end = |from: &Arc<Pipe>, to: &Arc<Pipe>| Self {
            from: from.clone(),
            to: to.clone(),
            deadline: None,
            calls: 0,
        };
        (end(&up, &down), end(&down, &up))
    }

    /// Waits until `is_ready` or the deadline; interrupts every third call.
    fn wait(
        &mut self,
        reads: bool,
        is_ready: impl Fn(&VecDeque<u8>) -> bool,
        act: impl FnOnce(&mut VecDeque<u8>) -> usize,
    ) -> io::Result<usize> {
        self.calls += 1;
        if self.calls.is_multiple_of(3) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let pipe = if reads { &self.from } else { &self.to };
        let mut state = pipe.bytes.lock().unwrap();
        while !is_ready(&state.0) {
            if state.1 {
                return Ok(0);
            }
            let left = self.deadline.map_or(Duration::MAX, |at| at - Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            state = pipe.changed.wait_timeout(state, left.min(Duration::from_secs(60))).unwrap().0;
        }
        let done = act(&mut state.0);
        pipe.changed.notify_all();
        Ok(done)
    }
}

impl Drop for Narrow {
    fn drop(&mut self) {
        for pipe in [&self.from, &self.to] {
            pipe.bytes.lock().unwrap().1 = true;
            pipe.changed.notify_all();
        }
    }
}

impl Read for Narrow {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.wait(
            true,
            |pipe| !pipe.is_empty(),
            |pipe| {
                bytes[0] = pipe.pop_front().unwrap();
                1
            },
        )
    }
}

impl Write for Narrow {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.wait(false, VecDeque::is_empty, |pipe| {
            pipe.push_back(bytes[0]);
            1
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl DeadlineStream for Narrow {
    fn set_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        self.deadline = deadline;
        Ok(())
    }
}

#[test]
fn a_stream_without_room_is_enough() {
    let rig = Rig::new();
    let (one, two) = Narrow::pair();
    let (one, two) = connects_over(&rig, one, two);
    assert!(one.deadline.is_none(), "it waits without a limit again");
    drop(one);
    // A handshake that the peer does not answer ends by its deadline.
    let mut two = two;
    let reason = error(rig.prepared().accept_over(&mut two, b"", at_once()));
    assert!(matches!(reason, ExchangeError::Closed(_)), "{reason}");
    rig.assert_nothing_left();
}

/// A stream whose deadline cannot be set.
struct WithoutDeadline(UnixStream);

impl Read for WithoutDeadline {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for WithoutDeadline {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl DeadlineStream for WithoutDeadline {
    fn set_deadline(&mut self, _: Option<Instant>) -> io::Result<()> {
        Err(io::Error::other("no"))
    }
}

/// A stream that cannot have a deadline gets an error before anything is sent.
#[test]
fn an_error_of_the_stream_is_handed_on() {
    let rig = Rig::new();
    let (one, mut two) = UnixStream::pair().unwrap();
    let mut broken = WithoutDeadline(one);
    let reason = error(rig.prepared().connect_over(&mut broken, b"", soon()));
    assert!(matches!(&reason, ExchangeError::Io(error) if error.to_string() == "no"), "{reason}");
    drop(broken);
    assert_eq!(two.read(&mut [0]).unwrap(), 0, "nothing was sent");
    drop(two);
    rig.assert_nothing_left();
}

/// Neither its calls nor, unless it `has_deadline`, setting its deadline do anything but report a signal.
struct Interrupted {
    has_deadline: bool,
}

impl Read for Interrupted {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::ErrorKind::Interrupted.into())
    }
}

impl Write for Interrupted {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::Interrupted.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl DeadlineStream for Interrupted {
    fn set_deadline(&mut self, _: Option<Instant>) -> io::Result<()> {
        if self.has_deadline { Ok(()) } else { Err(io::ErrorKind::Interrupted.into()) }
    }
}

#[test]
fn a_stream_that_is_always_interrupted_ends_by_its_deadline() {
    let rig = Rig::new();
    for has_deadline in [true, false] {
        let mut stream = Interrupted { has_deadline };
        for reason in [
            error(rig.prepared().connect_over(&mut stream, b"", at_once())),
            error(rig.prepared().accept_over(&mut stream, b"", at_once())),
        ] {
            assert!(matches!(reason, ExchangeError::TimedOut(_)), "{reason}");
        }
    }
    rig.assert_nothing_left();
}
