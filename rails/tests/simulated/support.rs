//! Two sides with several devices each, on a network in virtual time.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ibverbs_rails::{ControlStream, Event, PeerId, Rails, RailsBuilder};
use ibverbs_software::{Device, Network};

use super::frames::Frame;

/// A stream without a socket, so that a run repeats itself.
pub(crate) struct Pipe {
    pub(crate) input: Queue,
    pub(crate) output: Queue,
}

pub(crate) type Queue = Arc<Mutex<Line>>;

/// One direction of a stream.
#[derive(Default)]
pub(crate) struct Line {
    pub(crate) bytes: VecDeque<u8>,
    pub(crate) is_closed: bool,
    /// All that was ever said.
    pub(crate) said: Vec<u8>,
}

impl Line {
    /// Puts a frame behind what waits to be read.
    pub(crate) fn say(&mut self, frame: &Frame) {
        self.bytes.extend(frame.to_bytes());
    }
}

impl Pipe {
    pub(crate) fn pair() -> [Self; 2] {
        let [one, two] = [Queue::default(), Queue::default()];
        [Self { input: one.clone(), output: two.clone() }, Self { input: two, output: one }]
    }
}

impl Read for Pipe {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let mut input = self.input.lock().unwrap();
        match input.bytes.read(to)? {
            0 if !input.is_closed => Err(ErrorKind::WouldBlock.into()),
            length => Ok(length),
        }
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut output = self.output.lock().unwrap();
        output.said.extend(bytes);
        output.bytes.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.output.lock().unwrap().is_closed = true;
        self.input.lock().unwrap().is_closed = true;
    }
}

impl ControlStream for Pipe {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A stream that can be waited for.
pub(crate) struct Socket(UnixStream);

impl Socket {
    /// Both ends.
    pub(crate) fn pair() -> (Self, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        [&near, &far].into_iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
        (Self(near), far)
    }
}

impl Read for Socket {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.0.read(to)
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl ControlStream for Socket {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

pub(crate) struct World {
    pub(crate) network: Network,
    pub(crate) devices: [Vec<Device>; 2],
    pub(crate) sides: [Rails; 2],
    pub(crate) peers: [PeerId; 2],
    pub(crate) events: [Vec<Event>; 2],
    began: Instant,
    /// How much time passes before the sides look again.
    pub(crate) step: Duration,
}

/// No two devices of a process have the same name.
static DEVICES: AtomicU32 = AtomicU32::new(0);

impl World {
    /// Makes two connected sides with `rails` rails.
    pub(crate) fn new(rails: usize, network: Network) -> Self {
        Self::with(rails, network, |builder| builder)
    }

    pub(crate) fn with(
        rails: usize,
        network: Network,
        settings: impl Fn(RailsBuilder) -> RailsBuilder,
    ) -> Self {
        let mut world = Self::unconnected([rails, rails], network, settings);
        world.connect();
        world
    }

    pub(crate) fn unconnected(
        rails: [usize; 2],
        network: Network,
        settings: impl Fn(RailsBuilder) -> RailsBuilder,
    ) -> Self {
        let devices = [1, 2].map(|side| {
            let one = |rail| {
                let number = DEVICES.fetch_add(1, Ordering::Relaxed);
                let address = format!("10.0.{rail}.{side}").parse().unwrap();
                let builder = Device::builder().network(&network).address(address);
                let device = builder.name(format!("rail{number}")).build().unwrap();
                device.register();
                device
            };
            (0..rails[side - 1]).map(one).collect::<Vec<_>>()
        });
        let sides = devices.each_ref().map(|devices| {
            let builder = settings(Rails::builder());
            let builder = devices.iter().fold(builder, |builder, it| builder.device(it.name()));
            builder.build().unwrap()
        });
        let (began, step) = (Instant::now(), Duration::from_micros(5));
        Self {
            network,
            devices,
            sides,
            peers: [PeerId::default(); 2],
            events: Default::default(),
            began,
            step,
        }
    }

    /// Returns what each side reads of the other.
    pub(crate) fn connect(&mut self) -> [Queue; 2] {
        let [one, two] = Pipe::pair();
        let said = [one.input.clone(), two.input.clone()];
        let [a, b] = &mut self.sides;
        self.peers = [a.connect_over(one).unwrap(), b.accept_over(two).unwrap()];
        self.until(Duration::from_secs(1), |world| {
            world
                .events
                .iter()
                .all(|events| events.iter().any(|event| matches!(event, Event::Connected(_))))
        });
        said
    }

    pub(crate) fn now(&self) -> Instant {
        self.began + self.network.now()
    }

    /// A little time passes, and both sides see to it.
    pub(crate) fn step(&mut self) {
        self.network.advance(self.step);
        let now = self.now();
        for (side, events) in self.sides.iter_mut().zip(&mut self.events) {
            side.turn(now);
            events.extend(std::iter::from_fn(|| side.next_event()));
        }
    }

    /// Steps until it holds, and returns the time that this took.
    #[track_caller]
    pub(crate) fn until(&mut self, limit: Duration, holds: impl Fn(&Self) -> bool) -> Duration {
        let start = self.network.now();
        while !holds(self) {
            self.step();
            let taken = self.network.now() - start;
            assert!(taken < limit, "after {taken:?}: {:#?}", self.events);
        }
        self.network.now() - start
    }

    /// Whether a transfer of the first side has ended, and how.
    pub(crate) fn ended(&self) -> Vec<bool> {
        let ended = self.events[0].iter().filter_map(|event| match event {
            Event::Ended { result, .. } => Some(result.is_ok()),
            _ => None,
        });
        ended.collect()
    }

    /// The messages that a side has got.
    pub(crate) fn messages(&self, side: usize) -> Vec<&[u8]> {
        let messages = self.events[side].iter().filter_map(|event| match event {
            Event::Message { bytes, .. } => Some(bytes.as_slice()),
            _ => None,
        });
        messages.collect()
    }

    pub(crate) fn notified(&self) -> Vec<u16> {
        let tags = self.events[1].iter().filter_map(|event| match event {
            Event::Notified { tag, .. } => Some(*tag),
            _ => None,
        });
        tags.collect()
    }
}
