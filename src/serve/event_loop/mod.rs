//! Many channels on one thread: one completion queue, one table of operations, one owner.
//!
//! | to | |
//! |---|---|
//! | post what owns its buffer, serve many peers | [`Loop`], [`ChannelId`], [`Ended`], [`LoopBuffer`] |
//! | send datagrams, also to many at once | [`Loop::add_datagrams`], [`Loop::send_to`], [`Loop::join`] |
//! | post from other threads, beside the one that polls | [`LoopSender`] |
//! | end or share the waits of a loop | [`LoopWaker`], [`LoopWaiter`], [`ArmedWaiter`] |
//! | connect or destroy beside a running loop | [`DetachedChannel`], [`DestroyedChannel`] |

mod channels;
mod credit_waiters;
mod datagrams;
#[cfg_attr(not(feature = "async"), allow(dead_code))] // it is for futures
mod detached;
mod detached_channel;
mod ended;
mod ending;
#[cfg(all(test, ibverbs_loom))]
mod every_order;
mod flow;
mod members;
mod numbers;
mod peers;
mod post;
mod ring;
mod sender;
mod sends;
mod shared;
mod slots;
mod table;
#[cfg_attr(not(feature = "async"), allow(dead_code))] // it is for them
mod tasks;
mod unsignaled;
#[cfg_attr(not(feature = "async"), allow(dead_code))] // it is for them
mod waiters;
mod waking;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

pub use detached_channel::{DestroyedChannel, DetachedChannel};
pub(crate) use ended::Keep;
pub use ended::{ChannelId, Ended, LoopBuffer};
pub use sender::LoopSender;
pub use waking::{ArmedWaiter, LoopWaiter, LoopWaker};

#[cfg(feature = "async")]
pub(crate) use detached::{Detached, PendingDestroy, step};
use members::Members;
#[cfg(feature = "async")]
pub(crate) use shared::shared_queue;
use slots::{Slot, State};
use table::Table;
#[cfg(feature = "async")]
pub(crate) use tasks::DeferredStep;
#[cfg(feature = "async")]
pub(crate) use waiters::{DeferredWork, Woken};

use crate::base::{Error, ErrorKind, Result, debug, ffi};
use crate::channel::parts::poll_cq_of;
use crate::channel::{ChannelBuilder, TransportError, TransportResult};
use crate::verbs::completion::CompletionQueue;
use crate::verbs::device::ContextRef;
use crate::verbs::domain::DomainRef;

/// Many channels on one thread, with one completion queue. Each operation that has ended comes back with its channel,
/// its buffer and a number that the program chose.
///
/// It is the cheapest way to serve many peers. A loop has one owner (`&mut self`), so nothing is locked, counted or
/// allocated per operation. A program with several threads has a loop on each. A loop may move to another thread; a
/// channel stays in its loop.
///
/// `B` is the type of all buffers, such as [`PooledBuffer`](crate::PooledBuffer). For buffers of several types, use
/// `Loop<AnyBuffer>`.
///
/// ```no_run
/// # // not on Soft-RoCE alone: needs peers
/// use std::net::TcpListener;
/// use std::sync::Arc;
/// use std::time::{Duration, Instant};
///
/// use ibverbs::{
///     AccessFlags, BufferPool, Loop, PooledBuffer, ProtectionDomain, ReceiveWorkRequest, SendWorkRequest,
/// };
///
/// const RECEIVE: u64 = 0;
/// const SEND: u64 = 1;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let context = Arc::new(ibverbs::open("rxe0")?);
/// let domain = Arc::new(ProtectionDomain::new(&context)?);
/// let pool = BufferPool::new(&domain, 4096, 256, AccessFlags::empty())?;
/// let mut server = Loop::<PooledBuffer>::new(&context, 1024)?;
/// let listener = TcpListener::bind("[::]:18515")?;
/// for _ in 0..4 {
///     let deadline = Instant::now() + Duration::from_secs(10);
///     let prepared = server.create_channel(&domain).build()?;
///     let channel = server.add(prepared.accept(&listener, b"", deadline)?.0)?;
///     let buffer = pool.take().ok_or("all buffers are in use")?;
///     server.post(channel, ReceiveWorkRequest::new(buffer), RECEIVE)?;
/// }
/// loop {
///     let ended = server.wait_ended()?; // sleeps until there is something
///     if let Err(error) = ended.result() {
///         eprintln!("{error}");
///         // What is in flight ends with errors, too. The first of them removes the channel.
///         let _ = server.remove(ended.channel);
///     } else if ended.token == RECEIVE {
///         server.post(ended.channel, SendWorkRequest::new(ended.buffer), SEND)?; // the answer
///     } else {
///         server.post(ended.channel, ReceiveWorkRequest::new(ended.buffer), RECEIVE)?;
///     }
/// }
/// # }
/// ```
///
/// # When a peer dies
///
/// The loop notices when the peer of a channel has died or left, though nothing is sent, by the TCP stream over which the
/// channel was connected, or by the connection manager. All operations of the channel end with
/// [`PeerGone`](TransportError::PeerGone), after what the peer had sent. [`next_gone`](Self::next_gone) names a channel that
/// had none in flight.
///
/// # In an event loop
///
/// The [descriptor](AsFd) becomes readable when an operation has ended. Before the program sleeps on it, it calls
/// [`arm`](Self::arm), and then [`next_ended`](Self::next_ended) until that returns `None`. In this order no completion
/// is missed, even if the descriptor is watched edge-triggered:
///
/// ```
/// # use std::os::fd::{AsFd, BorrowedFd};
/// # fn sleep_until_readable(_: BorrowedFd<'_>) {}
/// # fn serve(_: &mut ibverbs::Loop<'_, ibverbs::PooledBuffer>, _: ibverbs::Ended<ibverbs::PooledBuffer>) {}
/// # fn run(server: &mut ibverbs::Loop<'_, ibverbs::PooledBuffer>) -> ibverbs::TransportResult<()> {
/// loop {
///     server.arm()?;
///     while let Some(ended) = server.next_ended()? {
///         serve(server, ended);
///     }
///     sleep_until_readable(server.as_fd());
///     # break;
/// }
/// # Ok(())
/// # }
/// ```
///
/// Under steady load `next_ended` may never return `None`: a program with other work bounds its turns.
///
/// # Under a protocol
///
/// Build a protocol whose own calls are polled (`poll_read`, `poll_write`) or block on a loop: the futures of
/// asynchronous channels borrow them. The protocol's threads and tasks share the loop behind a lock. They sleep with a
/// [waiter](Self::waiter) or on the descriptor, and connect and destroy channels that are [taken out](Self::take_out).
/// The crate `ibverbs-stream` is an example.
///
/// # When it is dropped
///
/// All channels are destroyed, and all buffers dropped. If a queue pair cannot be destroyed, the buffers that its
/// device may use are [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with everything that it was
/// made from. Forgetting a loop leaks everything.
pub struct Loop<'res, B> {
    table: Table<B>,
    members: Members<'res>,
    queue: Arc<CompletionQueue<'res>>,
    /// [`LoopWaker`] wakes that its waits have returned for.
    wakes: u64,
}

// SAFETY: the loop alone owns everything in it, and libibverbs may be called on any thread. Buffers move along, so `B`
// is `Send`.
unsafe impl<B: Send> Send for Loop<'_, B> {}

impl<'res, B> Loop<'res, B> {
    /// `ibv_create_comp_channel`, `ibv_create_cq`: a loop whose channels together can have `entries` operations in
    /// flight.
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::new`], [`CompletionChannel::new`](crate::CompletionChannel::new) and
    /// [`from_queue`](Self::from_queue).
    #[doc(alias = "ibv_create_cq")]
    pub fn new(context: impl Into<ContextRef<'res>>, entries: u32) -> Result<Self> {
        Self::from_queue(CompletionQueue::builder(context, entries).own_channel().build()?)
    }

    /// A loop on a completion queue with settings of its own, such as its vector.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the queue has no [channel of its own](crate::CompletionQueueBuilder::own_channel), or wakes for
    ///    solicited completions only, which the sends of a channel do not raise.
    pub fn from_queue(queue: CompletionQueue<'res>) -> Result<Self> {
        queue.own_channel()?;
        let reason = "the completion queue wakes for solicited completions only";
        Error::invalid_if(queue.is_solicited_only(), "ibv_req_notify_cq", reason)?;
        // SAFETY: the loop owns the queue, so it is live whenever the table polls it.
        let table = unsafe { Table::new(queue.as_raw(), poll_cq_of(queue.as_raw())) };
        let members = Members::new(queue.capacity());
        Ok(Self { table, members, queue: Arc::new(queue), wakes: 0 })
    }

    /// Starts to build a channel of this loop. It can post nothing until it is connected and [added](Self::add).
    pub fn create_channel(&self, domain: impl Into<DomainRef<'res>>) -> ChannelBuilder<'res> {
        ChannelBuilder::new(domain).of_loop(&self.queue, None)
    }

    /// `ibv_poll_cq`: the next operation that has ended, or `None`. It never waits. The operations of a queue come in
    /// the order in which they were posted.
    ///
    /// # Errors
    ///
    /// No operation is lost, and the next call goes on:
    ///
    ///  - [`Verbs`](crate::TransportError::Verbs): polling failed.
    ///  - [`UnknownCompletion`](crate::TransportError::UnknownCompletion): a completion belongs to no operation. It
    ///    ended nothing.
    #[doc(alias = "ibv_poll_cq")]
    #[inline(always)]
    pub fn next_ended(&mut self) -> TransportResult<Option<Ended<B>>> {
        let Self { table, members, queue, .. } = self;
        table.next_ended(|table| members.look_after_empty_poll(table, queue))
    }

    /// As [`next_ended`](Self::next_ended), but sleeps until an operation has ended. No signal ends the wait. It reads
    /// the events of the [descriptor](AsFd).
    ///
    /// # Errors
    ///
    /// Those of [`next_ended`](Self::next_ended) and [`arm`](Self::arm), and
    ///
    ///  - [`Cancelled`](crate::TransportError::Cancelled): a [`LoopWaker`] has woken the loop since a wait last returned
    ///    for it. Everything is still in flight.
    ///  - [`Verbs`](crate::TransportError::Verbs): `EDEADLK`: nothing was posted, or only
    ///    [sends without completions](Self::post_unsignaled), and no [`LoopWaker`] and no [`LoopSender`] is left: the wait
    ///    would never end.
    ///  - [`PeerGone`](crate::TransportError::PeerGone): [`next_gone`](Self::next_gone) has a channel.
    pub fn wait_ended(&mut self) -> TransportResult<Ended<B>> {
        match self.next_ended()? {
            Some(ended) => Ok(ended),
            None => self.sleep_until_ended(),
        }
    }

    /// Whether nothing will end by itself. Where something will, one of the first slots mostly tells.
    fn is_idle(&self) -> bool {
        let slots = &self.table.slots;
        let ends = |slot: &Slot<B>| slot.state.is_in_flight() && slot.state != State::Unsignaled;
        !slots.iter().any(ends) && self.table.sent_in_flight(&(0..slots.len() as u32)) == 0
    }

    #[cold]
    fn sleep_until_ended(&mut self) -> TransportResult<Ended<B>> {
        let queue = self.queue.clone();
        let waiters = queue.own_channel()?.waiters();
        loop {
            let (is_idle, wakes) = (self.is_idle(), self.wakes);
            // Also if the last handle that could wake it goes.
            let is_woken = || waiters.wakes() != wakes || is_idle && !waiters.is_wakeable();
            let poll = || match self.next_ended() {
                Ok(None) if is_woken() || self.has_gone() => Ok(Some(Ok(None))),
                ended => Ok(ended.transpose().map(|ended| ended.map(Some))),
            };
            match queue.sleep_until_found(None, poll, is_woken)?? {
                Some(ended) => return Ok(ended),
                None if self.take_wake()? => return Err(TransportError::Cancelled),
                None if self.has_gone() => return Err(TransportError::PeerGone),
                None if self.is_idle() => {
                    let reason = "nothing was posted that has a completion, and no LoopWaker would end the wait";
                    let error = Error::with_reason("ibv_get_cq_event", libc::EDEADLK, reason);
                    return Err(error.into());
                }
                // A sender has posted, and is gone.
                None => {}
            }
        }
    }

    /// As [`wait_ended`](Self::wait_ended), but returns `None` once the deadline has passed, a [`LoopWaker`] has woken
    /// the loop since the last such return, or [`next_credited`](Self::next_credited) or
    /// [`next_gone`](Self::next_gone) has a channel.
    ///
    /// # Errors
    ///
    /// Those of [`wait_ended`](Self::wait_ended).
    pub fn wait_ended_until(&mut self, deadline: Instant) -> TransportResult<Option<Ended<B>>> {
        // First, so that a wake reaches even a loop that always has completions.
        while !self.take_wake()? {
            let pause = self.credit_pause().and_then(|pause| Instant::now().checked_add(pause));
            let until = pause.map_or(deadline, |until| until.min(deadline));
            let queue = self.queue.clone();
            let (waiters, wakes) = (queue.own_channel()?.waiters(), self.wakes);
            let is_woken = || waiters.wakes() != wakes;
            let poll = || match self.next_ended() {
                // Peers' answers about credit raise events too.
                Ok(None)
                    if is_woken()
                        || self.has_gone()
                        || self.table.must_wait_end(pause.is_none(), until) =>
                {
                    Ok(Some(Ok(None)))
                }
                ended => Ok(ended.transpose().map(|ended| ended.map(Some))),
            };
            let slept = queue.sleep_until_found(Some(until), poll, is_woken);
            match slept {
                Err(error) if error.kind() != ErrorKind::TimedOut => return Err(error.into()),
                Ok(Ok(Some(ended))) => return Ok(Some(ended)),
                Ok(Err(error)) => return Err(error),
                Ok(Ok(None)) | Err(_) => {
                    let has_news = self.table.credited().is_some() || self.has_gone();
                    if has_news || Instant::now() >= deadline {
                        break;
                    }
                }
            }
        }
        Ok(None)
    }

    /// `ibv_req_notify_cq`: the next completion makes the [descriptor](AsFd) readable, also if a [waiter](Self::waiter)
    /// takes its event, and so does a [`LoopWaker`]. Earlier events are read, so it is not readable until then: check
    /// afterwards what a wake was for. One thread or task at a time sleeps on the descriptor.
    ///
    /// Completions that are there already raise no event: before sleeping, call [`next_ended`](Self::next_ended) until
    /// it returns `None`.
    ///
    /// # Errors
    ///
    ///  - `EIO`: the device is gone.
    #[doc(alias = "ibv_req_notify_cq")]
    pub fn arm(&self) -> Result<()> {
        self.queue.rearm_own()
    }

    /// The number of operations that all channels together can have in flight, and how many of these are not reserved.
    /// A channel reserves [`max_send_wr`](ChannelBuilder::max_send_wr) and [`max_recv_wr`](ChannelBuilder::max_recv_wr)
    /// from when it is added until it is removed.
    pub fn capacity(&self) -> (u32, u32) {
        (self.queue.capacity(), self.members.room)
    }

    pub(crate) fn queue(&self) -> &Arc<CompletionQueue<'res>> {
        &self.queue
    }

    /// The completion queue's C object, valid as long as the loop. If the caller polls a completion, the loop never
    /// sees it: its operation ends when the channel is removed.
    pub fn as_raw(&self) -> *mut ffi::ibv_cq {
        self.queue.as_raw()
    }
}

impl<B> AsFd for Loop<'_, B> {
    /// The file that is readable when there is an event, and sometimes without one. Only wait for it:
    /// [`arm`](Self::arm) reads from it. It stays the same for the life of the loop. It is an epoll instance: `poll` takes
    /// it always, and another instance unless those around it are too many (`EINVAL`).
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.ready_file().expect("checked when the loop was made")
    }
}

debug! { impl[B] Loop<'_, B>, self, queue: self.queue, available: self.members.room, .. }
