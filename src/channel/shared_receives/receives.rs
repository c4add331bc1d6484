//! A shared receive queue with the buffers of its receives: what the channels that it feeds have in common.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};

use super::table::{Member, Table, is_shared};
use crate::channel::owned_buffer::{HeldBuffer, OwnedBuffer};
use crate::channel::{OperationError, TransportError};
use crate::debug::debug;
use crate::error::Result;
use crate::ffi;
use crate::operation::Receive;
use crate::queue_pair::SharedReceiveQueue;
use crate::sync::{Mutex, MutexGuard};

const POST: &str = "ibv_post_srq_recv";

/// The next [`Receives::identity`].
static NEXT_IDENTITY: AtomicU32 = AtomicU32::new(1);

/// See the [module](self).
pub(in crate::channel) struct Receives {
    /// Present until this is dropped. Queue pairs hold it too.
    queue: ManuallyDrop<Arc<SharedReceiveQueue<'static>>>,
    /// The upper half of the request numbers, which no other queue has.
    identity: u32,
    table: Mutex<Table>,
}

impl Receives {
    /// # Errors
    ///
    ///  - `ENOMEM`: out of memory.
    pub(super) fn new(queue: SharedReceiveQueue<'static>, receives: u32) -> Result<Self> {
        let table = Mutex::new(Table::new(receives)?);
        let identity = NEXT_IDENTITY.fetch_add(1, Ordering::Relaxed);
        Ok(Self { queue: ManuallyDrop::new(Arc::new(queue)), identity, table })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Nothing panics while it holds the lock; even if something did, the table would be consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::channel) fn queue(&self) -> &Arc<SharedReceiveQueue<'static>> {
        &self.queue
    }

    /// The number of receives that can be posted.
    pub(in crate::channel) fn capacity(&self) -> u32 {
        self.lock().len()
    }

    pub(super) fn posted(&self) -> u32 {
        self.lock().posted
    }

    pub(in crate::channel) fn join(&self) -> Result<Member> {
        self.lock().join()
    }

    /// The member's channel is gone. Its messages are dropped.
    pub(in crate::channel) fn leave(&self, member: Member, leaked: bool) {
        self.clear(member);
        self.lock().leave(member, leaked);
    }

    /// Drops the messages of a member.
    pub(in crate::channel) fn clear(&self, member: Member) {
        // Buffers are dropped without the lock.
        while let Some(message) = self.next(member) {
            drop(message);
        }
    }

    pub(in crate::channel) fn has_message(&self, member: Member) -> bool {
        self.lock().has_message(member)
    }

    pub(super) fn next(&self, member: Member) -> Option<(HeldBuffer, ffi::ibv_wc)> {
        self.lock().next(member)
    }

    /// Whether a request has a number of this queue.
    pub(in crate::channel) fn owns(&self, wr_id: u64) -> bool {
        (wr_id >> 32) as u32 == self.identity && is_shared(wr_id as u32)
    }

    /// A completion was polled that this queue [owns](Self::owns). The message is the member's; without a member
    /// its buffer is dropped. Returns false if no such receive is posted.
    pub(in crate::channel) fn complete(
        &self,
        member: Option<Member>,
        completion: &ffi::ibv_wc,
    ) -> bool {
        let ended = self.lock().complete(completion.wr_id as u32, member, completion);
        // Dropped without the lock.
        ended.is_ok()
    }

    /// `ibv_post_srq_recv`.
    pub(super) fn post<B: OwnedBuffer>(&self, mut buffer: B) -> Result<(), OperationError<B>> {
        let fail = |error: TransportError, buffer| Err(OperationError { error, buffer });
        let mut list = match buffer.scatter() {
            Ok(list) => list,
            Err(error) => return fail(error.into(), Some(buffer)),
        };
        // Until the buffer is in its slot, so that no other thread finds the completion before.
        let mut table = self.lock();
        let Some(index) = table.take() else {
            drop(table);
            return fail(TransportError::QueueFull, Some(buffer));
        };
        let wr_id = u64::from(self.identity) << 32 | u64::from(table.number(index));
        let mut request = Receive::encode(wr_id, list.as_mut());
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue is live, `bad` is writable, and the request is one well-formed element of a list. An
        // `OwnedBuffer` keeps its memory until it is dropped. It goes to the slot next, with nothing in between
        // that unwinds, and leaves it when the completion was polled or the queue was destroyed.
        let returned =
            unsafe { ffi::ibv_post_srq_recv(self.queue.as_raw(), &raw mut request, &mut bad) };
        if returned == 0 {
            table.buffer(index).put(buffer);
            return Ok(());
        }
        let error = ffi::failed(POST, returned).into();
        if bad.is_null() {
            // The provider does not say that it did not take the request: it may have queued it.
            table.buffer(index).put(buffer);
            return fail(error, None);
        }
        table.untake(index);
        drop(table);
        fail(error, Some(buffer))
    }

    /// Destroys the queue, if no queue pair uses it any more. Buffers that the device may still use are leaked.
    fn destroy(&mut self) -> Result<()> {
        // SAFETY: it is taken once: the caller does not use this any more.
        let queue = unsafe { ManuallyDrop::take(&mut self.queue) };
        let destroyed = match Arc::try_unwrap(queue) {
            Ok(queue) => queue.close(),
            // Each channel holds this until its queue pair is gone.
            Err(_) => Err(super::in_use()),
        };
        if destroyed.is_err() {
            self.lock().leak_posted();
        }
        destroyed
    }

    /// Destroys the queue and reports a failure.
    pub(super) fn close(self) -> Result<()> {
        let mut this = ManuallyDrop::new(self);
        let destroyed = this.destroy();
        // SAFETY: it is dropped once, and not used any more; nothing else is left in it.
        unsafe { std::ptr::drop_in_place(&raw mut this.table) };
        destroyed
    }
}

impl Drop for Receives {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}

debug! { Receives, self, capacity: self.capacity(), posted: self.posted(), .. }
