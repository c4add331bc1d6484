//! Channels: RDMA in safe Rust. A [`Channel`] is a connection to one peer; a [`Loop`] has many of them.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
//! # rxe0.register();
//! use ibverbs::{Inline, TransportError};
//!
//! let context = ibverbs::open_first()?;
//! let domain = context.alloc_pd()?;
//! let prepared = domain.create_channel().max_inline_data(16).build()?;
//! let peer = prepared.endpoint(); // here the peer's would come in
//! let mut channel = prepared.handshake(peer)?;
//! let mut region = domain.allocate::<u8>(16)?;
//! channel.scope(|scope| {
//!     let receive = scope.post_receive(&mut region)?;
//!     scope.post_send(Inline(b"hello"))?.wait()?;
//!     println!("{} bytes", receive.wait()?.1.byte_len());
//!     Ok::<_, TransportError>(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! | to | |
//! |---|---|
//! | build and connect a channel | [`ChannelBuilder`], [`PreparedChannel`]; [`tcp`](crate::tcp), `rdmacm` |
//! | post and wait, one thing after the other | [`Channel`], with a deadline [`ChannelUntil`] |
//! | post many, which borrow their buffers | [`Scope`], [`ScopedPendingWork`] |
//! | send datagrams, also to many at once | [`DatagramsBuilder`], [`Loop::send_to`], [`Loop::join`] |
//! | post what owns its buffer, serve many peers | [`Loop`], [`ChannelId`], [`Ended`]; [`OwnedBuffer`], [`AnyBuffer`], [`LoopBuffer`] |
//! | end waits from another thread | [`CancelHandle`]; of a loop [`LoopWaker`], [`LoopWaiter`] |
//! | connect or destroy beside a running loop | [`DetachedChannel`], [`DestroyedChannel`] |
//! | do the same with several peers | [`ChannelSet`], [`SetScope`] |
//! | post by hand (`unsafe`) | [`PendingWork`] |
//! | understand an error | [`TransportError`], [`ScopeError`], [`OperationError`] |
//! | write a function for any request | [`WorkRequest`], [`IntoSend`], [`IntoReceive`] |

mod blocking;
mod builder;
mod channel_set;
mod core;
mod credits;
mod datagrams;
mod error;
mod in_flight;
mod link;
mod operation;
mod owned_buffer;
pub(crate) mod parts;
mod pending_work;
mod posting;
mod scope;
mod scoped_work;
mod sink;
mod slot;
mod stop;
mod wait;

pub use blocking::ChannelUntil;
pub use builder::ChannelBuilder;
pub use channel_set::{ChannelSet, PeerResults, SetScope};
pub use datagrams::DatagramsBuilder;
pub use error::{OperationError, OwnedResult, ScopeError, TransportError, TransportResult};
pub use link::PreparedChannel;
pub(crate) use owned_buffer::Piece;
pub use owned_buffer::{AnyBuffer, OwnedBuffer};
pub use pending_work::PendingWork;
pub use posting::{IntoReceive, IntoSend, WorkRequest};
pub use scope::Scope;
pub use scoped_work::ScopedPendingWork;
pub use wait::CancelHandle;

use std::time::Instant;

use self::core::Core;
use self::link::Link;

use crate::base::debug::debug;
use crate::base::error::{Error, Result, StateError};
use crate::base::ffi;
use crate::base::parent::Parent;
use crate::verbs::domain::ProtectionDomain;
use crate::verbs::memory::RemoteMemoryRegion;
use crate::verbs::operation::WriteWorkRequest;
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
/// | [`post_unpolled`](Self::post_unpolled), [`send_unpolled`](Self::send_unpolled) … | one operation; the rest is up to the caller, and `unsafe` | what does not fit into a scope |
///
/// An operation that owns its buffer, so that nothing is borrowed, is posted on a [`Loop`], of one channel if need be, or an
/// [`AsyncChannel`](crate::AsyncChannel).
///
/// Each takes any [request](crate::channel::WorkRequest). None of them allocates. The channel is built for a number of operations in flight
/// ([`max_send_wr`](ChannelBuilder::max_send_wr), [`max_recv_wr`](ChannelBuilder::max_recv_wr)).
///
/// # Waiting
///
/// Waiting means polling at full speed. With [`sleep_after`](ChannelBuilder::sleep_after), a wait first
/// polls, and then sleeps until the device wakes the thread. A receive completes when the peer sends, which
/// may be never: each wait has a variant with a **deadline** ([`until`](Self::until) for blocking operations). When the deadline of a blocking operation or of
/// a scope passes, the channel is stopped: the queue pair goes to the error state, and everything in flight ends. After
/// that, and after a failed operation, [`reset`](Self::reset) and a new [`handshake`](PreparedChannel::handshake)
/// make the channel usable again; the peer has to do the same. Waits for credit stop nothing: what is in flight
/// stays in flight.
///
/// # Example
///
/// ```no_run
/// # // not on Soft-RoCE alone: needs a peer
/// use std::time::{Duration, Instant};
/// use ibverbs::{Channel, MaxRnrRetries, TransportError};
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
/// [`MemorySlice`]: crate::MemorySlice
/// [`MemorySliceMut`]: crate::MemorySliceMut
/// [`SharedMemorySlice`]: crate::SharedMemorySlice
pub struct Channel<'res> {
    pub(crate) link: Link<'res>,
    /// The last write of `keep_alive`.
    probe: Option<PendingWork>,
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
    /// Starts to build a channel: see [`ChannelBuilder::new`].
    pub fn builder(
        domain: impl Into<Parent<'res, ProtectionDomain<'res>>>,
    ) -> ChannelBuilder<'res> {
        ChannelBuilder::new(domain)
    }

    fn connected(link: Link<'res>) -> Self {
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

    #[inline]
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

    /// `ibv_modify_qp`, `ibv_create_qp`: makes the channel ready to be connected again, to the same peer
    /// or another. Everything that was in flight has then ended. The peer of the connection has to do the
    /// same, and each needs the new [endpoint](PreparedChannel::endpoint) of the other.
    ///
    /// The channel gets another queue pair, with another number. The peer of the old connection retransmits
    /// unacknowledged packets for as long as *its* settings say, often for seconds, and the network may
    /// deliver packets late. All of these packets name the old queue pair, so the device drops them. No
    /// wait is needed.
    ///
    /// If the device has no room for a second queue pair, the channel keeps the old one. In that case, or
    /// if the device gives the old number to the new queue pair, only the random packet numbers keep the
    /// connections apart: a late packet is taken for one of the new connection if its number happens to be
    /// the next one (1 in 16 million), and a late acknowledgement may count for messages that were sent
    /// since. A program that must exclude that waits until the old peer has given up.
    ///
    /// # Errors
    ///
    /// The channel comes back in the [`StateError`]. It stays stopped, and can be reset again.
    ///
    ///  - `EINVAL`: the queue pair had to be destroyed earlier.
    ///  - `EIO`, `ENODEV`: the device is gone.
    ///  - `ENETDOWN`, `ENODATA`: the port is not active, or has no GID any more.
    ///  - `ETIMEDOUT`: the completion queue does not become empty.
    #[doc(alias = "ibv_modify_qp")]
    pub fn reset(mut self) -> Result<PreparedChannel<'res>, StateError<Self>> {
        match self.link.reset() {
            Ok(()) => Ok(PreparedChannel { link: self.link }),
            Err(error) => Err(StateError::new(self, error)),
        }
    }

    /// A failed reset is tried again by the next attempt to connect.
    pub(crate) fn into_prepared(mut self) -> PreparedChannel<'res> {
        let _ = self.link.reset();
        PreparedChannel { link: self.link }
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
    /// [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with all that it was made from. Nothing is in
    /// flight any more.
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

/// For a write without bytes: the peer does not look at the key.
pub(crate) fn nowhere() -> RemoteMemoryRegion {
    RemoteMemoryRegion::new(0, 0, 0).expect("nothing overflows")
}

pub(crate) fn check_reliable(core: &Core) -> Result<()> {
    if core.settings.limits.reliable {
        return Ok(());
    }
    let reason = "only the peer of a reliable connection acknowledges a write";
    Err(Error::with_reason("ibv_post_send", libc::EOPNOTSUPP, reason))
}

/// # Signs of life
impl Channel<'_> {
    /// `ibv_post_send`: if the connection is idle, writes 0 bytes to the peer, whose device acknowledges that without
    /// the peer's program. If the device does not answer, the connection fails, and a later call says so. It
    /// never waits.
    ///
    /// Without it, it goes unnoticed that the peer of an idle connection has lost its power or its network. Call this
    /// from a timer: a dead peer is then noticed within the period of the timer, plus the time that the device
    /// retries ([`ack_timeout`](crate::ChannelBuilder::ack_timeout),
    /// [`max_ack_retries`](crate::ChannelBuilder::max_ack_retries)), plus the period again, as the next call reports
    /// it. Receives that are posted end at once when the connection fails.
    ///
    /// If a send, write, read or atomic is in flight, its result will show it, and nothing is written. Otherwise
    /// this costs one place in the send queue, and one packet in each direction.
    ///
    /// The peer's channel must be built with
    /// [`access`](crate::ChannelBuilder::access) [`REMOTE_WRITE`](crate::AccessFlags::REMOTE_WRITE), although no
    /// memory is written: its device ends the connection otherwise.
    ///
    /// ```no_run
    /// # // not on Soft-RoCE alone: needs peers
    /// # fn tick(channels: &mut Vec<ibverbs::Channel<'static>>) {
    /// // Every second:
    /// channels.retain_mut(|channel| match channel.keep_alive() {
    ///     Ok(()) => true,
    ///     Err(error) => {
    ///         eprintln!("the peer of {:#x} is gone: {error}", channel.number());
    ///         false
    ///     }
    /// });
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    ///  - [`Work`](crate::TransportError::Work): the peer did not answer, or the connection had failed before.
    ///  - [`Stopped`](crate::TransportError::Stopped), [`Closed`](crate::TransportError::Closed): the channel is
    ///    stopped.
    ///  - [`Verbs`](crate::TransportError::Verbs): `EOPNOTSUPP`, the connection is not reliable, so the peer
    ///    acknowledges nothing; `ENOTCONN`, the connection has ended, and the device does not complete what is in
    ///    flight (iWARP), so the channel was stopped; or polling or posting failed.
    #[doc(alias = "ibv_post_send")]
    pub fn keep_alive(&mut self) -> TransportResult<()> {
        check_reliable(self.core())?;
        let core = self.core();
        while core.settle()? {}
        if let Some(mut probe) = self.probe.take() {
            match probe.poll(self) {
                None => {
                    self.probe = Some(probe);
                    return self.check_silent_device();
                }
                Some(ended) => drop(ended?),
            }
        }
        if self.core().table.outstanding_sends() > 0 {
            return self.check_silent_device();
        }
        // SAFETY: there is no memory.
        match unsafe { self.post_unpolled(WriteWorkRequest::new((), nowhere())) } {
            Ok(probe) => {
                self.probe = Some(probe);
                Ok(())
            }
            // The program has not taken results yet, so it has heard from the peer.
            Err(error) if error.is_queue_full() => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Soft-iWARP completes nothing that was posted after the end of a connection, so this also checks the queue
    /// pair.
    fn check_silent_device(&self) -> TransportResult<()> {
        let core = self.core();
        let checked = core.check_device_if_due(Instant::now());
        if checked.is_err() && core.table.is_open() {
            core.stop();
        }
        Ok(checked?)
    }
}

debug! { Channel<'_>, self, link: self.link }
