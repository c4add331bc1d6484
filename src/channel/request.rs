//! What channels take: requests, and what stands for one.

use super::operation::Operation;
use crate::memory::{GatherBuffer, ScatterBuffer};
use crate::operation::sealed::Request;
use crate::operation::{Extra, ReceiveWorkRequest, SendWorkRequest};

/// A request that a [`Channel`](crate::Channel), a [`Scope`](crate::Scope) or an
/// [`AsyncChannel`](crate::AsyncChannel) carries out: their methods `run` and `post` take any.
///
/// The trait is sealed. [`SendWorkRequest`], [`WriteWorkRequest`](crate::WriteWorkRequest),
/// [`ReadWorkRequest`](crate::ReadWorkRequest), [`CompareSwapWorkRequest`](crate::CompareSwapWorkRequest),
/// [`FetchAddWorkRequest`](crate::FetchAddWorkRequest),
/// [`LocalInvalidateWorkRequest`](crate::operation::LocalInvalidateWorkRequest) and [`ReceiveWorkRequest`] have it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a work request of a channel",
    label = "a request is needed here, such as `SendWorkRequest::new(buffer)`",
    note = "a channel has one peer, so its requests have no destination; flushes and atomic writes exist in batches of \
            queue pairs only"
)]
pub trait WorkRequest:
    Request<Operation: Operation, Buffer: GatherBuffer<Kept = <Self as WorkRequest>::Kept>>
{
    /// What the operation keeps while it is in flight, and gives back: the buffer, or `()` if the post copies the bytes.
    type Kept: GatherBuffer;
}

#[diagnostic::do_not_recommend]
impl<R: Request<Operation: Operation>> WorkRequest for R {
    type Kept = <R::Buffer as GatherBuffer>::Kept;
}

/// A message: a buffer, or a request that sends one.
///
/// The trait is sealed: every [`GatherBuffer`] and every [`SendWorkRequest`] has it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not registered memory that the device can read",
    label = "a slice of a region is needed here, such as `region.slice(..)?`, or a `SendWorkRequest`",
    note = "bytes that are not registered can be sent as `Inline(bytes)`"
)]
pub trait IntoSend: sealed::Message {
    /// The request.
    type Request: WorkRequest;

    /// The request that sends the message.
    fn into_send(self) -> Self::Request;
}

#[diagnostic::do_not_recommend]
impl<D: GatherBuffer> IntoSend for D {
    type Request = SendWorkRequest<D>;

    #[inline(always)]
    fn into_send(self) -> SendWorkRequest<D> {
        SendWorkRequest::new(self)
    }
}

impl<D: GatherBuffer, X: Extra> IntoSend for SendWorkRequest<D, X> {
    type Request = Self;

    #[inline(always)]
    fn into_send(self) -> Self {
        self
    }
}

/// Room for a message: a buffer, or a request that receives one.
///
/// The trait is sealed: every [`ScatterBuffer`] and every [`ReceiveWorkRequest`] has it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not registered memory that the device can write",
    label = "an exclusive slice of a region is needed here, such as `region.slice_mut(..)?`"
)]
pub trait IntoReceive: sealed::Room {
    /// The request.
    type Request: WorkRequest;

    /// The request that receives the message.
    fn into_receive(self) -> Self::Request;
}

#[diagnostic::do_not_recommend]
impl<D: ScatterBuffer> IntoReceive for D {
    type Request = ReceiveWorkRequest<D>;

    #[inline(always)]
    fn into_receive(self) -> ReceiveWorkRequest<D> {
        ReceiveWorkRequest::new(self)
    }
}

impl<D: ScatterBuffer> IntoReceive for ReceiveWorkRequest<D> {
    type Request = Self;

    #[inline(always)]
    fn into_receive(self) -> Self {
        self
    }
}

mod sealed {
    use super::*;

    pub trait Message {}

    #[diagnostic::do_not_recommend]
    impl<D: GatherBuffer> Message for D {}
    impl<D, X> Message for SendWorkRequest<D, X> {}

    pub trait Room {}

    #[diagnostic::do_not_recommend]
    impl<D: ScatterBuffer> Room for D {}
    impl<D> Room for ReceiveWorkRequest<D> {}
}

/// What [`IntoSend`] makes of a message keeps in flight.
pub(crate) type KeptSend<M> = <<M as IntoSend>::Request as WorkRequest>::Kept;
/// What [`IntoReceive`] makes of room keeps in flight.
pub(crate) type KeptReceive<M> = <<M as IntoReceive>::Request as WorkRequest>::Kept;
