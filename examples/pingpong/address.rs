//! The exchange of addresses over TCP, in the format of `ibv_rc_pingpong`.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};

use ibverbs::{Gid, QueuePairEndpoint, settings::PacketSequenceNumber};

use super::options::Options;
use super::{PATIENCE, Result};

/// The client's message when it has the server's address: `"done"` with its null.
const DONE: &[u8; 5] = b"done\0";

/// The contents of an address, which is sent as text: LID, queue pair number, packet number, GID.
pub(crate) struct Address {
    pub(crate) endpoint: QueuePairEndpoint,
    pub(crate) psn: PacketSequenceNumber,
}

impl Address {
    /// `sizeof "0000:000000:000000:00000000000000000000000000000000"`, with the null at its end.
    const LENGTH: usize = 4 + 1 + 6 + 1 + 6 + 1 + 32 + 1;

    fn to_wire(&self) -> [u8; Self::LENGTH] {
        let (endpoint, psn) = (self.endpoint, self.psn.value());
        let gid = u128::from_be_bytes(endpoint.gid().to_bytes());
        let text = format!("{:04x}:{:06x}:{psn:06x}:{gid:032x}", endpoint.lid(), endpoint.num());
        let mut wire = [0; Self::LENGTH];
        wire[..text.len()].copy_from_slice(text.as_bytes());
        wire
    }

    fn from_wire(wire: &[u8; Self::LENGTH]) -> Result<Self> {
        let text = std::str::from_utf8(wire)?.trim_end_matches('\0');
        let fields: Vec<&str> = text.split(':').collect();
        let &[lid, num, psn, gid] = fields.as_slice() else {
            return Err(format!("'{text}' is not an address of a ping-pong").into());
        };
        let gid = Gid::from_bytes(u128::from_str_radix(gid, 16)?.to_be_bytes());
        let (lid, num) = (u16::from_str_radix(lid, 16)?, u32::from_str_radix(num, 16)?);
        Ok(Self {
            endpoint: QueuePairEndpoint::new(num, lid, gid)?,
            psn: PacketSequenceNumber::new(u32::from_str_radix(psn, 16)?)?,
        })
    }

    pub(crate) fn print(&self, whose: &str) {
        let Self { endpoint: e, psn } = self;
        println!(
            "  {whose} LID {:#06x}, QPN {:#08x}, PSN {:#08x}, GID {}",
            e.lid(),
            e.num(),
            psn.value(),
            e.gid()
        );
    }
}

/// Exchanges addresses over TCP. A server also gets the connection: it calls [`answer`] only when it is
/// ready to receive. The client sends first, so no message arrives too early.
pub(crate) fn meet(local: &Address, options: &Options) -> Result<(Address, Option<TcpStream>)> {
    let port = options.tcp_port;
    let mut wire = [0; Address::LENGTH];
    let Some(host) = &options.server else {
        let any: [SocketAddr; 2] =
            [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()];
        let listener = TcpListener::bind(any.as_slice())
            .map_err(|error| format!("cannot listen on TCP port {port}: {error}"))?;
        let mut stream = listener.accept()?.0;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.read_exact(&mut wire)?;
        return Ok((Address::from_wire(&wire)?, Some(stream)));
    };
    let mut stream = TcpStream::connect((host.as_str(), port))
        .map_err(|error| format!("cannot connect to {host}:{port}: {error}"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(&local.to_wire())?;
    stream.read_exact(&mut wire)?;
    stream.write_all(DONE)?;
    Ok((Address::from_wire(&wire)?, None))
}

/// The server's part of the exchange, once the server is ready.
pub(crate) fn answer(mut client: TcpStream, local: &Address) -> Result<()> {
    client.write_all(&local.to_wire())?;
    let mut done = [0; DONE.len()];
    client.read_exact(&mut done)?;
    Ok(())
}
