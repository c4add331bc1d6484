//! Addresses that are well-formed but false, on a device, with channels of every kind.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use ibverbs::channel::OwnedResult;
use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, Channel, ChannelBuilder, ChannelId, CompletionQueue,
    Error, ErrorKind, Inline, Loop, MemoryRegion, PooledBuffer, ProtectionDomain, QueuePair,
    QueuePairEndpoint, QueuePairType, Reactor, ReadWorkRequest, RemoteMemoryRegion,
    SendWorkRequest, SharedMemoryRegion, TransportError, TransportResult, WorkStatus,
    WriteWorkRequest,
};
use ibverbs_function_device::{Builder, FunctionDevice, LinkLayer};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use crate::encodings::endpoint;
use crate::{property_tests, rig};

fn open(device: &FunctionDevice) -> Arc<ProtectionDomain<'static>> {
    let context = device.context();
    Arc::new(ProtectionDomain::new(Arc::new(context)).unwrap())
}

fn device(infiniband: bool) -> FunctionDevice {
    let layer = if infiniband { LinkLayer::InfiniBand } else { LinkLayer::Ethernet };
    Builder::model().link_layer(layer).build()
}

/// Refused, for a reason that the caller can act on.
fn is_refusal(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unreachable)
        && !error.to_string().is_empty()
}

/// Endpoints that a peer may send: some could be of a queue pair of this device, with the address of its
/// port.
fn any_endpoint() -> impl Strategy<Value = QueuePairEndpoint> {
    let near =
        (0..0x20_u32, 0..3_u16, prop::sample::select(vec!["::ffff:10.0.0.1", "fe80::1", "::"]));
    let near = near.prop_map(|(num, lid, gid)| {
        QueuePairEndpoint::new(num, lid, gid.parse().unwrap()).unwrap()
    });
    prop_oneof![endpoint(), near]
}

/// Short enough that the test is quick, since nobody answers.
fn soon() -> Instant {
    Instant::now() + Duration::from_millis(2)
}

/// A queue pair that is connected to itself may succeed; no other can.
fn is_typed_end(result: TransportResult<()>) -> Result<(), TestCaseError> {
    match result {
        Ok(_) | Err(TransportError::Work(_) | TransportError::TimedOut) => Ok(()),
        Err(error) => Err(TestCaseError::fail(format!("{error:?}"))),
    }
}

/// Which kind of channel meets the input.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Style {
    Blocking,
    Loop,
    Futures,
}

fn style() -> impl Strategy<Value = Style> {
    prop::sample::select(vec![Style::Blocking, Style::Loop, Style::Futures])
}

/// A channel of any kind.
enum Side {
    Blocking(Channel<'static>, Arc<ProtectionDomain<'static>>),
    Loop(Loop<'static, PooledBuffer>, ChannelId),
    Futures(AsyncChannel, Reactor),
}

impl Side {
    /// Connects to what `remote` returns. Returns the channel's own endpoint too.
    fn connect(
        style: Style,
        set: impl Fn(ChannelBuilder<'static>) -> ChannelBuilder<'static>,
        domain: &Arc<ProtectionDomain<'static>>,
        remote: QueuePairEndpoint,
    ) -> Result<(Self, QueuePairEndpoint), Error> {
        if style == Style::Futures {
            let reactor = Reactor::new(domain.context_parent(), 64)?;
            let prepared = reactor.prepare(set(Channel::builder(domain)))?;
            let own = prepared.endpoint();
            let channel = prepared.handshake(remote).map_err(|failed| failed.error)?;
            return Ok((Self::Futures(channel, reactor), own));
        }
        if style == Style::Loop {
            let mut event_loop = Loop::new(domain.context_parent(), 64)?;
            let prepared = set(event_loop.create_channel(domain)).build()?;
            let own = prepared.endpoint();
            let channel = prepared.handshake(remote).map_err(|failed| failed.error)?;
            let channel = event_loop.add(channel).map_err(|failed| failed.error)?;
            return Ok((Self::Loop(event_loop, channel), own));
        }
        let prepared = set(Channel::builder(domain)).build()?;
        let own = prepared.endpoint();
        let channel = prepared.handshake(remote).map_err(|failed| failed.error)?;
        Ok((Self::Blocking(channel, domain.clone()), own))
    }

    fn send(&mut self, buffer: PooledBuffer) -> TransportResult<()> {
        match self {
            Self::Blocking(channel, _) => channel.until(soon()).send(Inline(&buffer)).map(drop),
            Self::Loop(event_loop, channel) => {
                event_loop.post(*channel, SendWorkRequest::new(buffer), 0)?;
                wait(event_loop)
            }
            Self::Futures(channel, reactor) => run(channel.send(buffer), reactor),
        }
    }

    /// Writes to the peer's memory, or reads it.
    fn access(
        &mut self,
        mut buffer: PooledBuffer,
        remote: RemoteMemoryRegion,
        write: bool,
    ) -> TransportResult<()> {
        match self {
            Self::Blocking(channel, domain) => {
                let len = buffer.len();
                let mut local = MemoryRegion::new(&*domain, len.max(1))?;
                local[..len].copy_from_slice(&buffer);
                let result = match write {
                    true => channel.until(soon()).write(local.slice(..len)?, remote),
                    false => channel.until(soon()).read(&mut local.slice_mut(..len)?, remote),
                };
                buffer.copy_from_slice(&local[..len]);
                result.map(drop)
            }
            Self::Loop(event_loop, channel) => {
                match write {
                    true => event_loop.post(*channel, WriteWorkRequest::new(buffer, remote), 0)?,
                    false => event_loop.post(*channel, ReadWorkRequest::new(buffer, remote), 0)?,
                }
                wait(event_loop)
            }
            Self::Futures(channel, reactor) if write => run(channel.write(buffer, remote), reactor),
            Self::Futures(channel, reactor) => run(channel.read(buffer, remote), reactor),
        }
    }
}

fn wait(event_loop: &mut Loop<'static, PooledBuffer>) -> TransportResult<()> {
    match event_loop.wait_ended_until(soon())? {
        Some(ended) => ended.result().map(drop),
        // The buffer stays with the loop.
        None => Err(TransportError::TimedOut),
    }
}

/// Runs a future for a while, as a program does that gives up by its own timer. The device goes on with each poll.
fn run(
    mut future: impl Future<Output = OwnedResult<PooledBuffer>> + Unpin,
    reactor: &Reactor,
) -> TransportResult<()> {
    for _ in 0..1000 {
        let mut context = Context::from_waker(Waker::noop());
        if let Poll::Ready(ended) = Pin::new(&mut future).poll(&mut context) {
            return ended.map(drop).map_err(|failed| failed.error);
        }
        reactor.turn()?;
    }
    Err(TransportError::TimedOut)
}

proptest! {
    #![proptest_config(property_tests::config(100))]

    #[test]
    fn a_channel_meets_any_endpoint(remote in any_endpoint(), infiniband: bool, style in style()) {
        let _turn = rig::turn();
        let device = device(infiniband);
        let domain = open(&device);
        let set = |builder: ChannelBuilder<'static>| {
            builder.max_inline_data(16).settle_timeout(Duration::from_millis(50))
        };
        let pool = BufferPool::new(&domain, 16, 1, AccessFlags::empty()).unwrap();
        match Side::connect(style, set, &domain, remote) {
            Ok((mut side, _)) => is_typed_end(side.send(pool.take().unwrap()))?,
            Err(refused) => prop_assert!(is_refusal(&refused), "{refused}"),
        }
        prop_assert_eq!(pool.available(), 1, "the device has no channel that could use it");
        drop((pool, domain));
        device.assert_clean();
    }

    #[test]
    fn a_queue_pair_meets_any_endpoint(remote in any_endpoint(), infiniband: bool, kind in 0..2_usize) {
        let _turn = rig::turn();
        let device = device(infiniband);
        let domain = open(&device);
        let queue = CompletionQueue::new(domain.context(), 8).unwrap();
        let kind = [QueuePairType::ReliableConnected, QueuePairType::UnreliableConnected][kind];
        let prepared = QueuePair::builder(&domain, &queue, &queue, kind).build().unwrap();
        if let Err(failed) = prepared.handshake(remote) {
            prop_assert!(is_refusal(&failed.error), "{failed}");
        }
        drop(queue);
        drop(domain);
        device.assert_clean();
    }

    /// Only what the peer opened is reached, whatever the region claims.
    #[test]
    fn a_false_region_reaches_nothing(
        shift in -20..60_i64,
        // An empty buffer of a pool is no room for a read.
        length in 1..64_u64,
        wrong_key in prop::bool::weighted(0.2),
        foreign in prop::bool::weighted(0.2),
        write: bool,
        any_address in prop::option::weighted(0.2, any::<u64>()),
        style in style(),
    ) {
        const OPEN: AccessFlags = AccessFlags::REMOTE_READ.union(AccessFlags::REMOTE_WRITE);
        let _turn = rig::turn();
        let device = device(false);
        let domain = open(&device);
        let set = |builder: ChannelBuilder<'static>| {
            let builder = builder.max_inline_data(128).access(OPEN);
            builder.settle_timeout(Duration::from_millis(50))
        };
        let two = set(Channel::builder(&domain)).build().unwrap();
        let (mut one, to_one) = Side::connect(style, set, &domain, two.endpoint()).unwrap();
        let two = two.handshake(to_one).unwrap();

        // In the middle of a registered region that peers may not access.
        let target = SharedMemoryRegion::<u8>::new(&domain, 64, OPEN).unwrap();
        target.fill(7);
        let secret = MemoryRegion::<u8>::new(&domain, 64).unwrap();
        let pool = BufferPool::new(&domain, 128, 1, AccessFlags::empty()).unwrap();
        let mut local = pool.take_from(&[1; 128]).unwrap().unwrap();
        local.set_len(length as usize).unwrap();
        let right = target.remote();
        let rkey = if wrong_key { right.rkey() ^ 0x5500 } else { right.rkey() };
        let base = if foreign { secret.as_ptr() as u64 } else { right.address() };
        let address = any_address.unwrap_or(base.wrapping_add_signed(shift));
        let Ok(region) = RemoteMemoryRegion::new(address, length, rkey) else { return Ok(()) };
        let inside = address >= right.address()
            && u128::from(address) + u128::from(length) <= u128::from(right.address()) + 64;
        let allowed = length == 0 || (inside && !wrong_key);

        let result = one.access(local, region, write);
        match result {
            Ok(_) => prop_assert!(allowed, "{region:?} of {right:?}"),
            Err(TransportError::Work(error)) => {
                // For an access of no bytes, a device may ignore the key.
                prop_assert!(!allowed || length == 0, "{region:?} of {right:?}: {error}");
                prop_assert_eq!(error.status(), WorkStatus::RemoteAccess);
            }
            Err(error) => return Err(TestCaseError::fail(format!("{error:?}"))),
        }
        let done = allowed && length > 0;
        for (at, byte) in (right.address()..).zip(target.to_vec()) {
            let reached = done && write && (address..address + length).contains(&at);
            prop_assert_eq!(byte, if reached { 1 } else { 7 }, "at {}", at - right.address());
        }
        drop((one, two));
        let mut local = pool.take().expect("the device has no channel that could use it");
        local.set_len(128).unwrap();
        for (at, &byte) in (0..).zip(local.iter()) {
            prop_assert_eq!(byte, if done && !write && at < length { 7 } else { 1 }, "at {}", at);
        }
        prop_assert!(secret.iter().all(|&byte| byte == 0));
        drop((target, secret, local, pool, domain));
        device.assert_clean();
    }
}
