//! A completion queue that several channels share.

use std::ffi::c_int;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::epoch::new_epoch;
use super::in_flight::no_memory;
use crate::completion::CompletionQueue;
use crate::device::Context;
use crate::error::{Error, Result};
use crate::ffi;
use crate::parent::Parent;

/// The most completions that are polled at a time.
const BATCH: usize = 16;

/// A completion queue that serves several [`Channel`](crate::Channel)s, which may be on different
/// threads.
///
/// A channel that polls takes all completions that there are, and puts those of other channels into
/// their inboxes. Each inbox has room for everything that its channel can have in flight, so no
/// completion is lost and nothing is allocated. A lock guards the inboxes, so a channel with a
/// completion queue of its own is faster.
///
/// The queue has room for a fixed number of completions. Each channel reserves its depth
/// ([`max_send_wr`](crate::ChannelBuilder::max_send_wr) plus
/// [`max_recv_wr`](crate::ChannelBuilder::max_recv_wr)) from when it is built until it is dropped.
///
/// ```no_run
/// use ibverbs::{Channel, SharedCompletionQueue};
///
/// # fn main() -> ibverbs::Result<()> {
/// let context = ibverbs::open("rxe0")?;
/// let domain = context.alloc_pd()?;
/// let queue = SharedCompletionQueue::new(&context, 1024)?;
/// let one = Channel::builder(&domain).shared_completion_queue(&queue).build()?;
/// let other = Channel::builder(&domain).shared_completion_queue(&queue).build()?;
/// # Ok(())
/// # }
/// ```
pub struct SharedCompletionQueue<'ctx> {
    queue: Arc<CompletionQueue<'ctx>>,
    router: Arc<Router>,
}

impl<'ctx> SharedCompletionQueue<'ctx> {
    /// `ibv_create_cq`: creates a completion queue with room for at least `entries` completions.
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::new`].
    #[doc(alias = "ibv_create_cq")]
    pub fn new(context: impl Into<Parent<'ctx, Context<'ctx>>>, entries: u32) -> Result<Self> {
        Ok(CompletionQueue::new(context, entries)?.into())
    }

    /// The number of completions that it has room for.
    pub fn capacity(&self) -> u32 {
        self.router.capacity
    }

    /// The part of the capacity that no channel has reserved.
    pub fn available(&self) -> u32 {
        self.router.capacity - self.router.lock().reserved
    }

    /// The C object. It is valid while this queue or a channel that uses it exists. A completion that
    /// the caller polls from it is lost to its channel.
    pub fn as_raw(&self) -> *mut ffi::ibv_cq {
        self.queue.as_raw()
    }

    /// `ibv_destroy_cq`: destroys the completion queue, and reports a failure. Dropping it ignores a
    /// failure.
    ///
    /// # Errors
    ///
    ///  - `EBUSY`: a channel that uses it still exists. The queue is destroyed with the last of them.
    ///  - Those of [`CompletionQueue::close`].
    #[doc(alias = "ibv_destroy_cq")]
    pub fn close(self) -> Result<()> {
        match Arc::try_unwrap(self.queue) {
            Ok(queue) => queue.close(),
            Err(_) => {
                let reason = "a channel that uses the completion queue still exists";
                Err(Error::with_reason("ibv_destroy_cq", libc::EBUSY, reason))
            }
        }
    }

    pub(super) fn queue(&self) -> &Arc<CompletionQueue<'ctx>> {
        &self.queue
    }

    pub(super) fn router(&self) -> &Arc<Router> {
        &self.router
    }
}

impl<'ctx> From<CompletionQueue<'ctx>> for SharedCompletionQueue<'ctx> {
    /// Shares a completion queue that was made with other settings, such as a
    /// [channel to sleep on](crate::CompletionQueueBuilder::own_channel). Completions that are in
    /// it are dropped.
    fn from(queue: CompletionQueue<'ctx>) -> Self {
        let routes =
            Routes { numbers: Vec::new(), inboxes: Vec::new(), reserved: 0, batch: Box::default() };
        let router = Arc::new(Router {
            queue: queue.as_raw(),
            capacity: queue.capacity(),
            first_epoch: new_epoch(),
            routes: Mutex::new(routes),
        });
        // Completions of queue pairs that were destroyed: a channel may get the number of one of them.
        router.drain(&mut router.lock());
        Self { queue: Arc::new(queue), router }
    }
}

impl fmt::Debug for SharedCompletionQueue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedCompletionQueue")
            .field("queue", &self.queue)
            .field("available", &self.available())
            .finish_non_exhaustive()
    }
}

/// The index of an inbox.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Inbox(usize);

/// Gives each completion to the channel that it is for.
pub(super) struct Router {
    /// Live while the router is used: each user holds the `CompletionQueue`.
    queue: *mut ffi::ibv_cq,
    capacity: u32,
    /// Older than any channel that uses the queue.
    first_epoch: u32,
    routes: Mutex<Routes>,
}

// SAFETY: the completion queue may be used from any thread, and the rest is `Send`.
unsafe impl Send for Router {}
// SAFETY: as above; everything that changes is behind the lock.
unsafe impl Sync for Router {}

struct Routes {
    /// Numbers of queue pairs with the indices of their inboxes, in the order of the numbers.
    numbers: Vec<(u32, usize)>,
    /// `None`: free for a new channel.
    inboxes: Vec<Option<Ring>>,
    /// The part of the capacity that channels have reserved.
    reserved: u32,
    batch: Box<[ffi::ibv_wc; BATCH]>,
}

/// Completions in the order in which they came.
struct Ring {
    entries: Box<[ffi::ibv_wc]>,
    first: usize,
    len: usize,
    /// A completion found no room: the device has made more completions than there were requests.
    overflown: bool,
}

impl Ring {
    fn new(room: u32) -> Result<Self> {
        let mut entries = Vec::new();
        entries.try_reserve_exact(room as usize).map_err(|_| no_memory())?;
        entries.resize(room as usize, ffi::ibv_wc::default());
        Ok(Self { entries: entries.into(), first: 0, len: 0, overflown: false })
    }

    fn push(&mut self, completion: ffi::ibv_wc) {
        if self.len == self.entries.len() {
            self.overflown = true;
            return;
        }
        let at = (self.first + self.len) % self.entries.len();
        self.entries[at] = completion;
        self.len += 1;
    }

    fn pop(&mut self) -> Option<ffi::ibv_wc> {
        if self.len == 0 {
            return None;
        }
        let completion = self.entries[self.first];
        self.first = (self.first + 1) % self.entries.len();
        self.len -= 1;
        Some(completion)
    }
}

impl Routes {
    /// Puts a completion into the inbox that it is for. A completion without an inbox is of a queue pair
    /// that was destroyed, and is dropped.
    fn deliver(&mut self, completion: ffi::ibv_wc) {
        if let Ok(at) = self.numbers.binary_search_by_key(&completion.qp_num, |entry| entry.0)
            && let Some(inbox) = &mut self.inboxes[self.numbers[at].1]
        {
            inbox.push(completion);
        }
    }
}

impl Router {
    fn lock(&self) -> MutexGuard<'_, Routes> {
        // Nothing panics while it holds the lock; even if something did, the routes would be consistent.
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn first_epoch(&self) -> u32 {
        self.first_epoch
    }

    /// Makes an inbox for `room` completions, for a queue pair that does not exist yet.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: less than `room` of the capacity is left.
    ///  - `ENOMEM`: out of memory.
    pub(super) fn reserve(&self, room: u32) -> Result<Inbox> {
        let mut routes = self.lock();
        let left = self.capacity - routes.reserved;
        if room > left {
            let what = "the depth of the channel";
            return Err(Error::out_of_range("ibv_create_cq", what, room.into(), 0, left.into()));
        }
        let ring = Ring::new(room)?;
        // So that neither this nor `register` need allocate anything more.
        let channels = routes.inboxes.len() + 1;
        let (inboxes, numbers) = (routes.inboxes.len(), routes.numbers.len());
        routes.inboxes.try_reserve(channels - inboxes).map_err(|_| no_memory())?;
        routes.numbers.try_reserve(channels - numbers).map_err(|_| no_memory())?;
        routes.reserved += room;
        let index = routes.inboxes.iter().position(Option::is_none).unwrap_or_else(|| {
            routes.inboxes.push(None);
            routes.inboxes.len() - 1
        });
        routes.inboxes[index] = Some(ring);
        Ok(Inbox(index))
    }

    /// From now on, completions of the queue pair of this number go to the inbox.
    ///
    /// The number may still belong to another inbox, if its queue pair was destroyed and its channel was
    /// not dropped yet.
    pub(super) fn register(&self, inbox: Inbox, number: u32) {
        let mut routes = self.lock();
        let at = routes.numbers.partition_point(|entry| entry.0 < number);
        if routes.numbers.get(at).is_some_and(|entry| entry.0 == number) {
            // Completions of the old queue pair must not fill the new one's inbox.
            self.drain(&mut routes);
            routes.numbers[at].1 = inbox.0;
        } else {
            routes.numbers.insert(at, (number, inbox.0));
        }
    }

    /// Frees the inbox of a queue pair that was destroyed, or never existed.
    pub(super) fn release(&self, inbox: Inbox) {
        let mut routes = self.lock();
        routes.numbers.retain(|entry| entry.1 != inbox.0);
        if let Some(ring) = routes.inboxes[inbox.0].take() {
            // Completions of the queue pair take up room in the completion queue until they are polled.
            self.drain(&mut routes);
            routes.reserved -= ring.entries.len() as u32;
        }
    }

    /// Drops all completions of a queue pair that was reset.
    pub(super) fn clear(&self, inbox: Inbox) {
        let mut routes = self.lock();
        self.drain(&mut routes);
        if let Some(ring) = &mut routes.inboxes[inbox.0] {
            (ring.len, ring.overflown) = (0, false);
        }
    }

    /// Polls completions into the inboxes. Returns what the verb returned.
    fn fetch(&self, routes: &mut Routes) -> c_int {
        // SAFETY: the caller uses the completion queue, so it is live; there is room for a batch.
        let found =
            unsafe { ffi::ibv_poll_cq(self.queue, BATCH as c_int, routes.batch.as_mut_ptr()) };
        for index in 0..usize::try_from(found).unwrap_or(0).min(BATCH) {
            let completion = routes.batch[index];
            routes.deliver(completion);
        }
        found
    }

    /// Polls until the completion queue is empty, or polling fails.
    fn drain(&self, routes: &mut Routes) {
        // Bounded, because the device may add completions meanwhile.
        for _ in 0..=self.capacity {
            if self.fetch(routes) <= 0 {
                break;
            }
        }
    }

    /// As `ibv_poll_cq` with room for one, for one channel. The caller keeps the completion queue alive.
    ///
    /// It finds nothing only if the completion queue was empty, so a caller that has armed the queue
    /// may then sleep.
    pub(super) fn poll(&self, inbox: Inbox, completion: &mut ffi::ibv_wc) -> c_int {
        let mut routes = self.lock();
        // Each round polls at least one completion, and there are at most `capacity` of them while the
        // lock is held. The bound matters only for a device that invents completions.
        for _ in 0..=self.capacity {
            let Some(ring) = &mut routes.inboxes[inbox.0] else { return -libc::EINVAL };
            if let Some(next) = ring.pop() {
                *completion = next;
                return 1;
            }
            if ring.overflown {
                return -libc::EOVERFLOW;
            }
            let found = self.fetch(&mut routes);
            if found <= 0 {
                return found;
            }
        }
        0
    }
}

/// A `poll_cq` for channels that share a completion queue.
///
/// # Safety
///
/// `route` points to the router and the inbox of a live channel. `completion` points to an initialised
/// completion.
pub(super) unsafe extern "C" fn poll_routed(
    route: *mut ffi::ibv_cq,
    _one: c_int,
    completion: *mut ffi::ibv_wc,
) -> c_int {
    // SAFETY: the caller vouches for both.
    let ((router, inbox), completion) =
        unsafe { (&*route.cast::<(Arc<Router>, Inbox)>(), &mut *completion) };
    router.poll(*inbox, completion)
}

impl fmt::Debug for Router {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Router").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(wr_id: u64) -> ffi::ibv_wc {
        ffi::ibv_wc { wr_id, ..Default::default() }
    }

    #[test]
    fn a_ring_keeps_the_order_and_detects_overflow() {
        let mut ring = Ring::new(3).unwrap();
        for round in 0..5 {
            for n in 0..3 {
                ring.push(completion(round * 3 + n));
            }
            assert!(!ring.overflown);
            let out: Vec<_> = std::iter::from_fn(|| ring.pop()).map(|wc| wc.wr_id).collect();
            assert_eq!(out, [round * 3, round * 3 + 1, round * 3 + 2]);
            ring.push(completion(0));
            ring.pop();
        }
        for n in 0..4 {
            ring.push(completion(n));
        }
        assert!(ring.overflown);
        assert_eq!(ring.pop().map(|wc| wc.wr_id), Some(0));
    }

    #[test]
    fn a_ring_without_room_is_empty() {
        let mut ring = Ring::new(0).unwrap();
        assert!(ring.pop().is_none());
        ring.push(completion(1));
        assert!(ring.overflown && ring.pop().is_none());
    }
}
