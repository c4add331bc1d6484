//! Sleeping for a loop without borrowing it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::Loop;
use crate::base::{ErrorKind, Result, debug};
use crate::verbs::completion::{CompletionQueue, Waiters};

/// Wakes the thread that sleeps for a [`Loop`], from any thread: see [`Loop::waker`].
///
/// It may outlive the loop, and then does nothing.
pub struct LoopWaker(Arc<Waiters>);

impl Clone for LoopWaker {
    fn clone(&self) -> Self {
        Self::new(self.0.clone())
    }
}

impl Drop for LoopWaker {
    fn drop(&mut self) {
        self.0.remove_handle();
    }
}

impl LoopWaker {
    fn new(waiters: Arc<Waiters>) -> Self {
        waiters.add_handle();
        Self(waiters)
    }

    /// Wakes the thread in [`Loop::wait_ended_until`] or [`Loop::wait_ended`], or else its next call, and each
    /// [`LoopWaiter`], or else its next sleep. Several calls before a wake count as one. It also makes the descriptors of
    /// this waker and of the loop ([`AsFd`]) readable, until [`Loop::arm`].
    ///
    /// The woken thread sees all that the caller did before this call.
    pub fn wake(&self) {
        self.0.wake();
    }
}

impl AsFd for LoopWaker {
    /// An eventfd that [`wake`](Self::wake) makes readable. Only wait for it: [`Loop::arm`] reads from it, which forgets
    /// earlier wakes. So between `arm` and sleeping, check what the wake was for (a flag, a queue of jobs), not whether
    /// this file was readable. It is also readable when a thread with a [`LoopWaiter`] has taken the loop's event.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.elsewhere().expect("made with this")
    }
}

debug! { LoopWaker, self, wakes: self.0.wakes(), .. }

/// Sleeps for a [`Loop`] without borrowing it: see [`Loop::waiter`].
///
/// Threads that share one by reference share its wake-ups; a clone has its own.
pub struct LoopWaiter<'res> {
    queue: Arc<CompletionQueue<'res>>,
    /// Those that a sleep has returned for.
    wakes: AtomicU64,
}

impl Clone for LoopWaiter<'_> {
    fn clone(&self) -> Self {
        let wakes = AtomicU64::new(self.wakes.load(Ordering::SeqCst));
        Self { queue: self.queue.clone(), wakes }
    }
}

impl LoopWaiter<'_> {
    /// `ibv_req_notify_cq`: the first half of sleeping. Completions that are there already wake nobody: call
    /// [`next_ended`](Loop::next_ended) until it returns `None`, and then [`ArmedWaiter::wait_until`]. That returns at once
    /// if a [`LoopWaker`] has woken the loop since this waiter's last sleep ended.
    ///
    /// # Errors
    ///
    ///  - `EIO`: the device is gone.
    #[doc(alias = "ibv_req_notify_cq")]
    pub fn arm(&self) -> Result<ArmedWaiter<'_>> {
        let waiters = self.queue.own_channel()?.waiters();
        let (queue, seen) = (&*self.queue, &self.wakes);
        let wakes = seen.load(Ordering::SeqCst);
        Ok(ArmedWaiter { queue, waiters, events: queue.arm_own()?, seen, wakes })
    }
}

debug! { LoopWaiter<'_>, self, queue: self.queue, .. }

/// A thread that is about to sleep: see [`LoopWaiter::arm`].
#[must_use]
pub struct ArmedWaiter<'w> {
    queue: &'w CompletionQueue<'w>,
    waiters: &'w Waiters,
    events: u64,
    /// Those of the waiter's sleeps, and how many they were when it was armed.
    seen: &'w AtomicU64,
    wakes: u64,
}

impl ArmedWaiter<'_> {
    /// Sleeps until an operation has ended since it was armed, or a [`LoopWaker`] has woken the loop since the waiter's
    /// last sleep. Another thread may take that operation first.
    ///
    /// # Errors
    ///
    ///  - `EIO`: the device is gone.
    #[doc(alias = "ibv_get_cq_event")]
    pub fn wait(self) -> Result<()> {
        self.sleep(None)
    }

    /// As [`wait`](Self::wait), but returns false once the deadline has passed.
    ///
    /// # Errors
    ///
    /// Those of [`wait`](Self::wait).
    #[doc(alias = "ibv_get_cq_event")]
    pub fn wait_until(self, deadline: Instant) -> Result<bool> {
        match self.sleep(Some(deadline)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::TimedOut => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn sleep(self, deadline: Option<Instant>) -> Result<()> {
        let slept = self.queue.sleep(self.events, deadline, || self.waiters.wakes() != self.wakes);
        if slept.is_ok() {
            // The caller looks for work next. Another thread with this waiter may have seen more.
            self.seen.fetch_max(self.waiters.wakes(), Ordering::SeqCst);
        }
        slept
    }
}

debug! { ArmedWaiter<'_>, self, queue: self.queue, .. }

impl<'res, B> Loop<'res, B> {
    /// A handle that wakes the thread that sleeps for the loop, from any thread. The first call makes an eventfd, which
    /// all handles of the loop share.
    ///
    /// ```
    /// # use std::time::{Duration, Instant};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build()?;
    /// # let _rxe0 = rxe0.register();
    /// # let context = ibverbs::open("rxe0")?;
    /// use std::sync::mpsc;
    ///
    /// let mut server = ibverbs::Loop::<ibverbs::PooledBuffer>::new(&context, 1024)?;
    /// let (jobs, work) = mpsc::channel();
    /// let waker = server.waker()?;
    /// std::thread::spawn(move || {
    ///     jobs.send("shut down").unwrap();
    ///     waker.wake();
    /// });
    /// let deadline = Instant::now() + Duration::from_secs(60);
    /// while let Some(ended) = server.wait_ended_until(deadline)? {
    ///     // serve it
    /// #   drop(ended);
    /// }
    /// assert_eq!(work.try_recv()?, "shut down");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    ///  - `EMFILE`, `ENFILE`: the process, or the machine, has too many files open.
    ///  - `ENOMEM`: out of memory.
    pub fn waker(&self) -> Result<LoopWaker> {
        self.queue.wakeable().map(LoopWaker::new)
    }

    /// A handle that sleeps for the loop without borrowing it, on any thread. The loop can be behind a lock, which
    /// others take meanwhile to post. Any number of threads may sleep, and all are woken, as is one that sleeps on the
    /// loop's descriptor.
    ///
    /// ```
    /// # use std::time::Instant;
    /// # use ibverbs::event_loop::LoopWaiter;
    /// # use ibverbs::{Loop, PooledBuffer};
    /// # fn sleep(server: &std::sync::Mutex<Loop<'_, PooledBuffer>>, waiter: &LoopWaiter<'_>, deadline: Instant) -> Result<(), Box<dyn std::error::Error>> {
    /// loop {
    ///     let armed = waiter.arm()?;
    ///     while let Some(ended) = server.lock().unwrap().next_ended()? {
    ///         // serve it
    /// #       drop(ended);
    ///     }
    ///     if !armed.wait_until(deadline)? {
    ///         break Ok(());
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// While a channel with [flow control](crate::ChannelBuilder::flow_control) waits for its peer, sleep at most for
    /// [`credit_pause`](Loop::credit_pause).
    pub fn waiter(&self) -> LoopWaiter<'res> {
        let wakes = self.queue.own_channel().map_or(0, |channel| channel.waiters().wakes());
        LoopWaiter { queue: self.queue.clone(), wakes: AtomicU64::new(wakes) }
    }

    pub(super) fn take_wake(&mut self) -> Result<bool> {
        let wakes = self.queue.own_channel()?.waiters().wakes();
        Ok(std::mem::replace(&mut self.wakes, wakes) != wakes)
    }
}
