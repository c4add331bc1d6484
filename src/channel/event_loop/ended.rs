//! What a loop gives back: the operations that have ended.

use crate::channel::error::{TransportError, TransportResult};
use crate::channel::owned_buffer::{AnyBuffer, OwnedBuffer};
use crate::channel::prepared_window::PreparedWindow;
use crate::channel::slot::member;
use crate::completion::{WorkCompletion, WorkSuccess};
use crate::debug::debug;
use crate::ffi;

/// Names a channel of a [`Loop`](crate::Loop). Another loop does not know it: loops number their channels from different
/// values on. Once its channel was removed it names no
/// channel, even if another channel has taken the place.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ChannelId {
    pub(super) index: u32,
    pub(super) generation: u32,
}

impl ChannelId {
    /// An index for the program's own tables: less than the largest number of channels that the loop has had at one
    /// time. The index of a removed channel is used again.
    pub fn index(self) -> usize {
        self.index as usize
    }
}

/// An operation of a [`Loop`](crate::Loop) that has ended.
#[must_use = "dropping it drops the buffer"]
pub struct Ended<B> {
    /// The channel that it was posted on, which may be removed since.
    pub channel: ChannelId,
    /// The number that the program posted it with.
    pub token: u64,
    /// Its buffer. After a failure its contents are undefined where the operation writes it.
    pub buffer: B,
    pub(super) failed: Failed,
    pub(super) completion: ffi::ibv_wc,
}

impl<B> Ended<B> {
    /// How it has ended.
    ///
    /// # Errors
    ///
    ///  - [`Work`](TransportError::Work): the operation failed. All later ones of the channel then fail too.
    ///  - [`Closed`](TransportError::Closed): the channel was removed before its completion was polled. It may or may
    ///    not have been carried out.
    ///  - [`Stopped`](TransportError::Stopped): it was not posted, or ended by force, because a
    ///    [window](crate::Loop::post_window) or a handshake has failed.
    #[inline(always)]
    pub fn result(&self) -> TransportResult<WorkSuccess> {
        match self.failed.0 {
            0 => Ok(WorkSuccess::from_raw(self.completion)),
            _ => Err(self.failed.error()),
        }
    }

    /// Of a [window](crate::Loop::post_window) that has failed: the request that has failed first, counted from 0, unless it is
    /// the last one.
    pub fn request(&self) -> Option<usize> {
        member(self.completion.wr_id).map(|member| member.position)
    }
}

/// How the operation of a completion has ended.
/// The status of a completion, and the vendor's error above it; 0 if it is a success. Not read from the completion: what is read
/// of that together, the compiler keeps in memory.
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

/// The status of an operation that has ended without a completion: its channel was removed.
pub(super) const REMOVED: ffi::ibv_wc_status = ffi::ibv_wc_status(u32::MAX);
/// The status of an operation that has ended without a completion: its window, or an attempt to connect, has failed.
pub(super) const STOPPED: ffi::ibv_wc_status = ffi::ibv_wc_status(u32::MAX - 1);

/// Takes the fields, not the completion: taking its address would keep the completion in memory.
#[cold]
#[inline(never)]
fn failure(status: ffi::ibv_wc_status, vendor_err: u32) -> TransportError {
    match status {
        REMOVED => TransportError::Closed,
        STOPPED => TransportError::Stopped,
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

/// What a [`Loop`](crate::Loop) keeps buffers of type `K` as, and gives back: every [`OwnedBuffer`], or a [`PreparedWindow`]
/// of them, as itself, which costs nothing, or any of these as an [`AnyBuffer`].
///
/// The trait is sealed: a buffer of the program's own is kept if it is an `OwnedBuffer`.
#[diagnostic::on_unimplemented(
    message = "a `Loop<{Self}>` does not keep `{K}`",
    label = "the buffers of this loop are of another type",
    note = "a `Loop<AnyBuffer>` keeps buffers of every type, also the `()` of an `Inline` request"
)]
pub trait LoopBuffer<K>: Keep<K> + Send + 'static {}

#[diagnostic::do_not_recommend]
impl<K, B: Keep<K> + Send + 'static> LoopBuffer<K> for B {}

mod sealed {
    /// No program has a say in it: the device has the request when a post calls it.
    pub trait Keep<K> {
        fn keep(kept: K) -> Self;
    }
}

pub(crate) use sealed::Keep;

impl<B: OwnedBuffer> Keep<B> for B {
    #[inline(always)]
    fn keep(kept: B) -> B {
        kept
    }
}

impl<B: OwnedBuffer> Keep<B> for AnyBuffer {
    #[inline(always)]
    fn keep(kept: B) -> Self {
        Self::new(kept)
    }
}

macro_rules! windows {
    ($([$($parameter:tt)*] $buffers:ty),+) => {$(
        impl<B: OwnedBuffer $($parameter)*> Keep<PreparedWindow<$buffers>> for PreparedWindow<$buffers> {
            #[inline(always)]
            fn keep(kept: Self) -> Self {
                kept
            }
        }

        impl<B: OwnedBuffer $($parameter)*> Keep<PreparedWindow<$buffers>> for AnyBuffer {
            #[inline(always)]
            fn keep(kept: PreparedWindow<$buffers>) -> Self {
                Self::new(kept)
            }
        }
    )+};
}

windows!([, const N: usize] [B; N], [] Vec<B>);
