//! One client of the server.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ibverbs::pool::SharedMemoryRange;
use ibverbs::{AccessFlags, AsyncChannel, PooledBuffer, RemoteMemoryRegion, SharedMemoryRegion};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::protocol::{Body, MAX_VALUE, Message, ROOM, read};
use crate::shared::{Core, Shared, builder};
use crate::store::Value;
use crate::{Result, Share, Stream, message};

/// How long a client may take to connect, and one operation of a request.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves a client until it closes its stream, fails, or the server stops.
pub(crate) async fn serve(
    shared: Arc<Shared>,
    core: Arc<Core>,
    mut stream: impl Stream,
    mut stopping: watch::Receiver<bool>,
) -> Result<()> {
    stream.write_all(&[ROOM]).await?;
    let mut prepared = core.reactor.prepare(builder(&shared.domain))?;
    // The first request finds a receive, and so does one that comes while the last one is being finished.
    prepared.post_receive(core.buffer()?).map_err(|refused| refused.error)?;
    let (channel, _) = timeout(PATIENCE, prepared.accept(&mut stream, b"kv 1")).await??;
    let mut session = Session { shared, channel, offered: None };
    loop {
        let buffer = core.buffer()?;
        let buffer = tokio::select! {
            biased;
            // A receive that is dropped here loses no message.
            received = session.channel.receive(buffer) => {
                message(received?)?
            }
            () = has_closed(&mut stream) => return Ok(()),
            () = has_stopped(&mut stopping) => {
                timeout(PATIENCE, session.channel.shutdown()).await?;
                return Ok(());
            }
        };
        // A client that is killed now: its stream closes, and what is in flight ends with the channel.
        tokio::select! {
            biased;
            answered = timeout(PATIENCE, session.answer(buffer)) => answered??,
            () = has_closed(&mut stream) => return Ok(()),
        }
    }
}

/// Returns when the client has closed its stream, its machine is gone, or it sends something, which it should not.
async fn has_closed(stream: &mut impl Stream) {
    let _ = stream.read(&mut [0]).await;
}

/// Returns when the server stops.
async fn has_stopped(stopping: &mut watch::Receiver<bool>) {
    let _ = stopping.wait_for(|stop| *stop).await;
}

struct Session {
    shared: Arc<Shared>,
    channel: AsyncChannel<Share>,
    /// The region that the client may be reading, until its next request.
    offered: Option<Arc<SharedMemoryRegion<'static, u8>>>,
}

impl Session {
    /// Answers a request in the same buffer.
    async fn answer(&mut self, mut buffer: PooledBuffer) -> Result<()> {
        self.offered = None;
        let answer = self.carry_out(&buffer).await;
        buffer.clear();
        let answer = match answer {
            Ok(value) => value,
            Err(error) => {
                let reason = error.to_string();
                Message::Refused(&reason).write(&mut buffer)?;
                return self.send(buffer).await;
            }
        };
        let body = match &answer {
            None => Body::Nothing,
            Some(Value::Small(bytes)) => Body::Small(bytes),
            Some(Value::Large(region)) => Body::Large(region.remote()),
        };
        Message::Answer(body).write(&mut buffer)?;
        if let Some(Value::Large(region)) = answer {
            self.offered = Some(region);
        }
        self.send(buffer).await
    }

    async fn send(&self, buffer: PooledBuffer) -> Result<()> {
        // Now, not when the send has completed: the client may have gone by then, with its answer.
        self.shared.requests.fetch_add(1, Ordering::Relaxed);
        self.channel.send(buffer).await?;
        Ok(())
    }

    async fn carry_out(&self, request: &[u8]) -> Result<Option<Value>> {
        let store = &self.shared.store;
        match read(request)? {
            Message::Get { key } => Ok(store.get(key)),
            Message::Put { key, value } => {
                let value = match value {
                    Body::Nothing => None,
                    Body::Small(bytes) => Some(Value::Small(bytes.into())),
                    Body::Large(remote) => Some(Value::Large(self.fetch(remote).await?)),
                };
                store.put(key, value)?;
                Ok(None)
            }
            Message::Answer(_) | Message::Refused(_) => Err("that is no request".into()),
        }
    }

    /// Reads a value from the client's memory.
    async fn fetch(
        &self,
        remote: RemoteMemoryRegion,
    ) -> Result<Arc<SharedMemoryRegion<'static, u8>>> {
        let length = usize::try_from(remote.length())?;
        if length > MAX_VALUE {
            return Err("the value is longer than 1 MiB".into());
        }
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ;
        let region = Arc::new(SharedMemoryRegion::new(&self.shared.domain, length, access)?);
        let range = SharedMemoryRange::new(region.clone(), ..)?;
        self.channel.read(range, remote).await?;
        Ok(region)
    }
}
