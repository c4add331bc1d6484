//! Futures of a loop's channels: of one thread, and behind a lock.

use std::future::{Future, poll_fn};
use std::os::fd::{AsFd, OwnedFd};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ibverbs::{
    AccessFlags, BufferPool, AsyncChannel, Reactor, PooledBuffer, ProtectionDomain, Share,
    TransportError, TransportResult,
};
use ibverbs_function_device::{Builder, FunctionDevice};

use crate::rig::{LENGTH, context, epoll_of};
use crate::server::Peers;
use crate::server_futures::{ANSWERED, Task, WOKEN, run_tasks};

/// A reactor with one channel, which is connected to itself.
fn channel<S: Share<Buffer = PooledBuffer>>(
    reactor: &Reactor<S>,
    domain: &Arc<ProtectionDomain<'static>>,
) -> AsyncChannel<S> {
    let builder = reactor.create_channel(domain).max_send_wr(1).max_recv_wr(1);
    let prepared = builder.build().expect("a channel");
    let itself = prepared.endpoint();
    reactor.add(prepared.handshake(itself).expect("a connection")).expect("room")
}

/// The event server with a task for each connection. Fields are dropped in order.
pub(crate) struct TasksRig<S: Share> {
    peers: Peers,
    tasks: Vec<Task>,
    reactor: Reactor<S>,
    epoll: OwnedFd,
    /// Room for those that were woken.
    woken: Vec<usize>,
}

/// Receives and answers, one message after the other.
async fn serve<S: Share<Buffer = PooledBuffer>>(
    channel: AsyncChannel<S>,
    mut buffer: PooledBuffer,
) -> TransportError {
    loop {
        let (mut message, received) = match channel.receive(buffer).await {
            Ok(message) => message,
            Err(failed) => return failed.error,
        };
        if let Err(error) = message.set_len(received.byte_len() as usize) {
            return error.into();
        }
        buffer = match channel.send(message).await {
            Ok((buffer, _)) => buffer,
            Err(failed) => return failed.error,
        };
        if let Err(error) = buffer.set_len(LENGTH) {
            return error.into();
        }
        let (answered, bytes) = ANSWERED.get();
        ANSWERED.set((answered + 1, bytes + u64::from(received.byte_len())));
    }
}

impl<S: Share<Buffer = PooledBuffer> + 'static> TasksRig<S> {
    pub(crate) fn new(connections: usize) -> Self {
        let (peers, context) = Peers::new(connections);
        let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
        let pool = BufferPool::new(&domain, LENGTH, connections, AccessFlags::empty());
        let pool = pool.expect("a pool");
        let reactor = Reactor::new(&context, 2 * connections as u32).expect("a reactor");
        let task = |_| -> Task {
            Box::pin(serve::<S>(channel(&reactor, &domain), pool.take().expect("a buffer")))
        };
        let tasks: Vec<_> = (0..connections).map(task).collect();
        let epoll = epoll_of(reactor.as_fd());
        let mut woken = Vec::with_capacity(connections);
        woken.extend(0..connections);
        let mut rig = Self { peers, tasks, reactor, epoll, woken };
        run_tasks(&mut rig.tasks, &mut rig.woken).expect("they are posted");
        WOKEN.with_borrow_mut(|woken| woken.reserve(connections));
        rig.reactor.arm().expect("it works");
        // Lists get their sizes.
        tasks_server(&mut rig, 2 * connections as u64).expect("it works");
        rig
    }
}

/// Answers this many messages.
#[inline(never)]
pub(crate) fn tasks_server<S: Share>(
    rig: &mut TasksRig<S>,
    operations: u64,
) -> TransportResult<u64> {
    let TasksRig { peers, tasks, reactor, epoll, woken } = rig;
    ANSWERED.set((0, 0));
    while ANSWERED.get().0 < operations {
        peers.next_messages(operations - ANSWERED.get().0, epoll);
        reactor.arm()?;
        while reactor.turn()? > 0 {
            WOKEN.with_borrow_mut(|new| std::mem::swap(new, woken));
            run_tasks(tasks, woken)?;
        }
    }
    Ok(ANSWERED.get().1)
}

/// A channel, with two buffers.
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
        let reactor = Reactor::new(domain.context_parent(), 2).expect("a reactor");
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
    let take = || pool.take().ok_or(TransportError::UnknownWork);
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

/// A send after the other.
pub(crate) struct SendRig<S: Share> {
    reactor: Reactor<S>,
    channel: AsyncChannel<S>,
    pool: BufferPool,
}

impl<S: Share<Buffer = PooledBuffer>> SendRig<S> {
    pub(crate) fn new() -> Self {
        let domain = Arc::new(ProtectionDomain::new(context()).expect("a domain"));
        let pool = BufferPool::new(&domain, LENGTH, 1, AccessFlags::empty()).expect("a pool");
        let reactor = Reactor::new(domain.context_parent(), 2).expect("a reactor");
        let channel = channel(&reactor, &domain);
        let mut rig = Self { reactor, channel, pool };
        sends(&mut rig, 2).expect("it works");
        rig
    }
}

#[inline(never)]
pub(crate) fn sends<S: Share<Buffer = PooledBuffer>>(
    rig: &mut SendRig<S>,
    operations: u64,
) -> TransportResult<u64> {
    let SendRig { reactor, channel, pool } = rig;
    let mut buffer = pool.take().ok_or(TransportError::UnknownWork)?;
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
