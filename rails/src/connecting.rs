//! How peers are found: over TCP, or a stream of the program's.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use crate::control::{Control, ControlStream, Frame, VERSION};
use crate::error::{RailsError, Result};
use crate::event::{Event, PeerId};
use crate::pair::pause;
use crate::peer::Peer;
use crate::rails::Rails;

/// A peer that cannot be reached is tried again after this time, then after twice as long, and so on.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A peer whose machine has not answered over TCP for this time is gone.
const SILENCE: Duration = Duration::from_secs(60);

impl Rails {
    /// Connects to a peer that [accepts](Self::accept) at this TCP address, and returns when each pair of devices was
    /// tried.
    ///
    /// A peer that does not accept yet, or has too much to do, is tried again until the deadline, with pauses that grow
    /// and differ. While the TCP connection is made, the other peers wait: if no answer comes from the address, that is until the
    /// deadline. [`connect_over`](Self::connect_over) takes a stream that is made elsewhere.
    ///
    /// The peer is gone when its machine has not answered over TCP for a minute.
    ///
    /// # Errors
    ///
    ///  - [`Control`](RailsError::Control): the address is none, or until the deadline no TCP connection was made that
    ///    lasted.
    ///  - [`NoPair`](RailsError::NoPair): no device of ours can reach one of the peer's.
    ///  - [`AllRailsDown`](RailsError::AllRailsDown): until the deadline, none of those that should does.
    ///  - [`Refused`](RailsError::Refused): the peer speaks another version.
    ///  - [`Verbs`](RailsError::Verbs): those of [`allocate`](Self::allocate), for messages.
    ///  - [`TimedOut`](RailsError::TimedOut): the deadline has passed.
    pub fn connect(&mut self, address: impl ToSocketAddrs, deadline: Instant) -> Result<PeerId> {
        let addresses: Vec<_> = address.to_socket_addrs()?.collect();
        if addresses.is_empty() {
            return Err(io::Error::from(ErrorKind::AddrNotAvailable).into());
        }
        let mut longest = FIRST_PAUSE;
        let mut failure = None;
        for attempt in 0_u32.. {
            let now = Instant::now();
            if now >= deadline {
                break;
            }
            let address = addresses[attempt as usize % addresses.len()];
            match self.try_connect(address, deadline) {
                Err(error @ (RailsError::Control(_) | RailsError::AllRailsDown(_))) => {
                    failure = Some(error);
                }
                Err(RailsError::TimedOut) => break,
                result => return result,
            }
            let random = self.random((attempt, now));
            let until = deadline.min(Instant::now() + pause(longest, random));
            longest = (2 * longest).min(LONGEST_PAUSE);
            // The other peers do not wait for it.
            let woken = self.wait_until(until, None, |_| None::<()>);
            if let Err(error @ RailsError::Control(_)) = woken {
                return Err(error);
            }
        }
        Err(failure.unwrap_or(RailsError::TimedOut))
    }

    fn try_connect(&mut self, address: SocketAddr, deadline: Instant) -> Result<PeerId> {
        let time = deadline.saturating_duration_since(Instant::now());
        let stream = TcpStream::connect_timeout(&address, time.max(Duration::from_millis(1)))?;
        let peer = self.connect_over(nonblocking(stream)?)?;
        match self.wait_until(deadline, None, |rails| rails.take_connected(&[peer])) {
            Ok((_, connected)) => connected,
            Err(error) => {
                self.remove(peer);
                Err(error)
            }
        }
    }

    /// Waits for a peer that [connects](Self::connect). Peers that come at the same time are worked with at the same
    /// time; the next call returns the next of them.
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect), of one peer: a server calls it again. A peer that connects and says nothing is an
    /// error ([`Control`](RailsError::Control)) after 10 s.
    pub fn accept(&mut self, listener: &TcpListener, deadline: Instant) -> Result<PeerId> {
        // A peer that gives up makes `accept` wait for the next one, hence the mode.
        listener.set_nonblocking(true)?;
        self.wait_until(deadline, Some(listener.as_fd()), |rails| {
            // If no file is left for a stream, those that connect already go first.
            let mut failed = None;
            // Takes the streams that have come by now, as far as there is room.
            for _ in rails.accepting.len()..rails.most_accepting {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let peer = nonblocking(stream).map_err(RailsError::from);
                        match peer.and_then(|stream| rails.accept_over(stream)) {
                            Ok(peer) => rails.accepting.push(peer),
                            Err(error) => return Some(Err(error)),
                        }
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                    Err(error) => {
                        failed = Some(Err(error.into()));
                        break;
                    }
                }
            }
            let accepting = std::mem::take(&mut rails.accepting);
            let connected = rails.take_connected(&accepting);
            rails.accepting = accepting;
            let Some((peer, result)) = connected else { return failed };
            rails.accepting.retain(|&other| other != peer);
            Some(result)
        })?
    }

    /// Begins to [`connect`](Self::connect) over a stream of the program's, without waiting:
    /// [`Event::Connected`] or [`Event::Disconnected`] follows. That the peer's machine is gone is for the stream to notice: a
    /// program switches the keep-alive of its TCP streams on.
    ///
    /// # Errors
    ///
    ///  - [`Control`](RailsError::Control): the stream cannot be waited for.
    pub fn connect_over(&mut self, stream: impl ControlStream + 'static) -> Result<PeerId> {
        let peer = self.add_peer(stream, true)?;
        let rails = self.devices.iter().map(|device| device.facts.clone()).collect();
        let queue_pairs = self.queue_pairs;
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.control.send(&Frame::Hello { version: VERSION, queue_pairs, rails });
        }
        // The other side does not wait for this one's first turn.
        self.speak(peer, Instant::now());
        Ok(peer)
    }

    /// Begins to [`accept`](Self::accept) over a stream of the program's, without waiting:
    /// [`Event::Connected`] or [`Event::Disconnected`] follows. See [`connect_over`](Self::connect_over).
    ///
    /// # Errors
    ///
    ///  - [`Control`](RailsError::Control): the stream cannot be waited for.
    pub fn accept_over(&mut self, stream: impl ControlStream + 'static) -> Result<PeerId> {
        self.add_peer(stream, false)
    }

    fn add_peer(&mut self, stream: impl ControlStream + 'static, opens: bool) -> Result<PeerId> {
        let peer = self.peers.insert(Peer::new(Control::new(Box::new(stream)), opens));
        self.changes += 1;
        match self.watch(peer) {
            Ok(()) => Ok(peer),
            Err(error) => {
                self.peers.remove(peer);
                Err(error.into())
            }
        }
    }

    /// One of the peers that is connected now, or the reason why one is not.
    pub(crate) fn take_connected(&mut self, peers: &[PeerId]) -> Option<(PeerId, Result<PeerId>)> {
        let event = self.take_event(|event| match event {
            Event::Connected(peer) | Event::Disconnected { peer, .. } => peers.contains(peer),
            _ => false,
        });
        match event? {
            Event::Connected(peer) => Some((peer, Ok(peer))),
            Event::Disconnected { peer, error } => Some((peer, Err(error))),
            _ => None,
        }
    }
}

fn nonblocking(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    // The kernel asks a machine that has been silent for 15 s, every 10 s, and gives up after the minute.
    sockopt::set_tcp_user_timeout(&stream, SILENCE.as_millis() as u32)?;
    sockopt::set_tcp_keepidle(&stream, SILENCE / 4)?;
    sockopt::set_tcp_keepintvl(&stream, SILENCE / 6)?;
    sockopt::set_socket_keepalive(&stream, true)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_is_gone_is_noticed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = nonblocking(stream).unwrap();
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        let first = sockopt::tcp_keepidle(&stream).unwrap();
        let all = first + 4 * sockopt::tcp_keepintvl(&stream).unwrap();
        assert!(all <= SILENCE, "{all:?}");
        assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), 60_000);
    }
}
