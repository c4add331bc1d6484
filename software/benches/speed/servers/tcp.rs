//! The servers over TCP.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Builder;

use super::super::{Result, SMALL};

/// Sockets, and those that are readable.
pub(super) struct Sockets {
    epoll: OwnedFd,
    streams: Vec<TcpStream>,
    readable: Vec<libc::epoll_event>,
}

impl Sockets {
    pub(super) fn new(streams: Vec<TcpStream>) -> Result<Self> {
        // SAFETY: it makes a descriptor, and nothing else.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if epoll < 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        // SAFETY: it is new, and nobody else's.
        let epoll = unsafe { OwnedFd::from_raw_fd(epoll) };
        for (number, stream) in streams.iter().enumerate() {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: number as u64 };
            let (epoll, stream) = (epoll.as_raw_fd(), stream.as_fd().as_raw_fd());
            // SAFETY: both are open, and the event is only read.
            if unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, stream, &raw mut event) } != 0 {
                return Err(std::io::Error::last_os_error().into());
            }
        }
        let readable = Vec::with_capacity(streams.len());
        Ok(Self { epoll, streams, readable })
    }

    /// Sleeps until messages have come, and gives the socket of each to this function, with the message.
    pub(super) fn receive(
        &mut self,
        mut each: impl FnMut(&mut TcpStream, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let (epoll, room) = (self.epoll.as_raw_fd(), self.readable.capacity() as i32);
        // SAFETY: the list has that much room, and as many are initialised as the call says.
        unsafe {
            let count = libc::epoll_wait(epoll, self.readable.as_mut_ptr(), room, -1);
            self.readable.set_len(usize::try_from(count).map_err(|_| "epoll_wait")?);
        }
        for event in &self.readable {
            let (mut message, stream) = ([0; SMALL], &mut self.streams[event.u64 as usize]);
            match stream.read(&mut message) {
                // Messages are so small that none comes in parts.
                Ok(SMALL) => each(stream, &message)?,
                Ok(length) => return Err(format!("{length} bytes").into()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    pub(super) fn send_to_all(&mut self) -> Result<()> {
        self.streams.iter_mut().try_for_each(|stream| Ok(stream.write_all(&[0; SMALL])?))
    }
}

pub(super) fn epoll(listener: &TcpListener, connections: usize) -> Result<()> {
    let accepted = (0..connections).map(|_| listener.accept().map(|(stream, _)| stream));
    let mut sockets = Sockets::new(accepted.collect::<std::io::Result<_>>()?)?;
    loop {
        sockets.receive(|stream, message| Ok(stream.write_all(message)?))?;
    }
}

pub(super) fn tokio(listener: TcpListener) -> Result<()> {
    listener.set_nonblocking(true)?;
    Builder::new_current_thread().enable_all().build()?.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        loop {
            let (mut stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            tokio::spawn(async move {
                let mut message = [0; SMALL];
                while stream.read_exact(&mut message).await.is_ok() {
                    if stream.write_all(&message).await.is_err() {
                        break;
                    }
                }
            });
        }
    })
}
