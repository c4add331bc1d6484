//! Queue pairs: transports, states, addresses. To post requests, see [`operation`](crate::operation).
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
//! # rxe0.register();
//! use ibverbs::{Rc, settings::MaxRnrRetries};
//!
//! let context = ibverbs::open_first()?;
//! let domain = context.alloc_pd()?;
//! let queue = context.create_cq(16)?;
//! let builder = domain.create_qp(&queue, &queue, Rc).max_send_wr(16).max_rnr_retries(MaxRnrRetries::UNLIMITED);
//! let prepared = builder.build()?;
//! let peer = prepared.endpoint(); // here the peer's would come in
//! let queue_pair = prepared.handshake(peer)?;
//! println!("queue pair {} is {:?}", queue_pair.number(), queue_pair.state()?);
//! # Ok(())
//! # }
//! ```
//!
//! | to | |
//! |---|---|
//! | choose a transport | [`Rc`], [`Uc`], [`Ud`], [`RawPacket`], [`XrcSend`], [`XrcReceive`]; by features `Srd` and `Dci`; [`Transport`] |
//! | make a queue pair | [`QueuePairBuilder`], [`ConnectionSettings`], [`CreateFlags`], [`SendOperations`]; [`PreparedQueuePair`], then [`QueuePair`] |
//! | connect it | [`QueuePairEndpoint`], [`AddressVector`]; step by step [`StateTransition`] |
//! | query it | [`QueuePairAttributes`], [`AttributeMask`], [`DataInOrder`], [`EnhancedConnection`], [`ResolvedEthernet`] |
//! | send datagrams | [`AddressHandle`]; answer them with [`GlobalRouteHeader`] |
//! | share receives | [`SharedReceiveQueue`], [`Tag`] |
//! | share it with other processes | [`OpenedQueuePair`] |
//! | write generic functions | [`marker`] |
//!
//! The crate checks state changes against the tables of `ibv_modify_qp(3)` before it calls the kernel.

mod address_vector;
mod attributes;
mod builder;
#[cfg(rdma_core_65)]
mod completion_counters;
mod connection_settings;
mod create;
#[cfg(feature = "mlx5")]
mod dc;
#[cfg(feature = "mlx5")]
mod dc_options;
mod endpoint;
mod endpoint_bytes;
mod extended_operations;
mod global_route_header;
mod message_limits;
#[cfg(feature = "mlx5")]
mod mlx5;
mod modify;
mod object;
mod shared_receive_queue;
#[cfg(feature = "efa")]
mod srd;
#[cfg(feature = "efa")]
mod srd_options;
mod steering;
mod tag_matching;
mod transition;
mod transport;
mod tuning;

pub(crate) use address_vector::gid_like;
pub use address_vector::{AddressHandle, AddressVector};
pub use attributes::{AttributeMask, MigrationState, QueuePairAttributes};
pub use builder::{CreateFlags, PreparedQueuePair, QueuePairBuilder};
pub use connection_settings::ConnectionSettings;
#[cfg(feature = "channel")]
pub(crate) use connection_settings::connection_settings;
#[cfg(feature = "mlx5")]
pub use dc::DcTarget;
#[cfg(feature = "mlx5")]
pub use dc_options::DcStreams;
pub use endpoint::QueuePairEndpoint;
#[cfg(feature = "channel")]
pub(crate) use endpoint_bytes::{CREDITS_VERSION, VERSION};
pub(crate) use extended_operations::function;
pub use extended_operations::{FlushPlacement, SendOperations, WorkRequestOpcode};
pub use global_route_header::GlobalRouteHeader;
pub(crate) use message_limits::{ALWAYS_SENT, LONGEST_MESSAGE, MessageLimits};
pub use object::OpenedQueuePair;
pub use shared_receive_queue::{SharedReceiveQueue, SharedReceiveQueueAttributes};
#[cfg(feature = "efa")]
pub use srd_options::SrdOptions;
pub use tag_matching::{Tag, TagHandle, TagListSize, TagOperation};
pub use transition::StateTransition;
#[cfg(feature = "rdmacm")]
pub(crate) use transport::Datagram;
#[cfg(feature = "mlx5")]
pub use transport::Dci;
#[cfg(feature = "channel")]
pub(crate) use transport::DriverTransport;
#[cfg(feature = "efa")]
pub use transport::Srd;
pub(crate) use transport::{
    Addressed, AddressedBy, Atomics, Connected, FixedPeer, PostsRdma, Reads, ReceiveQueue, Sends,
    Writes,
};
pub use transport::{RawPacket, Rc, Transport, Uc, Ud, XrcReceive, XrcSend};
pub use tuning::{DataInOrder, EnhancedConnection, RateLimit, ResolvedEthernet};

/// The abilities of transports, as traits that bound the methods of a queue pair.
pub mod marker {
    pub use super::transport::{
        AddressedBy, Atomics, Connected, Datagram, FixedPeer, PostsRdma, Reads, ReceiveQueue,
        Reliable, Sends, Unconnected, Writes,
    };
}

use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use connection_settings::{Answers, first_psn};
use object::{Object, Parents, Properties};

use crate::base::{Error, Handle, Leak, QueuePairType, Result, StateError, debug, ffi, getters};
use crate::verbs::completion::{CompletionQueue, QueueRef};
use crate::verbs::domain::{DomainRef, ProtectionDomain};
use crate::verbs::flow::Flows;
use crate::verbs::settings::{MaximumTransferUnit, PacketSequenceNumber};

/// `struct ibv_qp`: a queue pair, to which sends and receives are posted.
///
/// Posting is `unsafe`, because nothing ties the memory to a request once the method returns.
#[cfg_attr(feature = "channel", doc = "[`Channel`](crate::Channel) is the safe layer.")]
///
/// | To post | there is |
/// |---|---|
/// | a part of one region | [`post_send`](Self::post_send), [`post_receive`](Self::post_receive), [`post_write`](Self::post_write), [`post_read`](Self::post_read) |
/// | any request | [`post`](Self::post) |
/// | the same request repeatedly | [`post_prepared`](Self::post_prepared) |
/// | many requests at once | [`post_list`](Self::post_list), and [`batch`](Self::batch) where the device has the extended interface |
/// | from two threads | [`split`](Self::split) |
///
/// # The contract of posting
///
/// Every method that posts has this contract:
///
/// 1. Until a request ends, its regions and its address handle are not dropped. Memory that the device reads is not
///    written, unless it is inline. Memory that the device writes is neither read nor written.
/// 2. A request ends when you have polled the completion of its `wr_id` (if unsignaled, of a later request of the same
///    queue), or when the queue pair was moved to RESET or destroyed. Only [`close`](Self::close) that returns `Ok`
///    proves that it was destroyed: a `drop` ignores a failure. An error from polling ends nothing.
/// 3. **An error of a post does not end it either**, unless the crate found it before it called the verb, such as a
///    range out of bounds. Soft-RoCE and Soft-iWARP queue a request before they notify the kernel. If the kernel then
///    refuses, with any errno value, the request stays in the queue. In RESET, INIT and RTR, Soft-RoCE returns
///    `EINVAL`, and carries the request out once the queue pair is in RTS, with the contents that the memory has by
///    then. Move the queue pair to RESET to take the request back. Other providers do not post a request that they
///    refuse.
/// 4. `wr_id` differs from those of all outstanding requests of the same completion queue. Otherwise one completion
///    could be taken for another.
/// 5. On mlx4 and mthca no element of a [prepared](crate::operation::PreparedRequest) request is empty: they read 0
///    bytes as 2 GiB (mlx4 for memory that is written, mthca for any). All other methods leave empty elements out.
/// 6. The queue pair is not an [`XrcReceive`](QueuePairType::XrcReceive), which has no queues: mlx4 and mlx5 follow
///    null pointers.
/// 7. On a DC initiator of mlx5 every request is in a [`batch`](Self::batch): otherwise mlx5 posts it without a target.
///
/// With the [transport](Transport) in the type of the queue pair, [`post`](Self::post) and [`batch`](Self::batch) that
/// break 6 or 7 do not compile. Both remain for prepared requests and lists, and if the transport is a
/// [`QueuePairType`].
///
/// Two things may block for ever: to post while the thread holds a completion of an
/// [`ExtendedPoller`](crate::completion::ExtendedPoller) of one of the completion queues, and to poll within a
/// [`batch`](Self::batch).
#[repr(transparent)]
pub struct QueuePair<'res, T = Rc> {
    object: Object<'res>,
    transport: PhantomData<T>,
}

impl<'res, T: Transport> QueuePair<'res, T> {
    fn new(
        raw: Handle<ffi::ibv_qp>,
        extended: Option<NonNull<ffi::ibv_qp_ex>>,
        properties: Properties,
        parents: Parents<'res>,
        answers: Answers,
    ) -> Self {
        let (groups, flows) = (Vec::new(), Flows::default());
        let object = Object {
            raw,
            extended,
            properties,
            parents,
            groups,
            flows,
            #[cfg(rdma_core_65)]
            counters: Vec::new(),
            _answers: answers,
        };
        Self { object, transport: PhantomData }
    }

    /// Begins a queue pair: see [`QueuePairBuilder::new`].
    pub fn builder(
        domain: impl Into<DomainRef<'res>>,
        send_cq: impl Into<QueueRef<'res>>,
        receive_cq: impl Into<QueueRef<'res>>,
        transport: T,
    ) -> QueuePairBuilder<'res, T> {
        QueuePairBuilder::new(domain, send_cq, receive_cq, transport)
    }

    /// Moves the transport from the type to a value, so that a program can hold several kinds.
    pub fn erase(self) -> QueuePair<'res, QueuePairType> {
        QueuePair { object: self.object, transport: PhantomData }
    }

    pub(crate) fn message_limits(&self) -> &MessageLimits {
        &self.object.properties.messages
    }

    #[inline]
    pub(crate) fn erased(&self) -> &QueuePair<'res, QueuePairType> {
        // SAFETY: both are `repr(transparent)` wrappers of the same struct.
        unsafe { &*ptr::from_ref(self).cast() }
    }

    /// The number by which peers address it.
    #[inline]
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is live.
        unsafe { (*self.as_raw()).qp_num }
    }

    getters! { self,
        /// The address that the peer needs, from the creation or the last reset.
        endpoint: QueuePairEndpoint => self.object.properties.endpoint;

        /// Its type.
        queue_pair_type: QueuePairType => self.object.properties.kind;

        /// How many requests the send queue holds: at least as many as asked for, as for all sizes here.
        max_send_wr: u32 => self.object.properties.capacities.max_send_wr;

        /// How many requests the receive queue holds.
        max_recv_wr: u32 => self.object.properties.capacities.max_recv_wr;

        /// How many gather elements a request on the send queue can have.
        max_send_sge: u32 => self.object.properties.capacities.max_send_sge;

        /// How many scatter elements a receive can have.
        max_recv_sge: u32 => self.object.properties.capacities.max_recv_sge;

        /// How many bytes a request can carry inline.
        max_inline_data: u32 => self.object.properties.capacities.max_inline_data;

        /// The operations that [`batch`](Self::batch) can post, chosen by [`QueuePairBuilder::extended`]; none without
        /// the extended posting interface.
        #[inline]
        extended_operations: SendOperations => self.object.properties.operations;

        /// The domain that it was created in.
        protection_domain: &ProtectionDomain<'res> => &self.object.parents.domain;

        /// The completion queue of the send queue.
        send_cq: &CompletionQueue<'res> => &self.object.parents.send_cq;

        /// The completion queue of the receive queue.
        receive_cq: &CompletionQueue<'res> => &self.object.parents.receive_cq;
    }

    /// The shared receive queue that it receives from, if any.
    pub fn shared_receive_queue(&self) -> Option<&SharedReceiveQueue<'res>> {
        self.object.parents.srq.as_deref()
    }

    /// The C object, valid while the queue pair is.
    pub fn as_raw(&self) -> *mut ffi::ibv_qp {
        self.object.raw.as_ptr()
    }

    /// The C object of the extended posting interface, if it was built with that.
    pub fn as_raw_extended(&self) -> Option<NonNull<ffi::ibv_qp_ex>> {
        self.object.extended
    }

    pub(crate) fn has_peer(&self) -> bool {
        self.object.properties.has_peer
    }

    pub(crate) fn extended_functions(&self) -> u64 {
        self.object.properties.functions
    }

    pub(crate) fn is_srd(&self) -> bool {
        self.object.properties.driver.is_some_and(|driver| !driver.is_dc())
    }

    pub(crate) fn settings(&self) -> &ConnectionSettings {
        &self.object.properties.settings
    }

    #[cfg(feature = "rdmacm")]
    pub(crate) fn place(&self) -> (*mut ffi::ibv_context, QueuePairType) {
        (self.protection_domain().context().as_raw(), self.queue_pair_type())
    }

    /// Call it in RESET.
    #[cfg(feature = "rdmacm")]
    pub(crate) fn set_partition(&mut self, qkey: u32, pkey_index: u16) {
        self.object.properties.settings.qkey = qkey;
        self.object.properties.settings.pkey_index = pkey_index;
    }

    pub(crate) fn send_psn(&self) -> PacketSequenceNumber {
        self.object.properties.endpoint.send_psn.unwrap_or_default()
    }

    pub(crate) fn set_send_psn(&mut self, psn: PacketSequenceNumber) {
        self.object.properties.endpoint.send_psn = Some(psn);
    }

    pub(crate) fn set_receive_psn(&mut self, psn: PacketSequenceNumber) {
        self.object.properties.settings.receive_psn = Some(psn);
    }

    pub(crate) fn set_path_mtu(&mut self, mtu: MaximumTransferUnit) {
        self.object.properties.settings.path_mtu = Some(mtu);
        self.object.properties.endpoint.path_mtu = Some(mtu);
    }

    pub(crate) fn renew_psns(&mut self) {
        let raw = self.as_raw();
        let Properties { settings, endpoint, .. } = &mut self.object.properties;
        // SAFETY: the queue pair is live.
        endpoint.send_psn = Some(unsafe { first_psn(raw, &endpoint.gids) });
        settings.receive_psn = None;
    }

    /// The destroy verb was called elsewhere. If that failed, leaks the parents.
    pub(crate) fn disown(mut self, destroyed: bool) {
        self.object.raw.disown(destroyed);
        if !destroyed {
            self.object.parents.leak();
        }
    }

    /// `ibv_destroy_qp`: destroys the queue pair and reports a failure, which a drop ignores. Outstanding requests end
    /// without completion.
    ///
    /// # Errors
    ///
    /// The queue pair is then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with its parents.
    ///
    ///  - `EBUSY`: it is still attached to a multicast group, by means other than this crate.
    #[doc(alias = "ibv_destroy_qp")]
    pub fn close(mut self) -> Result<()> {
        self.object.destroy()
    }
}

impl<'res> QueuePair<'res, QueuePairType> {
    /// Without the options that channels do not use.
    pub(crate) fn another(
        &self,
        capacities: ffi::ibv_qp_cap,
        settings: ConnectionSettings,
    ) -> Result<Self> {
        let Parents { domain, send_cq, receive_cq, srq, .. } = self.object.parents.clone();
        let builder = QueuePairBuilder::new(domain, send_cq, receive_cq, self.queue_pair_type());
        let builder = match srq {
            Some(srq) => builder.srq(srq),
            None => builder,
        };
        Ok(builder
            .capacities(capacities, false)
            .connection_settings(settings)
            .build()?
            .into_queue_pair())
    }

    /// Moves the transport from a value to the type.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: it has another transport. The queue pair comes back in the [`StateError`].
    pub fn typed<T: Transport>(self) -> Result<QueuePair<'res, T>, StateError<Self>> {
        let Properties { kind, driver, .. } = &self.object.properties;
        if T::is(*kind, driver.as_ref()) {
            return Ok(QueuePair { object: self.object, transport: PhantomData });
        }
        let error = Error::invalid("ibv_create_qp", "the queue pair has another transport");
        Err(StateError::new(self, error))
    }
}

debug! {
    impl[T] QueuePair<'_, T>, self,
    // SAFETY: the queue pair is live.
    number: unsafe { (*self.object.raw.as_ptr()).qp_num },
    queue_pair_type: self.object.properties.kind, capacities: self.object.properties.capacities, ..
}
