use std::time::Instant;

use super::Channel;
use super::error::TransportResult;
use super::operation::{Operation, Queue};
use super::posting::{IntoReceive, IntoSend, WorkRequest};
use crate::base::err_from_call;
use crate::verbs::completion::WorkSuccess;
use crate::verbs::memory::{GatherBuffer, RemoteMemoryRegion, ScatterBuffer};
use crate::verbs::operation::{ReadWorkRequest, WriteWorkRequest};

macro_rules! blocking_methods {
    () => {
        /// `ibv_post_send`: sends one message, a buffer or a [`SendWorkRequest`](crate::SendWorkRequest), and waits until
        /// the peer has it (on a reliable connection: until it has acknowledged it).
        ///
        /// # Errors
        ///
        /// [Those of blocking operations](Channel#blocking-operations).
        #[inline(always)]
        pub fn send<M: IntoSend>(&mut self, message: M) -> TransportResult<WorkSuccess> {
            self.run(message.into_send())
        }

        /// `ibv_post_recv`: receives one message into a buffer. Its length is [`WorkSuccess::byte_len`]: see
        /// [`ReceiveWorkRequest`](crate::ReceiveWorkRequest).
        ///
        /// If the peer sends before the receive is posted, the peer's device retries up to its
        /// [`max_rnr_retries`](crate::ChannelBuilder::max_rnr_retries). To avoid retries, post receives ahead,
        /// in a [`scope`](Channel::scope).
        ///
        /// # Errors
        ///
        /// [Those of blocking operations](Channel#blocking-operations).
        #[inline(always)]
        pub fn receive<M: IntoReceive>(&mut self, room: M) -> TransportResult<WorkSuccess> {
            self.run(room.into_receive())
        }

        /// `ibv_post_send`: writes to the peer's memory. The peer does not notice. See
        /// [`WriteWorkRequest`].
        ///
        /// # Errors
        ///
        /// [Those of blocking operations](Channel#blocking-operations).
        #[inline(always)]
        pub fn write<D: GatherBuffer>(
            &mut self,
            data: D,
            remote: impl Into<RemoteMemoryRegion>,
        ) -> TransportResult<WorkSuccess> {
            self.run(WriteWorkRequest::new(data, remote))
        }

        /// `ibv_post_send`: fills the buffer from the peer's memory. See [`ReadWorkRequest`].
        ///
        /// # Errors
        ///
        /// [Those of blocking operations](Channel#blocking-operations).
        #[inline(always)]
        pub fn read<D: ScatterBuffer>(
            &mut self,
            buffer: D,
            remote: impl Into<RemoteMemoryRegion>,
        ) -> TransportResult<WorkSuccess> {
            self.run(ReadWorkRequest::new(buffer, remote))
        }
    };
}

/// # Blocking operations
///
/// Each posts one request and waits until it has ended, successfully or not. The buffer is mostly lent, `&slice` or
/// `&mut slice`; one that is given is dropped at the end of the call. Errors are
///
///  - [`Work`](crate::TransportError::Work): it was posted and failed.
///  - [`QueueFull`](crate::TransportError::QueueFull): unpolled work takes up the queue.
///  - [`Verbs`](crate::TransportError::Verbs): an argument is wrong (there are more pieces or more inline data than the
///    channel was built for; the peer's memory is too short, or not aligned for an atomic; an unreliable connection has
///    no reads and atomics; on iWARP, a read fills memory that peers may never write); or the device has refused the
///    request; or completions could not be polled, or the provider cannot tell whether the device has
///    the request, and the channel was stopped.
///  - [`Verbs`](crate::TransportError::Verbs): in debug builds, memory of another protection domain or device. Release
///    builds do not look: there the operation ends with an error.
///  - [`UnknownCompletion`](crate::TransportError::UnknownCompletion): the completion queue holds a
///    completion that belongs to no operation of this channel, and the channel was stopped.
///  - [`Stopped`](crate::TransportError::Stopped), [`Closed`](crate::TransportError::Closed): an
///    earlier failure has stopped the channel.
///  - [`TimedOut`](crate::TransportError::TimedOut): the deadline has passed, where there is one. The
///    channel was stopped, and must be [reset](Self::reset).
///  - [`Cancelled`](crate::TransportError::Cancelled): a [cancel handle](Channel::cancel_handle) has ended the wait. The
///    channel was stopped, unless nothing was posted yet for lack of credit.
///  - [`NoCredit`](crate::TransportError::NoCredit): the channel has
///    [flow control](crate::ChannelBuilder::flow_control), and the deadline has passed before the peer has
///    posted a receive. Nothing was posted, and the channel was not stopped.
impl<'res> Channel<'res> {
    /// `ibv_post_send`, `ibv_post_recv`: posts any request, and waits until it has ended.
    ///
    /// ```
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// use ibverbs::{Channel, FetchAddWorkRequest, MemoryRegion, RemoteMemoryRegion, TransportError};
    ///
    /// fn take_ticket(
    ///     channel: &mut Channel<'_>,
    ///     result: &mut MemoryRegion<'_, u64>,
    ///     counter: RemoteMemoryRegion,
    /// ) -> Result<u64, TransportError> {
    ///     channel.run(FetchAddWorkRequest::new(&mut result.slice_mut(..)?, counter, 1))?;
    ///     Ok(result[0])
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[doc(alias = "ibv_post_send")]
    #[doc(alias = "ibv_post_recv")]
    #[inline(always)]
    pub fn run<R: WorkRequest>(&mut self, request: R) -> TransportResult<WorkSuccess> {
        self.run_with(request, None)
    }

    /// The same operations, each of which gives up at `deadline`:
    /// `channel.until(deadline).receive(&mut room)?`.
    #[inline(always)]
    pub fn until(&mut self, deadline: Instant) -> ChannelUntil<'_, 'res> {
        ChannelUntil { channel: self, deadline }
    }

    blocking_methods!();

    #[inline(always)]
    fn run_with<R: WorkRequest>(
        &mut self,
        request: R,
        deadline: Option<Instant>,
    ) -> TransportResult<WorkSuccess> {
        let (operation, mut buffer) = request.split();
        let core = self.core();
        let mut list = match R::list(&mut buffer) {
            Ok(list) => list,
            Err(error) => {
                let limits = &core.settings.limits;
                return err_from_call(R::Operation::explain_buffer(limits, error).into());
            }
        };
        // SAFETY: the buffer keeps its memory valid and exclusive. It lives until the end of this function, which
        // does not access it meanwhile.
        let ended = unsafe { core.run(operation, list.as_mut(), deadline) };
        if const { matches!(<R::Operation as Operation>::QUEUE, Queue::Receive) }
            && let Ok(success) = &ended
        {
            success.tell_buffer(&mut buffer);
        }
        ended
    }
}

/// A channel whose blocking operations give up at a time: see [`Channel::until`]. A deadline that passes stops the channel,
/// which must then be [reset](Channel::reset).
#[derive(Debug)]
#[must_use = "it does nothing until one of its methods is called"]
pub struct ChannelUntil<'c, 'res> {
    channel: &'c mut Channel<'res>,
    deadline: Instant,
}

impl ChannelUntil<'_, '_> {
    /// `ibv_post_send`, `ibv_post_recv`: posts any request, and waits until it has ended. See [`Channel::run`].
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Channel#blocking-operations).
    #[doc(alias = "ibv_post_send")]
    #[doc(alias = "ibv_post_recv")]
    #[inline(always)]
    pub fn run<R: WorkRequest>(&mut self, request: R) -> TransportResult<WorkSuccess> {
        self.channel.run_with(request, Some(self.deadline))
    }

    blocking_methods!();
}
