//! The servers on the device.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Instant;

use ibverbs::future::Share;
use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, Channel, ChannelBuilder, Context, Loop, PooledBuffer,
    ProtectionDomain, Reactor, ReceiveWorkRequest, SendWorkRequest,
    settings::{MaxRnrRetries, MinRnrTimer},
};
use ibverbs_software::Device;
use tokio::runtime::Builder;
use tokio::task::LocalSet;

use super::super::{Result, SMALL};
use super::PATIENCE;

/// Receives that are posted. While an answer is on its way, its buffer is not posted: the next message finds the other.
const RECEIVES: u32 = 2;
const RECEIVED: u64 = 0;
const SENT: u64 = 1;

/// The resources of one side for this number of connections.
pub(super) struct Side {
    pub(super) context: Arc<Context<'static>>,
    pub(super) domain: Arc<ProtectionDomain<'static>>,
    pool: BufferPool,
    _device: Device,
}

impl Side {
    pub(super) fn new(connections: usize) -> Result<Self> {
        let device = Device::new()?;
        let context = Arc::new(device.open()?);
        let domain = Arc::new(ProtectionDomain::new(&context)?);
        let pool = BufferPool::new(&domain, SMALL, 3 * connections, AccessFlags::empty())?;
        Ok(Self { context, domain, pool, _device: device })
    }

    pub(super) fn buffer(&self) -> Result<PooledBuffer> {
        Ok(self.pool.take().ok_or("all buffers are in use")?)
    }
}

pub(super) fn settings(builder: ChannelBuilder<'static>) -> ChannelBuilder<'static> {
    builder
        .max_send_wr(RECEIVES)
        .max_recv_wr(RECEIVES)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .min_rnr_timer(MinRnrTimer::SHORTEST)
}

/// Room in a completion queue.
pub(super) fn entries(connections: usize) -> u32 {
    2 * RECEIVES * connections as u32
}

pub(super) fn tokens(listener: &TcpListener, connections: usize) -> Result<()> {
    let side = Side::new(connections)?;
    let mut server = Loop::<PooledBuffer>::new(&side.context, entries(connections))?;
    for _ in 0..connections {
        let prepared = settings(server.create_channel(&side.domain)).build()?;
        let accepted = prepared.accept(listener, b"", Instant::now() + PATIENCE);
        let channel = server.add(accepted.map_err(|e| e.error)?.0).map_err(|e| e.error)?;
        for _ in 0..RECEIVES {
            server
                .post(channel, ReceiveWorkRequest::new(side.buffer()?), RECEIVED)
                .map_err(|e| e.error)?;
        }
    }
    loop {
        let ended = server.wait_ended()?;
        ended.result()?;
        let posted = if ended.token == RECEIVED {
            server.post(ended.channel, SendWorkRequest::new(ended.buffer), SENT)
        } else {
            server.post(ended.channel, ReceiveWorkRequest::new(ended.buffer), RECEIVED)
        };
        posted.map_err(|e| e.error)?;
    }
}

pub(super) fn futures<S>(listener: TcpListener, connections: usize) -> Result<()>
where
    S: Share<Buffer = PooledBuffer> + 'static,
{
    listener.set_nonblocking(true)?;
    let side = Side::new(connections)?;
    let reactor = Reactor::<S>::with_share(&side.context, entries(connections))?;
    let serve = async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        for _ in 0..connections {
            let mut prepared = reactor.prepare(settings(Channel::builder(&side.domain)))?;
            for _ in 0..RECEIVES {
                prepared.post_receive(side.buffer()?).map_err(|e| e.error)?;
            }
            let (mut stream, _) = listener.accept().await?;
            let (channel, _) = prepared.accept(&mut stream, b"").await.map_err(|e| e.error)?;
            tokio::task::spawn_local(async move {
                if let Err(error) = answer(&channel).await {
                    eprintln!("{error}");
                }
            });
        }
        Result::Ok(reactor.run_on_tokio().await?)
    };
    let runtime = Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, serve)
}

/// Sends back what comes.
async fn answer<S: Share<Buffer = PooledBuffer>>(channel: &AsyncChannel<S>) -> Result<()> {
    loop {
        let (message, _) = channel.next_message().await.map_err(|e| e.error)?;
        let (buffer, _) = channel.send(message).await.map_err(|e| e.error)?;
        channel.post_receive(buffer).map_err(|e| e.error)?;
    }
}
