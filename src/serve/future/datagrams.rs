//! Datagram ends as futures.

use std::net::IpAddr;
use std::sync::Arc;
use std::task::Waker;

use super::AsyncChannel;
use super::locked_loop::{Lock, Locked, Share, put_back};
use super::operation::AsyncOperation;
use super::reactor::Reactor;
use super::receive::AsyncReceive;
use super::request::AsyncRequest;
use super::request::sealed::Request;
use crate::base::{Error, Result, debug};
use crate::channel::parts::{DatagramPort, EndKind, KeptSend, Link, Refused};
use crate::channel::{
    DatagramsBuilder, EndDestination, IntoSend, OperationError, OwnedResult, TransportError,
    TransportResult, WorkRequest,
};
use crate::serve::event_loop::{ChannelId, Keep, Loop, LoopBuffer};
use crate::serve::pool::{DatagramBuffer, PooledBuffer};
use crate::verbs::memory::ScatterBuffer;
use crate::verbs::operation::{DatagramDestination, SendQueueRequest};
#[cfg(doc)]
use crate::verbs::queue_pair::AddressVector;
use crate::verbs::queue_pair::{AddressHandle, QueuePairEndpoint};

/// A datagram end whose operations are futures that own their buffers. It sends to any peer and receives from all.
///
/// [`Reactor::datagrams`] makes one; any number of tasks can use it. [`AsyncChannel`] says how operations end when
/// their future or the reactor is dropped.
///
/// ```
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// use ibverbs::{AsyncDatagrams, BufferPool, OperationError, PooledBuffer};
///
/// /// Answers each message with itself.
/// async fn echo(end: &AsyncDatagrams, mut buffer: PooledBuffer) -> Result<(), OperationError<PooledBuffer>> {
///     loop {
///         let (message, sender) = end.recv_from(buffer).await?;
///         buffer = end.send_to(message, &sender).await?;
///     }
/// }
/// ```
///
/// Dropping it calls `ibv_destroy_qp`, with no lock held, and leaves all groups.
pub struct AsyncDatagrams<S: Share = Locked<PooledBuffer>> {
    channel: AsyncChannel<S>,
    at: Arc<DatagramPort<'static>>,
}

impl<S: Share> Reactor<S> {
    /// `ibv_create_qp`, `ibv_modify_qp`: a datagram end on the reactor's completion queue.
    ///
    /// # Errors
    ///
    /// Those of [`Loop::add_datagrams`].
    #[doc(alias = "ibv_create_qp")]
    pub fn datagrams(&self, builder: DatagramsBuilder<'static>) -> Result<AsyncDatagrams<S>> {
        let (channel, end) = builder.build(&self.queue)?;
        let (number, at) = (channel.number(), end.at.clone());
        let mut guard = self.share.lock();
        let share = self.share.clone();
        // Made before the guard is dropped: a waker that panics then must not lose the end.
        let added = guard
            .core
            .add_end(channel, end)
            .map(|id| AsyncDatagrams { channel: AsyncChannel { share, id, number }, at });
        drop(guard);
        // An error destroys the queue pair, outside the lock.
        added.map_err(|failed| failed.error)
    }
}

impl<S: Share> AsyncDatagrams<S> {
    /// The address that peers need to send here: see [`destination`](Self::destination).
    pub fn endpoint(&self) -> QueuePairEndpoint {
        self.at.endpoint
    }

    /// The number of operations that the device has.
    pub fn in_flight(&self) -> usize {
        self.channel.in_flight()
    }

    /// `ibv_post_send`: sends a datagram of at most the port's MTU, when there is room in the queue. The output is the
    /// buffer, once the datagram is on its way: nothing tells whether it arrives.
    ///
    /// The first use of a path makes its address handle, with no lock held, and keeps it. On RoCE, the thread may wait
    /// then while the kernel looks up the peer's MAC address.
    ///
    /// # Errors
    ///
    /// Those of [`Loop::send_to`], and why the reactor was stopped.
    #[doc(alias = "ibv_post_send")]
    pub async fn send_to<M: IntoSend>(
        &self,
        message: M,
        destination: &impl EndDestination,
    ) -> Result<S::Buffer, OperationError<S::Buffer>>
    where
        KeptSend<M>: LoopBuffer<S::Buffer>,
    {
        let (buffer, _) = self.run_to(message.into_send(), destination).await?;
        Ok(buffer)
    }

    /// `ibv_wr_start`: as [`send_to`](Self::send_to), for any request: also a write, a read and a write with an immediate on
    /// [SRD](DatagramsBuilder::srd), and these and atomics on [DC](DatagramsBuilder::dc_initiator). The output is the buffer
    /// and the completion.
    ///
    /// # Errors
    ///
    /// Those of [`Loop::post_to`], and why the reactor was stopped.
    #[doc(alias = "ibv_wr_start")]
    pub async fn run_to<R: WorkRequest<Kept: LoopBuffer<S::Buffer>> + SendQueueRequest>(
        &self,
        request: R,
        destination: &impl EndDestination,
    ) -> OwnedResult<S::Buffer> {
        let destination = *destination;
        let handle = match self.handle_to(&destination) {
            Ok(handle) => handle,
            Err(error) => return Err(Refused::new(error, Some(request)).into()),
        };
        let functions = self.at.functions;
        AsyncOperation::new(&self.channel, DirectedTo { request, destination, functions, handle })
            .await
    }

    /// `ibv_post_recv`: the next message of an [SRD](DatagramsBuilder::srd) end, which no header precedes: see
    /// [`AsyncChannel::receive`]. The completion tells its length, its immediate and the number of the sender's queue pair.
    ///
    /// # Errors
    ///
    /// Those of [`AsyncChannel::receive`].
    #[doc(alias = "ibv_post_recv")]
    pub fn receive<D: ScatterBuffer>(&self, buffer: D) -> AsyncReceive<'_, D, S>
    where
        D::Kept: LoopBuffer<S::Buffer>,
    {
        self.channel.receive(buffer)
    }

    /// `ibv_post_recv`: the next datagram and its sender, to answer with the Q_Key of this end. Datagrams are handed
    /// out in the order of arrival; which of several tasks gets one is not fixed.
    ///
    /// `buffer` needs room for 40 bytes and the message. The device drops a datagram for which no receive is posted:
    /// [`post_receive`](Self::post_receive) keeps some posted.
    ///
    /// # Errors
    ///
    /// Those of [`AsyncChannel::receive`], and those of [`AddressVector::reply_to`] but `ENOENT`: any peer can send a
    /// datagram that cannot be answered, as its header names none of our GIDs. It is dropped.
    #[doc(alias = "ibv_post_recv")]
    pub async fn recv_from(
        &self,
        mut buffer: PooledBuffer,
    ) -> OwnedResult<S::Buffer, (DatagramBuffer, DatagramDestination)>
    where
        PooledBuffer: LoopBuffer<S::Buffer>,
        DatagramBuffer: LoopBuffer<S::Buffer>,
        S::Buffer: Into<DatagramBuffer>,
    {
        if self.at.kind != EndKind::Unreliable {
            let reason = "no header with the sender precedes a message of SRD, and a DC initiator receives none: take \
                          receive";
            let error = Error::with_reason("ibv_post_recv", libc::EOPNOTSUPP, reason).into();
            return Err(OperationError { error, buffer: Some(buffer.keep()) });
        }
        loop {
            let (kept, success) = self.channel.receive(buffer).await?;
            let message = kept.into();
            match self.at.sender(&success, &message.header()) {
                Ok(sender) => return Ok((message, sender)),
                Err(error) if error.errno() == libc::ENOENT => buffer = message.into_inner(),
                Err(error) => {
                    let buffer = Some(message.keep());
                    return Err(OperationError { error: error.into(), buffer });
                }
            }
        }
    }

    /// `ibv_post_recv`: posts a receive ahead: see [`AsyncChannel::post_receive`].
    ///
    /// # Errors
    ///
    /// Those of [`AsyncChannel::post_receive`], and
    ///
    ///  - [`Verbs`](TransportError::Verbs): `EMSGSIZE`: the buffer has no room for 40 bytes.
    #[doc(alias = "ibv_post_recv")]
    pub fn post_receive(&self, buffer: PooledBuffer) -> OwnedResult<S::Buffer, ()>
    where
        PooledBuffer: LoopBuffer<S::Buffer>,
    {
        self.channel.post_receive(buffer)
    }

    /// Where a peer's datagram end is: see [`Loop::destination`].
    ///
    /// # Errors
    ///
    /// Those of [`Loop::destination`].
    pub fn destination(&self, peer: &QueuePairEndpoint) -> Result<DatagramDestination> {
        self.at.destination(peer)
    }

    /// Where the multicast group of an IP address is: see [`Loop::group`].
    ///
    /// # Errors
    ///
    /// Those of [`Loop::group`].
    pub fn group(&self, group: IpAddr) -> Result<DatagramDestination> {
        self.at.group(group)
    }

    /// `ibv_attach_mcast`: the end receives what is sent to the group, until it [leaves](Self::leave) or is dropped.
    ///
    /// # Errors
    ///
    /// Those of [`Loop::join`], and
    ///
    ///  - `EBUSY`: another task joins or leaves a group now.
    #[doc(alias = "ibv_attach_mcast")]
    pub fn join(&self, group: &DatagramDestination) -> Result<()> {
        self.outside("ibv_attach_mcast", |link| link.join(&group.path))
    }

    /// `ibv_detach_mcast`: leaves a group.
    ///
    /// # Errors
    ///
    /// Those of [`Loop::leave`], and
    ///
    ///  - `EBUSY`: another task joins or leaves a group now.
    #[doc(alias = "ibv_detach_mcast")]
    pub fn leave(&self, group: &DatagramDestination) -> Result<()> {
        self.outside("ibv_detach_mcast", |link| link.leave(&group.path))
    }

    /// Calls a verb on the queue pair without the lock.
    fn outside(
        &self,
        verb: &'static str,
        call: impl FnOnce(&mut Link<'static>) -> Result<()>,
    ) -> Result<()> {
        let AsyncChannel { share, id, .. } = &self.channel;
        let mut guard = share.lock();
        let Some(mut out) = guard.core.borrow_out(*id) else {
            let reason = "another task joins or leaves a group at the moment";
            return Err(Error::with_reason(verb, libc::EBUSY, reason));
        };
        // The tasks are woken once the queue pair is back: a waker that panics would destroy it under the loop.
        guard.unlock();
        let called = call(&mut out.channel.link);
        put_back(share, out, None);
        called
    }

    fn handle_to<D: EndDestination>(
        &self,
        destination: &D,
    ) -> TransportResult<Arc<AddressHandle<'static>>> {
        self.at.check::<D>()?;
        let path = destination.path();
        let AsyncChannel { share, id, .. } = &self.channel;
        let mut guard = share.lock();
        let end = guard.core.datagram_end(*id).ok_or(TransportError::Closed)?;
        let (spent, known, domain) = (end.take_spent(), end.known(path), self.at.domain.clone());
        drop(guard);
        drop(spent);
        if let Some(handle) = known? {
            return Ok(handle);
        }
        let handle = Arc::new(AddressHandle::new(domain, path)?);
        let mut guard = share.lock();
        let removed = guard.core.datagram_end(*id).map(|end| end.keep(path, &handle));
        drop(guard);
        drop(removed);
        Ok(handle)
    }
}

struct DirectedTo<R, D> {
    request: R,
    destination: D,
    functions: u64,
    handle: Arc<AddressHandle<'static>>,
}

impl<B, R, D> AsyncRequest<B> for DirectedTo<R, D>
where
    R: WorkRequest<Kept: LoopBuffer<B>> + SendQueueRequest,
    D: EndDestination,
{
}

impl<B, R, D> Request<B> for DirectedTo<R, D>
where
    R: WorkRequest<Kept: LoopBuffer<B>> + SendQueueRequest,
    D: EndDestination,
{
    fn post(
        self,
        core: &mut Loop<'static, B>,
        channel: ChannelId,
        waker: &mut Option<Waker>,
    ) -> Result<u64, Refused<Self>> {
        let Self { request, destination, functions, handle } = self;
        core.post_task_to(channel, request, (&destination, functions), &handle, waker).map_err(
            |refused| {
                let Refused { error, request } = refused;
                Refused::new(
                    error,
                    request.map(|request| Self { request, destination, functions, handle }),
                )
            },
        )
    }

    fn refused(refused: Refused<Self>) -> OperationError<B> {
        let Refused { error, request } = refused;
        Refused::new(error, request.map(|directed| directed.request)).into()
    }
}

debug! { impl[S: Share] AsyncDatagrams<S>, self, channel: self.channel, endpoint: self.endpoint() }
