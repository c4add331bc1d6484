//! Futures of many channels on one reactor.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::os::fd::{AsFd, OwnedFd};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use ibverbs::future::Share;
use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, Channel, PooledBuffer, ProtectionDomain, Reactor,
    TransportError, TransportResult,
};
use ibverbs_function_device::{Builder, FunctionDevice};

use crate::rig::{LENGTH, WINDOW, context, epoll_of, full, sleep_in};

/// A channel of one operation in each direction, which is connected to itself.
pub(crate) fn channel<S: Share<Buffer = PooledBuffer>>(
    reactor: &Reactor<S>,
    domain: &Arc<ProtectionDomain<'static>>,
) -> AsyncChannel<S> {
    channel_of(reactor, domain, 1)
}

/// A channel that is its own peer, with this number of operations at a time.
pub(crate) fn channel_of<S: Share<Buffer = PooledBuffer>>(
    reactor: &Reactor<S>,
    domain: &Arc<ProtectionDomain<'static>>,
    depth: u32,
) -> AsyncChannel<S> {
    let builder = Channel::builder(domain).max_send_wr(depth).max_recv_wr(depth);
    let prepared = reactor.prepare(builder).expect("a channel");
    let itself = prepared.endpoint();
    prepared.handshake(itself).expect("a connection")
}

/// Tasks that send, each on a channel of its own.
pub(crate) struct ReactorRig {
    reactor: Reactor,
    tasks: Vec<Pin<Box<dyn Future<Output = TransportError>>>>,
    /// The task whose turn it is.
    next: usize,
    sent: Rc<Sent>,
}

/// The sends of all tasks.
#[derive(Default)]
struct Sent {
    messages: Cell<u64>,
    bytes: Cell<u64>,
}

/// Sends one message after the other.
async fn send(channel: AsyncChannel, mut buffer: PooledBuffer, sent: Rc<Sent>) -> TransportError {
    loop {
        match channel.send(buffer).await {
            Ok((back, success)) => {
                buffer = back;
                sent.messages.set(sent.messages.get() + 1);
                sent.bytes.set(sent.bytes.get() + u64::from(success.byte_len()));
            }
            Err(failed) => return failed.error,
        }
    }
}

impl ReactorRig {
    pub(crate) fn new(channels: usize) -> Self {
        let context = context();
        let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
        let pool = BufferPool::new(&domain, LENGTH, channels, AccessFlags::empty());
        let pool = pool.expect("a pool");
        let reactor = Reactor::new(&context, 2 * channels as u32).expect("a reactor");
        let sent = Rc::new(Sent::default());
        let task = |_| -> Pin<Box<dyn Future<Output = TransportError>>> {
            let channel = channel(&reactor, &domain);
            Box::pin(send(channel, full(&pool, LENGTH).expect("a buffer"), sent.clone()))
        };
        let tasks = (0..channels).map(task).collect();
        let mut rig = Self { reactor, tasks, next: 0, sent };
        // After this, each turn of a task ends one send and begins another. Lists get their size too.
        rig.poll(channels, &mut Context::from_waker(Waker::noop())).expect("they are posted");
        while rig.reactor.turn().expect("it works") > 0 {}
        sends(&mut rig, 2 * channels as u64).expect("it works");
        rig
    }

    /// Polls this number of tasks. Each takes the result of its last message and posts the next one.
    fn poll(&mut self, count: usize, context: &mut Context<'_>) -> Result<(), TransportError> {
        for _ in 0..count {
            if let Poll::Ready(error) = self.tasks[self.next].as_mut().poll(context) {
                return Err(error);
            }
            self.next = if self.next + 1 == self.tasks.len() { 0 } else { self.next + 1 };
        }
        Ok(())
    }
}

impl Sent {
    /// The number of bytes, if `f` has sent this number of messages.
    fn by(
        self: &Rc<Self>,
        messages: u64,
        f: impl FnOnce() -> Result<(), TransportError>,
    ) -> Result<u64, TransportError> {
        let (messages_before, bytes_before) = (self.messages.get(), self.bytes.get());
        f()?;
        if self.messages.get() - messages_before != messages {
            return Err(TransportError::UnknownWork);
        }
        Ok(self.bytes.get() - bytes_before)
    }
}

/// Sends: each task has its turn, and then the reactor runs until it finds nothing.
#[inline(never)]
pub(crate) fn sends(rig: &mut ReactorRig, operations: u64) -> Result<u64, TransportError> {
    let mut context = Context::from_waker(Waker::noop());
    rig.sent.clone().by(operations, || {
        let mut left = operations as usize;
        while left > 0 {
            let round = left.min(rig.tasks.len());
            rig.poll(round, &mut context)?;
            while rig.reactor.turn()? > 0 {}
            left -= round;
        }
        Ok(())
    })
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

/// Sends: the program sleeps once, and then each task has its turn.
#[inline(never)]
pub(crate) fn sends_asleep(rig: &mut SleepingRig, operations: u64) -> Result<u64, TransportError> {
    let SleepingRig { rig, epoll, task, waker } = rig;
    let mut context = Context::from_waker(waker);
    let ReactorRig { reactor, tasks, sent, .. } = rig;
    let is_readable = Cell::new(false);
    let mut run = pin!(reactor.run(|_| match is_readable.take() {
        true => Poll::Ready(Ok(())),
        false => Poll::Pending,
    }));
    // Runs the reactor until it waits for its file.
    let mut serve = |context: &mut Context<'_>| loop {
        task.is_woken.store(false, Ordering::Relaxed);
        match run.as_mut().poll(context) {
            Poll::Ready(Err(error)) => break Err(TransportError::Verbs(error)),
            Poll::Ready(Ok(())) => break Err(TransportError::Stopped),
            Poll::Pending if !task.is_woken.load(Ordering::Relaxed) => break Ok(()),
            Poll::Pending => {}
        }
    };
    sent.by(operations, || {
        serve(&mut context)?;
        for _ in 0..operations / WINDOW as u64 {
            for task in tasks.iter_mut() {
                if let Poll::Ready(error) = task.as_mut().poll(&mut context) {
                    return Err(error);
                }
            }
            sleep_in(epoll);
            is_readable.set(true);
            serve(&mut context)?;
        }
        Ok(())
    })
}

/// A channel on a reactor, with two buffers.
pub(crate) struct PairRig<S: Share> {
    device: FunctionDevice,
    reactor: Reactor<S>,
    channel: AsyncChannel<S>,
    pool: BufferPool,
}

impl<S: Share<Buffer = PooledBuffer>> PairRig<S> {
    pub(crate) fn new() -> Self {
        let device = Builder::lean().held_receives(1).build();
        let domain = Arc::new(ProtectionDomain::new(Arc::new(device.context())).expect("a domain"));
        let pool = BufferPool::new(&domain, LENGTH, 2, AccessFlags::empty()).expect("a pool");
        let reactor = Reactor::with_share(domain.context_parent(), 2).expect("a reactor");
        let channel = channel(&reactor, &domain);
        let mut rig = Self { device, reactor, channel, pool };
        // Lists get their sizes.
        pairs(&mut rig, 2).expect("it works");
        rig
    }
}

/// A receive, a send that is awaited, and the receive, whose message has come first.
#[inline(never)]
pub(crate) fn pairs<S: Share<Buffer = PooledBuffer>>(
    rig: &mut PairRig<S>,
    operations: u64,
) -> TransportResult<u64> {
    let PairRig { device, reactor, channel, pool } = rig;
    let take = || full(pool, LENGTH).ok_or(TransportError::UnknownWork);
    let (mut message, mut room) = (take()?, take()?);
    let task = async {
        let mut sum = 0;
        for _ in 0..operations {
            let mut receive = pin!(channel.receive(room));
            let posted = poll_fn(|context| Poll::Ready(receive.as_mut().poll(context))).await;
            if posted.is_ready() {
                return Err(TransportError::UnknownWork);
            }
            device.deliver(1);
            (message, _) = channel.send(message).await.map_err(|failed| failed.error)?;
            let received;
            (room, received) = receive.await.map_err(|failed| failed.error)?;
            sum += u64::from(received.byte_len());
        }
        Ok(sum)
    };
    run(reactor, pin!(task))
}

/// One task, which sends one message after the other.
pub(crate) struct SendRig<S: Share> {
    reactor: Reactor<S>,
    channel: AsyncChannel<S>,
    pool: BufferPool,
}

impl<S: Share<Buffer = PooledBuffer>> SendRig<S> {
    pub(crate) fn new() -> Self {
        let domain = Arc::new(ProtectionDomain::new(context()).expect("a domain"));
        let pool = BufferPool::new(&domain, LENGTH, 1, AccessFlags::empty()).expect("a pool");
        let reactor = Reactor::with_share(domain.context_parent(), 2).expect("a reactor");
        let channel = channel(&reactor, &domain);
        let mut rig = Self { reactor, channel, pool };
        sends_of_one(&mut rig, 2).expect("it works");
        rig
    }
}

#[inline(never)]
pub(crate) fn sends_of_one<S: Share<Buffer = PooledBuffer>>(
    rig: &mut SendRig<S>,
    operations: u64,
) -> TransportResult<u64> {
    let SendRig { reactor, channel, pool } = rig;
    let mut buffer = full(pool, LENGTH).ok_or(TransportError::UnknownWork)?;
    let task = async {
        let mut sum = 0;
        for _ in 0..operations {
            let sent;
            (buffer, sent) = channel.send(buffer).await.map_err(|failed| failed.error)?;
            sum += u64::from(sent.byte_len());
        }
        Ok(sum)
    };
    run(reactor, pin!(task))
}

/// Turns the reactor until the task has ended, which is polled after each turn that finds something.
fn run<S: Share>(
    reactor: &Reactor<S>,
    mut task: Pin<&mut impl Future<Output = TransportResult<u64>>>,
) -> TransportResult<u64> {
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(result) = task.as_mut().poll(&mut context) {
            return result;
        }
        reactor.turn()?;
    }
}

/// Turns that find nothing.
#[inline(never)]
pub(crate) fn empty<S: Share<Buffer = PooledBuffer>>(
    rig: &mut SendRig<S>,
    operations: u64,
) -> TransportResult<u64> {
    for _ in 0..operations {
        if rig.reactor.turn()? > 0 {
            return Err(TransportError::UnknownWork);
        }
    }
    Ok(operations * LENGTH as u64)
}
