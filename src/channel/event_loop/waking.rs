//! Sleeping until a loop has something, without borrowing it, and waking who sleeps.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use super::Loop;
use crate::completion::{CompletionQueue, Waiters};
use crate::debug::debug;
use crate::error::{ErrorKind, Result};

/// Wakes the thread that sleeps for a [`Loop`], from any thread: see [`Loop::waker`].
///
/// It may outlive the loop; it then does nothing.
#[derive(Clone)]
pub struct LoopWaker(Arc<Waiters>);

impl LoopWaker {
    /// Wakes whoever sleeps for the loop: a [`Loop::wait_ended_until`], or else the next one, and every [`ArmedWaiter`]
    /// that was armed before. Several calls before that count as one. It also makes the [descriptor](AsFd) readable.
    ///
    /// The woken thread sees everything that the caller did before this.
    pub fn wake(&self) {
        self.0.wake();
    }
}

impl AsFd for LoopWaker {
    /// An eventfd that [`wake`](Self::wake) makes readable, for a program that watches several files and sleeps for this one
    /// beside the loop's own. Only wait for it: [`Loop::arm`] reads from it. A `wake` before `arm` is therefore forgotten: look
    /// between `arm` and sleeping at what it was for (a flag, a queue of jobs), not at whether this file was readable.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.waker().expect("made with this").as_fd()
    }
}

debug! { LoopWaker, self, wakes: self.0.wakes(), .. }

/// Sleeps until a [`Loop`] has something, without borrowing it: see [`Loop::waiter`].
#[derive(Clone)]
pub struct LoopWaiter<'res>(Arc<CompletionQueue<'res>>);

impl LoopWaiter<'_> {
    /// `ibv_req_notify_cq`: the first half of sleeping. What is in the loop already wakes nobody: call
    /// [`next_ended`](Loop::next_ended) after this until it returns `None`, and [`ArmedWaiter::wait_until`] then.
    ///
    /// # Errors
    ///
    ///  - `EIO`: the device is gone.
    #[doc(alias = "ibv_req_notify_cq")]
    pub fn arm(&self) -> Result<ArmedWaiter<'_>> {
        let waiters = self.0.own_channel()?.waiters();
        // Read first: the caller then looks at what those who wake have done.
        let wakes = waiters.wakes();
        Ok(ArmedWaiter { queue: &self.0, waiters, events: self.0.arm_own()?, wakes })
    }
}

debug! { LoopWaiter<'_>, self, queue: self.0, .. }

/// A thread that is about to sleep: see [`LoopWaiter::arm`].
#[must_use]
pub struct ArmedWaiter<'w> {
    queue: &'w CompletionQueue<'w>,
    waiters: &'w Waiters,
    events: u64,
    wakes: u64,
}

impl ArmedWaiter<'_> {
    /// Sleeps until an operation has ended since it was armed, or a [`LoopWaker`] has woken it. It does not sleep if that has
    /// happened before. Another thread may find what has ended first.
    ///
    /// # Errors
    ///
    ///  - `EIO`: the device is gone.
    #[doc(alias = "ibv_get_cq_event")]
    pub fn wait(self) -> Result<()> {
        self.sleep(None)
    }

    /// As [`wait`](Self::wait), but returns false when the deadline has passed.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    #[doc(alias = "ibv_get_cq_event")]
    pub fn wait_until(self, deadline: Instant) -> Result<bool> {
        match self.sleep(Some(deadline)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::TimedOut => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn sleep(self, deadline: Option<Instant>) -> Result<()> {
        self.queue.sleep(self.events, deadline, || self.waiters.wakes() != self.wakes)
    }
}

debug! { ArmedWaiter<'_>, self, queue: self.queue, .. }

impl<'res, B> Loop<'res, B> {
    /// A handle that wakes the thread that sleeps for the loop, from any thread: to give it work, or to stop it. The
    /// first one makes an eventfd, which all handles of a loop share; a loop without one has none.
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
        self.queue.wakeable().map(LoopWaker)
    }

    /// A handle that sleeps for the loop without borrowing it, on any thread: so the loop can be behind a lock that
    /// others take meanwhile, to post. Any number of threads may sleep; all of them are woken.
    ///
    /// ```
    /// # use std::time::Instant;
    /// # use ibverbs::channel::LoopWaiter;
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
    /// While a channel with [flow control](crate::ChannelBuilder::flow_control) waits for its peer, the deadline is to be
    /// [`credit_pause`](Loop::credit_pause) at most.
    pub fn waiter(&self) -> LoopWaiter<'res> {
        LoopWaiter(self.queue.clone())
    }

    /// Whether it was woken since the last call.
    pub(super) fn take_wake(&mut self) -> Result<bool> {
        let wakes = self.queue.own_channel()?.waiters().wakes();
        Ok(std::mem::replace(&mut self.wakes, wakes) != wakes)
    }
}
