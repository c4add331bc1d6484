use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use super::error::{ExchangeError, ExchangeStage};
use super::exchange::{Exchange, Exchanged, Role};
use crate::base::panics::catch;
use crate::connect::handshake::{Handshake, Step};

/// A stream over which two sides can connect: its waits can have a deadline.
///
/// [`TcpStream`] and [`UnixStream`] are such streams. Others, such as TLS over TCP, pass the deadline to the socket below:
///
/// ```
/// use std::io::{Read, Result, Write};
/// use std::net::TcpStream;
/// use std::time::Instant;
/// use ibverbs::tcp::DeadlineStream;
///
/// /// Holds the TLS stream of another crate.
/// struct Tls(TcpStream);
/// # impl Read for Tls {
/// #     fn read(&mut self, bytes: &mut [u8]) -> Result<usize> { self.0.read(bytes) }
/// # }
/// # impl Write for Tls {
/// #     fn write(&mut self, bytes: &[u8]) -> Result<usize> { self.0.write(bytes) }
/// #     fn flush(&mut self) -> Result<()> { Ok(()) }
/// # }
///
/// impl DeadlineStream for Tls {
///     fn set_deadline(&mut self, deadline: Option<Instant>) -> Result<()> {
///         self.0.set_deadline(deadline)
///     }
/// }
/// ```
pub trait DeadlineStream: Read + Write {
    /// Makes `read`, `write` and `flush` wait only until `deadline`, then fail with
    /// [`TimedOut`](io::ErrorKind::TimedOut) or [`WouldBlock`](io::ErrorKind::WouldBlock). `None` removes the deadline.
    ///
    /// It is called before each of them, so a time limit for a single call is enough. If a stream ignores it, `connect`
    /// and `accept` wait longer.
    ///
    /// # Errors
    ///
    /// [`TimedOut`](io::ErrorKind::TimedOut) if the deadline has passed, or the stream's own error.
    fn set_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()>;
}

/// For one call.
fn timeout(deadline: Option<Instant>) -> io::Result<Option<Duration>> {
    let Some(deadline) = deadline else { return Ok(None) };
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
        // The kernel counts microseconds; 0 would mean for ever.
        left => Ok(Some(left.max(Duration::from_millis(1)))),
    }
}

impl DeadlineStream for TcpStream {
    fn set_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let timeout = timeout(deadline)?;
        self.set_read_timeout(timeout)?;
        self.set_write_timeout(timeout)
    }
}

impl DeadlineStream for UnixStream {
    fn set_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let timeout = timeout(deadline)?;
        self.set_read_timeout(timeout)?;
        self.set_write_timeout(timeout)
    }
}

impl<S: DeadlineStream + ?Sized> DeadlineStream for &mut S {
    fn set_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        (**self).set_deadline(deadline)
    }
}

impl<S: DeadlineStream + ?Sized> DeadlineStream for Box<S> {
    fn set_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        (**self).set_deadline(deadline)
    }
}

struct Timed<'s, S: DeadlineStream> {
    stream: &'s mut S,
    deadline: Instant,
}

impl<S: DeadlineStream> Timed<'_, S> {
    /// Calls until the stream does something or the deadline passes.
    fn once<R>(&mut self, mut call: impl FnMut(&mut S) -> io::Result<R>) -> io::Result<R> {
        use io::ErrorKind as Kind;

        loop {
            let limited = self.stream.set_deadline(Some(self.deadline));
            let done = limited.and_then(|()| call(self.stream));
            let left = self.deadline.saturating_duration_since(Instant::now());
            match done.as_ref().map_err(io::Error::kind) {
                Err(Kind::Interrupted) if left.is_zero() => return Err(Kind::TimedOut.into()),
                Err(Kind::Interrupted) => {}
                // The stream does not block, or its clock is coarser.
                Err(Kind::TimedOut | Kind::WouldBlock) if !left.is_zero() => {
                    thread::sleep(left.min(Duration::from_millis(1)));
                }
                _ => return done,
            }
        }
    }
}

impl<S: DeadlineStream> Read for Timed<'_, S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.once(|stream| stream.read(bytes))
    }
}

impl<S: DeadlineStream> Write for Timed<'_, S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.once(|stream| stream.write(bytes))?;
        if written > 0 {
            self.flush()?;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.once(|stream| stream.flush())
    }
}

impl<S: DeadlineStream> Drop for Timed<'_, S> {
    /// The caller's next use of the stream reports a failure.
    fn drop(&mut self) {
        // The program's code, and its error's drop, may panic during a panic.
        let _ = catch(|| drop(self.stream.set_deadline(None)));
    }
}

pub(crate) fn exchange<P: Handshake, S: DeadlineStream + ?Sized>(
    prepared: P,
    role: Role,
    mut stream: &mut S,
    private_data: &[u8],
    deadline: Instant,
) -> Exchanged<P> {
    let mut stream = Timed { stream: &mut stream, deadline };
    match Exchange::new(prepared, role, private_data)?.step(&mut stream)? {
        Step::Done(connected) => Ok(connected),
        // The stream would block, and the deadline has passed.
        Step::Pending(exchange) => {
            Err(exchange.fail(ExchangeError::TimedOut(ExchangeStage::Addresses)))
        }
    }
}
