//! The exchanges of rdma-core's ping-pongs and of perftest over TCP.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ibverbs::{Gid, QueuePairEndpoint, settings::PacketSequenceNumber};

use crate::KERNEL;
use crate::memory::Result;
use crate::two_machines::PATIENCE;

/// A message of both kinds of programs, with the null at its end.
const DONE: &[u8; 5] = b"done\0";

/// A TCP connection to the peer's program.
pub(crate) struct Exchange {
    stream: TcpStream,
    client: bool,
}

/// The address of a queue pair, which both kinds of programs exchange.
#[derive(Clone, Copy)]
pub(crate) struct Address {
    pub(crate) number: u32,
    pub(crate) psn: PacketSequenceNumber,
    pub(crate) gid: Gid,
}

/// The address of a queue pair and the keys of its memory, which perftest exchanges.
#[derive(Clone, Copy)]
pub(crate) struct Keys {
    pub(crate) address: Address,
    /// The number of reads and atomics under way.
    pub(crate) reads: u8,
    pub(crate) rkey: u32,
    pub(crate) start: u64,
}

impl Exchange {
    /// Connects to a program on the other machine that may not listen yet. TCP is always over IPv4, which is all that
    /// some of the programs listen to; the family of a case is that of the GIDs.
    pub(crate) fn connect(port: u16) -> Result<Self> {
        let start = Instant::now();
        loop {
            match TcpStream::connect((KERNEL[0], port)) {
                Ok(stream) => return Self::new(stream, true),
                Err(error) if start.elapsed() > PATIENCE / 2 => return Err(error.into()),
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Waits for a program that connects to our listener, for a limited time.
    pub(crate) fn accept(listener: &TcpListener) -> Result<Self> {
        listener.set_nonblocking(true)?;
        let start = Instant::now();
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    return Self::new(stream, false);
                }
                Err(error) if start.elapsed() > PATIENCE / 2 => return Err(error.into()),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    fn new(stream: TcpStream, client: bool) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE / 2))?;
        Ok(Self { stream, client })
    }

    pub(crate) fn is_client(&self) -> bool {
        self.client
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.stream.write_all(bytes)?)
    }

    pub(crate) fn receive(&mut self, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Sends a message and receives one of the same length. The client speaks first.
    pub(crate) fn swap(&mut self, ours: &[u8]) -> Result<Vec<u8>> {
        if self.client {
            self.send(ours)?;
            return self.receive(ours.len());
        }
        let theirs = self.receive(ours.len())?;
        self.send(ours)?;
        Ok(theirs)
    }

    pub(crate) fn say_done(&mut self) -> Result<()> {
        self.send(DONE)
    }

    pub(crate) fn hear_done(&mut self) -> Result<()> {
        let heard = self.receive(DONE.len())?;
        if heard == DONE { Ok(()) } else { Err(format!("{heard:?} instead of done").into()) }
    }
}

fn hexadecimal(text: &str) -> Result<u32> {
    Ok(u32::from_str_radix(text, 16)?)
}

/// The bytes of a text, with nulls behind it.
fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    bytes
}

fn text(bytes: &[u8]) -> Result<&str> {
    Ok(std::str::from_utf8(bytes)?.trim_end_matches('\0'))
}

impl Address {
    /// `sizeof "0000:000000:000000:00000000000000000000000000000000"`, with the null at its end.
    pub(crate) const LENGTH: usize = 4 + 1 + 6 + 1 + 6 + 1 + 32 + 1;

    pub(crate) fn endpoint(&self) -> Result<QueuePairEndpoint> {
        Ok(QueuePairEndpoint::new(self.number, 0, self.gid)?)
    }

    /// Writes the address as `ibv_*_pingpong` does: LID, number, first packet, GID.
    pub(crate) fn to_ping_pong(self) -> [u8; Self::LENGTH] {
        let gid = u128::from_be_bytes(self.gid.to_bytes());
        padded(&format!("0000:{:06x}:{:06x}:{gid:032x}", self.number, self.psn.value()))
    }

    pub(crate) fn from_ping_pong(bytes: &[u8]) -> Result<Self> {
        let fields: Vec<&str> = text(bytes)?.split(':').collect();
        let &[_, number, psn, gid] = fields.as_slice() else {
            return Err(format!("{fields:?} is not the address of a ping-pong").into());
        };
        Ok(Self {
            number: hexadecimal(number)?,
            psn: PacketSequenceNumber::new(hexadecimal(psn)?)?,
            gid: Gid::from_bytes(u128::from_str_radix(gid, 16)?.to_be_bytes()),
        })
    }
}

impl Keys {
    const LENGTH: usize = 108;

    /// Writes the keys as perftest does with a GID index: LID, reads, number, first packet, key, address of
    /// the memory, the bytes of the GID, number of the shared receive queue.
    pub(crate) fn to_perftest(self) -> [u8; Self::LENGTH] {
        let Self { address: Address { number, psn, gid }, reads, rkey, start } = self;
        let gid: String = gid.to_bytes().iter().map(|byte| format!("{byte:02x}:")).collect();
        let psn = psn.value();
        padded(&format!(
            "0000:{reads:04x}:{number:06x}:{psn:06x}:{rkey:08x}:{start:016x}:{gid}{:08x}:",
            0
        ))
    }

    pub(crate) fn from_perftest(bytes: &[u8]) -> Result<Self> {
        let fields: Vec<&str> = text(bytes)?.split(':').collect();
        let [_, reads, number, psn, rkey, start, gid @ ..] = fields.as_slice() else {
            return Err(format!("{fields:?} are not perftest's").into());
        };
        let gid: Vec<u8> =
            gid.iter().take(16).map(|byte| Ok(hexadecimal(byte)? as u8)).collect::<Result<_>>()?;
        Ok(Self {
            address: Address {
                number: hexadecimal(number)?,
                psn: PacketSequenceNumber::new(hexadecimal(psn)?)?,
                gid: Gid::from_bytes(gid.try_into().map_err(|_| "a GID has 16 bytes")?),
            },
            reads: u8::try_from(hexadecimal(reads)?)?,
            rkey: hexadecimal(rkey)?,
            start: u64::from_str_radix(start, 16)?,
        })
    }
}
