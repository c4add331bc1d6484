//! The asynchronous events of a device.
//!
//! Destroying a queue pair, completion queue, shared receive queue or work queue waits until each event that was read
//! about it is acknowledged. So the call that reads an event copies the object's number or token, acknowledges the
//! event, and does not touch the pointer again. The kernel discards unread events about a destroyed object.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Instant;

use super::context::{Context, ContextRef};
use super::{event_file, quirks};
use crate::base::{
    Result, c_enum, debug,
    event_acks::{self, EventFile},
    ffi, trace,
};

const GET: &str = "ibv_get_async_event";

c_enum! {
    /// `enum ibv_event_type`: what happened.
    #[doc(alias = "ibv_event_type")]
    pub enum AsyncEventKind: ibv_event_type(u32) {
        /// A completion queue overflowed and is broken. Destroy its queue pairs, then the queue.
        CompletionQueueError = IBV_EVENT_CQ_ERR,
        /// A queue pair failed and cannot complete its requests.
        QueuePairFatal = IBV_EVENT_QP_FATAL,
        /// The peer sent an invalid request; the queue pair is in the error state.
        QueuePairRequestError = IBV_EVENT_QP_REQ_ERR,
        /// The peer sent a request without the right to it; the queue pair is in the error state.
        QueuePairAccessError = IBV_EVENT_QP_ACCESS_ERR,
        /// A message reached a queue pair that is ready to receive but not yet to send.
        CommunicationEstablished = IBV_EVENT_COMM_EST,
        /// The send queue of a queue pair in draining is empty.
        SendQueueDrained = IBV_EVENT_SQ_DRAINED,
        /// A connection migrated to its alternative path.
        PathMigrated = IBV_EVENT_PATH_MIG,
        /// A connection could not migrate to its alternative path.
        PathMigrationError = IBV_EVENT_PATH_MIG_ERR,
        /// The device failed or was pulled out: close everything on it. See
        /// [`AsyncEvents`](AsyncEvents#when-the-device-goes).
        DeviceFatal = IBV_EVENT_DEVICE_FATAL,
        /// The port's link came up.
        PortActive = IBV_EVENT_PORT_ACTIVE,
        /// The port's link went down.
        PortError = IBV_EVENT_PORT_ERR,
        /// The LID of the port changed.
        LidChange = IBV_EVENT_LID_CHANGE,
        /// The P_Key table of the port changed.
        PkeyChange = IBV_EVENT_PKEY_CHANGE,
        /// The port has another subnet manager.
        SubnetManagerChange = IBV_EVENT_SM_CHANGE,
        /// A shared receive queue is broken.
        SharedReceiveQueueError = IBV_EVENT_SRQ_ERR,
        /// A shared receive queue fell below its limit: see
        /// [`SharedReceiveQueue::set_limit`](crate::SharedReceiveQueue::set_limit).
        SharedReceiveQueueLimit = IBV_EVENT_SRQ_LIMIT_REACHED,
        /// A queue pair in the error state takes no more requests from its shared receive queue.
        LastRequestReached = IBV_EVENT_QP_LAST_WQE_REACHED,
        /// The subnet manager asks its clients to subscribe again.
        ClientReregister = IBV_EVENT_CLIENT_REREGISTER,
        /// The GID table of the port changed.
        GidChange = IBV_EVENT_GID_CHANGE,
        /// A work queue failed.
        WorkQueueFatal = IBV_EVENT_WQ_FATAL,
        /// The speed of a port changed: see `Context::query_port_speed`.
        DeviceSpeedChange = IBV_EVENT_DEVICE_SPEED_CHANGE,
    }
}

/// `struct ibv_async_event`: an event of [`AsyncEvents`], copied and already acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[doc(alias = "ibv_async_event")]
pub struct AsyncEvent {
    kind: AsyncEventKind,
    subject: AsyncEventSubject,
}

/// The object that an [`AsyncEvent`] is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum AsyncEventSubject {
    /// The device.
    Device,
    /// The port with this number.
    Port(u32),
    /// The queue pair with this [`number`](crate::QueuePair::number).
    QueuePair(u32),
    /// The completion queue with this [`token`](crate::CompletionQueueBuilder::token).
    CompletionQueue(usize),
    /// The shared receive queue with this [token](crate::SharedReceiveQueue::set_token).
    SharedReceiveQueue(usize),
    /// The work queue with this number.
    WorkQueue(u32),
    /// An event type that this version of the crate does not know: the number in the kernel's event.
    Unknown(u32),
}

impl AsyncEvent {
    /// The kind of the event.
    pub fn kind(&self) -> AsyncEventKind {
        self.kind
    }

    /// The object that the event is about.
    pub fn subject(&self) -> AsyncEventSubject {
        self.subject
    }

    /// # Safety
    ///
    /// If the event is about an object, the object is live.
    unsafe fn read(raw: &ffi::ibv_async_event) -> Self {
        use AsyncEventKind as Kind;

        let kind = Kind::from(raw.event_type);
        let element = &raw.element;
        // SAFETY: `ibv_get_async_event` sets the union's member for this type, and the caller vouches for the object.
        // The load is atomic because another thread may change a shared receive queue's token.
        let subject = unsafe {
            match kind {
                Kind::CompletionQueueError => {
                    AsyncEventSubject::CompletionQueue((*element.cq).cq_context as usize)
                }
                Kind::QueuePairFatal
                | Kind::QueuePairRequestError
                | Kind::QueuePairAccessError
                | Kind::CommunicationEstablished
                | Kind::SendQueueDrained
                | Kind::PathMigrated
                | Kind::PathMigrationError
                | Kind::LastRequestReached => AsyncEventSubject::QueuePair((*element.qp).qp_num),
                Kind::SharedReceiveQueueError | Kind::SharedReceiveQueueLimit => {
                    AsyncEventSubject::SharedReceiveQueue(
                        token(element.srq).load(Ordering::Relaxed) as usize,
                    )
                }
                Kind::WorkQueueFatal => AsyncEventSubject::WorkQueue((*element.wq).wq_num),
                Kind::DeviceFatal | Kind::DeviceSpeedChange => AsyncEventSubject::Device,
                Kind::PortActive
                | Kind::PortError
                | Kind::LidChange
                | Kind::PkeyChange
                | Kind::SubnetManagerChange
                | Kind::ClientReregister
                | Kind::GidChange => AsyncEventSubject::Port(element.port_num.cast_unsigned()),
                Kind::Unknown(_) => AsyncEventSubject::Unknown(element.port_num.cast_unsigned()),
            }
        };
        Self { kind, subject }
    }
}

/// The asynchronous events of a device.
///
/// It is [`AsFd`], readable when there is an event. The events belong to the context: each goes to exactly
/// one reader, even with several `AsyncEvents` of the context or several threads. It is acknowledged
/// (`ibv_ack_async_event`) before it is handed out, so no destroy waits for it.
///
/// # When the device goes
///
/// When a device is pulled out or its driver unloaded, each context gets one
/// [`DeviceFatal`](AsyncEventKind::DeviceFatal), its last event. All verbs then fail with `EIO`. Threads that
/// sleep for completions wake with `EIO`. A thread that spins on a `Channel` notices within
/// about a second, as the channel asks the kernel from time to time. A `Reactor` asks too,
/// asleep or not, and its futures fail with `EIO`.
///
/// A channel gives back a buffer in flight only after its queue pair was destroyed. The kernel has done that
/// by then, but answers the destroy verb with `EIO`, which proves nothing. A channel with work in flight then
/// aborts the process, or, if all of that work owns its buffers, leaks them. A program that must survive sets
/// `RDMAV_ALLOW_DISASSOC_DESTROY=1` in its environment before it starts: libibverbs then takes that answer as
/// success.
///
/// With the variable, libibverbs frees the object after such an answer without waiting for C code in the
/// process to acknowledge events about it, so no such code may be handling one then. This crate reads no
/// event of a context while one of its objects is destroyed: [`next_event`](Self::next_event) waits, and so
/// does [`CompletionChannel::next_event`](crate::CompletionChannel::next_event) for completion queues.
/// Without the variable, no event waits for a destroy.
///
/// ```no_run
/// # // not on Soft-RoCE alone: waits for an event
/// use ibverbs::device::{AsyncEventKind, AsyncEventSubject};
///
/// # fn main() -> ibverbs::Result<()> {
/// let context = ibverbs::open("rxe0")?;
/// let events = context.async_events()?;
/// loop {
///     let event = events.wait()?;
///     match (event.kind(), event.subject()) {
///         (AsyncEventKind::PortError, AsyncEventSubject::Port(port)) => println!("{port} is down"),
///         (AsyncEventKind::DeviceFatal, _) => break,
///         (kind, subject) => println!("{kind:?} {subject:?}"),
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub struct AsyncEvents<'ctx> {
    context: ContextRef<'ctx>,
    file: EventFile,
}

impl<'ctx> AsyncEvents<'ctx> {
    /// Makes the context's event file non-blocking, also for C code that shares the context.
    ///
    /// # Errors
    ///
    ///  - `EBADF`: the context has no such file.
    pub fn new(context: impl Into<ContextRef<'ctx>>) -> Result<Self> {
        let context = context.into();
        let frees =
            context.query_device().map_or(true, |device| quirks::frees_what_it_keeps(&device));
        let file = EventFile::new(context.as_raw(), None, frees);
        let events = Self { context, file };
        event_file::set_nonblocking(GET, events.as_raw_fd())?;
        Ok(events)
    }

    /// `ibv_get_async_event`, `ibv_ack_async_event`: takes the oldest event, if any, without waiting.
    ///
    /// It drops an event about an object whose destroy verb failed.
    ///
    /// # Errors
    ///
    ///  - `EIO`: the device is gone.
    #[doc(alias = "ibv_get_async_event")]
    #[doc(alias = "ibv_ack_async_event")]
    pub fn next_event(&self) -> Result<Option<AsyncEvent>> {
        let event = self.file.read(|| self.read_event())?;
        if let Some(event) = &event {
            trace::async_event(event.kind(), event.subject());
        }
        Ok(event)
    }

    fn read_event(&self) -> Result<Option<AsyncEvent>> {
        loop {
            let mut raw = ffi::ibv_async_event::default();
            let read = event_file::read_event(GET, || {
                // SAFETY: the context is live, and `raw` is writable.
                unsafe { ffi::ibv_get_async_event(self.context.as_raw(), &mut raw) }
            })?;
            if !read {
                return Ok(None);
            }
            // SAFETY: every member of the union is a number or a pointer. A port's number is no object's address.
            let address = unsafe { raw.element.qp }.addr();
            if event_acks::failed_to_destroy(address) {
                // Acknowledging would write to the object, and nothing waits for it.
                continue;
            }
            // SAFETY: an object is live: its destroy verb has not failed, and waits for this acknowledgement or for the
            // end of `EventFile::read`.
            unsafe {
                let event = AsyncEvent::read(&raw);
                ffi::ibv_ack_async_event(&mut raw);
                return Ok(Some(event));
            }
        }
    }

    /// Sleeps until there is a [`next_event`](Self::next_event). A signal does not end the wait (`EINTR` is
    /// retried).
    ///
    /// # Errors
    ///
    /// Those of [`next_event`](Self::next_event).
    pub fn wait(&self) -> Result<AsyncEvent> {
        event_file::take_before(GET, self.as_raw_fd(), None, || self.next_event())
    }

    /// [`wait`](Self::wait), not after `deadline`.
    ///
    /// # Errors
    ///
    /// Those of [`next_event`](Self::next_event); `ETIMEDOUT`: there was no event.
    pub fn wait_until(&self, deadline: Instant) -> Result<AsyncEvent> {
        event_file::take_before(GET, self.as_raw_fd(), Some(deadline), || self.next_event())
    }

    /// Their context.
    pub fn context(&self) -> &Context<'ctx> {
        &self.context
    }
}

impl AsRawFd for AsyncEvents<'_> {
    fn as_raw_fd(&self) -> RawFd {
        // SAFETY: the context is live.
        unsafe { (*self.context.as_raw()).async_fd }
    }
}

impl AsFd for AsyncEvents<'_> {
    /// Readable when there is an event. Read only through [`next_event`](Self::next_event).
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is borrowed, and keeps its file open.
        unsafe { BorrowedFd::borrow_raw(self.as_raw_fd()) }
    }
}

debug! { AsyncEvents<'_>, self, device: self.context.name(), fd: self.as_raw_fd() }

impl Context<'_> {
    /// [`AsyncEvents::new`], borrowing this context. To return the events from a function, call that with the
    /// context by value or in an `Arc`.
    ///
    /// # Errors
    ///
    /// Those of [`AsyncEvents::new`].
    #[doc(alias = "ibv_get_async_event")]
    pub fn async_events(&self) -> Result<AsyncEvents<'_>> {
        AsyncEvents::new(self)
    }
}

/// A field that libibverbs does not use.
///
/// # Safety
///
/// `queue` is live for `'a`, and its `srq_context` is accessed through this alone.
pub(crate) unsafe fn token<'a>(queue: *mut ffi::ibv_srq) -> &'a AtomicPtr<std::ffi::c_void> {
    // SAFETY: the caller vouches for the queue and for the exclusive access.
    unsafe { AtomicPtr::from_ptr(&raw mut (*queue).srq_context) }
}
