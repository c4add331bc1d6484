//! The builder of queue pairs: all settings for creating and connecting one.

use std::marker::PhantomData;

use super::connection_settings::{ConnectionSettings, connection_settings};
use super::driver::DriverTransport;
use super::object::Parents;
use super::shared_receive_queue::SharedReceiveQueue;
use super::transport::{Datagram, Rc, ReceiveQueue, Reliable, Transport};
use crate::completion::CompletionQueue;
use crate::debug::debug;
use crate::domain::{ProtectionDomain, XrcDomain};
use crate::ffi;
use crate::foreign_enum::setters;
use crate::memory::AccessFlags;
use crate::parent::Parent;
use crate::queue_pair::SendOperations;
use crate::queue_pair_state::QueuePairType;
use crate::settings::{
    AckTimeout, FlowLabel, MaxAckRetries, MaxRnrRetries, MaximumTransferUnit, MinRnrTimer,
    PacketSequenceNumber, ServiceLevel, StaticRate,
};

/// The settings for creating and connecting a queue pair: see
/// [`QueuePair::builder`](crate::QueuePair::builder).
///
/// Every setting has a default that works on RoCE, InfiniBand and Soft-RoCE; each method states it.
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
    /// The operations of the extended posting interface, and whether to build without them if they are
    /// missing.
    pub(super) extended: Option<(SendOperations, bool)>,
    /// Whether requests can set memory keys of mlx5.
    #[cfg(feature = "mlx5")]
    pub(super) memory_keys: bool,
    /// The provider's own transport, for type `Driver`.
    pub(super) driver: Option<DriverTransport>,
    /// Whether a queue pair without inline data will do, where the device has no room for that much.
    pub(super) inline_if_possible: bool,
    pub(super) settings: ConnectionSettings,
}

bitflags::bitflags! {
    /// `enum ibv_qp_create_flags`: options of a queue pair that few devices have.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    #[doc(alias = "ibv_qp_create_flags")]
    pub struct CreateFlags: u32 {
        /// A multicast datagram does not come back to the queue pairs of the context that sent it.
        const BLOCK_SELF_MULTICAST_LOOPBACK =
            ffi::ibv_qp_create_flags::IBV_QP_CREATE_BLOCK_SELF_MCAST_LB.0;
        /// The checksum of an Ethernet frame is received with it (raw packets).
        const SCATTER_FCS = ffi::ibv_qp_create_flags::IBV_QP_CREATE_SCATTER_FCS.0;
        /// The VLAN tag of an Ethernet frame is removed and reported in the completion (raw packets).
        const CVLAN_STRIPPING = ffi::ibv_qp_create_flags::IBV_QP_CREATE_CVLAN_STRIPPING.0;
        /// Writes to memory are padded to whole cache lines.
        const PCI_WRITE_END_PADDING =
            ffi::ibv_qp_create_flags::IBV_QP_CREATE_PCI_WRITE_END_PADDING.0;
    }
}

impl<T: Transport> QueuePairBuilder<'_, T> {
    setters! { self,
        /// How many requests can be outstanding on the send queue (1 unless set).
        max_send_wr(value: u32) => self.capacities.max_send_wr = value;

        /// How many requests can be outstanding on the receive queue (1 unless set).
        max_recv_wr(value: u32) => self.capacities.max_recv_wr = value;

        /// How many gather elements a request on the send queue can have (1 unless set).
        max_send_sge(value: u32) => self.capacities.max_send_sge = value;

        /// How many scatter elements a receive can have (1 unless set).
        max_recv_sge(value: u32) => self.capacities.max_recv_sge = value;

        /// How many bytes a request can carry inline (0 unless set); the device may allow more.
        max_inline_data(value: u32) => self.capacities.max_inline_data = value;

        /// Whether every request on the send queue has a completion, signalled or not (not unless set).
        signal_all(value: bool) => self.signal_all = value;

        /// Options that few devices have (none unless set).
        create_flags(value: CreateFlags) => self.create_flags = value;

        /// The sender's queue pair number in datagrams of a UD queue pair (its own number unless set).
        source_number(value: u32) => self.source_number = Some(value);

        /// How many bytes of headers a segmented send can have (0 unless set).
        max_tso_header(value: u16) => self.max_tso_header = value;
    }
}

/// Defines the methods for the settings of the connection, for the transports that have them.
macro_rules! connection {
    (
        any peer { $($peer:tt)+ }
        datagrams { $($datagrams:tt)+ }
    ) => {
        connection! { $($peer)+ $($datagrams)+ }
    };
    ($($(#[$meta:meta])* [$bound:ident] $name:ident: $type:ty, $stored:ty = $default:expr;)+) => {
        impl<T: Transport> QueuePairBuilder<'_, T> {
            $(
                $(#[$meta])*
                pub fn $name(mut self, value: $type) -> Self
                where
                    T: $bound,
                {
                    self.settings = self.settings.$name(value);
                    self
                }
            )+
        }
    };
}

connection_settings!(connection);

impl<'res, T: Transport> QueuePairBuilder<'res, T> {
    /// Begins a queue pair of this transport: [`Rc`](crate::Rc), [`Ud`](crate::Ud) .., or a [`QueuePairType`]
    /// that is known at run time only. Its send and receive requests complete on the given queues, which may be
    /// the same queue.
    pub fn new(
        domain: impl Into<Parent<'res, ProtectionDomain<'res>>>,
        send_cq: impl Into<Parent<'res, CompletionQueue<'res>>>,
        receive_cq: impl Into<Parent<'res, CompletionQueue<'res>>>,
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
            // Turns a number with a known name into that name, because all code that depends on the type
            // compares names.
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

    /// Takes over the sizes that a channel was given.
    pub(crate) fn capacities(
        mut self,
        capacities: ffi::ibv_qp_cap,
        inline_if_possible: bool,
    ) -> Self {
        self.capacities = capacities;
        self.inline_if_possible = inline_if_possible;
        self
    }

    /// Replaces all settings of the connection.
    pub fn connection_settings(mut self, settings: ConnectionSettings) -> Self {
        self.settings = settings;
        self
    }

    /// Lets the peer read and write, in addition to what [`access`](Self::access) allows.
    pub fn allow_remote_rw(mut self) -> Self {
        self.settings = self.settings.allow_remote_rw();
        self
    }

    /// Receives from a shared receive queue instead of the queue pair's own receive queue. No receives can
    /// then be posted to the queue pair, and `max_recv_wr` and `max_recv_sge` have no effect.
    pub fn srq(mut self, queue: impl Into<Parent<'res, SharedReceiveQueue<'res>>>) -> Self
    where
        T: ReceiveQueue,
    {
        self.parents.srq = Some(queue.into());
        self
    }

    /// The domain of an [`XrcReceive`](QueuePairType::XrcReceive) queue pair, which requires one; other
    /// types must not have one. Such a queue pair has no queues of its own.
    pub fn xrc_domain(mut self, domain: impl Into<Parent<'res, XrcDomain<'res>>>) -> Self {
        self.parents.xrc_domain = Some(domain.into());
        self
    }

    setters! { self,
        /// Asks for the extended posting interface with these operations, for
        /// [`QueuePair::batch`](crate::QueuePair::batch).
        ///
        /// Building fails with `EOPNOTSUPP` if the device lacks the interface or one of the operations.
        extended(operations: SendOperations) => self.extended = Some((operations, false));

        /// Like [`extended`](Self::extended), but if the device lacks the interface or one of the operations,
        /// builds a queue pair without the interface.
        /// [`QueuePair::extended_operations`](crate::QueuePair::extended_operations) shows the result.
        extended_if_available(operations: SendOperations) => self.extended = Some((operations, true));
    }
}

impl ProtectionDomain<'_> {
    /// `ibv_create_qp`: begins a queue pair that borrows its parents. See [`QueuePairBuilder::new`].
    ///
    /// For a value that leaves its function: `QueuePair::builder(domain, send_cq, receive_cq, ..)`, with each parent by value
    /// or in an `Arc`.
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
