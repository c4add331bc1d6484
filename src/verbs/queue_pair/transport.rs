//! The transport of a queue pair as a type, or as a value if chosen at run time.
//!
//! Traits say what a transport can do, so that the compiler rejects everything else, and names the alternative.

pub(crate) use self::sealed::Addressed;

use std::fmt;

use super::attributes::AttributeMask;
#[cfg(feature = "mlx5")]
use super::dc_options::{self as dc, DcStreams};
#[cfg(feature = "efa")]
use super::srd_options::{self as srd, SrdOptions};
use crate::base::{Error, QueuePairState, QueuePairType, Result, ffi};

mod sealed {
    use crate::base::{QueuePairType, Result};
    use crate::verbs::queue_pair::transport::DriverTransport;

    pub trait Sealed {
        /// Only the provider's own verb creates it.
        fn driver(self) -> Option<DriverTransport>
        where
            Self: Sized,
        {
            None
        }

        /// Where the compiler could not check it.
        #[inline(always)]
        fn need_peer(_has_peer: bool) -> Result<()> {
            Ok(())
        }

        fn is(kind: QueuePairType, driver: Option<&DriverTransport>) -> bool;
    }

    /// The requests of the transport go to an `A`.
    pub trait Addressed<A> {}
}

/// The transport of a [`QueuePair`](crate::QueuePair): a type that is also a value, or a [`QueuePairType`].
///
/// | | [`Rc`] | [`Uc`] | [`Ud`] | [`RawPacket`] | [`XrcSend`] | [`XrcReceive`] | `Srd` | `Dci` | gives |
/// |---|---|---|---|---|---|---|---|---|---|
/// | [`Connected`] | x | x | | | x | x | | | [`handshake`](crate::PreparedQueuePair::handshake), `connect`, `accept` |
/// | [`Unconnected`] | | | x | x | | | x | x | [`activate`](crate::PreparedQueuePair::activate) |
/// | [`FixedPeer`] | x | x | | x | | | | | requests without a destination |
/// | [`AddressedBy`] | | | [`DatagramPeer`](crate::operation::DatagramPeer) | | [`XrcPeer`](crate::operation::XrcPeer) | | [`DatagramPeer`](crate::operation::DatagramPeer) | `DcPeer` | requests [with one](crate::SendWorkRequest::to) |
/// | [`Sends`], [`Writes`] | x x | x x | x - | x - | x x | - - | x b | b b | sends, writes; b: in [batches](crate::QueuePair::batch) only |
/// | [`Reads`], [`Atomics`] | x x | - - | - - | - - | x x | - - | b - | b b | reads; atomics, flushes and atomic writes |
/// | [`ReceiveQueue`] | x | x | x | x | | | x | | receives, [`srq`](crate::QueuePairBuilder::srq) |
/// | [`Reliable`] | x | | | | x | x | | x | time-outs, retries, outstanding reads |
/// | [`Datagram`] | | | x | | | | x | | [`qkey`](crate::QueuePairBuilder::qkey) |
///
/// `Srd` exists with feature `efa`, `Dci` with feature `mlx5`. Misuse does not compile:
///
/// ```compile_fail,E0277
/// # fn f(domain: &ibverbs::ProtectionDomain<'_>, queue: &ibverbs::CompletionQueue<'_>) -> ibverbs::Result<()> {
/// // A datagram queue pair gets no acknowledgements.
/// domain.create_qp(queue, queue, ibverbs::Ud).ack_timeout(ibverbs::settings::AckTimeout::MAX).build()?;
/// # Ok(())
/// # }
/// ```
///
/// A program that chooses at run time passes a [`QueuePairType`], which has all of these traits. Misuse is then an
/// error at run time. [`QueuePair::erase`](crate::QueuePair::erase) and [`QueuePair::typed`](crate::QueuePair::typed)
/// convert:
///
/// ```
/// use ibverbs::{QueuePair, QueuePairType, Rc, Ud};
///
/// # fn main() -> ibverbs::Result<()> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// # let context = ibverbs::open("rxe0")?;
/// # let domain = context.alloc_pd()?;
/// # let queue = context.create_cq(16)?;
/// let messages = domain.create_qp(&queue, &queue, Rc).build()?.into_queue_pair();
/// let datagrams = domain.create_qp(&queue, &queue, Ud).qkey(7).build()?.activate()?;
/// let both: [QueuePair<'_, QueuePairType>; 2] = [messages.erase(), datagrams.erase()];
/// # let [messages, datagrams] = both;
/// let messages: QueuePair<'_, Rc> = messages.typed()?;
/// assert!(datagrams.typed::<Rc>().is_err());
/// # drop(messages);
/// # Ok(())
/// # }
/// ```
///
/// The trait is sealed.
pub trait Transport: sealed::Sealed + Copy + fmt::Debug + Send + Sync + 'static {
    /// `enum ibv_qp_type`: its type in C.
    fn queue_pair_type(self) -> QueuePairType;
}

/// A transport with one peer, with which [`handshake`](crate::PreparedQueuePair::handshake) connects it.
#[diagnostic::on_unimplemented(
    message = "a `{Self}` queue pair has no connection",
    note = "`activate` makes it ready, without a peer; then each request of `Ud`, `Srd` and `Dci` says where it goes"
)]
pub trait Connected: Transport {}

/// A transport that becomes ready without a peer, by [`activate`](crate::PreparedQueuePair::activate).
#[diagnostic::on_unimplemented(
    message = "a `{Self}` queue pair is connected with a peer",
    note = "`handshake(endpoint)` connects it; so do `connect` and `accept`, over TCP"
)]
pub trait Unconnected: Transport {}

/// All its requests go to one peer, and name no destination.
#[diagnostic::on_unimplemented(
    message = "on a `{Self}` queue pair, each request needs a destination",
    label = "this request goes nowhere",
    note = "add `.to(..)`: a `DatagramPeer` for Ud and Srd, a `DcPeer` for Dci, an `XrcPeer` for XrcSend"
)]
pub trait FixedPeer: Transport {}

/// Its requests name destinations of type `A`, with [`to`](crate::SendWorkRequest::to).
#[diagnostic::on_unimplemented(
    message = "a request on a `{Self}` queue pair cannot go to a `{A}`",
    label = "the destination is of the wrong kind",
    note = "Rc, Uc and RawPacket take no destination; Ud and Srd a `DatagramPeer`, Dci a `DcPeer`, XrcSend an `XrcPeer`"
)]
pub trait AddressedBy<A>: Transport + Addressed<A> {}

/// A transport that sends messages.
#[diagnostic::on_unimplemented(
    message = "nothing can be sent on a `{Self}` queue pair",
    note = "an XrcReceive queue pair has no queues"
)]
pub trait Sends: Transport {}

/// A transport with RDMA writes.
#[diagnostic::on_unimplemented(
    message = "transport `{Self}` has no RDMA writes",
    note = "Rc, Uc, XrcSend, Srd and Dci have them"
)]
pub trait Writes: Transport {}

/// A transport with RDMA reads.
#[diagnostic::on_unimplemented(
    message = "transport `{Self}` has no RDMA reads",
    note = "Rc, XrcSend, Srd and Dci have them"
)]
pub trait Reads: Transport {}

/// A transport with atomics, flushes and atomic writes.
#[diagnostic::on_unimplemented(
    message = "transport `{Self}` has no atomics",
    note = "Rc, XrcSend and Dci have them"
)]
pub trait Atomics: Transport {}

/// `ibv_post_send` can post its writes, reads and atomics, not only batches.
#[diagnostic::on_unimplemented(
    message = "on a `{Self}` queue pair, reads, writes and atomics are posted in a batch",
    note = "`queue_pair.batch(|batch| batch.add(..))`"
)]
pub trait PostsRdma: Transport {}

/// A transport with a receive queue, its own or a shared one.
#[diagnostic::on_unimplemented(
    message = "a `{Self}` queue pair has no receive queue",
    note = "`Dci` and `XrcSend` only send; what arrives at an `XrcReceive` goes to the shared receive queue that the sender names"
)]
pub trait ReceiveQueue: Transport {}

/// A transport with acknowledgements, time-outs and retries.
#[diagnostic::on_unimplemented(
    message = "transport `{Self}` has no acknowledgements, so no time-outs, retries and outstanding reads to set",
    note = "`Rc`, `XrcSend`, `XrcReceive` and `Dci` have them"
)]
pub trait Reliable: Transport {}

/// Its messages are datagrams, which carry a Q_Key.
#[diagnostic::on_unimplemented(
    message = "transport `{Self}` has no Q_Key",
    note = "datagrams have one: `Ud` and `Srd`"
)]
pub trait Datagram: Unconnected {}

macro_rules! transports {
    ($($(#[$meta:meta])* $name:ident = $kind:ident $(($driver:pat = $new:expr))?: $($trait:ident),*;)+) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
        pub struct $name;

        impl sealed::Sealed for $name {
            $(
                fn driver(self) -> Option<DriverTransport> {
                    Some($new)
                }
            )?

            fn is(kind: QueuePairType, driver: Option<&DriverTransport>) -> bool {
                let fits = |driver: Option<&DriverTransport>| {
                    transports!(@fits driver $($driver)?)
                };
                kind == QueuePairType::$kind && fits(driver)
            }
        }

        impl Transport for $name {
            #[inline]
            fn queue_pair_type(self) -> QueuePairType {
                QueuePairType::$kind
            }
        }

        $(impl $trait for $name {})*
    )+};
    (@fits $driver:ident) => { $driver.is_none() };
    (@fits $driver:ident $pattern:pat) => { matches!($driver, Some($pattern)) };
}

transports! {
    /// RC, reliable connected: acknowledged sends, writes, reads and atomics to one peer. The usual one.
    #[doc(alias = "IBV_QPT_RC")]
    Rc = ReliableConnected:
        Connected, FixedPeer, Sends, Writes, Reads, Atomics, PostsRdma, ReceiveQueue, Reliable;

    /// UC, unreliable connected: sends and writes to one peer, which may be lost.
    #[doc(alias = "IBV_QPT_UC")]
    Uc = UnreliableConnected: Connected, FixedPeer, Sends, Writes, PostsRdma, ReceiveQueue;

    /// UD, unreliable datagram: messages of up to one packet; each names its destination.
    #[doc(alias = "IBV_QPT_UD")]
    Ud = UnreliableDatagram: Unconnected, Sends, ReceiveQueue, Datagram;

    /// Whole Ethernet frames, with their headers.
    #[doc(alias = "IBV_QPT_RAW_PACKET")]
    RawPacket = RawPacket: Unconnected, FixedPeer, Sends, ReceiveQueue;

    /// The sending side of an extended reliable connection (XRC). Each request names a shared receive queue of the
    /// peer.
    #[doc(alias = "IBV_QPT_XRC_SEND")]
    XrcSend = XrcSend: Connected, Sends, Writes, Reads, Atomics, PostsRdma, Reliable;

    /// The receiving side of an XRC connection. It has no queues, and nothing is posted to it.
    #[doc(alias = "IBV_QPT_XRC_RECV")]
    XrcReceive = XrcReceive: Connected, Reliable;
}

#[cfg(feature = "efa")]
transports! {
    /// SRD, EFA's scalable reliable datagram: see [`QueuePairBuilder::srd`](crate::QueuePairBuilder::srd).
    #[doc(alias = "EFADV_QP_DRIVER_TYPE_SRD")]
    Srd = Driver (DriverTransport::Srd { .. } = DriverTransport::Srd { options: SrdOptions::default(), rnr_retry: false }):
        Unconnected, Sends, Writes, Reads, ReceiveQueue, Datagram;
}

#[cfg(feature = "mlx5")]
transports! {
    /// The initiator of DC, mlx5's dynamically connected transport. It only posts, and each batch names the
    /// [target](crate::queue_pair::DcTarget).
    ///
    /// [`build`](crate::QueuePairBuilder::build) calls `mlx5dv_create_qp(3)`, and fails with
    /// `EOPNOTSUPP` on other devices. [`activate`](crate::PreparedQueuePair::activate) makes the queue pair ready. Each
    /// request goes to a [`DcPeer`](crate::operation::DcPeer): an [`AddressHandle`](crate::AddressHandle), and the
    /// number and access key of a target. Without [`extended`](crate::QueuePairBuilder::extended), it has sends, reads,
    /// writes and atomics.
    ///
    /// ```no_run
    /// use ibverbs::operation::DcPeer;
    /// use ibverbs::queue_pair::Dci;
    /// use ibverbs::{SendWorkRequest, queue_pair::AddressVector};
    ///
    /// # fn main() -> ibverbs::Result<()> {
    /// let context = ibverbs::open("mlx5_0")?;
    /// let domain = context.alloc_pd()?;
    /// let region = domain.allocate::<u8>(4096)?;
    /// let queue = context.create_cq(64)?;
    /// let mut initiator =
    ///     domain.create_qp(&queue, &queue, Dci).max_send_wr(32).build()?.activate()?;
    /// # let (peer, key) = (initiator.endpoint(), 7);
    ///
    /// // A peer has sent the endpoint and the access key of its target.
    /// let path = domain.create_ah(&AddressVector::to_peer(&context, 1, &peer)?)?;
    /// let to = DcPeer { path: &path, number: peer.num(), access_key: key, stream: None };
    /// let send = SendWorkRequest::new(region.gather_element(..1024)?).to(to);
    /// // SAFETY: region and address handle stay until the completion of 7 was polled.
    /// unsafe { initiator.batch(|batch| batch.add(send, 7))? };
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "MLX5DV_DCTYPE_DCI")]
    Dci = Driver (DriverTransport::DcInitiator(_) = DriverTransport::DcInitiator(None)):
        Unconnected, Sends, Writes, Reads, Atomics, Reliable;
}

impl sealed::Sealed for QueuePairType {
    #[inline]
    fn need_peer(has_peer: bool) -> Result<()> {
        if has_peer { Ok(()) } else { Err(no_peer()) }
    }

    fn is(_: QueuePairType, _: Option<&DriverTransport>) -> bool {
        true
    }
}

#[cold]
fn no_peer() -> Error {
    let reason = "the queue pair has no peer: post a request that says where it goes, with `to`";
    Error::invalid("ibv_post_send", reason)
}

impl Transport for QueuePairType {
    fn queue_pair_type(self) -> QueuePairType {
        self
    }
}

macro_rules! at_run_time {
    ($($trait:ident)+) => {$(
        impl $trait for QueuePairType {}
    )+};
}

at_run_time! {
    Connected Unconnected FixedPeer Sends Writes Reads Atomics PostsRdma ReceiveQueue Reliable Datagram
}

#[diagnostic::do_not_recommend]
impl<A, T: Transport + Addressed<A>> AddressedBy<A> for T {}

impl<A> Addressed<A> for QueuePairType {}

/// The transport of a queue pair of type [`Driver`](crate::QueuePairType::Driver).
#[derive(Clone, Copy, Debug)]
pub enum DriverTransport {
    #[cfg(feature = "efa")]
    Srd {
        options: SrdOptions,
        /// Whether `max_rnr_retries` can be set.
        rnr_retry: bool,
    },
    #[cfg(feature = "mlx5")]
    DcInitiator(Option<DcStreams>),
    #[cfg(feature = "mlx5")]
    DcTarget { access_key: u64 },
}

impl DriverTransport {
    pub(super) fn verb(self) -> &'static str {
        match self {
            #[cfg(feature = "efa")]
            Self::Srd { .. } => srd::CREATE,
            #[cfg(feature = "mlx5")]
            Self::DcInitiator(_) | Self::DcTarget { .. } => dc::CREATE,
        }
    }

    pub(super) fn is_dc(self) -> bool {
        match self {
            #[cfg(feature = "efa")]
            Self::Srd { .. } => false,
            #[cfg(feature = "mlx5")]
            Self::DcInitiator(_) | Self::DcTarget { .. } => true,
        }
    }

    #[cfg(feature = "mlx5")]
    pub(super) fn has_streams(self) -> bool {
        matches!(self, Self::DcInitiator(Some(_)))
    }

    /// # Safety
    ///
    /// `context` is live, as is all that `attributes` names.
    pub(super) unsafe fn create(
        self,
        context: *mut ffi::ibv_context,
        attributes: &mut ffi::ibv_qp_init_attr_ex,
    ) -> *mut ffi::ibv_qp {
        // Unused without any provider's transport.
        let _ = (context, &attributes);
        match self {
            #[cfg(feature = "efa")]
            // SAFETY: passes on the guarantees of the caller, here and below.
            Self::Srd { options, .. } => unsafe { srd::create(context, attributes, options) },
            #[cfg(feature = "mlx5")]
            Self::DcInitiator(streams) => {
                // SAFETY: as above.
                unsafe { dc::create(context, attributes, dc::initiator(streams)) }
            }
            #[cfg(feature = "mlx5")]
            Self::DcTarget { access_key } => {
                // SAFETY: as above.
                unsafe { dc::create(context, attributes, dc::target(access_key)) }
            }
        }
    }

    /// The attributes that the kernel's drivers require; its core has no rule.
    pub(super) fn attributes(
        self,
        from: QueuePairState,
        to: QueuePairState,
        of_datagrams: AttributeMask,
    ) -> AttributeMask {
        let _ = (from, to, of_datagrams);
        match self {
            #[cfg(feature = "efa")]
            Self::Srd { rnr_retry: true, .. } if to == QueuePairState::ReadyToSend => {
                of_datagrams | AttributeMask::MAX_RNR_RETRIES
            }
            #[cfg(feature = "efa")]
            Self::Srd { .. } => of_datagrams,
            #[cfg(feature = "mlx5")]
            Self::DcInitiator(_) => dc::initiator_attributes(from, to),
            #[cfg(feature = "mlx5")]
            Self::DcTarget { .. } => dc::target_attributes(from, to),
        }
    }
}
