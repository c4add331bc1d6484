//! The key-value store over TCP, for comparison: a message is a header, the key, and the value,
//! whatever its length.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::Result;
use crate::protocol::{MAX_KEY, MAX_VALUE};
use crate::store::{Store, Value};

/// The kinds of messages: requests, and answers.
const GET: u8 = 0;
const PUT: u8 = 1;
const NOTHING: u8 = 2;
const VALUE: u8 = 3;

/// A longer message is written in two parts, to save a copy.
const SHORT: usize = 8192;

struct Stream(BufReader<TcpStream>);

impl Stream {
    fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream)))
    }

    async fn send(&mut self, kind: u8, key: &[u8], value: &[u8]) -> Result<()> {
        if key.len() > MAX_KEY || value.len() > MAX_VALUE {
            return Err("the key or the value is too long".into());
        }
        let mut message = vec![kind, key.len() as u8];
        message.extend((value.len() as u32).to_be_bytes());
        message.extend(key);
        if value.len() <= SHORT {
            message.extend(value);
            self.0.write_all(&message).await?;
        } else {
            self.0.write_all(&message).await?;
            self.0.write_all(value).await?;
        }
        Ok(())
    }

    async fn receive(&mut self) -> Result<(u8, Vec<u8>, Vec<u8>)> {
        let (kind, key) = (self.0.read_u8().await?, self.0.read_u8().await?);
        let value = self.0.read_u32().await? as usize;
        if value > MAX_VALUE {
            return Err("the value is longer than 1 MiB".into());
        }
        let (mut key, mut value) = (vec![0; key.into()], vec![0; value]);
        self.0.read_exact(&mut key).await?;
        self.0.read_exact(&mut value).await?;
        Ok((kind, key, value))
    }
}

/// Serves clients.
pub async fn run(listener: TcpListener) -> std::convert::Infallible {
    let store = Arc::new(Store::default());
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            // Too many files are open, for one: those that end close theirs.
            Err(error) => {
                eprintln!("{error}");
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                continue;
            }
        };
        let store = store.clone();
        tokio::spawn(async move {
            if let Err(error) = serve(&store, stream).await {
                eprintln!("{address}: {error}");
            }
        });
    }
}

/// Serves a client until it closes its stream.
async fn serve(store: &Store, stream: TcpStream) -> Result<()> {
    let mut stream = Stream::new(stream)?;
    while stream.0.get_ref().peek(&mut [0]).await? > 0 {
        let (kind, key, value) = stream.receive().await?;
        match kind {
            GET => match store.get(&key) {
                None => stream.send(NOTHING, b"", b"").await?,
                Some(Value::Small(bytes)) => stream.send(VALUE, b"", &bytes).await?,
                Some(Value::Large(region)) => stream.send(VALUE, b"", &region.to_vec()).await?,
            },
            PUT => {
                store.put(&key, Some(Value::Small(value.into())))?;
                stream.send(NOTHING, b"", b"").await?;
            }
            _ => return Err("that is no request".into()),
        }
    }
    Ok(())
}

/// A client.
pub struct PlainClient(Stream);

impl PlainClient {
    /// Connects.
    ///
    /// # Errors
    ///
    /// The server cannot be reached.
    pub async fn connect(address: SocketAddr) -> Result<Self> {
        Ok(Self(Stream::new(TcpStream::connect(address).await?)?))
    }

    /// The value of a key, if there is one.
    ///
    /// # Errors
    ///
    /// The stream fails.
    pub async fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.0.send(GET, key, b"").await?;
        let (kind, _, value) = self.0.receive().await?;
        Ok((kind == VALUE).then_some(value))
    }

    /// Stores a value.
    ///
    /// # Errors
    ///
    /// The stream fails.
    pub async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.0.send(PUT, key, value).await?;
        self.0.receive().await.map(drop)
    }
}
