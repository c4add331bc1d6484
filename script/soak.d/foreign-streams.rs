//! tokio's and std's TCP by name, streams of `ibverbs-stream` in truth: for the tests of others, whose lines that import these types
//! `foreign-streams` changes.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use ibverbs_software::Device;
use ibverbs_stream::Hub;

static DEVICE: LazyLock<Device> = LazyLock::new(|| Device::new().unwrap());

/// One for each listener and connection: each test has a runtime of its own.
fn hub() -> io::Result<Hub> {
    Hub::builder(&Arc::new(DEVICE.open()?)).chunk(4096).max_connections(16).build()
}

/// Stands where programs name `tokio::net`.
pub mod net {
    use std::net::SocketAddr;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use ibverbs_stream::tokio::{Listener, Stream};
    use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, ReadBuf};
    use tokio::net::ToSocketAddrs;
    use tokio::sync::Mutex;

    use super::*;

    #[derive(Debug)]
    pub struct TcpListener(Mutex<Listener>, SocketAddr);

    impl TcpListener {
        pub async fn bind(address: impl ToSocketAddrs + std::fmt::Debug) -> io::Result<Self> {
            let listener = Listener::bind(&hub()?, address).await?;
            let local = listener.local_addr()?;
            Ok(Self(Mutex::new(listener), local))
        }

        pub fn local_addr(&self) -> io::Result<SocketAddr> {
            Ok(self.1)
        }

        pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
            let (stream, peer) = self.0.lock().await.accept().await?;
            Ok((TcpStream::new(stream), peer))
        }
    }

    #[derive(Debug)]
    pub struct ReadHalf(ibverbs_stream::tokio::ReadHalf, usize);
    #[derive(Debug)]
    pub struct WriteHalf(ibverbs_stream::tokio::WriteHalf, usize);
    #[derive(Debug)]
    pub struct TcpStream(ReadHalf, WriteHalf);
    #[derive(Debug)]
    pub struct ReuniteError(pub ReadHalf, pub WriteHalf);

    impl TcpStream {
        fn new(stream: Stream) -> Self {
            static NEXT: AtomicUsize = AtomicUsize::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let (read, write) = stream.into_split();
            Self(ReadHalf(read, number), WriteHalf(write, number))
        }

        pub async fn connect(address: impl ToSocketAddrs + std::fmt::Debug) -> io::Result<Self> {
            Stream::connect(&hub()?, address).await.map(Self::new)
        }

        pub fn split(&mut self) -> (&mut ReadHalf, &mut WriteHalf) {
            (&mut self.0, &mut self.1)
        }

        pub fn into_split(self) -> (ReadHalf, WriteHalf) {
            (self.0, self.1)
        }

        pub fn set_zero_linger(&self) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    impl ReadHalf {
        pub async fn peek(&mut self, to: &mut [u8]) -> io::Result<usize> {
            let bytes = self.0.fill_buf().await?;
            let len = bytes.len().min(to.len());
            to[..len].copy_from_slice(&bytes[..len]);
            Ok(len)
        }

        pub fn reunite(self, other: WriteHalf) -> Result<TcpStream, ReuniteError> {
            if self.1 == other.1 {
                Ok(TcpStream(self, other))
            } else {
                Err(ReuniteError(self, other))
            }
        }
    }

    macro_rules! reads_and_writes {
        ($($read:ident, $write:ident, $to:tt;)+) => {$(
            impl AsyncRead for $read {
                fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, to: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
                    Pin::new(&mut self.0).poll_read(cx, to)
                }
            }

            impl AsyncWrite for $write {
                fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
                    Pin::new(&mut self.$to).poll_write(cx, from)
                }

                fn poll_write_vectored(
                    mut self: Pin<&mut Self>,
                    cx: &mut Context<'_>,
                    from: &[io::IoSlice<'_>],
                ) -> Poll<io::Result<usize>> {
                    Pin::new(&mut self.$to).poll_write_vectored(cx, from)
                }

                fn is_write_vectored(&self) -> bool {
                    self.$to.is_write_vectored()
                }

                fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                    Pin::new(&mut self.$to).poll_flush(cx)
                }

                fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                    Pin::new(&mut self.$to).poll_shutdown(cx)
                }
            }
        )+};
    }

    reads_and_writes! {
        ReadHalf, WriteHalf, 0;
        TcpStream, TcpStream, 1;
    }
}

/// Stands where programs name `std::net`.
pub mod blocking {
    use std::io::{Read, Write};
    use std::net::{SocketAddr, ToSocketAddrs};
    use std::time::{Duration, Instant};

    use super::*;

    pub struct TcpListener(ibverbs_stream::Listener);
    pub struct TcpStream(ibverbs_stream::Stream);

    impl TcpListener {
        pub fn bind(address: impl ToSocketAddrs + std::fmt::Debug) -> io::Result<Self> {
            ibverbs_stream::Listener::bind(&hub()?, address).map(Self)
        }

        pub fn local_addr(&self) -> io::Result<SocketAddr> {
            self.0.local_addr()
        }

        pub fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
            self.0.accept().map(|(stream, peer)| (TcpStream(stream), peer))
        }
    }

    impl TcpStream {
        pub fn connect(address: impl ToSocketAddrs + std::fmt::Debug) -> io::Result<Self> {
            let soon = Instant::now() + Duration::from_secs(60);
            ibverbs_stream::Stream::connect(&hub()?, address, soon).map(Self)
        }
    }

    impl Read for TcpStream {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            self.0.read(to)
        }
    }

    impl Write for TcpStream {
        fn write(&mut self, from: &[u8]) -> io::Result<usize> {
            self.0.write(from)
        }

        fn flush(&mut self) -> io::Result<()> {
            self.0.flush()
        }
    }
}
