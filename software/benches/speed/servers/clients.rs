//! The clients: each sends its next message when it has the answer to the last one.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use ibverbs::{ChannelId, Loop, PooledBuffer, ReceiveWorkRequest, SendWorkRequest};

use super::super::{Result, SMALL};
use super::PATIENCE;
use super::device::{Side, entries, settings};
use super::tcp::Sockets;

const RECEIVED: u64 = 0;
const SENT: u64 = 1;

pub(super) enum Clients {
    Tcp { sockets: Sockets, connections: usize },
    Device(Box<OnDevice>),
}

pub(super) struct OnDevice {
    clients: Loop<'static, PooledBuffer>,
    /// Each at the index of its channel.
    connections: Vec<Connection>,
    _side: Side,
}

struct Connection {
    channel: ChannelId,
    /// Its buffer for messages, unless one is under way.
    message: Option<PooledBuffer>,
    is_answered: bool,
}

impl Clients {
    pub(super) fn connect(over_tcp: bool, port: u16, connections: usize) -> Result<Self> {
        let address = ("127.0.0.1", port);
        if over_tcp {
            let streams = (0..connections).map(|_| TcpStream::connect(address));
            let sockets = Sockets::new(streams.collect::<std::io::Result<_>>()?)?;
            return Ok(Self::Tcp { sockets, connections });
        }
        let side = Side::new(connections)?;
        let mut clients = Loop::new(&side.context, entries(connections))?;
        let mut all = Vec::new();
        for _ in 0..connections {
            let prepared = settings(clients.create_channel(&side.domain)).build()?;
            let connected = prepared.connect(address, b"", Instant::now() + PATIENCE);
            let channel = clients.add(connected.map_err(|e| e.error)?.0).map_err(|e| e.error)?;
            for _ in 0..2 {
                clients
                    .post(channel, ReceiveWorkRequest::new(side.buffer()?), RECEIVED)
                    .map_err(|e| e.error)?;
            }
            let mut message = side.buffer()?;
            message.extend_from_slice(&[0; SMALL])?;
            assert_eq!(channel.index(), all.len(), "channels are numbered");
            all.push(Connection { channel, message: Some(message), is_answered: true });
        }
        Ok(Self::Device(Box::new(OnDevice { clients, connections: all, _side: side })))
    }

    /// Sends messages for this time. Returns how many were answered.
    pub(super) fn ask(&mut self, time: Duration) -> Result<u64> {
        let end = Instant::now() + time;
        match self {
            Self::Tcp { sockets, connections } => {
                let (mut answered, mut waiting) = (0, *connections);
                sockets.send_to_all()?;
                while waiting > 0 {
                    let goes_on = Instant::now() < end;
                    sockets.receive(|stream, message| {
                        answered += 1;
                        if goes_on {
                            std::io::Write::write_all(stream, message)?;
                        } else {
                            waiting -= 1;
                        }
                        Ok(())
                    })?;
                }
                Ok(answered)
            }
            Self::Device(device) => device.ask(end),
        }
    }
}

impl OnDevice {
    fn ask(&mut self, end: Instant) -> Result<u64> {
        let Self { clients, connections, .. } = self;
        let mut answered = 0;
        for connection in connections.iter_mut() {
            connection.send(clients)?;
        }
        let mut waiting = connections.len();
        while waiting > 0 {
            let ended = clients.wait_ended()?;
            ended.result()?;
            let connection = &mut connections[ended.channel.index()];
            if ended.token == RECEIVED {
                answered += 1;
                connection.is_answered = true;
                let again = ReceiveWorkRequest::new(ended.buffer);
                clients.post(ended.channel, again, RECEIVED).map_err(|e| e.error)?;
            } else {
                connection.message = Some(ended.buffer);
            }
            if connection.is_answered && connection.message.is_some() {
                if Instant::now() < end {
                    connection.send(clients)?;
                } else {
                    waiting -= 1;
                }
            }
        }
        Ok(answered)
    }
}

impl Connection {
    fn send(&mut self, clients: &mut Loop<'static, PooledBuffer>) -> Result<()> {
        let message = self.message.take().ok_or("it is under way")?;
        self.is_answered = false;
        clients.post(self.channel, SendWorkRequest::new(message), SENT).map_err(|e| e.error)?;
        Ok(())
    }
}
