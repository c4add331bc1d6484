use std::ptr;

use super::work_queue::IndirectionTable;
use crate::base::{Error, Handle, Leak, Parent, QueuePairType, Result, debug, ffi, getters};
use crate::verbs::device::ReceiveScalingCapabilities;
use crate::verbs::domain::{DomainRef, ProtectionDomain};
use crate::verbs::flow::{FlowId, Flows, Rule};
use crate::verbs::queue_pair::StateTransition;

const VERB: &str = "ibv_create_qp";

/// A queue pair that spreads packets over the work queues of an [`IndirectionTable`], by a hash of their headers (RSS,
/// receive-side scaling). Threads share the load, and the packets of a connection stay in order.
///
/// Nothing can be posted to it. Packets reach it through [flows](Self::create_flow).
///
/// ```no_run
/// # // not on Soft-RoCE alone: it has no work queues
/// use ibverbs::flow::{EthernetMatch, Rule};
/// use ibverbs::work_queue::{IndirectionTable, ReceiveHash, ReceiveHashFields, ReceiveScalingQueuePair, WorkQueue, Flags, State};
/// use ibverbs::QueuePairType;
///
/// # fn main() -> ibverbs::Result<()> {
/// let context = ibverbs::open("mlx5_0")?;
/// let domain = context.alloc_pd()?;
/// let completions = [context.create_cq(256)?, context.create_cq(256)?];
/// let none = Flags::empty();
/// let queues = [
///     WorkQueue::new(&domain, &completions[0], 256, 1, none)?,
///     WorkQueue::new(&domain, &completions[1], 256, 1, none)?,
/// ];
/// for queue in &queues {
///     queue.modify(State::Ready)?;
/// }
/// let table = IndirectionTable::new(&queues)?;
/// let fields = ReceiveHashFields::SOURCE_IPV4 | ReceiveHashFields::DESTINATION_IPV4;
/// let hash = ReceiveHash::toeplitz([0x6d; 40], fields)?;
/// let mut spreading =
///     ReceiveScalingQueuePair::new(&domain, &table, QueuePairType::RawPacket, &hash)?;
/// let to_us = EthernetMatch::new().destination([2, 0, 0, 0, 0, 1]);
/// spreading.create_flow(&Rule::new(1).matching(to_us))?;
/// # Ok(())
/// # }
/// ```
pub struct ReceiveScalingQueuePair<'res> {
    raw: Handle<ffi::ibv_qp>,
    kind: QueuePairType,
    flows: Flows<'res>,
    parents: Parents<'res>,
}

struct Parents<'res> {
    domain: DomainRef<'res>,
    table: Parent<'res, IndirectionTable<'res>>,
}

impl Leak for Parents<'_> {
    fn leak(&self) {
        self.domain.leak();
        self.table.leak();
    }
}

impl Drop for ReceiveScalingQueuePair<'_> {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}

impl<'res> ReceiveScalingQueuePair<'res> {
    /// `ibv_create_qp_ex`: creates a queue pair of type [`RawPacket`](QueuePairType::RawPacket), or
    /// [`UnreliableDatagram`](QueuePairType::UnreliableDatagram) where the device can spread that.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the table belongs to another context, or the device rejects the length of the key.
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device does not spread packets of this type, or not by these fields.
    ///  - `ENOMEM`: the device has no queue pair left.
    ///  - `EPERM`: the process may not receive raw packets (`CAP_NET_RAW`).
    #[doc(alias = "ibv_create_qp_ex")]
    pub fn new(
        domain: impl Into<DomainRef<'res>>,
        table: impl Into<Parent<'res, IndirectionTable<'res>>>,
        queue_pair_type: QueuePairType,
        hash: &ReceiveHash,
    ) -> Result<Self> {
        use ffi::ibv_qp_init_attr_mask as mask;

        let (domain, table) = (domain.into(), table.into());
        let context = domain.context();
        context.check_same(table.context(), VERB, "the table belongs to another context")?;
        let device = context.query_device()?.receive_scaling();
        let reason = "the device does not spread packets of queue pairs of this type";
        Error::unsupported_if(!device.supported_types.contains(queue_pair_type), VERB, reason)?;
        hash.check(&device)?;
        let fields = mask::IBV_QP_INIT_ATTR_PD
            | mask::IBV_QP_INIT_ATTR_IND_TABLE
            | mask::IBV_QP_INIT_ATTR_RX_HASH;
        let mut attributes = ffi::ibv_qp_init_attr_ex {
            qp_type: queue_pair_type.into(),
            comp_mask: fields.0,
            pd: domain.as_raw(),
            rwq_ind_tbl: table.as_raw(),
            rx_hash_conf: hash.to_raw(),
            ..Default::default()
        };
        let attributes = ptr::from_mut(&mut attributes);
        // SAFETY: context, domain and table are live, and kept; C reads the key during the call only; the queue
        // pair is ours alone.
        let raw =
            unsafe { Handle::new(VERB, ffi::ibv_create_qp_ex(context.as_raw(), attributes)) }?;
        let parents = Parents { domain, table };
        Ok(Self { raw, kind: queue_pair_type, flows: Flows::default(), parents })
    }

    /// `ibv_create_flow`, as [`QueuePair::create_flow`](crate::QueuePair::create_flow).
    ///
    /// # Errors
    ///
    /// Those of [`QueuePair::create_flow`](crate::QueuePair::create_flow).
    #[doc(alias = "ibv_create_flow")]
    pub fn create_flow(&mut self, rule: &Rule<'res>) -> Result<FlowId> {
        let context = self.parents.domain.context();
        // SAFETY: the queue pair is live, of that type, and destroys its flows before itself.
        unsafe { self.flows.create(self.raw.as_ptr(), self.kind, context, rule) }
    }

    /// `ibv_destroy_flow`, as [`QueuePair::destroy_flow`](crate::QueuePair::destroy_flow).
    ///
    /// # Errors
    ///
    /// Those of [`QueuePair::destroy_flow`](crate::QueuePair::destroy_flow).
    #[doc(alias = "ibv_destroy_flow")]
    pub fn destroy_flow(&mut self, flow: FlowId) -> Result<()> {
        self.flows.destroy(flow, &self.raw, &self.parents)
    }

    /// `ibv_modify_qp`: changes the state. On mlx4 the queue pair receives once moved from INIT, with its port, to RTR.
    /// On mlx5 it has no states, and always receives.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there is no such transition, or an attribute is missing or not allowed.
    ///  - `EOPNOTSUPP`: it has no states.
    #[doc(alias = "ibv_modify_qp")]
    pub fn modify(&mut self, transition: StateTransition) -> Result<()> {
        // SAFETY: the queue pair is live.
        let state = unsafe { (*self.as_raw()).state };
        transition.check(self.kind, state.into())?;
        // SAFETY: the queue pair is live.
        unsafe { transition.apply(self.as_raw()) }
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is live.
        unsafe { (*self.as_raw()).qp_num }
    }

    getters! { self,
        /// Its type.
        queue_pair_type: QueuePairType => self.kind;

        /// The table of its work queues.
        indirection_table: &IndirectionTable<'res> => &self.parents.table;

        /// The domain that it was created in.
        protection_domain: &ProtectionDomain<'res> => &self.parents.domain;

        /// The C object, valid while the queue pair is. Nothing may be posted to it.
        as_raw: *mut ffi::ibv_qp => self.raw.as_ptr();
    }

    /// `ibv_destroy_qp`: destroys the flows and the queue pair, and reports a failure, which a drop ignores.
    ///
    /// # Errors
    ///
    /// The provider's errno value. The queue pair is then
    /// [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with its parents.
    #[doc(alias = "ibv_destroy_qp")]
    pub fn close(mut self) -> Result<()> {
        self.destroy()
    }

    fn destroy(&mut self) -> Result<()> {
        self.flows.destroy_all(&self.raw, &self.parents);
        self.raw.destroy().inspect_err(|_| self.parents.leak())
    }
}

debug! {
    ReceiveScalingQueuePair<'_>, self,
    number: self.number(), queue_pair_type: self.kind, table: self.parents.table, ..
}

bitflags::bitflags! {
    /// `enum ibv_rx_hash_fields`: the header fields to hash.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    #[doc(alias = "ibv_rx_hash_fields")]
    pub struct ReceiveHashFields: u64 {
        /// The IPv4 source.
        const SOURCE_IPV4 = ffi::ibv_rx_hash_fields::IBV_RX_HASH_SRC_IPV4.0 as u64;
        /// The IPv4 destination.
        const DESTINATION_IPV4 = ffi::ibv_rx_hash_fields::IBV_RX_HASH_DST_IPV4.0 as u64;
        /// The IPv6 source.
        const SOURCE_IPV6 = ffi::ibv_rx_hash_fields::IBV_RX_HASH_SRC_IPV6.0 as u64;
        /// The IPv6 destination.
        const DESTINATION_IPV6 = ffi::ibv_rx_hash_fields::IBV_RX_HASH_DST_IPV6.0 as u64;
        /// The TCP source port.
        const SOURCE_PORT_TCP = ffi::ibv_rx_hash_fields::IBV_RX_HASH_SRC_PORT_TCP.0 as u64;
        /// The TCP destination port.
        const DESTINATION_PORT_TCP = ffi::ibv_rx_hash_fields::IBV_RX_HASH_DST_PORT_TCP.0 as u64;
        /// The UDP source port.
        const SOURCE_PORT_UDP = ffi::ibv_rx_hash_fields::IBV_RX_HASH_SRC_PORT_UDP.0 as u64;
        /// The UDP destination port.
        const DESTINATION_PORT_UDP = ffi::ibv_rx_hash_fields::IBV_RX_HASH_DST_PORT_UDP.0 as u64;
        /// IPsec's security parameters index.
        const IPSEC_SPI = ffi::ibv_rx_hash_fields::IBV_RX_HASH_IPSEC_SPI.0 as u64;
        /// Hashes the inner headers of a tunnel.
        const INNER = ffi::ibv_rx_hash_fields::IBV_RX_HASH_INNER.0 as u64;
        const _ = !0;
    }
}

/// `struct ibv_rx_hash_conf`: how a [`ReceiveScalingQueuePair`](crate::work_queue::ReceiveScalingQueuePair) hashes
/// packets. Devices have only Toeplitz's function.
#[derive(Clone, PartialEq, Eq)]
#[doc(alias = "ibv_rx_hash_conf")]
pub struct ReceiveHash {
    key: Vec<u8>,
    fields: ReceiveHashFields,
}

impl ReceiveHash {
    /// Toeplitz's hash of these fields with this key. mlx4 and mlx5 need 40 bytes.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the key is empty or longer than 255 bytes; there are no fields; or they include both IPv4 and IPv6,
    ///    or both TCP and UDP.
    pub fn toeplitz(key: impl Into<Vec<u8>>, fields: ReceiveHashFields) -> Result<Self> {
        use ReceiveHashFields as F;

        let key = key.into();
        Error::within(VERB, "the length of the hash's key", key.len() as u64, 1, u8::MAX)?;
        Error::invalid_if(fields.difference(F::INNER).is_empty(), VERB, "the hash has no fields")?;
        let both = |a: F, b: F| fields.intersects(a) && fields.intersects(b);
        if both(F::SOURCE_IPV4 | F::DESTINATION_IPV4, F::SOURCE_IPV6 | F::DESTINATION_IPV6) {
            return Err(Error::invalid(VERB, "one hash cannot have fields of both IPv4 and IPv6"));
        }
        if both(
            F::SOURCE_PORT_TCP | F::DESTINATION_PORT_TCP,
            F::SOURCE_PORT_UDP | F::DESTINATION_PORT_UDP,
        ) {
            return Err(Error::invalid(VERB, "one hash cannot have ports of both TCP and UDP"));
        }
        Ok(Self { key, fields })
    }

    /// The fields that are hashed.
    pub fn fields(&self) -> ReceiveHashFields {
        self.fields
    }

    pub(super) fn check(&self, device: &ReceiveScalingCapabilities) -> Result<()> {
        let function = ffi::ibv_rx_hash_function_flags::IBV_RX_HASH_FUNC_TOEPLITZ.0;
        let reason = "the device does not have Toeplitz's hash function";
        Error::unsupported_if(u32::from(device.rx_hash_function) & function == 0, VERB, reason)?;
        let reason = "the device cannot hash one of the fields: see \
                          DeviceAttributes::receive_scaling";
        Error::unsupported_if(self.fields.bits() & !device.rx_hash_fields_mask != 0, VERB, reason)?;
        Ok(())
    }

    /// C only reads the key.
    pub(super) fn to_raw(&self) -> ffi::ibv_rx_hash_conf {
        ffi::ibv_rx_hash_conf {
            rx_hash_function: ffi::ibv_rx_hash_function_flags::IBV_RX_HASH_FUNC_TOEPLITZ.0 as u8,
            // `toeplitz` has checked the length.
            rx_hash_key_len: self.key.len() as u8,
            rx_hash_key: self.key.as_ptr().cast_mut(),
            rx_hash_fields_mask: self.fields.bits(),
        }
    }
}

// Without the key, which lets an attacker direct all packets to one queue.
debug! { ReceiveHash, self, fields: self.fields, .. }
