use std::future::poll_fn;
use std::io;
use std::os::fd::BorrowedFd;
use std::task::{Context, Poll};

use super::error::{ExchangeError, ExchangeStage, MAX_PRIVATE_DATA};
use super::exchange::{Exchange, Exchanged, Role};
use crate::base::StateError;
use crate::connect::handshake::{Handshake, Step};

/// A stream of bytes of an asynchronous runtime, over which two sides can connect.
///
/// With feature `tokio`, tokio's `TcpStream` and `UnixStream` are such streams.
#[cfg_attr(
    not(feature = "tokio"),
    diagnostic::on_unimplemented(
        note = "tokio's `TcpStream` and `UnixStream` are such streams with feature `tokio` of `ibverbs-bundled`"
    )
)]
pub trait AsyncStream {
    /// Reads some bytes, and returns their number: 0 at the end of the stream. If there are none, has the task woken
    /// when there are.
    ///
    /// # Errors
    ///
    /// Those of the stream.
    fn poll_read(&mut self, cx: &mut Context<'_>, bytes: &mut [u8]) -> Poll<io::Result<usize>>;

    /// Writes some of the bytes, and returns their number. If there is no room, has the task woken when
    /// there is.
    ///
    /// # Errors
    ///
    /// Those of the stream.
    fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>>;

    /// The socket below, if there is one. A channel keeps a duplicate, so the socket stays open as long as the channel;
    /// by its end the [reactor](crate::Reactor) notices that the peer is gone.
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// The peer then sees the end of the stream when the caller closes it.
fn give_up_socket<P: Handshake>(
    mut failed: StateError<P, ExchangeError>,
) -> StateError<P, ExchangeError> {
    let _ = failed.object.set_socket(None);
    failed
}

pub(crate) async fn exchange_over<P: Handshake>(
    mut prepared: P,
    role: Role,
    stream: &mut (impl AsyncStream + Send),
    private_data: &[u8],
) -> Exchanged<P> {
    // Without one, that of an earlier connection goes too.
    let keeps = match prepared.set_socket(stream.socket()) {
        Ok(keeps) => keeps,
        Err(error) => return Err(StateError::new(prepared, error.into())),
    };
    let exchange = Exchange::new(prepared, role, private_data).map_err(give_up_socket)?;
    let mut exchange = exchange.keeping(keeps);
    loop {
        exchange = match exchange.advance().map_err(give_up_socket)? {
            Step::Done(connected) => return Ok(connected),
            Step::Pending(pending) => pending,
        };
        let done = match exchange.to_send() {
            [] => {
                let mut bytes = vec![0; exchange.wants().min(MAX_PRIVATE_DATA)];
                let read = poll_fn(|cx| stream.poll_read(cx, &mut bytes)).await;
                // A wrong number from the stream must not lead out of bounds.
                read.map(|read| exchange.received(&bytes[..read.min(bytes.len())]))
            }
            bytes => {
                let sent = poll_fn(|cx| stream.poll_write(cx, bytes)).await;
                sent.inspect(|&sent| exchange.sent(sent))
            }
        };
        let error = match done {
            Ok(0) => ExchangeError::Closed(ExchangeStage::Addresses),
            Ok(_) => continue,
            Err(error) => ExchangeError::from_stream(error),
        };
        return Err(give_up_socket(exchange.fail(error)));
    }
}

#[cfg(feature = "tokio")]
mod on_tokio {
    use std::os::fd::AsFd;
    use std::pin::Pin;

    use super::*;

    /// Implements the stream by tokio's non-blocking calls.
    macro_rules! streams {
        ($($stream:ty),+) => {$(
            impl AsyncStream for $stream {
                fn poll_read(
                    &mut self,
                    cx: &mut Context<'_>,
                    bytes: &mut [u8],
                ) -> Poll<io::Result<usize>> {
                    let mut buffer = tokio::io::ReadBuf::new(bytes);
                    tokio::io::AsyncRead::poll_read(Pin::new(self), cx, &mut buffer)
                        .map_ok(|()| buffer.filled().len())
                }

                fn poll_write(
                    &mut self,
                    cx: &mut Context<'_>,
                    bytes: &[u8],
                ) -> Poll<io::Result<usize>> {
                    tokio::io::AsyncWrite::poll_write(Pin::new(self), cx, bytes)
                }

                fn socket(&self) -> Option<BorrowedFd<'_>> {
                    Some(self.as_fd())
                }
            }
        )+};
    }

    streams!(tokio::net::TcpStream, tokio::net::UnixStream);
}
