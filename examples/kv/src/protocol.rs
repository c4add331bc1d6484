//! The messages. On the TCP stream, the server first says whether there is [`ROOM`] for one more client; then both sides
//! connect. A message has a kind, the length of the key, the key, and a body.

use std::io::Write;

use ibverbs::RemoteMemoryRegion;

use crate::Result;

/// The first byte on the stream: the client is to connect.
pub const ROOM: u8 = 1;
/// The first byte on the stream: there are as many clients as the server serves.
pub const FULL: u8 = 0;

/// The longest key.
pub const MAX_KEY: usize = 255;
/// The longest value within a message.
pub const MAX_SMALL: usize = 4096;
/// The longest value.
pub const MAX_VALUE: usize = 1 << 20;
/// The longest message.
pub const MAX_MESSAGE: usize = 2 + MAX_KEY + MAX_SMALL;

/// The value that a message carries or refers to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Body<'a> {
    /// The key has no value.
    Nothing,
    /// The value.
    Small(&'a [u8]),
    /// The memory where the value can be read, until the next message.
    Large(RemoteMemoryRegion),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message<'a> {
    Get {
        key: &'a [u8],
    },
    Put {
        key: &'a [u8],
        value: Body<'a>,
    },
    /// The answer to both.
    Answer(Body<'a>),
    /// The request was refused, for this reason.
    Refused(&'a str),
}

const GET: u8 = 0;
const PUT: u8 = 16;
const ANSWER: u8 = 32;
const REFUSED: u8 = 48;

impl Message<'_> {
    /// Writes the message.
    ///
    /// # Errors
    ///
    /// The key or the value is too long, or there is no room for the message.
    pub fn write(&self, out: &mut impl Write) -> Result<()> {
        let region;
        let (kind, key, body): (u8, &[u8], &[u8]) = match self {
            Self::Get { key } => (GET, key, &[]),
            Self::Refused(reason) => (REFUSED, &[], reason.as_bytes()),
            Self::Put { value, .. } | Self::Answer(value) => {
                let (kind, key): (u8, &[u8]) = match self {
                    Self::Put { key, .. } => (PUT, key),
                    _ => (ANSWER, &[]),
                };
                match value {
                    Body::Nothing => (kind, key, &[]),
                    Body::Small(value) => (kind + 1, key, value),
                    Body::Large(remote) => {
                        region = remote.to_bytes();
                        (kind + 2, key, &region[..])
                    }
                }
            }
        };
        if key.len() > MAX_KEY || body.len() > MAX_SMALL {
            return Err("the key or the value is too long".into());
        }
        out.write_all(&[kind, key.len() as u8])?;
        out.write_all(key)?;
        Ok(out.write_all(body)?)
    }
}

/// Reads a message. It comes from the network: anything may be wrong with it.
///
/// # Errors
///
/// It is not a message.
pub fn read(bytes: &[u8]) -> Result<Message<'_>> {
    let [kind, key_length, rest @ ..] = bytes else { return Err("a message is too short".into()) };
    let Some((key, body)) = rest.split_at_checked(usize::from(*key_length)) else {
        return Err("a message is too short for its key".into());
    };
    let value = match kind & 15 {
        0 => Body::Nothing,
        1 => Body::Small(body),
        2 => Body::Large(RemoteMemoryRegion::from_bytes(body)?),
        _ => return Err("a message has an unknown kind of value".into()),
    };
    match kind & !15 {
        GET => Ok(Message::Get { key }),
        PUT => Ok(Message::Put { key, value }),
        ANSWER => Ok(Message::Answer(value)),
        REFUSED => Ok(Message::Refused(str::from_utf8(body)?)),
        _ => Err("a message is of an unknown kind".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let value = vec![7; MAX_SMALL];
        let key = [b'k'; MAX_KEY];
        let mut bytes = Vec::new();
        for message in [
            Message::Get { key: b"" },
            Message::Get { key: &key },
            Message::Put { key: &key, value: Body::Small(&value) },
            Message::Put { key: b"x", value: Body::Nothing },
            Message::Answer(Body::Small(b"")),
            Message::Refused("no"),
        ] {
            bytes.clear();
            message.write(&mut bytes).unwrap();
            assert!(bytes.len() <= MAX_MESSAGE);
            assert_eq!(read(&bytes).unwrap(), message);
        }
        let too_long = [0; MAX_SMALL + 1];
        assert!(Message::Answer(Body::Small(&too_long)).write(&mut bytes).is_err());
    }

    #[test]
    fn nonsense_is_refused() {
        for bytes in [&[][..], &[0], &[0, 1], &[3, 0], &[64, 0], &[2, 0, 1, 2], &[48, 0, 255]] {
            assert!(read(bytes).is_err(), "{bytes:?}");
        }
    }
}
