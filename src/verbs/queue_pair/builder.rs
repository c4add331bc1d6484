//! The builder of queue pairs, and queue pairs that are not connected yet.

use std::marker::PhantomData;

use super::connection_settings::{ConnectionSettings, connection_settings};
use super::endpoint::QueuePairEndpoint;
use super::object::Parents;
use super::shared_receive_queue::SharedReceiveQueue;
use super::transition::StateTransition;
use super::transport::{
    Connected, Datagram, DriverTransport, Rc, ReceiveQueue, Reliable, Transport, Unconnected,
};
use super::{QueuePair, SendOperations};
use crate::base::{Parent, QueuePairType, Result, StateError, debug, ffi, setters};
use crate::verbs::completion::{CompletionQueue, QueueRef};
use crate::verbs::domain::{DomainRef, ProtectionDomain, XrcDomain};
use crate::verbs::memory::AccessFlags;
use crate::verbs::settings::{
    AckTimeout, FlowLabel, MaxAckRetries, MaxRnrRetries, MaximumTransferUnit, MinRnrTimer,
    PacketSequenceNumber, ServiceLevel, StaticRate,
};

/// Builds a queue pair. Each method states its default, which works on RoCE, InfiniBand and Soft-RoCE.
///
/// ```
/// use ibverbs::{AccessFlags, Rc};
///
/// # fn main() -> ibverbs::Result<()> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// let context = ibverbs::open("rxe0")?;
/// let domain = context.alloc_pd()?;
/// let queue = context.create_cq(128)?;
/// let prepared = domain
///     .create_qp(&queue, &queue, Rc)
///     .max_send_wr(64)
///     .max_recv_wr(64)
///     .access(AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE)
///     .build()?;
/// println!("tell the peer: {}", prepared.endpoint());
/// # let remote = prepared.endpoint();
/// let queue_pair = prepared.handshake(remote)?;
/// # Ok(())
/// # }
/// ```
#[doc(alias = "ibv_qp_init_attr")]
#[must_use]
pub struct QueuePairBuilder<'res, T = Rc> {
    pub(super) transport: PhantomData<T>,
    pub(super) parents: Parents<'res>,
    pub(super) kind: QueuePairType,
    pub(super) capacities: ffi::ibv_qp_cap,
    pub(super) signal_all: bool,
    pub(super) create_flags: CreateFlags,
    pub(super) source_number: Option<u32>,
    pub(super) max_tso_header: u16,
    /// `true`: builds without them if they are missing.
    pub(super) extended: Option<(SendOperations, bool)>,
    #[cfg(feature = "mlx5")]
    pub(super) memory_keys: bool,
    pub(super) driver: Option<DriverTransport>,
    pub(super) inline_if_possible: bool,
    pub(super) settings: ConnectionSettings,
}

bitflags::bitflags! {
    /// `enum ibv_qp_create_flags`: options of a queue pair that few devices have.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    #[doc(alias = "ibv_qp_create_flags")]
    pub struct CreateFlags: u32 {
        /// Queue pairs do not receive multicast datagrams that their context sent.
        const BLOCK_SELF_MULTICAST_LOOPBACK =
            ffi::ibv_qp_create_flags::IBV_QP_CREATE_BLOCK_SELF_MCAST_LB.0;
        /// Receives the checksum of an Ethernet frame with it (raw packets).
        const SCATTER_FCS = ffi::ibv_qp_create_flags::IBV_QP_CREATE_SCATTER_FCS.0;
        /// Removes the VLAN tag of an Ethernet frame, and reports it in the completion (raw packets).
        const CVLAN_STRIPPING = ffi::ibv_qp_create_flags::IBV_QP_CREATE_CVLAN_STRIPPING.0;
        /// Pads writes to memory to whole cache lines.
        const PCI_WRITE_END_PADDING =
            ffi::ibv_qp_create_flags::IBV_QP_CREATE_PCI_WRITE_END_PADDING.0;
    }
}

impl<T: Transport> QueuePairBuilder<'_, T> {
    setters! { self,
        /// How many requests the send queue must hold (1 unless set).
        max_send_wr(value: u32) => self.capacities.max_send_wr = value;

        /// How many requests the receive queue must hold (1 unless set).
        max_recv_wr(value: u32) => self.capacities.max_recv_wr = value;

        /// How many gather elements a request on the send queue can have (1 unless set).
        max_send_sge(value: u32) => self.capacities.max_send_sge = value;

        /// How many scatter elements a receive can have (1 unless set).
        max_recv_sge(value: u32) => self.capacities.max_recv_sge = value;

        /// How many bytes a request can carry inline (0 unless set); the device may allow more.
        max_inline_data(value: u32) => self.capacities.max_inline_data = value;

        /// Whether every request on the send queue has a completion (only signaled ones unless set).
        signal_all(value: bool) => self.signal_all = value;

        /// Options that few devices have (none unless set).
        create_flags(value: CreateFlags) => self.create_flags = value;

        /// The sender's queue pair number in datagrams of a UD queue pair (its own unless set).
        source_number(value: u32) => self.source_number = Some(value);

        /// How many bytes of headers a segmented send can have (0 unless set).
        max_tso_header(value: u16) => self.max_tso_header = value;
    }
}

macro_rules! connection_setting_methods {
    (
        any peer { $($peer:tt)+ }
        datagrams { $($datagrams:tt)+ }
    ) => {
        connection_setting_methods! { $($peer)+ $($datagrams)+ }
    };
    ($($(#[$meta:meta])* [$bound:ident] $name:ident: $type:ty, $stored:ty = $default:expr;)+) => {
        impl<T: Transport> QueuePairBuilder<'_, T> {
            $(
                $(#[$meta])*
                pub fn $name(mut self, value: $type) -> Self
                where
                    T: $bound,
                {
                    self.settings.$name = value.into();
                    self
                }
            )+
        }
    };
}

connection_settings!(connection_setting_methods);

impl<'res, T: Transport> QueuePairBuilder<'res, T> {
    /// Begins a queue pair of this transport: [`Rc`](crate::Rc), [`Ud`](crate::Ud) .., or a [`QueuePairType`] known
    /// only at run time. Both completion queues may be the same.
    pub fn new(
        domain: impl Into<DomainRef<'res>>,
        send_cq: impl Into<QueueRef<'res>>,
        receive_cq: impl Into<QueueRef<'res>>,
        transport: T,
    ) -> Self {
        Self {
            parents: Parents {
                domain: domain.into(),
                send_cq: send_cq.into(),
                receive_cq: receive_cq.into(),
                srq: None,
                xrc_domain: None,
            },
            // A known number becomes its name, which all code compares.
            kind: ffi::ibv_qp_type::from(transport.queue_pair_type()).into(),
            capacities: ffi::ibv_qp_cap {
                max_send_wr: 1,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            signal_all: false,
            create_flags: CreateFlags::empty(),
            source_number: None,
            max_tso_header: 0,
            extended: None,
            #[cfg(feature = "mlx5")]
            memory_keys: false,
            driver: transport.driver(),
            inline_if_possible: false,
            transport: PhantomData,
            settings: ConnectionSettings::default(),
        }
    }

    pub(crate) fn capacities(
        mut self,
        capacities: ffi::ibv_qp_cap,
        inline_if_possible: bool,
    ) -> Self {
        self.capacities = capacities;
        self.inline_if_possible = inline_if_possible;
        self
    }

    #[cfg(feature = "channel")]
    pub(crate) fn driver(mut self, driver: Option<DriverTransport>) -> Self {
        self.driver = driver.or(self.driver);
        self
    }

    /// Replaces all settings of the connection.
    pub fn connection_settings(mut self, settings: ConnectionSettings) -> Self {
        self.settings = settings;
        self
    }

    /// Lets the peer read and write, in addition to [`access`](Self::access).
    pub fn allow_remote_rw(mut self) -> Self {
        self.settings.access |= AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        self
    }

    /// Receives from a shared receive queue. Then the queue pair accepts no receives, and ignores `max_recv_wr` and
    /// `max_recv_sge`.
    pub fn srq(mut self, queue: impl Into<Parent<'res, SharedReceiveQueue<'res>>>) -> Self
    where
        T: ReceiveQueue,
    {
        self.parents.srq = Some(queue.into());
        self
    }

    /// The domain that an [`XrcReceive`](QueuePairType::XrcReceive) queue pair requires, and other types must not have.
    pub fn xrc_domain(mut self, domain: impl Into<Parent<'res, XrcDomain<'res>>>) -> Self {
        self.parents.xrc_domain = Some(domain.into());
        self
    }

    setters! { self,
        /// Requires the extended posting interface with these operations, for
        /// [`QueuePair::batch`](crate::QueuePair::batch).
        ///
        /// Building fails with `EOPNOTSUPP` if the device lacks one of them.
        extended(operations: SendOperations) => self.extended = Some((operations, false));

        /// As [`extended`](Self::extended), but builds without the interface if the device lacks one of the operations.
        /// [`QueuePair::extended_operations`](crate::QueuePair::extended_operations) shows the result.
        extended_if_available(operations: SendOperations) => self.extended = Some((operations, true));
    }
}

impl ProtectionDomain<'_> {
    /// `ibv_create_qp`: begins a queue pair that borrows its parents. To own or share them, call
    /// [`QueuePairBuilder::new`].
    #[doc(alias = "ibv_create_qp")]
    pub fn create_qp<'res, T: Transport>(
        &'res self,
        send_cq: &'res CompletionQueue<'res>,
        receive_cq: &'res CompletionQueue<'res>,
        transport: T,
    ) -> QueuePairBuilder<'res, T> {
        QueuePairBuilder::new(self, send_cq, receive_cq, transport)
    }
}

debug! {
    impl[T] QueuePairBuilder<'_, T>, self,
    queue_pair_type: self.kind, capacities: self.capacities, signal_all: self.signal_all,
    extended: self.extended, settings: self.settings, ..
}

/// A queue pair in RESET, not connected, with the address that a peer needs.
#[derive(Debug)]
#[must_use]
pub struct PreparedQueuePair<'res, T = Rc> {
    queue_pair: QueuePair<'res, T>,
}

impl<'res, T: Transport> PreparedQueuePair<'res, T> {
    pub(super) fn new(queue_pair: QueuePair<'res, T>) -> Self {
        Self { queue_pair }
    }

    /// The address that the peer needs.
    pub fn endpoint(&self) -> QueuePairEndpoint {
        self.queue_pair.endpoint()
    }

    /// The number of the first packet that we send. The [endpoint](Self::endpoint) contains it; otherwise the peer
    /// passes it to `receive_psn`.
    pub fn send_psn(&self) -> PacketSequenceNumber {
        self.queue_pair.send_psn()
    }

    setters! { self,
        /// Sets the number of the first packet that we send next, as
        /// [`QueuePairBuilder::send_psn`](crate::QueuePairBuilder::send_psn) does.
        set_send_psn(psn: PacketSequenceNumber) => self.queue_pair.set_send_psn(psn);

        /// Sets the number of the first packet that we receive, as
        /// [`QueuePairBuilder::receive_psn`](crate::QueuePairBuilder::receive_psn) does, if the peer's endpoint lacks
        /// it.
        receive_psn(psn: PacketSequenceNumber) => self.queue_pair.set_receive_psn(psn);

        /// Sets the largest path MTU, also in the endpoint, as
        /// [`QueuePairBuilder::path_mtu`](crate::QueuePairBuilder::path_mtu) does.
        path_mtu(mtu: MaximumTransferUnit) => self.queue_pair.set_path_mtu(mtu);
    }

    /// The queue pair in RESET, for queries.
    pub fn queue_pair(&self) -> &QueuePair<'res, T> {
        &self.queue_pair
    }

    #[cfg(feature = "rdmacm")]
    pub(crate) fn queue_pair_mut(&mut self) -> &mut QueuePair<'res, T> {
        &mut self.queue_pair
    }

    /// The queue pair in RESET, to change its state step by step with [`QueuePair::modify`].
    pub fn into_queue_pair(self) -> QueuePair<'res, T> {
        self.queue_pair
    }

    /// `ibv_destroy_qp`, as [`QueuePair::close`].
    ///
    /// # Errors
    ///
    /// Those of [`QueuePair::close`].
    #[doc(alias = "ibv_destroy_qp")]
    pub fn close(self) -> Result<()> {
        self.queue_pair.close()
    }

    /// `ibv_modify_qp`: connects the queue pair to the peer's, through INIT and RTR to RTS.
    ///
    /// Both sides derive the same parameters from the two endpoints: the smaller path MTU, at most as many outstanding
    /// reads and atomics as the other side answers, the first packet numbers, and the best matching pair of GIDs.
    ///
    /// Either side may call this first: the device resends what the peer is not ready for, as often as the settings
    /// allow. A queue pair without a peer, such as a UD one, needs [`activate`](Self::activate) instead.
    ///
    /// # Errors
    ///
    /// The queue pair comes back in the [`StateError`], in RESET and with the same endpoint, for another attempt.
    ///
    ///  - Those of [`QueuePair::modify`].
    ///  - `EINVAL`: the endpoint has another type or partition (the error names both), or another link layer.
    ///  - `EADDRNOTAVAIL`: none of our GIDs matches one of the peer's (the error names both), or our GID has left the
    ///    port's table.
    ///  - `EOPNOTSUPP`: on iWARP only the connection manager can connect (feature `rdmacm`).
    #[doc(alias = "ibv_modify_qp")]
    pub fn handshake(
        self,
        remote: QueuePairEndpoint,
    ) -> Result<QueuePair<'res, T>, StateError<Self>>
    where
        T: Connected,
    {
        self.connected(Some(&remote))
    }

    /// The changes to INIT, RTR and RTS that [`handshake`](Self::handshake) makes with this peer. A program can alter
    /// them, and apply them to the [queue pair](Self::into_queue_pair) in this order.
    ///
    /// ```
    /// use ibverbs::{Rc, settings::MinRnrTimer};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// # let context = ibverbs::open("rxe0")?;
    /// # let domain = context.alloc_pd()?;
    /// # let queue = context.create_cq(16)?;
    /// let prepared = domain.create_qp(&queue, &queue, Rc).build()?;
    /// let remote = prepared.endpoint(); // here the peer's would come in
    /// let [init, to_receive, to_send] = prepared.transitions(&remote)?;
    /// let mut queue_pair = prepared.into_queue_pair();
    /// for step in [init, to_receive.min_rnr_timer(MinRnrTimer::SHORTEST), to_send] {
    ///     queue_pair.modify(step)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// `EINVAL`, `EADDRNOTAVAIL` and `EOPNOTSUPP` of [`handshake`](Self::handshake).
    pub fn transitions(&self, remote: &QueuePairEndpoint) -> Result<[StateTransition; 3]>
    where
        T: Connected,
    {
        self.queue_pair.steps(Some(remote))
    }

    /// `ibv_modify_qp`: makes a queue pair without a peer, such as a UD one, ready, through INIT and RTR to RTS. Each
    /// send then names its destination.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: a setting is wrong for this device, or the type requires a peer.
    ///
    /// The queue pair comes back in the [`StateError`], in RESET, for another attempt.
    pub fn activate(self) -> Result<QueuePair<'res, T>, StateError<Self>>
    where
        T: Unconnected,
    {
        self.connected(None)
    }

    fn connected(
        mut self,
        remote: Option<&QueuePairEndpoint>,
    ) -> Result<QueuePair<'res, T>, StateError<Self>> {
        match self.queue_pair.connect(remote) {
            Ok(()) => Ok(self.queue_pair),
            Err(error) => {
                self.queue_pair.back_to_reset();
                Err(StateError::new(self, error))
            }
        }
    }
}
