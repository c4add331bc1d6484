//! A client.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ibverbs::channel::AnyBuffer;
use ibverbs::future::SpawnedReactor;
use ibverbs::pool::SharedMemoryRange;
use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, Context, OperationError, PooledBuffer, ProtectionDomain,
    Reactor, SharedMemoryRegion,
};
use tokio::io::AsyncReadExt;
use tokio::time::timeout;

use crate::protocol::{Body, FULL, MAX_MESSAGE, MAX_SMALL, MAX_VALUE, Message, ROOM, read};
use crate::shared::builder;
use crate::{Connect, Result, Share, message};

/// How long a request may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// A client. After a failure, the next request connects again.
pub struct Client<C: Connect = SocketAddr> {
    address: C,
    domain: Arc<ProtectionDomain<'static>>,
    reactor: SpawnedReactor<Share>,
    pool: BufferPool,
    session: Option<Session<C::Stream>>,
}

struct Session<S> {
    channel: AsyncChannel<Share>,
    /// The server notices by its end that the client is gone.
    _stream: S,
}

impl<C: Connect> Client<C> {
    /// A client of the server at this address. It connects with the first request.
    ///
    /// # Errors
    ///
    /// The device fails.
    pub fn new(context: Context<'static>, address: C) -> Result<Self> {
        let context = Arc::new(context);
        let domain = Arc::new(ProtectionDomain::new(&context)?);
        let pool = BufferPool::new(&domain, MAX_MESSAGE, 4, AccessFlags::empty())?;
        let reactor = Reactor::with_share(&context, 64)?.spawn_on_tokio();
        Ok(Self { address, domain, reactor, pool, session: None })
    }

    /// The value of a key, if there is one.
    ///
    /// # Errors
    ///
    /// The server refuses the request, or cannot be reached.
    pub async fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let answer = self.ask(Message::Get { key }).await?;
        match read(&answer)? {
            Message::Answer(Body::Nothing) => Ok(None),
            Message::Answer(Body::Small(value)) => Ok(Some(value.to_vec())),
            Message::Answer(Body::Large(remote)) => {
                let length = usize::try_from(remote.length())?;
                if length > MAX_VALUE {
                    return Err("the server offers more than 1 MiB".into());
                }
                let region =
                    SharedMemoryRegion::new(&self.domain, length, AccessFlags::LOCAL_WRITE)?;
                let region = Arc::new(region);
                let range = SharedMemoryRange::new(region.clone(), ..)?;
                let session = self.session.as_ref().ok_or("not connected")?;
                let done = timeout(PATIENCE, session.channel.read(range, remote)).await;
                if !matches!(done, Ok(Ok(_))) {
                    self.session = None;
                }
                done??;
                Ok(Some(region.to_vec()))
            }
            Message::Refused(reason) => Err(reason.into()),
            _ => Err("the server answers nonsense".into()),
        }
    }

    /// Stores a value, or removes it (`None`).
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get).
    pub async fn put(&mut self, key: &[u8], value: Option<&[u8]>) -> Result<()> {
        let region;
        let value = match value {
            None => Body::Nothing,
            Some(value) if value.len() <= MAX_SMALL => Body::Small(value),
            Some(value) if value.len() > MAX_VALUE => return Err("longer than 1 MiB".into()),
            Some(value) => {
                region =
                    SharedMemoryRegion::new(&self.domain, value.len(), AccessFlags::REMOTE_READ)?;
                region.write(0, value)?;
                Body::Large(region.remote())
            }
        };
        let answer = self.ask(Message::Put { key, value }).await?;
        match read(&answer)? {
            Message::Answer(Body::Nothing) => Ok(()),
            Message::Refused(reason) => Err(reason.into()),
            _ => Err("the server answers nonsense".into()),
        }
    }

    /// Sends a request and receives the answer, within a time limit. After a failure the session is over.
    async fn ask(&mut self, request: Message<'_>) -> Result<PooledBuffer> {
        let mut buffer = self.pool.take().ok_or("all buffers are in use")?;
        request.write(&mut buffer)?;
        let session = match self.session.take() {
            Some(session) => session,
            None => timeout(PATIENCE, self.connect()).await??,
        };
        let room = self.pool.take().ok_or("all buffers are in use")?;
        let exchange = async {
            // The receive is posted first, so that the answer finds it.
            let (received, _) =
                tokio::try_join!(session.channel.receive(room), session.channel.send(buffer))?;
            Ok::<_, OperationError<AnyBuffer>>(received)
        };
        let received = timeout(PATIENCE, exchange).await??;
        self.session = Some(session);
        message(received)
    }

    async fn connect(&self) -> Result<Session<C::Stream>> {
        let mut stream = self.address.connect().await?;
        match stream.read_u8().await? {
            ROOM => {}
            FULL => return Err("the server has as many clients as it serves".into()),
            _ => return Err("that is another server".into()),
        }
        let prepared = self.reactor.prepare(builder(&self.domain))?;
        let (channel, told) = prepared.connect(&mut stream, b"").await?;
        if told != b"kv 1" {
            return Err("that is another server".into());
        }
        Ok(Session { channel, _stream: stream })
    }
}
