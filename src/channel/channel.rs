use super::core::Core;
use super::link::Link;
use super::pending_work::PendingWork;
use super::wait::CancelHandle;
use crate::base::{Result, debug, ffi};
use crate::verbs::queue_pair::QueuePairEndpoint;

/// A connection to one peer over which data is moved without `unsafe`: by sends and receives, and by
/// reads, writes and atomics on the peer's memory.
///
/// # The life of a buffer
///
/// ```text
///    the program's                        the device's                     the program's
///
///  region.slice_mut(..) ── post_receive ──►  in flight  ──►  completion ──► wait() gives it back
///        │                   (moved in)          │             seen
///        │                                       │
///        │                                       ├──► deadline, poll error, panic, early return:
///        │                                       │    queue pair to ERR, what is flushed is polled;
///        │                                       │    failing that, RESET; failing that, destroyed;
///        │                                       │    failing that, the process aborts
///        │                                       │
///        └─ borrowed ────────────────────────────┴──── until the scope has ended: the compiler ────►
///                                                      allows no access before
/// ```
///
/// The device reads and writes memory on its own, at a time of its choosing. Meanwhile the memory must stay
/// where it is, and nothing else may write (or even read) it. The borrow checker enforces this: an operation
/// takes a **slice of a region** ([`MemorySlice`], [`MemorySliceMut`], [`SharedMemorySlice`], or arrays and
/// tuples of them), and the region stays borrowed until the operation has ended. An operation has ended
/// when its completion was polled, or when the queue pair was reset or destroyed. An error of `ibv_poll_cq`
/// ends nothing. (One exception: if a post fails and the queue pair can be neither flushed nor reset, a
/// buffer that the device only reads is given back nevertheless. The device may then send the peer what the
/// buffer holds later.) Soundness does not depend on a guard's `Drop`: an operation whose handle was
/// forgotten with [`mem::forget`](std::mem::forget) is ended like all others.
///
/// # Three ways to post
///
/// | | posts | for |
/// |---|---|---|
/// | [`run`](Self::run), [`send`](Self::send), [`receive`](Self::receive), [`write`](Self::write), [`read`](Self::read) | one operation, and waits for it | one thing after the other |
/// | [`scope`](Self::scope), [`manual_scope`](Self::manual_scope) | many, each with a handle to wait for it | several things at a time: pipelines |
/// | [`post_unpolled`](Self::post_unpolled) | one operation; the rest is up to the caller, and `unsafe` | what does not fit into a scope |
///
/// An operation that owns its buffer, so that nothing is borrowed, is posted on a [`Loop`](crate::Loop), of one channel
/// if need be, or an [`AsyncChannel`](crate::AsyncChannel).
///
/// Each takes any [request](crate::channel::WorkRequest). None of them allocates. The channel is built for a number of
/// operations in flight ([`max_send_wr`](crate::ChannelBuilder::max_send_wr),
/// [`max_recv_wr`](crate::ChannelBuilder::max_recv_wr)).
///
/// # Waiting
///
/// Waiting means polling at full speed. With [`sleep_after`](crate::ChannelBuilder::sleep_after), a wait first
/// polls, and then sleeps until the device wakes the thread. A receive completes when the peer sends, which
/// may be never: each wait has a variant with a **deadline** ([`until`](Self::until) for blocking operations). When the deadline of a blocking operation or of
/// a scope passes, the channel is stopped: the queue pair goes to the error state, and everything in flight ends. After
/// that, and after a failed operation, [`reset`](Self::reset) and a new
/// [`handshake`](crate::PreparedChannel::handshake) make the channel usable again; the peer has to do the same. Waits
/// for credit stop nothing: what is in flight stays in flight.
///
/// # Example
///
/// ```no_run
/// # // not on Soft-RoCE alone: needs a peer
/// use std::time::{Duration, Instant};
/// use ibverbs::{Channel, TransportError, settings::MaxRnrRetries};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let context = ibverbs::open("rxe0")?;
/// let domain = context.alloc_pd()?;
/// // The device resends a message that arrives before its receive is posted, without limit.
/// let builder = Channel::builder(&domain).max_rnr_retries(MaxRnrRetries::UNLIMITED);
/// let deadline = Instant::now() + Duration::from_secs(10);
/// // The peer calls `accept`. The rest is the same on both sides.
/// let (mut channel, _) = builder.build()?.connect("server:18515", b"", deadline)?;
///
/// let mut region = domain.allocate::<u8>(4096)?;
/// region[..5].copy_from_slice(b"hello");
/// let (message, room) = region.slice_mut(..)?.split_at(5)?;
/// channel.scope_until(deadline, |scope| {
///     // The receive comes first: if both sides waited for their sends, neither would receive.
///     let receive = scope.post_receive(room)?;
///     scope.post_send(message)?.wait()?;
///     let (room, completion) = receive.wait()?;
///     println!("the peer says {:?}", &room[..completion.byte_len() as usize]);
///     Ok::<_, TransportError>(())
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// [`MemorySlice`]: crate::memory::MemorySlice
/// [`MemorySliceMut`]: crate::memory::MemorySliceMut
/// [`SharedMemorySlice`]: crate::memory::SharedMemorySlice
pub struct Channel<'res> {
    pub(crate) link: Link<'res>,
    /// The last write of `keep_alive`.
    pub(super) probe: Option<PendingWork>,
}

/// How a channel was closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChannelClosed {
    /// All operations had completed, successfully or not, before the channel was closed.
    Drained,
    /// This many operations were still in flight and were ended by force. The peer may or may not have
    /// seen them.
    Flushed(u32),
}

impl<'res> Channel<'res> {
    pub(super) fn connected(link: Link<'res>) -> Self {
        Self { link, probe: None }
    }

    /// The caller has taken the queue pair to RTS.
    #[cfg(feature = "rdmacm")]
    pub(crate) fn allow_sends(&self) {
        self.core().open_unless_stopped();
    }

    #[cfg(feature = "rdmacm")]
    pub(crate) fn try_end(&self) -> bool {
        self.core().try_stop()
    }

    pub(crate) fn core(&self) -> &Core {
        &self.link.core
    }

    /// The number of the queue pair.
    pub fn number(&self) -> u32 {
        self.core().number
    }

    /// The address of the channel, as the peer knows it.
    pub fn endpoint(&self) -> QueuePairEndpoint {
        self.link.endpoint()
    }

    /// The queue pair's C object, or null if it had to be destroyed. It is valid while the channel exists,
    /// unless a later call returns [`Closed`](crate::TransportError::Closed). Do not post to it and do not
    /// poll its completion queue: the channel would lose count of the operations in flight.
    pub fn as_raw(&self) -> *mut ffi::ibv_qp {
        if self.core().destroyed.get() { std::ptr::null_mut() } else { self.core().queue_pair }
    }

    /// `ibv_destroy_qp`: ends all operations, destroys the queue pair, and reports how the operations
    /// ended. Dropping does the same, but reports nothing and never waits.
    ///
    /// Operations are in flight then only if an unpolled method posted them. Those that have ended
    /// by now count as drained, the others are flushed.
    ///
    /// # Errors
    ///
    /// The provider's errno value. The channel is then
    /// [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with all that it was made from. Nothing is
    /// in flight any more.
    #[doc(alias = "ibv_destroy_qp")]
    pub fn close(self) -> Result<ChannelClosed> {
        let core = self.core();
        // If polling fails, the rest counts as outstanding.
        while core.table.outstanding() > 0 && core.settle() == Ok(true) {}
        let left = core.table.outstanding();
        if left > 0 {
            core.stop();
        }
        self.link.close()?;
        Ok(if left == 0 { ChannelClosed::Drained } else { ChannelClosed::Flushed(left) })
    }
}

impl Channel<'_> {
    /// A handle with which another thread can end a wait of this channel. All handles of a channel are the
    /// same; they stay valid after a [`reset`](Self::reset).
    ///
    /// A cancelled wait returns [`Cancelled`](crate::TransportError::Cancelled), and does what it does when its
    /// deadline passes: a wait for [credit](crate::ChannelBuilder::flow_control), also that of a blocking operation,
    /// which was not posted then, leaves everything in flight, and can be called again. All others (blocking operations
    /// that were posted, scopes, unpolled operations) lend memory to the device that must come back, so they stop the
    /// channel. (A [`Loop`](crate::Loop) owns its buffers: its [`LoopWaker`](crate::event_loop::LoopWaker) stops
    /// nothing.) A channel without a handle pays nothing: only a wait that has found nothing for a while looks.
    ///
    /// ```no_run
    /// # // not on Soft-RoCE alone: needs a peer
    /// # fn serve(channel: &mut ibverbs::Channel<'_>, region: &mut ibverbs::MemoryRegion<'_, u8>) -> Result<(), Box<dyn std::error::Error>> {
    /// use ibverbs::TransportError;
    ///
    /// let stop = channel.cancel_handle()?;
    /// std::thread::spawn(move || {
    ///     let mut line = String::new();
    ///     let _ = std::io::stdin().read_line(&mut line);
    ///     stop.cancel();
    /// });
    /// match channel.receive(&mut region.slice_mut(..)?) {
    ///     Ok(success) => println!("{} bytes", success.byte_len()),
    ///     Err(TransportError::Cancelled) => println!("the channel is stopped: reset it, or drop it"),
    ///     Err(error) => return Err(error.into()),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The first handle of a channel that [sleeps](crate::ChannelBuilder::sleep_after) needs a file:
    ///
    ///  - `EMFILE`, `ENFILE`: the process, or the machine, has too many files open.
    ///  - `ENOMEM`: out of memory.
    pub fn cancel_handle(&mut self) -> Result<CancelHandle> {
        let core = self.core();
        CancelHandle::of(&core.cancel, core.settings.sleep)
    }
}

debug! { Channel<'_>, self, link: self.link }
