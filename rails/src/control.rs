//! The stream by which the two sides agree: frames of a length and a value.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use ibverbs::{QueuePairEndpoint, RemoteMemoryRegion};
use serde::{Deserialize, Serialize};

use crate::memory::RemoteRailMemory;
use crate::pairing::Facts;
use crate::panics::caught;

/// The version of the frames. Sides of different versions do not connect.
pub(crate) const VERSION: u32 = 3;
/// A longer frame is not from such a peer.
const MAX_FRAME: usize = 128 << 10;
/// Bytes that a peer may leave unread before it counts as gone.
const MAX_UNREAD: usize = 4 * MAX_FRAME;
/// A peer that leaves more than [`MAX_FRAME`] unread is not listened to, and counts as gone if it reads none of it in this time.
const UNREAD: Duration = Duration::from_secs(10);
/// The bytes of a name, which Linux limits to 64.
pub(crate) const LONGEST_NAME: usize = 64;
/// The bytes of a reason.
const LONGEST_REASON: usize = 256;
/// The most addresses that a side tells, of all its devices.
pub(crate) const MAX_ADDRESSES: usize = 4096;

/// Carries a connection's control messages in order and without losses: a [`TcpStream`], or something of the
/// program's own.
///
/// `read` and `write` never wait: they fail with [`WouldBlock`](io::ErrorKind::WouldBlock), and 0 bytes read mean that
/// the peer has closed. A stream that panics costs its own peer alone.
pub trait ControlStream: Read + Write + Send {
    /// The descriptor that becomes readable when there is something to read. `None`: the program itself knows when to call
    /// [`Rails::turn`](crate::Rails::turn).
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}

impl ControlStream for TcpStream {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }
}

/// A frame of the control stream. A pair has another epoch each time that it is opened.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Frame {
    /// First, from the side that connects.
    Hello {
        version: u32,
        queue_pairs: u8,
        rails: Vec<Facts>,
    },
    /// The answer: which of its rails work with which of ours.
    Pairs {
        rails: Vec<Facts>,
        pairs: Vec<(u8, u8)>,
    },
    /// Instead of an answer.
    Refused {
        version: u32,
        reason: String,
    },
    /// Asks to open the pair. The side that connected sends it.
    Open {
        pair: u8,
        epoch: u32,
        ends: Ends,
    },
    Opened {
        pair: u8,
        epoch: u32,
        ends: Ends,
    },
    CannotOpen {
        pair: u8,
        epoch: u32,
        reason: String,
    },
    /// Says that data has gone over the pair. The side that connected sends it.
    Up {
        pair: u8,
        epoch: u32,
    },
    /// All pairs were tried once.
    Ready,
    /// The pair has failed. What had arrived by it is counted.
    Down {
        pair: u8,
        epoch: u32,
        reason: String,
    },
    /// Answers [`Down`](Self::Down).
    DownSeen {
        pair: u8,
        epoch: u32,
    },
    /// The slots for messages to this side, and the longest message that it takes.
    Inbox {
        memory: RemoteRailMemory,
        longest: u32,
    },
    /// The program has taken all messages below this number.
    Taken {
        below: u64,
    },
    /// All notified transfers of this direction below this number are complete.
    Confirmed {
        below: u64,
    },
    /// No more pieces of this notified transfer come: it has failed.
    Abandoned {
        number: u64,
    },
}

/// One side's queue pairs, and a few bytes that the other may read.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ends {
    pub(crate) endpoints: Vec<QueuePairEndpoint>,
    pub(crate) probe: RemoteMemoryRegion,
}

pub(crate) struct Control {
    /// `None` only while it is dropped.
    stream: Option<Box<dyn ControlStream>>,
    input: Vec<u8>,
    output: Vec<u8>,
    /// Since when it is full, and the stream has taken nothing.
    full_since: Option<Instant>,
}

impl Control {
    pub(crate) fn new(stream: Box<dyn ControlStream>) -> Self {
        Self { stream: Some(stream), input: Vec::new(), output: Vec::new(), full_since: None }
    }

    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let mut descriptor = None;
        caught(|| descriptor = self.stream.as_ref().and_then(|stream| stream.descriptor()));
        descriptor
    }

    /// Whether it waits for room in the stream.
    pub(crate) fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// Whether so much waits that the peer is not listened to.
    pub(crate) fn is_full(&self) -> bool {
        self.output.len() > MAX_FRAME
    }

    /// When the peer counts as gone, unless it reads something before.
    pub(crate) fn full_until(&self) -> Option<Instant> {
        Some(self.full_since? + UNREAD)
    }

    /// Puts a frame behind those that wait to be written. None is longer than [`MAX_FRAME`]: names, addresses and reasons
    /// are cut.
    pub(crate) fn send(&mut self, frame: &Frame) {
        let start = self.output.len();
        self.output.extend([0; 4]);
        let config = bincode::config::standard();
        // Writing to memory does not fail, and every part of a frame can be serialised.
        let written = bincode::serde::encode_into_std_write(frame, &mut self.output, config);
        match written.ok().and_then(|length| u32::try_from(length).ok()) {
            Some(length) => self.output[start..start + 4].copy_from_slice(&length.to_be_bytes()),
            None => {
                debug_assert!(false, "{frame:?}");
                self.output.truncate(start);
            }
        }
    }

    /// Writes what the stream takes.
    ///
    /// # Errors
    ///
    /// Those of the stream; or the peer has not read for long.
    pub(crate) fn flush(&mut self, now: Instant) -> io::Result<()> {
        while !self.output.is_empty() {
            let Self { stream: Some(stream), output, .. } = self else { break };
            match unless_it_panics(|| stream.write(output)) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => {
                    self.output.drain(..written);
                    self.full_since = None;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        if self.is_full() {
            self.full_since.get_or_insert(now);
        }
        if self.output.len() > MAX_UNREAD || self.full_until().is_some_and(|until| until <= now) {
            let text = "the peer does not read what it is told";
            return Err(io::Error::new(ErrorKind::TimedOut, text));
        }
        Ok(())
    }

    /// The next frame, if all of it is there. Each frame, and each attempt to read, takes one of `steps`: if none is left,
    /// there may be more. A peer that does not read what it is told is not listened to.
    pub(crate) fn receive(&mut self, steps: &mut u32) -> io::Result<Option<Frame>> {
        if self.is_full() {
            return Ok(None);
        }
        loop {
            let Some(left) = steps.checked_sub(1) else { return Ok(None) };
            *steps = left;
            if let Some(frame) = self.parse()? {
                return Ok(Some(frame));
            }
            let mut bytes = [0; 4096];
            let Some(stream) = &mut self.stream else { return Ok(None) };
            match unless_it_panics(|| stream.read(&mut bytes)) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(length) => self.input.extend(&bytes[..length]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    fn parse(&mut self) -> io::Result<Option<Frame>> {
        let Some((length, rest)) = self.input.split_first_chunk() else { return Ok(None) };
        let length = u32::from_be_bytes(*length) as usize;
        if length > MAX_FRAME {
            return Err(io::Error::new(ErrorKind::InvalidData, "a frame longer than 128 KiB"));
        }
        let Some(bytes) = rest.get(..length) else { return Ok(None) };
        let config = bincode::config::standard().with_limit::<MAX_FRAME>();
        match bincode::serde::decode_from_slice::<Frame, _>(bytes, config) {
            Ok((frame, used)) if used == length => {
                self.input.drain(..4 + length);
                Ok(Some(frame.cut()))
            }
            _ => Err(io::Error::new(ErrorKind::InvalidData, "not a frame of ibverbs-rails")),
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        caught(|| drop(self.stream.take()));
    }
}

/// A stream is code of the program's.
fn unless_it_panics(call: impl FnOnce() -> io::Result<usize>) -> io::Result<usize> {
    let mut result = None;
    caught(|| result = Some(call()));
    result.unwrap_or_else(|| Err(io::Error::other("the program's stream has panicked")))
}

impl Frame {
    /// Cuts what people read, which can be of any length.
    fn cut(mut self) -> Self {
        match &mut self {
            Self::Hello { rails, .. } | Self::Pairs { rails, .. } => {
                rails.iter_mut().for_each(|rail| cut(&mut rail.name, LONGEST_NAME));
            }
            Self::Refused { reason, .. }
            | Self::CannotOpen { reason, .. }
            | Self::Down { reason, .. } => cut_reason(reason),
            _ => {}
        }
        self
    }
}

/// Cuts a reason to a length that can be kept, sent, and given to each transfer.
pub(crate) fn cut_reason(reason: &mut String) {
    cut(reason, LONGEST_REASON);
}

fn cut(text: &mut String, longest: usize) {
    let boundary = (0..=longest.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    text.truncate(boundary.unwrap_or(0));
    text.shrink_to_fit();
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control").field("output", &self.output.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// Gives out a byte at a time, then nothing.
    struct Slow(VecDeque<u8>);

    impl Read for Slow {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            let byte = self.0.pop_front().ok_or(ErrorKind::WouldBlock)?;
            to[0] = byte;
            Ok(1)
        }
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.push_back(bytes[0]);
            Ok(1)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl ControlStream for Slow {
        fn descriptor(&self) -> Option<BorrowedFd<'_>> {
            None
        }
    }

    #[test]
    fn frames_pass_byte_by_byte() {
        let (mut control, now) = (Control::new(Box::new(Slow(VecDeque::new()))), Instant::now());
        for below in 0..3 {
            control.send(&Frame::Confirmed { below });
        }
        control.flush(now).unwrap();
        // Each byte takes a step, and each frame another one.
        let mut steps = 100;
        for expected in 0..3 {
            let frame = control.receive(&mut steps).unwrap();
            assert!(matches!(frame, Some(Frame::Confirmed { below }) if below == expected));
        }
        let left = steps;
        assert!(left > 0 && control.receive(&mut steps).unwrap().is_none());
        assert_eq!(steps, left - 1, "nothing more is there");
        control.send(&Frame::Ready);
        control.flush(now).unwrap();
        let mut steps = 5;
        assert!(control.receive(&mut steps).unwrap().is_none());
        assert_eq!(steps, 0, "there is more");
        assert!(control.receive(&mut 5).unwrap().is_some());
    }

    /// Takes nothing.
    struct Deaf;

    impl Read for Deaf {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(ErrorKind::WouldBlock.into())
        }
    }

    impl Write for Deaf {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(ErrorKind::WouldBlock.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl ControlStream for Deaf {
        fn descriptor(&self) -> Option<BorrowedFd<'_>> {
            None
        }
    }

    #[test]
    fn a_peer_that_reads_nothing_is_gone() {
        let (mut control, now) = (Control::new(Box::new(Deaf)), Instant::now());
        while control.output.len() <= MAX_UNREAD {
            control.flush(now).unwrap();
            control.send(&Frame::Confirmed { below: u64::MAX });
        }
        let error = control.flush(now).unwrap_err();
        assert!(error.to_string().contains("does not read"), "{error}");
    }

    #[test]
    fn the_longest_frames_fit() {
        let rail = Facts {
            name: "x".repeat(LONGEST_NAME),
            link: crate::pairing::Link::Ethernet,
            gids: vec![std::net::Ipv6Addr::from_bits(u128::MAX); MAX_ADDRESSES / 255],
            speed: u32::MAX,
        };
        let rails = vec![rail; 255];
        let pairs = vec![(255, 255); 255];
        for frame in [
            Frame::Hello { version: u32::MAX, queue_pairs: 255, rails: rails.clone() },
            Frame::Pairs { rails, pairs },
        ] {
            let bytes = bincode::serde::encode_to_vec(&frame, bincode::config::standard()).unwrap();
            assert!(bytes.len() <= MAX_FRAME, "{}", bytes.len());
        }
    }

    #[test]
    fn what_is_no_frame_is_an_error() {
        for bytes in [vec![0xff; 8], vec![0, 0, 0, 2, 200, 1], vec![0, 0, 0, 3, 10, 1, 1]] {
            let mut control = Control::new(Box::new(Slow(bytes.into())));
            assert_eq!(control.receive(&mut 100).unwrap_err().kind(), ErrorKind::InvalidData);
        }
    }
}
