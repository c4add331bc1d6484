//! Each answers every call with the same bytes.

use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, BufferPool, Channel, ChannelBuilder, Context, Loop, PooledBuffer, PreparedChannel,
    ProtectionDomain, Reactor, ReceiveWorkRequest, RemoteMemoryRegion, SendWorkRequest,
    SharedMemoryRegion, settings::MaxRnrRetries,
};
use ibverbs_software::Device;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{Kind, Result, SIZE};

pub(crate) const HERE: &str = "127.0.0.1:0";

pub(crate) fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

pub(crate) fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

pub(crate) fn settings(builder: ChannelBuilder<'static>) -> ChannelBuilder<'static> {
    builder.max_send_wr(64).max_recv_wr(64).max_rnr_retries(MaxRnrRetries::UNLIMITED)
}

/// A device with buffers.
pub(crate) struct Node {
    pub(crate) context: Arc<Context<'static>>,
    pub(crate) domain: Arc<ProtectionDomain<'static>>,
    pub(crate) pool: BufferPool,
    _device: Device,
}

impl Node {
    pub(crate) fn new() -> Result<Self> {
        Self::with(false)
    }

    pub(crate) fn with(one_sided: bool) -> Result<Self> {
        let device = Device::builder().one_sided(one_sided).build()?;
        let context = Arc::new(device.open()?);
        let domain = Arc::new(ProtectionDomain::new(&context)?);
        let pool = BufferPool::new(&domain, SIZE, 128, AccessFlags::empty())?;
        Ok(Self { context, domain, pool, _device: device })
    }
}

/// A number that the peer writes, and a place for the next one that it is sent.
pub(crate) struct Target {
    pub(crate) region: SharedMemoryRegion<'static, u64>,
    next: SharedMemoryRegion<'static, u64>,
}

impl Target {
    pub(crate) fn new(node: &'static Node) -> Result<Self> {
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
        let allocate = || node.domain.allocate_shared::<u64>(1, access);
        Ok(Self { region: allocate()?, next: allocate()? })
    }

    pub(crate) fn prepare(&self, node: &'static Node) -> Result<PreparedChannel<'static>> {
        Ok(node.domain.create_channel().access(AccessFlags::REMOTE_WRITE).build()?)
    }

    pub(crate) fn write(
        &self,
        channel: &mut Channel<'static>,
        number: u64,
        to: RemoteMemoryRegion,
    ) -> Result {
        self.next.write_one(0, number)?;
        channel.until(later()).write(self.next.slice(..)?, to)?;
        Ok(())
    }

    pub(crate) fn wait_for(&self, number: u64) -> Result {
        while self.region.read_one(0)? != number {
            std::hint::spin_loop();
        }
        Ok(())
    }
}

fn serve_writes(one_sided: bool) -> Result {
    let node: &'static Node = Box::leak(Box::new(Node::with(one_sided)?));
    let listener = TcpListener::bind(HERE)?;
    tell(listener.local_addr()?.port());
    let target = Target::new(node)?;
    let region = target.region.remote().to_bytes();
    let accepted = target.prepare(node)?.accept(&listener, &region, later());
    let (mut channel, remote) = accepted.map_err(|e| e.error)?;
    let remote = RemoteMemoryRegion::from_bytes(&remote)?;
    for number in 1.. {
        target.wait_for(number)?;
        target.write(&mut channel, number, remote)?;
    }
    Ok(())
}

/// A reactor that a task drives.
pub(crate) fn reactor(node: &Node) -> Result<Arc<Reactor>> {
    let reactor = Arc::new(Reactor::new(&node.context, 256)?);
    let driven = reactor.clone();
    tokio::spawn(async move {
        if let Err(error) = driven.run_on_tokio().await {
            eprintln!("the reactor has ended: {error}");
        }
    });
    Ok(reactor)
}

fn tell(port: u16) {
    println!("{port}");
}

pub(crate) fn serve(kind: Kind) -> Result {
    match kind {
        Kind::Reactor => runtime()?.block_on(serve_by_futures()),
        Kind::TokioTcp => runtime()?.block_on(serve_tokio_tcp()),
        Kind::Blocking => serve_by_loop(),
        Kind::Writes => serve_writes(false),
        Kind::OneSided => serve_writes(true),
        Kind::Tcp => {
            let listener = TcpListener::bind(HERE)?;
            tell(listener.local_addr()?.port());
            let mut stream = listener.accept()?.0;
            stream.set_nodelay(true)?;
            let mut bytes = [0; SIZE];
            loop {
                stream.read_exact(&mut bytes)?;
                stream.write_all(&bytes)?;
            }
        }
        Kind::Udp => {
            let socket = UdpSocket::bind(HERE)?;
            tell(socket.local_addr()?.port());
            let mut bytes = [0; SIZE];
            loop {
                let (length, from) = socket.recv_from(&mut bytes)?;
                socket.send_to(&bytes[..length], from)?;
            }
        }
    }
}

async fn serve_by_futures() -> Result {
    let node = Node::new()?;
    let reactor = reactor(&node)?;
    let listener = tokio::net::TcpListener::bind(HERE).await?;
    tell(listener.local_addr()?.port());
    let mut stream = listener.accept().await?.0;
    let prepared = reactor.prepare(settings(Channel::builder(&node.domain)))?;
    let channel = Arc::new(prepared.accept(&mut stream, b"").await?.0);
    loop {
        let buffer = node.pool.wait().await;
        let (message, _) = channel.receive(buffer).await.map_err(|e| e.error)?;
        let channel = channel.clone();
        tokio::spawn(async move { channel.send(message).await.map(drop).map_err(|e| e.error) });
    }
}

async fn serve_tokio_tcp() -> Result {
    let listener = tokio::net::TcpListener::bind(HERE).await?;
    tell(listener.local_addr()?.port());
    let mut stream = listener.accept().await?.0;
    stream.set_nodelay(true)?;
    let mut bytes = [0; SIZE];
    loop {
        stream.read_exact(&mut bytes).await?;
        stream.write_all(&bytes).await?;
    }
}

fn serve_by_loop() -> Result {
    const RECEIVE: u64 = 0;
    const SEND: u64 = 1;
    let node = Node::new()?;
    let listener = TcpListener::bind(HERE)?;
    tell(listener.local_addr()?.port());
    let mut server = Loop::<PooledBuffer>::new(&node.context, 128)?;
    let prepared = settings(server.create_channel(&node.domain)).build()?;
    let channel = prepared.accept(&listener, b"", later()).map_err(|e| e.error)?.0;
    let id = server.add(channel).map_err(|e| e.error)?;
    let take = || node.pool.take().ok_or("no buffer is left");
    for _ in 0..32 {
        server.post(id, ReceiveWorkRequest::new(take()?), RECEIVE)?;
    }
    loop {
        let ended = server.wait_ended()?;
        ended.result()?;
        if ended.token == RECEIVE {
            let answer = node.pool.take_from(&ended.buffer)?.ok_or("no buffer is left")?;
            server.post(id, SendWorkRequest::new(answer), SEND)?;
            server.post(id, ReceiveWorkRequest::new(ended.buffer), RECEIVE)?;
        }
    }
}
