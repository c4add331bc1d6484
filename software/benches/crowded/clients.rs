//! One call after the other.

use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::sync::Arc;
use std::time::Instant;

use ibverbs::{Channel, RemoteMemoryRegion, TransportError, settings::MaxRnrRetries};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::servers::{HERE, Node, Target, later, reactor, runtime, settings};
use super::{Client, Kind, Result, SIZE};

const LOCAL: &str = "127.0.0.1";

fn since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}

/// A client of calls that block.
fn blocking(mut call: impl FnMut() -> Result + 'static) -> Client {
    Box::new(move |count| {
        (0..count)
            .map(|_| {
                let start = Instant::now();
                call()?;
                Ok(since(start))
            })
            .collect()
    })
}

pub(crate) fn connect(kind: Kind, port: u16) -> Result<Client> {
    Ok(match kind {
        Kind::Reactor => futures(port)?,
        Kind::TokioTcp => tokio_tcp(port)?,
        Kind::Blocking => channel(port)?,
        Kind::Writes => writes(port, false)?,
        Kind::OneSided => writes(port, true)?,
        Kind::Tcp => {
            let mut stream = TcpStream::connect((LOCAL, port))?;
            stream.set_nodelay(true)?;
            let mut bytes = [1; SIZE];
            blocking(move || {
                stream.write_all(&bytes)?;
                Ok(stream.read_exact(&mut bytes)?)
            })
        }
        Kind::Udp => {
            let socket = UdpSocket::bind(HERE)?;
            socket.connect((LOCAL, port))?;
            let mut bytes = [1; SIZE];
            blocking(move || {
                socket.send(&bytes)?;
                socket.recv(&mut bytes)?;
                Ok(())
            })
        }
    })
}

/// The device and its domain live for as long as the program.
fn channel(port: u16) -> Result<Client> {
    let node: &'static Node = Box::leak(Box::new(Node::new()?));
    let builder = node.domain.create_channel().sleep_after(0);
    let prepared = builder.max_rnr_retries(MaxRnrRetries::UNLIMITED).build()?;
    let connected = prepared.connect((LOCAL, port), b"", later()).map_err(|e| e.error)?;
    let mut channel = connected.0;
    let request = node.domain.allocate::<u8>(SIZE)?;
    let mut response = node.domain.allocate::<u8>(SIZE)?;
    Ok(blocking(move || {
        channel.scope(|scope| {
            let receive = scope.post_receive(response.slice_mut(..)?)?;
            scope.post_send(request.slice(..)?)?;
            receive.wait().map(drop)
        })?;
        Ok(())
    }))
}

/// Each call is a WRITE, and one back. Both sides look at their memory.
fn writes(port: u16, one_sided: bool) -> Result<Client> {
    let node: &'static Node = Box::leak(Box::new(Node::with(one_sided)?));
    let target = Target::new(node)?;
    let prepared = target.prepare(node)?;
    let connected = prepared.connect((LOCAL, port), &target.region.remote().to_bytes(), later());
    let (mut channel, remote) = connected.map_err(|e| e.error)?;
    let remote = RemoteMemoryRegion::from_bytes(&remote)?;
    let mut number = 0;
    Ok(blocking(move || {
        number += 1;
        target.write(&mut channel, number, remote)?;
        target.wait_for(number)
    }))
}

fn futures(port: u16) -> Result<Client> {
    let runtime = runtime()?;
    let (node, channel, reactor) = runtime.block_on(async {
        let node = Node::new()?;
        let reactor = reactor(&node)?;
        let mut stream = tokio::net::TcpStream::connect((LOCAL, port)).await?;
        let prepared = reactor.prepare(settings(Channel::builder(&node.domain)))?;
        let channel = Arc::new(prepared.connect(&mut stream, b"").await?.0);
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>((node, channel, reactor))
    })?;
    Ok(Box::new(move |count| {
        let _keeps = &reactor;
        runtime
            .block_on(async {
                let mut times = Vec::with_capacity(count);
                for _ in 0..count {
                    let start = Instant::now();
                    let room = node.pool.wait().await;
                    let mut message = node.pool.wait().await;
                    message.extend_from_slice(&[1; SIZE])?;
                    let (received, sent) =
                        tokio::join!(channel.receive(room), channel.send(message));
                    let ended = received.map(drop).map_err(|e| e.error);
                    ended.and(sent.map(drop).map_err(|e: ibverbs::OperationError<_>| e.error))?;
                    times.push(since(start));
                }
                Ok::<_, TransportError>(times)
            })
            .map_err(Into::into)
    }))
}

fn tokio_tcp(port: u16) -> Result<Client> {
    let runtime = runtime()?;
    let mut stream = runtime.block_on(tokio::net::TcpStream::connect((LOCAL, port)))?;
    stream.set_nodelay(true)?;
    Ok(Box::new(move |count| {
        runtime.block_on(async {
            let (mut times, mut bytes) = (Vec::with_capacity(count), [1; SIZE]);
            for _ in 0..count {
                let start = Instant::now();
                stream.write_all(&bytes).await?;
                stream.read_exact(&mut bytes).await?;
                times.push(since(start));
            }
            Ok(times)
        })
    }))
}
