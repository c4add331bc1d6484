//! Posting operations that own their buffers.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::Channel;
use super::core::Core;
use super::error::TransportError;
use super::operation::Operation;
use super::operation_error::OwnedResult;
use super::owned_buffer::OwnedBuffer;
use super::owned_work::OwnedWork;
use super::posting::PostFailure;
use super::request::WorkRequest;
use super::slot::Owner;
use crate::memory::keep;

/// # Owned operations
///
/// Each posts one operation and moves its buffer into the channel until the operation has ended. Nothing
/// is borrowed, and nothing is allocated. The handle gives the buffer back: see [`OwnedWork`].
/// They may be in flight at the same time as a [`scope`](Self::scope) and blocking operations. A blocking
/// operation or scope that stops the channel ends them too.
///
/// When posting fails, the buffer comes back in the [`OperationError`](super::OperationError), with the reason, which is one of
/// [those of posting in a scope](crate::Scope#errors). It does not come back if the provider cannot tell whether the device
/// has the request, and the queue pair could be neither flushed nor reset: the channel then keeps the buffer.
///
/// A post that finds the queue full polls first: see [`OwnedWork`].
impl Channel<'_> {
    /// `ibv_post_send`, `ibv_post_recv`: posts any request whose buffer an operation can own: an [`OwnedBuffer`], or
    /// [`Inline`](crate::Inline) bytes, of which it keeps nothing.
    ///
    /// ```
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// # fn receive(channel: &mut ibverbs::Channel<'_>, pool: &ibverbs::BufferPool) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::{Duration, Instant};
    ///
    /// use ibverbs::ReceiveWorkRequest;
    ///
    /// let buffer = pool.take().ok_or("all buffers are in use")?;
    /// let mut receive = channel.post_owned(ReceiveWorkRequest::new(buffer))?;
    /// let soon = Instant::now() + Duration::from_millis(10);
    /// match receive.wait_until(channel, soon)? {
    ///     Some((buffer, success)) => println!("{:?}", &buffer[..success.byte_len() as usize]),
    ///     None => println!("nothing yet: the receive stays posted"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [Those of owned operations](Self#owned-operations).
    #[doc(alias = "ibv_post_send")]
    #[doc(alias = "ibv_post_recv")]
    #[inline(always)]
    pub fn post_owned<R: WorkRequest>(
        &mut self,
        request: R,
    ) -> OwnedResult<R::Kept, OwnedWork<R::Kept>>
    where
        R::Kept: OwnedBuffer,
    {
        post_owned(&self.link.core, request)
    }
}

/// A request that was not posted, and why.
#[expect(missing_debug_implementations, reason = "no program can name it")]
pub struct Refused<R> {
    pub(crate) error: TransportError,
    /// `None` if the device may have it.
    pub(crate) request: Option<R>,
    /// Of a window: which of its requests is wrong, or has failed.
    pub(crate) index: Option<usize>,
}

impl<R> Refused<R> {
    pub(crate) fn new(error: TransportError, request: Option<R>) -> Self {
        Self { error, request, index: None }
    }
}

/// Posts an operation that owns its buffer. The caller has the core's link for itself.
#[inline(always)]
pub(super) fn post_owned<R: WorkRequest>(
    core: &Arc<Core>,
    request: R,
) -> OwnedResult<R::Kept, OwnedWork<R::Kept>>
where
    R::Kept: OwnedBuffer,
{
    let (operation, buffer) = request.split();
    // Nothing below drops it, not even if something unwinds: that would keep it in memory, and free what the device may
    // use.
    let mut buffer = ManuallyDrop::new(buffer);
    core.release_dropped();
    let mut list = match R::list(&mut buffer) {
        Ok(list) => list,
        Err(error) => {
            let request = Some(R::join(operation, ManuallyDrop::into_inner(buffer)));
            let error = R::Operation::explain_buffer(&core.limits, error);
            return Err(Refused::new(error.into(), request).into());
        }
    };
    // SAFETY: an `OwnedBuffer` keeps its memory until it is dropped. It goes to the slot's entry next,
    // with nothing in between that unwinds. It leaves the entry when the state of the slot says that
    // the operation has ended; a core that is dropped before that leaks it. What is not kept was copied by the post.
    match unsafe { core.try_post(operation, list.as_mut(), Owner::Handle) } {
        Ok(slot) => {
            slot.entry.buffer.put(keep(ManuallyDrop::into_inner(buffer)));
            // SAFETY: the slot is one of the core's, and was just taken for the operation.
            Ok(unsafe { OwnedWork::new(core, slot) })
        }
        Err(failure) => Err(post_failed::<R>(core, failure, operation, buffer).into()),
    }
}

/// The error of a post, with the request, unless the device may still use its buffer. That is left in the slot then.
#[cold]
#[inline(never)]
fn post_failed<R: WorkRequest>(
    core: &Core,
    failure: PostFailure<'_>,
    operation: R::Operation,
    buffer: ManuallyDrop<R::Buffer>,
) -> Refused<R>
where
    R::Kept: OwnedBuffer,
{
    let (error, kept_by) = match failure {
        PostFailure::Refused(error) => (error, None),
        PostFailure::Failed(slot, returned) => {
            let error = core.post_failed::<R::Operation>(slot, Owner::Handle, returned);
            (error, Some(slot).filter(|slot| slot.state().is_outstanding()))
        }
    };
    let buffer = ManuallyDrop::into_inner(buffer);
    let request = match kept_by {
        Some(slot) => {
            slot.entry.buffer.put(keep(buffer));
            None
        }
        None => Some(R::join(operation, buffer)),
    };
    Refused::new(error, request)
}
