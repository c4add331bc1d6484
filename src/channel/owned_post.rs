//! Posting operations that own their buffers.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::Channel;
use super::core::Core;
use super::kinds::{
    CompareSwap, FetchAdd, Read, Send, SendWithImmediate, Write, WriteWithImmediate,
};
use super::operation::{Operation, Receive, Request};
use super::operation_error::{OperationError, OwnedResult};
use super::owned_buffer::OwnedBuffer;
use super::owned_work::OwnedWork;
use super::posting::PostFailure;
use super::slot::{Owner, Slot};
use crate::memory::RemoteMemoryRegion;

/// # Owned operations
///
/// Each posts one operation and moves its buffer into the channel until the operation has ended. Nothing
/// is borrowed, and nothing is allocated. The handle gives the buffer back: see [`OwnedWork`].
/// They may be in flight at the same time as a [`scope`](Self::scope) and blocking operations. A blocking
/// operation or scope that stops the channel ends them too.
///
/// When posting fails, the buffer comes back in the [`OperationError`], with the reason, which is one of
/// [those of posting in a scope](crate::Scope#errors). It does not come back if the provider cannot tell whether the device
/// has the request, and the queue pair could be neither flushed nor reset: the channel then keeps the buffer.
///
/// A post that finds the queue full polls first: see [`OwnedWork`].
impl Channel<'_> {
    /// `ibv_post_recv`: posts a receive. See [`receive`](Self::receive).
    ///
    /// ```
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// # fn receive(channel: &mut ibverbs::Channel<'_>, pool: &ibverbs::BufferPool) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::{Duration, Instant};
    ///
    /// let buffer = pool.take().ok_or("all buffers are in use")?;
    /// let mut receive = channel.post_receive_owned(buffer).map_err(|error| error.error)?;
    /// let soon = Instant::now() + Duration::from_millis(10);
    /// match receive.wait_deadline(channel, soon)? {
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
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub fn post_receive_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
    ) -> OwnedResult<B, OwnedWork<B>> {
        self.post_owned(buffer, Receive, Owner::Handle)
    }

    /// `ibv_post_send`: posts a send. See [`send`](Self::send).
    ///
    /// # Errors
    ///
    /// [Those of owned operations](Self#owned-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn post_send_owned<B: OwnedBuffer>(&mut self, buffer: B) -> OwnedResult<B, OwnedWork<B>> {
        self.post_owned(buffer, Request::new(Send {}), Owner::Handle)
    }

    /// `ibv_post_send`: posts a send with an immediate. See
    /// [`send_with_immediate`](Self::send_with_immediate).
    ///
    /// # Errors
    ///
    /// [Those of owned operations](Self#owned-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn post_send_with_immediate_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        immediate: u32,
    ) -> OwnedResult<B, OwnedWork<B>> {
        self.post_owned(buffer, Request::new(SendWithImmediate { immediate }), Owner::Handle)
    }

    /// `ibv_post_send`: posts an RDMA write. See [`write`](Self::write).
    ///
    /// # Errors
    ///
    /// [Those of owned operations](Self#owned-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn post_write_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> OwnedResult<B, OwnedWork<B>> {
        let remote = remote.into();
        self.post_owned(buffer, Request::new(Write { remote }), Owner::Handle)
    }

    /// `ibv_post_send`: posts an RDMA write with an immediate. See
    /// [`write_with_immediate`](Self::write_with_immediate).
    ///
    /// # Errors
    ///
    /// [Those of owned operations](Self#owned-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn post_write_with_immediate_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        remote: impl Into<RemoteMemoryRegion>,
        immediate: u32,
    ) -> OwnedResult<B, OwnedWork<B>> {
        self.post_owned(
            buffer,
            Request::new(WriteWithImmediate { remote: remote.into(), immediate }),
            Owner::Handle,
        )
    }

    /// `ibv_post_send`: posts an RDMA read. See [`read`](Self::read).
    ///
    /// # Errors
    ///
    /// [Those of owned operations](Self#owned-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn post_read_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> OwnedResult<B, OwnedWork<B>> {
        let remote = remote.into();
        self.post_owned(
            buffer,
            Request::new(Read { remote, shared: B::PEERS_MAY_WRITE }),
            Owner::Handle,
        )
    }

    /// `ibv_post_send`: posts an atomic compare-and-swap, whose buffer has 8 bytes. See
    /// [`compare_swap`](Self::compare_swap).
    ///
    /// # Errors
    ///
    /// [Those of owned operations](Self#owned-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn post_compare_swap_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        remote: impl Into<RemoteMemoryRegion>,
        compare: u64,
        swap: u64,
    ) -> OwnedResult<B, OwnedWork<B>> {
        let remote = remote.into();
        self.post_owned(buffer, Request::new(CompareSwap { remote, compare, swap }), Owner::Handle)
    }

    /// `ibv_post_send`: posts an atomic fetch-and-add, whose buffer has 8 bytes. See
    /// [`fetch_add`](Self::fetch_add).
    ///
    /// # Errors
    ///
    /// [Those of owned operations](Self#owned-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn post_fetch_add_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        remote: impl Into<RemoteMemoryRegion>,
        add: u64,
    ) -> OwnedResult<B, OwnedWork<B>> {
        let remote = remote.into();
        self.post_owned(buffer, Request::new(FetchAdd { remote, add }), Owner::Handle)
    }

    #[inline(always)]
    pub(super) fn post_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        operation: impl Operation,
        owner: Owner,
    ) -> OwnedResult<B, OwnedWork<B>> {
        post_owned(&self.link.core, buffer, operation, owner)
    }
}

/// Posts an operation that owns its buffer. The caller has the core's link for itself.
#[inline(always)]
pub(super) fn post_owned<B: OwnedBuffer>(
    core: &Arc<Core>,
    buffer: B,
    operation: impl Operation,
    owner: Owner,
) -> OwnedResult<B, OwnedWork<B>> {
    // SAFETY: the slot is one of the core's, and was just taken for the operation.
    post_to_slot(core, buffer, operation, owner, |slot| unsafe { OwnedWork::new(core, slot) })
}

/// As [`post_owned`], and returns what `handle` makes of the slot of the operation.
#[inline(always)]
pub(super) fn post_to_slot<B: OwnedBuffer, O: Operation, H>(
    core: &Core,
    buffer: B,
    operation: O,
    owner: Owner,
    handle: impl FnOnce(&Slot) -> H,
) -> OwnedResult<B, H> {
    // Nothing below drops it, not even if something unwinds: that would keep it in memory, and free what the device may
    // use.
    let mut buffer = ManuallyDrop::new(buffer);
    core.release_dropped();
    let mut list = match buffer.element() {
        Ok(element) => [element],
        Err(error) => {
            let buffer = Some(ManuallyDrop::into_inner(buffer));
            return Err(OperationError { error: error.into(), buffer });
        }
    };
    // SAFETY: an `OwnedBuffer` keeps its memory until it is dropped. It goes to the slot's entry next,
    // with nothing in between that unwinds. It leaves the entry when the state of the slot says that
    // the operation has ended; a core that is dropped before that leaks it.
    match unsafe { core.try_post(operation, &mut list, owner) } {
        Ok(slot) => {
            slot.entry.buffer.put(ManuallyDrop::into_inner(buffer));
            Ok(handle(slot))
        }
        Err(failure) => Err(post_failed::<B, O>(core, failure, owner, buffer)),
    }
}

/// The error of a post, with the buffer, unless the device may still use that. It is left in the slot then.
#[cold]
#[inline(never)]
fn post_failed<B: OwnedBuffer, O: Operation>(
    core: &Core,
    failure: PostFailure<'_>,
    owner: Owner,
    buffer: ManuallyDrop<B>,
) -> OperationError<B> {
    let (error, kept_by) = match failure {
        PostFailure::Refused(error) => (error, None),
        PostFailure::Failed(slot, returned) => {
            let error = core.post_failed::<O>(slot, owner, returned);
            (error, Some(slot).filter(|slot| slot.state().is_outstanding()))
        }
    };
    let buffer = ManuallyDrop::into_inner(buffer);
    let buffer = match kept_by {
        Some(slot) => {
            slot.entry.buffer.put(buffer);
            None
        }
        None => Some(buffer),
    };
    OperationError { error, buffer }
}
