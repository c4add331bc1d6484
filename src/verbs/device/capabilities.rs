use crate::base::{QueuePairType, ffi};

bitflags::bitflags! {
    /// `ibv_device_cap_flags`: what a device can do. The upper 32 bits are those of `device_cap_flags_ex`.
    ///
    /// Bits without a name here are kept.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    #[doc(alias = "ibv_device_cap_flags")]
    pub struct DeviceCapabilities: u64 {
        /// A queue pair's depth can be changed.
        const RESIZE_MAX_WR = ffi::ibv_device_cap_flags::IBV_DEVICE_RESIZE_MAX_WR.0 as u64;
        /// Ports count packets with a wrong P_Key.
        const BAD_PKEY_CNTR = ffi::ibv_device_cap_flags::IBV_DEVICE_BAD_PKEY_CNTR.0 as u64;
        /// Ports count packets with a wrong Q_Key.
        const BAD_QKEY_CNTR = ffi::ibv_device_cap_flags::IBV_DEVICE_BAD_QKEY_CNTR.0 as u64;
        /// Raw packets can be multicast.
        const RAW_MULTI = ffi::ibv_device_cap_flags::IBV_DEVICE_RAW_MULTI.0 as u64;
        /// A connection can migrate to another path by itself.
        const AUTO_PATH_MIG = ffi::ibv_device_cap_flags::IBV_DEVICE_AUTO_PATH_MIG.0 as u64;
        /// A connection can migrate to another port.
        const CHANGE_PHY_PORT = ffi::ibv_device_cap_flags::IBV_DEVICE_CHANGE_PHY_PORT.0 as u64;
        /// The port of a UD queue pair's address handles is checked.
        const UD_AV_PORT_ENFORCE = ffi::ibv_device_cap_flags::IBV_DEVICE_UD_AV_PORT_ENFORCE.0 as u64;
        /// A transition can name the expected current state.
        const CURR_QP_STATE_MOD = ffi::ibv_device_cap_flags::IBV_DEVICE_CURR_QP_STATE_MOD.0 as u64;
        /// A port can be shut down.
        const SHUTDOWN_PORT = ffi::ibv_device_cap_flags::IBV_DEVICE_SHUTDOWN_PORT.0 as u64;
        /// A port can ask the subnet manager for a type of initialisation.
        const INIT_TYPE = ffi::ibv_device_cap_flags::IBV_DEVICE_INIT_TYPE.0 as u64;
        /// A port that becomes active raises an event.
        const PORT_ACTIVE_EVENT = ffi::ibv_device_cap_flags::IBV_DEVICE_PORT_ACTIVE_EVENT.0 as u64;
        /// The device has a system image GUID.
        const SYS_IMAGE_GUID = ffi::ibv_device_cap_flags::IBV_DEVICE_SYS_IMAGE_GUID.0 as u64;
        /// An RC queue pair without a receive tells the sender to wait.
        const RC_RNR_NAK_GEN = ffi::ibv_device_cap_flags::IBV_DEVICE_RC_RNR_NAK_GEN.0 as u64;
        /// A shared receive queue can be resized.
        const SRQ_RESIZE = ffi::ibv_device_cap_flags::IBV_DEVICE_SRQ_RESIZE.0 as u64;
        /// A completion queue can notify after several completions.
        const N_NOTIFY_CQ = ffi::ibv_device_cap_flags::IBV_DEVICE_N_NOTIFY_CQ.0 as u64;
        /// Memory windows of type 1.
        const MEM_WINDOW = ffi::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW.0 as u64;
        /// IP checksums on UD queue pairs.
        const UD_IP_CSUM = ffi::ibv_device_cap_flags::IBV_DEVICE_UD_IP_CSUM.0 as u64;
        /// XRC queue pairs.
        const XRC = ffi::ibv_device_cap_flags::IBV_DEVICE_XRC.0 as u64;
        /// Send with invalidate, among others.
        const MEM_MGT_EXTENSIONS = ffi::ibv_device_cap_flags::IBV_DEVICE_MEM_MGT_EXTENSIONS.0 as u64;
        /// Memory windows of type 2A.
        const MEM_WINDOW_TYPE_2A = ffi::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2A.0 as u64;
        /// Memory windows of type 2B.
        const MEM_WINDOW_TYPE_2B = ffi::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B.0 as u64;
        /// IP checksums on RC queue pairs.
        const RC_IP_CSUM = ffi::ibv_device_cap_flags::IBV_DEVICE_RC_IP_CSUM.0 as u64;
        /// IP checksums on raw packet queue pairs.
        const RAW_IP_CSUM = ffi::ibv_device_cap_flags::IBV_DEVICE_RAW_IP_CSUM.0 as u64;
        /// Flow steering that the device manages.
        const MANAGED_FLOW_STEERING =
            ffi::ibv_device_cap_flags::IBV_DEVICE_MANAGED_FLOW_STEERING.0 as u64;
        /// Raw packets are received with their frame check sequence.
        const RAW_SCATTER_FCS = ffi::IBV_DEVICE_RAW_SCATTER_FCS;
        /// Writes over PCI can be padded to full cache lines.
        const PCI_WRITE_END_PADDING = ffi::IBV_DEVICE_PCI_WRITE_END_PADDING;
        const _ = !0;
    }
}

bitflags::bitflags! {
    /// `ibv_odp_general_caps`: whether a device has on-demand paging.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    #[doc(alias = "ibv_odp_general_caps")]
    pub struct OnDemandPaging: u64 {
        /// On-demand paging.
        const SUPPORT = ffi::ibv_odp_general_caps::IBV_ODP_SUPPORT.0 as u64;
        /// One region can cover the whole address space.
        const SUPPORT_IMPLICIT = ffi::ibv_odp_general_caps::IBV_ODP_SUPPORT_IMPLICIT.0 as u64;
        const _ = !0;
    }
}

bitflags::bitflags! {
    /// `ibv_odp_transport_cap_bits`: the operations that may use memory paged on demand.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    #[doc(alias = "ibv_odp_transport_cap_bits")]
    pub struct OnDemandPagingOperations: u32 {
        /// Sends.
        const SEND = ffi::ibv_odp_transport_cap_bits::IBV_ODP_SUPPORT_SEND.0;
        /// Receives.
        const RECEIVE = ffi::ibv_odp_transport_cap_bits::IBV_ODP_SUPPORT_RECV.0;
        /// RDMA writes.
        const WRITE = ffi::ibv_odp_transport_cap_bits::IBV_ODP_SUPPORT_WRITE.0;
        /// RDMA reads.
        const READ = ffi::ibv_odp_transport_cap_bits::IBV_ODP_SUPPORT_READ.0;
        /// Atomics.
        const ATOMIC = ffi::ibv_odp_transport_cap_bits::IBV_ODP_SUPPORT_ATOMIC.0;
        /// Receives on a shared receive queue.
        const SRQ_RECEIVE = ffi::ibv_odp_transport_cap_bits::IBV_ODP_SUPPORT_SRQ_RECV.0;
        const _ = !0;
    }
}

bitflags::bitflags! {
    /// `ibv_raw_packet_caps`: what raw packet queue pairs can do.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    #[doc(alias = "ibv_raw_packet_caps")]
    pub struct RawPacketCapabilities: u32 {
        /// Take the VLAN tag out of a packet and report it in the completion.
        const CVLAN_STRIPPING = ffi::ibv_raw_packet_caps::IBV_RAW_PACKET_CAP_CVLAN_STRIPPING.0;
        /// Receive packets with their frame check sequence.
        const SCATTER_FCS = ffi::ibv_raw_packet_caps::IBV_RAW_PACKET_CAP_SCATTER_FCS.0;
        /// Compute and check IP checksums.
        const IP_CSUM = ffi::ibv_raw_packet_caps::IBV_RAW_PACKET_CAP_IP_CSUM.0;
        /// Hold packets back for a while when there is no receive.
        const DELAY_DROP = ffi::ibv_raw_packet_caps::IBV_RAW_PACKET_CAP_DELAY_DROP.0;
        const _ = !0;
    }
}

bitflags::bitflags! {
    /// `ibv_tm_cap_flags`: the queue pairs with tag matching.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    #[doc(alias = "ibv_tm_cap_flags")]
    pub struct TagMatchingFlags: u32 {
        /// RC queue pairs.
        const RC = ffi::ibv_tm_cap_flags::IBV_TM_CAP_RC.0;
        const _ = !0;
    }
}

/// A set of queue pair types.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct QueuePairTypes(u32);

impl QueuePairTypes {
    pub(super) const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// `ibv_is_qpt_supported`: whether the type is in the set.
    #[doc(alias = "ibv_is_qpt_supported")]
    pub fn contains(self, queue_pair_type: QueuePairType) -> bool {
        let number = ffi::ibv_qp_type::from(queue_pair_type).0;
        1u32.checked_shl(number).is_some_and(|bit| self.0 & bit != 0)
    }

    /// Whether no type is in the set.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The set as in C: bit n is the type with number n.
    pub const fn bits(self) -> u32 {
        self.0
    }
}

/// `struct ibv_odp_caps`: on-demand paging, with its operations by transport.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
#[doc(alias = "ibv_odp_caps")]
pub struct OnDemandPagingCapabilities {
    /// Whether there is on-demand paging at all.
    pub general: OnDemandPaging,
    /// On RC queue pairs.
    pub rc: OnDemandPagingOperations,
    /// On UC queue pairs.
    pub uc: OnDemandPagingOperations,
    /// On UD queue pairs.
    pub ud: OnDemandPagingOperations,
    /// On XRC queue pairs.
    pub xrc: OnDemandPagingOperations,
}

/// `struct ibv_tso_caps`: TCP segmentation by the device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
#[doc(alias = "ibv_tso_caps")]
pub struct SegmentationCapabilities {
    /// The largest payload, in bytes; 0 if there is no segmentation.
    pub max_tso: u32,
    /// The queue pair types with it.
    pub supported_types: QueuePairTypes,
}

/// `struct ibv_rss_caps`: the spreading of packets over work queues by a hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
#[doc(alias = "ibv_rss_caps")]
pub struct ReceiveScalingCapabilities {
    /// The queue pair types with it.
    pub supported_types: QueuePairTypes,
    /// The most indirection tables.
    pub max_rwq_indirection_tables: u32,
    /// The most entries of one indirection table.
    pub max_rwq_indirection_table_size: u32,
    /// The fields that can be hashed: bits of `enum ibv_rx_hash_fields`.
    pub rx_hash_fields_mask: u64,
    /// The hash functions: bits of `enum ibv_rx_hash_function_flags`.
    pub rx_hash_function: u8,
}

/// `struct ibv_packet_pacing_caps`: rate limits of single queue pairs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
#[doc(alias = "ibv_packet_pacing_caps")]
pub struct PacketPacingCapabilities {
    /// The lowest limit, in kb/s.
    pub min_rate: u32,
    /// The highest limit, in kb/s; 0 if there are no limits.
    pub max_rate: u32,
    /// The queue pair types with them.
    pub supported_types: QueuePairTypes,
}

/// `struct ibv_tm_caps`: tag matching by the device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
#[doc(alias = "ibv_tm_caps")]
pub struct TagMatchingCapabilities {
    /// The longest header of a rendezvous request, in bytes.
    pub max_rendezvous_header: u32,
    /// The most tagged buffers in a list; 0 if there is no tag matching.
    pub max_tags: u32,
    /// The queue pairs with it.
    pub flags: TagMatchingFlags,
    /// The most outstanding operations on a list.
    pub max_operations: u32,
    /// The most scatter elements of a tagged buffer.
    pub max_sge: u32,
}

/// `struct ibv_cq_moderation_caps`: how long a completion queue can hold back events.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
#[doc(alias = "ibv_cq_moderation_caps")]
pub struct ModerationCapabilities {
    /// The most completions; 0 if there is no moderation.
    pub max_count: u16,
    /// The longest time, in microseconds; 0 if there is no moderation.
    pub max_period: u16,
}

/// `struct ibv_pci_atomic_caps`: the sizes of atomics over PCI, as bits of `enum ibv_pci_atomic_op_size` (1:
/// 4 bytes, 2: 8, 4: 16).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
#[doc(alias = "ibv_pci_atomic_caps")]
pub struct PciAtomicCapabilities {
    /// Fetch and add.
    pub fetch_add: u16,
    /// Swap.
    pub swap: u16,
    /// Compare and swap.
    pub compare_swap: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_of_types_knows_its_members() {
        let set = QueuePairTypes::from_bits(1 << ffi::ibv_qp_type::IBV_QPT_UD.0);
        assert!(set.contains(QueuePairType::UnreliableDatagram) && !set.is_empty());
        assert!(!set.contains(QueuePairType::ReliableConnected));
        assert!(!set.contains(QueuePairType::Unknown(4711)), "no shift overflows");
    }

    #[test]
    fn bits_without_a_name_are_kept() {
        let bits = 0x1c0_0122_3c76;
        let flags = DeviceCapabilities::from_bits_retain(bits);
        assert_eq!(flags.bits(), bits);
        assert!(flags.contains(DeviceCapabilities::SRQ_RESIZE));
        let mut names = flags.iter_names();
        assert_eq!(names.by_ref().count(), 12);
        assert_eq!(names.remaining().bits(), 0x1c0_0000_0000);
    }
}
