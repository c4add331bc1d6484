//! The messages between the two processes over TCP, separate from the measured traffic.
//!
//! Each message is its length and then its bytes; the first one of each side begins with a magic
//! number. Any other client gets a refusal with a reason, and allocates no memory here.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ibverbs::{QueuePairEndpoint, RemoteMemoryRegion};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::plan::Plan;

/// The longest silence of the peer, and the longest time for a completion.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Identifies this program and the format of its messages.
const MAGIC: &[u8; 8] = b"IBVPERF1";
/// The longest message in bytes: a plan of all sizes, or the addresses of all queue pairs.
const MAX_LENGTH: u32 = 64 << 10;

/// The first message of a client.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) plan: Plan,
    /// The active MTU of its port in bytes.
    pub(crate) mtu: u32,
}

/// The information that each side needs from the other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Address {
    pub(crate) endpoints: Vec<QueuePairEndpoint>,
    pub(crate) memory: Vec<RemoteMemoryRegion>,
}

/// A message of the server.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer<T> {
    Yes(T),
    /// Refusal, with the reason.
    No(String),
}

/// The next request of a client.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Step {
    /// Carry out this many iterations on each queue pair with messages of this size in bytes.
    Run { size: u32, iterations: u64 },
    /// The iterations are complete.
    Done,
    /// End of the session.
    Finish,
}

/// An error of the connection.
#[derive(Debug)]
pub(crate) enum WireError {
    Io(io::Error),
    /// The first bytes are not those of this program.
    Stranger([u8; 8]),
    TooLong(u32),
    Garbage(String),
    /// The peer's error message.
    Refused(String),
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                write!(f, "the peer has gone")
            }
            Self::Io(error)
                if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) =>
            {
                write!(f, "the peer was silent for {PATIENCE:?}")
            }
            Self::Io(error) => write!(f, "the connection to the peer: {error}"),
            Self::Stranger(bytes) => write!(
                f,
                "the peer is not an ibverbs-perf of this version: it begins with \"{}\"",
                bytes.escape_ascii()
            ),
            Self::TooLong(length) => {
                write!(f, "the peer announced a message of {length} bytes, more than {MAX_LENGTH}")
            }
            Self::Garbage(why) => write!(f, "what the peer sent makes no sense: {why}"),
            Self::Refused(why) => write!(f, "the peer refused: {why}"),
        }
    }
}

impl std::error::Error for WireError {}

impl From<io::Error> for WireError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// The connection to the peer.
#[derive(Debug)]
pub(crate) struct Wire(TcpStream);

impl Wire {
    /// Waits for the client, or connects to the server.
    pub(crate) fn connect(host: Option<&str>, port: u16) -> Result<Self, String> {
        let stream = match host {
            Some(host) => TcpStream::connect((host, port))
                .map_err(|error| format!("cannot connect to {host}:{port}: {error}"))?,
            None => {
                let any: [SocketAddr; 2] =
                    [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()];
                let listener = TcpListener::bind(any.as_slice())
                    .map_err(|error| format!("cannot listen on TCP port {port}: {error}"))?;
                listener.accept().map_err(|error| format!("cannot accept: {error}"))?.0
            }
        };
        let ready = |stream: &TcpStream| {
            stream.set_nodelay(true)?;
            stream.set_write_timeout(Some(PATIENCE))?;
            stream.set_read_timeout(Some(PATIENCE))
        };
        ready(&stream).map_err(|error| format!("cannot set up the connection: {error}"))?;
        Ok(Self(stream))
    }

    /// Sends the magic number.
    pub(crate) fn introduce(&mut self) -> Result<(), WireError> {
        Ok(self.0.write_all(MAGIC)?)
    }

    /// Checks the peer's magic number.
    pub(crate) fn meet(&mut self) -> Result<(), WireError> {
        let mut magic = [0; 8];
        self.0.read_exact(&mut magic)?;
        if &magic == MAGIC { Ok(()) } else { Err(WireError::Stranger(magic)) }
    }

    pub(crate) fn send(&mut self, message: &impl Serialize) -> Result<(), WireError> {
        let bytes = bincode::serde::encode_to_vec(message, bincode::config::standard())
            .map_err(|error| WireError::Garbage(error.to_string()))?;
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        if length > MAX_LENGTH {
            return Err(WireError::TooLong(length));
        }
        // Length and message go as one segment: the peer would otherwise wait for two.
        Ok(self.0.write_all(&[&length.to_be_bytes(), bytes.as_slice()].concat())?)
    }

    pub(crate) fn receive<T: DeserializeOwned>(&mut self) -> Result<T, WireError> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length)?;
        let length = u32::from_be_bytes(length);
        if length > MAX_LENGTH {
            return Err(WireError::TooLong(length));
        }
        let mut bytes = vec![0; length as usize];
        self.0.read_exact(&mut bytes)?;
        // Lengths within the message are not trusted either.
        let config = bincode::config::standard().with_limit::<{ MAX_LENGTH as usize * 8 }>();
        match bincode::serde::decode_from_slice(&bytes, config) {
            Ok((message, used)) if used == bytes.len() => Ok(message),
            Ok(_) => Err(WireError::Garbage("it goes on after its end".to_owned())),
            Err(error) => Err(WireError::Garbage(error.to_string())),
        }
    }

    /// Receives the client's next request, without a time limit while the client measures.
    pub(crate) fn step(&mut self) -> Result<Step, WireError> {
        self.0.set_read_timeout(None)?;
        let step = self.receive();
        self.0.set_read_timeout(Some(PATIENCE))?;
        step
    }

    /// Receives an answer; a refusal is an error.
    pub(crate) fn answer<T: DeserializeOwned>(&mut self) -> Result<T, WireError> {
        match self.receive()? {
            Answer::Yes(message) => Ok(message),
            Answer::No(why) => Err(WireError::Refused(why)),
        }
    }

    /// Sends a refusal, and ignores errors of sending it.
    pub(crate) fn refuse(&mut self, why: &dyn fmt::Display) {
        let _ = self.send(&Answer::<()>::No(why.to_string()));
        // Closing with unread bytes would reset the connection and discard the answer. So read the remaining
        // bytes for a moment.
        let _ = self.0.shutdown(std::net::Shutdown::Write);
        let _ = self.0.set_read_timeout(Some(Duration::from_millis(100)));
        let (mut rest, until) = ([0; 4096], Instant::now() + Duration::from_secs(1));
        while Instant::now() < until && self.0.read(&mut rest).is_ok_and(|count| count > 0) {}
    }

    /// The peer's message about a failure here, if it arrives soon.
    pub(crate) fn last_words(&mut self) -> Option<String> {
        self.0.set_read_timeout(Some(Duration::from_millis(500))).ok()?;
        match self.answer::<u64>() {
            Err(WireError::Refused(why)) => Some(why),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::plan;

    fn pair() -> (Wire, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Wire(listener.accept().unwrap().0), theirs)
    }

    fn told(bytes: &[u8]) -> Wire {
        let (ours, mut theirs) = pair();
        theirs.write_all(bytes).unwrap();
        ours
    }

    #[test]
    fn messages_arrive_as_they_were() {
        let (mut ours, theirs) = pair();
        let mut theirs = Wire(theirs);
        ours.introduce().unwrap();
        ours.send(&Hello { plan: plan(), mtu: 1024 }).unwrap();
        ours.send(&Answer::<u64>::No("no".to_owned())).unwrap();
        drop(ours);
        theirs.meet().unwrap();
        let hello: Hello = theirs.receive().unwrap();
        assert_eq!((hello.plan, hello.mtu), (plan(), 1024));
        let refused = theirs.answer::<u64>().unwrap_err();
        assert_eq!(refused.to_string(), "the peer refused: no");
        assert_eq!(theirs.step().unwrap_err().to_string(), "the peer has gone");
    }

    #[test]
    fn strangers_are_told_from_peers() {
        let error = told(b"GET / HTTP/1.1\r\n\r\n").meet().unwrap_err();
        assert!(matches!(error, WireError::Stranger(_)), "{error}");
        assert!(error.to_string().contains("it begins with \"GET / HT\""), "{error}");
        let error = told(b"IBV").meet().unwrap_err();
        assert!(matches!(error, WireError::Io(_)), "{error}");
        let error = told(&[0xff; 100]).receive::<Hello>().unwrap_err();
        assert!(matches!(error, WireError::TooLong(u32::MAX)), "{error}");
        // A list of sizes that claims to be longer than the message, and one that has more.
        let error = told(&[0, 0, 0, 8, 0, 0, 0, 0, 0xfd, 0xff, 0xff, 0xff]).receive::<Hello>();
        assert!(matches!(error, Err(WireError::Garbage(_))));
        let error = told(&[0, 0, 0, 2, 5, 5]).receive::<u8>();
        assert!(matches!(error, Err(WireError::Garbage(_))));
    }

    #[test]
    fn a_refusal_is_heard_by_who_still_talks() {
        let (mut ours, theirs) = pair();
        let mut theirs = Wire(theirs);
        theirs.send(&Step::Done).unwrap();
        ours.refuse(&"not today");
        drop(ours);
        assert_eq!(theirs.last_words().as_deref(), Some("not today"));
    }
}
