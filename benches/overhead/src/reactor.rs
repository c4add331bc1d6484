//! Futures of many channels on one reactor.

use std::cell::Cell;
use std::future::Future;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use ibverbs::{
    AccessFlags, AsyncChannel, AsyncOperation, BufferPool, Channel, PooledBuffer, ProtectionDomain,
    Reactor, TransportError,
};

use crate::rig::{LENGTH, WINDOW, context, epoll_of, sleep_in};

pub(crate) struct ReactorRig {
    reactor: Reactor,
    channels: Vec<AsyncChannel>,
    /// The buffer of each channel, while it is not in flight.
    buffers: Vec<PooledBuffer>,
    /// With room for one operation of each channel.
    operations: Vec<AsyncOperation<PooledBuffer>>,
    /// The channel whose turn it is.
    next: usize,
}

impl ReactorRig {
    pub(crate) fn new(channels: usize) -> Self {
        let context = context();
        let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
        let pool = BufferPool::new(&domain, LENGTH, channels, AccessFlags::empty());
        let pool = pool.expect("a pool");
        let reactor = Reactor::new(&context, 2 * channels as u32).expect("a reactor");
        let connect = |_| {
            let builder = Channel::builder(&domain).max_send_wr(1).max_recv_wr(1);
            let prepared = reactor.prepare(builder).expect("a channel");
            let itself = prepared.endpoint();
            prepared.handshake(itself).expect("a connection")
        };
        let connected = (0..channels).map(connect).collect();
        let buffers = (0..channels).map(|_| pool.take().expect("a buffer")).collect();
        let operations = Vec::with_capacity(channels);
        let mut rig = Self { reactor, channels: connected, buffers, operations, next: 0 };
        // Lists of wakers get their size with the first operations of each channel.
        sends(&mut rig, 2 * channels as u64).expect("it works");
        rig
    }
}

/// Sends: one on each channel, then the reactor runs until it finds nothing, then each result is taken.
#[inline(never)]
pub(crate) fn sends(rig: &mut ReactorRig, operations: u64) -> Result<u64, TransportError> {
    let ReactorRig { reactor, channels, buffers, operations: sending, next } = rig;
    let mut context = Context::from_waker(Waker::noop());
    let (mut sum, mut done) = (0, 0);
    while done < operations {
        for _ in 0..channels.len().min((operations - done) as usize) {
            let Some(buffer) = buffers.pop() else { break };
            let mut send = channels[*next].send(buffer);
            *next = if *next + 1 == channels.len() { 0 } else { *next + 1 };
            // Posts it.
            if Pin::new(&mut send).poll(&mut context).is_ready() {
                return Err(TransportError::UnknownWork);
            }
            sending.push(send);
        }
        while reactor.turn()? > 0 {}
        for mut send in sending.drain(..) {
            let Poll::Ready(sent) = Pin::new(&mut send).poll(&mut context) else {
                return Err(TransportError::UnknownWork);
            };
            let (buffer, success) = sent?;
            buffers.push(buffer);
            sum += u64::from(success.byte_len());
            done += 1;
        }
    }
    Ok(sum)
}

/// Sixteen channels, in a program that sleeps between their operations.
pub(crate) struct SleepingRig {
    rig: ReactorRig,
    epoll: OwnedFd,
    task: Arc<Task>,
    waker: Waker,
}

/// The one task of the program.
#[derive(Default)]
struct Task {
    is_woken: AtomicBool,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.is_woken.store(true, Ordering::Relaxed);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.store(true, Ordering::Relaxed);
    }
}

impl SleepingRig {
    pub(crate) fn new() -> Self {
        let rig = ReactorRig::new(WINDOW);
        let (epoll, task) = (epoll_of(rig.reactor.as_fd()), Arc::new(Task::default()));
        let waker = Waker::from(task.clone());
        Self { rig, epoll, task, waker }
    }
}

/// Sends: one on each channel, then the program sleeps once. After that all of them have ended.
#[inline(never)]
pub(crate) fn sends_asleep(rig: &mut SleepingRig, operations: u64) -> Result<u64, TransportError> {
    let SleepingRig { rig, epoll, task, waker } = rig;
    let ReactorRig { reactor, channels, buffers, operations: sending, .. } = rig;
    let mut context = Context::from_waker(waker);
    let is_readable = Cell::new(false);
    let mut run = reactor.run(|_| match is_readable.take() {
        true => Poll::Ready(Ok(())),
        false => Poll::Pending,
    });
    // Runs the reactor until it waits for its file.
    let mut serve = |context: &mut Context<'_>| loop {
        task.is_woken.store(false, Ordering::Relaxed);
        match Pin::new(&mut run).poll(context) {
            Poll::Ready(Err(error)) => break Err(TransportError::Verbs(error)),
            Poll::Ready(Ok(())) => break Err(TransportError::Stopped),
            Poll::Pending if !task.is_woken.load(Ordering::Relaxed) => break Ok(()),
            Poll::Pending => {}
        }
    };
    serve(&mut context)?;
    let mut sum = 0;
    for _ in 0..operations / WINDOW as u64 {
        for channel in channels.iter() {
            let Some(buffer) = buffers.pop() else { break };
            let mut send = channel.send(buffer);
            if Pin::new(&mut send).poll(&mut context).is_ready() {
                return Err(TransportError::UnknownWork);
            }
            sending.push(send);
        }
        sleep_in(epoll);
        is_readable.set(true);
        serve(&mut context)?;
        for mut send in sending.drain(..) {
            let Poll::Ready(sent) = Pin::new(&mut send).poll(&mut context) else {
                return Err(TransportError::UnknownWork);
            };
            let (buffer, success) = sent?;
            buffers.push(buffer);
            sum += u64::from(success.byte_len());
        }
    }
    Ok(sum)
}
