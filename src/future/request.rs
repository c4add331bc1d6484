//! What a channel carries out as one operation of its send queue.

use crate::channel::{
    LoopBuffer, OperationError, OwnedBuffer, PreparedWindow, TransportError, WindowError,
    WorkRequest,
};
use crate::operation::SendQueueRequest;

/// What an [`AsyncChannel`](crate::AsyncChannel) carries out as one operation: a request of the send queue that owns its
/// buffer, or a [`PreparedWindow`] of them. `B` is what its reactor keeps.
///
/// The trait is sealed.
#[diagnostic::on_unimplemented(
    message = "an `AsyncChannel` cannot carry out `{Self}`",
    label = "a request of the send queue is needed here, whose buffer is a `{B}`, such as `SendWorkRequest::new(buffer)`",
    note = "channels whose reactor has an `AnyBuffer` for a buffer keep buffers of every type, and windows"
)]
pub trait AsyncRequest<B>: sealed::Request<B> {
    /// Why it was not carried out, with its buffer or buffers: an [`OperationError`], or of a window a [`WindowError`].
    type Error: From<TransportError> + sealed::Failure<Self, B>;
}

#[diagnostic::do_not_recommend]
impl<B: LoopBuffer<R::Kept>, R> AsyncRequest<B> for R
where
    R: WorkRequest<Kept: OwnedBuffer> + SendQueueRequest,
{
    type Error = OperationError<B>;
}

impl<B: LoopBuffer<Self>, C> AsyncRequest<B> for PreparedWindow<C> {
    type Error = WindowError<B>;
}

pub(super) mod sealed {
    use std::task::Waker;

    use super::super::operation::failed;
    use super::*;
    use crate::channel::{ChannelId, Ended, Loop, Refused};

    pub trait Request<B>: Sized {
        fn post(
            self,
            core: &mut Loop<'static, B>,
            channel: ChannelId,
            waker: &mut Option<Waker>,
        ) -> Result<u64, Refused<Self>>;
    }

    impl<B: LoopBuffer<R::Kept>, R> Request<B> for R
    where
        R: WorkRequest<Kept: OwnedBuffer> + SendQueueRequest,
    {
        #[inline(always)]
        fn post(
            self,
            core: &mut Loop<'static, B>,
            channel: ChannelId,
            waker: &mut Option<Waker>,
        ) -> Result<u64, Refused<Self>> {
            core.post_task(channel, self, waker)
        }
    }

    impl<B: LoopBuffer<Self>, C> Request<B> for PreparedWindow<C> {
        #[inline(always)]
        fn post(
            self,
            core: &mut Loop<'static, B>,
            channel: ChannelId,
            waker: &mut Option<Waker>,
        ) -> Result<u64, Refused<Self>> {
            core.post_window_task(channel, self, waker)
        }
    }

    /// The error of a request.
    pub trait Failure<R, B> {
        fn refused(refused: Refused<R>) -> Self;

        fn ended(error: TransportError, ended: Ended<B>) -> Self;
    }

    impl<R: WorkRequest<Kept: OwnedBuffer>, B: LoopBuffer<R::Kept>> Failure<R, B>
        for OperationError<B>
    {
        #[cold]
        fn refused(refused: Refused<R>) -> Self {
            refused.into()
        }

        #[cold]
        fn ended(error: TransportError, ended: Ended<B>) -> Self {
            failed(error, ended)
        }
    }

    impl<C, B: LoopBuffer<PreparedWindow<C>>> Failure<PreparedWindow<C>, B> for WindowError<B> {
        #[cold]
        fn refused(refused: Refused<PreparedWindow<C>>) -> Self {
            let Refused { error, request, index } = refused;
            Self { error, request: index, buffers: request.map(B::keep) }
        }

        #[cold]
        fn ended(error: TransportError, ended: Ended<B>) -> Self {
            Self { error, request: ended.request(), buffers: Some(ended.buffer) }
        }
    }
}
