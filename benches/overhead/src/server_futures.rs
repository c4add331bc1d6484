//! The event server with a task for each connection.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::ptr::without_provenance;
use std::sync::Arc;
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Waker};

use ibverbs::future::Share;
use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, PooledBuffer, ProtectionDomain, Reactor, TransportError,
    TransportResult,
};

use crate::reactor::channel;
use crate::rig::{LENGTH, epoll_of};
use crate::server::Peers;

thread_local! {
    /// The tasks that were woken.
    static WOKEN: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// The number of answers of all tasks, and their bytes.
    static ANSWERED: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// A waker is the number of its task: the least that an executor of one thread needs.
const WAKER: RawWakerVTable =
    RawWakerVTable::new(|task| RawWaker::new(task, &WAKER), wake, wake, |_| {});

fn wake(task: *const ()) {
    WOKEN.with_borrow_mut(|woken| woken.push(task.addr()));
}

fn waker(task: usize) -> Waker {
    // SAFETY: the functions take any number, and use what belongs to the thread that calls them.
    unsafe { Waker::new(without_provenance(task), &WAKER) }
}

pub(crate) type Task = Pin<Box<dyn Future<Output = TransportError>>>;

/// Tasks that serve. Fields are dropped in order.
pub(crate) struct Tasks<S: Share> {
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
        let (message, received) = match channel.receive(buffer).await {
            Ok(message) => message,
            Err(failed) => return failed.error,
        };
        buffer = match channel.send(message).await {
            Ok((buffer, _)) => buffer,
            Err(failed) => return failed.error,
        };
        note_answer(received.byte_len());
    }
}

/// Counts a message that was answered.
pub(crate) fn note_answer(len: u32) {
    let (answered, bytes) = ANSWERED.get();
    ANSWERED.set((answered + 1, bytes + u64::from(len)));
}

/// The event server with a task for each connection.
pub(crate) fn tasks<S: Share<Buffer = PooledBuffer> + 'static>(connections: usize) -> Tasks<S> {
    let (peers, context) = Peers::new(connections);
    let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
    let pool = BufferPool::new(&domain, LENGTH, connections, AccessFlags::empty());
    let pool = pool.expect("a pool");
    let reactor = Reactor::with_share(&context, 2 * connections as u32).expect("a reactor");
    let task = |_| -> Task {
        Box::pin(serve::<S>(channel(&reactor, &domain), pool.take().expect("a buffer")))
    };
    let tasks = (0..connections).map(task).collect();
    Tasks::new(peers, reactor, tasks)
}

impl<S: Share> Tasks<S> {
    /// Tasks that receive first.
    pub(crate) fn new(peers: Peers, reactor: Reactor<S>, tasks: Vec<Task>) -> Self {
        let count = tasks.len();
        let epoll = epoll_of(reactor.as_fd());
        let mut woken = Vec::with_capacity(count);
        woken.extend(0..count);
        let mut rig = Self { peers, tasks, reactor, epoll, woken };
        run_tasks(&mut rig.tasks, &mut rig.woken).expect("they are posted");
        WOKEN.with_borrow_mut(|woken| woken.reserve(count));
        rig.reactor.arm().expect("it works");
        // Lists get their sizes.
        tasks_server(&mut rig, 2 * count as u64).expect("it works");
        rig
    }
}

/// Polls tasks, and forgets their numbers.
fn run_tasks(tasks: &mut [Task], numbers: &mut Vec<usize>) -> TransportResult<()> {
    for number in numbers.drain(..) {
        if let Poll::Ready(error) =
            tasks[number].as_mut().poll(&mut Context::from_waker(&waker(number)))
        {
            return Err(error);
        }
    }
    Ok(())
}

/// Answers this many messages.
#[inline(never)]
pub(crate) fn tasks_server<S: Share>(rig: &mut Tasks<S>, operations: u64) -> TransportResult<u64> {
    let Tasks { peers, tasks, reactor, epoll, woken } = rig;
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
