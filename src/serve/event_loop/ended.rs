//! What a loop returns: the operations that have ended.

use crate::base::{debug, ffi};
use crate::channel::{AnyBuffer, OwnedBuffer, TransportError, TransportResult};
use crate::verbs::completion::{WorkCompletion, WorkSuccess};
use crate::verbs::memory::GatherBuffer;

/// Names a channel of a [`Loop`](crate::Loop). After the channel was removed it names none, even if another channel
/// takes the place. Other loops do not know the id: each numbers its channels from another value on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ChannelId {
    pub(super) index: u32,
    pub(super) generation: u32,
}

impl ChannelId {
    /// An index for the program's own tables, less than the largest number of channels that the loop had at one time. A
    /// removed channel's index is used again.
    pub fn index(self) -> usize {
        self.index as usize
    }
}

/// An operation of a [`Loop`](crate::Loop) that has ended.
#[must_use = "dropping it drops the buffer"]
pub struct Ended<B> {
    /// The channel that it was posted on. It may be removed by now.
    pub channel: ChannelId,
    /// The number that the program posted it with.
    pub token: u64,
    /// Its buffer. After a failure, the contents that the operation writes are undefined.
    pub buffer: B,
    pub(super) failed: Failed,
    pub(super) completion: ffi::ibv_wc,
}

impl<B> Ended<B> {
    /// The result of the operation.
    ///
    /// # Errors
    ///
    ///  - [`Work`](TransportError::Work): it failed. All later ones of the channel then fail too.
    ///  - [`Closed`](TransportError::Closed): the channel was removed before the completion was polled. The operation
    ///    may have been carried out.
    ///  - [`PeerGone`](TransportError::PeerGone): the peer has left. All later ones of the channel then fail too.
    ///  - [`Stopped`](TransportError::Stopped): the channel was [stopped](crate::Loop::stop); or a handshake failed, so it
    ///    was not posted or was ended by force.
    #[inline(always)]
    pub fn result(&self) -> TransportResult<WorkSuccess> {
        match self.failed.0 {
            0 => Ok(WorkSuccess::from_raw(self.completion)),
            _ => Err(self.failed.error()),
        }
    }
}

/// 0, or the status with the vendor's error in the upper half. A copy spares the compiler from keeping the completion
/// in memory.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Failed(u64);

impl Failed {
    pub(super) const NOT: Self = Self(0);

    #[inline(always)]
    pub(super) fn of(completion: &ffi::ibv_wc) -> Self {
        let &ffi::ibv_wc { status, vendor_err, .. } = completion;
        let is_success = status == ffi::ibv_wc_status::IBV_WC_SUCCESS;
        Self(if is_success { 0 } else { u64::from(status.0) | u64::from(vendor_err) << 32 })
    }

    #[cold]
    fn error(self) -> TransportError {
        failure(ffi::ibv_wc_status(self.0 as u32), (self.0 >> 32) as u32)
    }
}

#[inline(always)]
pub(super) fn result(completion: &ffi::ibv_wc) -> TransportResult<WorkSuccess> {
    if completion.status == ffi::ibv_wc_status::IBV_WC_SUCCESS {
        Ok(WorkSuccess::from_raw(*completion))
    } else {
        Err(failure(completion.status, completion.vendor_err))
    }
}

/// The channel was removed before the operation completed.
pub(super) const REMOVED: ffi::ibv_wc_status = ffi::ibv_wc_status(u32::MAX);
/// A failed attempt to connect has ended the operation.
pub(super) const STOPPED: ffi::ibv_wc_status = ffi::ibv_wc_status(u32::MAX - 1);

/// The peer is gone, so the operation was flushed.
pub(super) const GONE: ffi::ibv_wc_status = ffi::ibv_wc_status(u32::MAX - 2);

/// The error of what is posted after a failure.
pub(super) fn flushed() -> TransportError {
    failure(ffi::ibv_wc_status::IBV_WC_WR_FLUSH_ERR, 0)
}

/// With a reference to the completion as argument, the compiler would keep that in memory.
#[cold]
#[inline(never)]
fn failure(status: ffi::ibv_wc_status, vendor_err: u32) -> TransportError {
    match status {
        REMOVED => TransportError::Closed,
        STOPPED => TransportError::Stopped,
        GONE => TransportError::PeerGone,
        _ => match WorkCompletion::from(ffi::ibv_wc { status, vendor_err, ..Default::default() })
            .result()
        {
            Err(error) => error.into(),
            Ok(_) => TransportError::UnknownWork,
        },
    }
}

debug! {
    impl[B] Ended<B>, self,
    channel: self.channel, token: self.token, result: self.result(), ..
}

/// A buffer that a [`Loop`](crate::Loop) keeps as a `B`. Every [`OwnedBuffer`] is kept as itself at no cost, or as an
/// [`AnyBuffer`].
///
/// The trait is sealed: a program's own buffer implements `OwnedBuffer` to be kept.
#[diagnostic::on_unimplemented(
    message = "a `Loop<{B}>` does not keep `{Self}`",
    label = "a buffer without borrowed parts is needed here, of the type that the loop keeps",
    note = "a `Loop<AnyBuffer>` keeps owned buffers of every type, also the `()` of an `Inline` request",
    note = "several pieces are a `Vec`, an array or a tuple of `PooledBuffer`s or of `MemoryRange`s",
    note = "in a scope, operations borrow their buffers: `channel.scope(|scope| scope.post(..))`"
)]
pub trait LoopBuffer<B>: Keep<B> {}

impl<B, K: Keep<B>> LoopBuffer<B> for K {}

mod sealed {
    use crate::channel::OwnedBuffer;

    pub trait Keep<B>: OwnedBuffer {
        /// A post calls it when the device already has the request: no code of the program may run here.
        fn keep(self) -> B;

        /// A list of this crate has received a message.
        fn received(_kept: &mut B, _bytes: usize) {}
    }
}

pub(crate) use sealed::Keep;

impl<B: OwnedBuffer> Keep<B> for B {
    #[inline(always)]
    fn keep(self) -> B {
        self
    }

    fn received(kept: &mut B, bytes: usize) {
        GatherBuffer::received(kept, bytes);
    }
}

impl<B: OwnedBuffer> Keep<AnyBuffer> for B {
    #[inline(always)]
    fn keep(self) -> AnyBuffer {
        AnyBuffer::new(self)
    }

    fn received(kept: &mut AnyBuffer, bytes: usize) {
        kept.received(bytes);
    }
}
