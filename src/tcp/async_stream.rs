use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll};

use super::error::{ExchangeError, ExchangeStage};
use super::exchange::Messages;

/// A stream of bytes of an asynchronous runtime, over which two sides can connect.
///
/// With feature `tokio`, tokio's `TcpStream` and `UnixStream` are such streams.
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
}

pub(crate) struct Polled<'s, S>(pub(crate) &'s mut S);

/// 0 bytes mean the stream's end.
fn done(result: io::Result<usize>) -> Result<usize, ExchangeError> {
    match result {
        Ok(0) => Err(ExchangeError::Closed(ExchangeStage::Addresses)),
        Ok(done) => Ok(done),
        Err(error) => Err(ExchangeError::from_stream(error)),
    }
}

impl<S: AsyncStream + Send> Messages for Polled<'_, S> {
    async fn read(&mut self, bytes: &mut [u8]) -> Result<(), ExchangeError> {
        let mut left = bytes;
        while !left.is_empty() {
            let read = done(poll_fn(|cx| self.0.poll_read(cx, left)).await)?;
            // A wrong number from the stream must not lead out of bounds.
            left = left.get_mut(read..).unwrap_or_default();
        }
        Ok(())
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<(), ExchangeError> {
        let mut left = bytes;
        while !left.is_empty() {
            let written = done(poll_fn(|cx| self.0.poll_write(cx, left)).await)?;
            left = left.get(written..).unwrap_or_default();
        }
        Ok(())
    }
}

#[cfg(feature = "tokio")]
mod on_tokio {
    use std::pin::Pin;

    use super::*;

    /// By tokio's non-blocking calls.
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
            }
        )+};
    }

    streams!(tokio::net::TcpStream, tokio::net::UnixStream);
}
