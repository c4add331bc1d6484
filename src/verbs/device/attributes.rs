use std::ffi::c_int;

use super::capabilities::{
    DeviceCapabilities, ModerationCapabilities, OnDemandPaging, OnDemandPagingCapabilities,
    OnDemandPagingOperations, PacketPacingCapabilities, PciAtomicCapabilities, QueuePairTypes,
    RawPacketCapabilities, ReceiveScalingCapabilities, SegmentationCapabilities,
    TagMatchingCapabilities, TagMatchingFlags,
};
use super::gid::Guid;
use crate::base::{c_enum, debug, ffi, serialized_getters};

/// `struct ibv_device_attr_ex`: the limits and capabilities of a device.
///
/// A limit holds for the whole device; a queue pair type or a combination may get less. With feature `serde` it serialises
/// as a struct of its numbers and names.
#[derive(Clone, Copy)]
#[doc(alias = "ibv_device_attr")]
#[doc(alias = "ibv_device_attr_ex")]
pub struct DeviceAttributes(ffi::ibv_device_attr_ex);

impl From<ffi::ibv_device_attr_ex> for DeviceAttributes {
    fn from(raw: ffi::ibv_device_attr_ex) -> Self {
        Self(raw)
    }
}

/// C's `int` is never negative.
fn limit(value: c_int) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

serialized_getters! { DeviceAttributes, self,
    /// The most queue pairs.
    max_qp: u32 => limit(self.0.orig_attr.max_qp);

    /// The most work requests outstanding on a queue.
    max_qp_wr: u32 => limit(self.0.orig_attr.max_qp_wr);

    /// The most elements of a work request.
    max_sge: u32 => limit(self.0.orig_attr.max_sge);

    /// The most scatter elements of an RDMA read.
    max_sge_rd: u32 => limit(self.0.orig_attr.max_sge_rd);

    /// The most completion queues.
    max_cq: u32 => limit(self.0.orig_attr.max_cq);

    /// The most entries of a completion queue.
    max_cqe: u32 => limit(self.0.orig_attr.max_cqe);

    /// The most memory regions.
    max_mr: u32 => limit(self.0.orig_attr.max_mr);

    /// The most protection domains.
    max_pd: u32 => limit(self.0.orig_attr.max_pd);

    /// The most reads and atomics that a queue pair answers at a time.
    max_qp_rd_atom: u32 => limit(self.0.orig_attr.max_qp_rd_atom);

    /// The most reads and atomics that all queue pairs together answer at a time.
    max_res_rd_atom: u32 => limit(self.0.orig_attr.max_res_rd_atom);

    /// The most reads and atomics that a queue pair has outstanding.
    max_qp_init_rd_atom: u32 => limit(self.0.orig_attr.max_qp_init_rd_atom);

    /// The most EE contexts (reliable datagrams; no device has them).
    max_ee: u32 => limit(self.0.orig_attr.max_ee);

    /// The most reads and atomics that an EE context answers at a time.
    max_ee_rd_atom: u32 => limit(self.0.orig_attr.max_ee_rd_atom);

    /// The most reads and atomics that an EE context has outstanding.
    max_ee_init_rd_atom: u32 => limit(self.0.orig_attr.max_ee_init_rd_atom);

    /// The most reliable datagram domains.
    max_rdd: u32 => limit(self.0.orig_attr.max_rdd);

    /// The most raw IPv6 queue pairs.
    max_raw_ipv6_qp: u32 => limit(self.0.orig_attr.max_raw_ipv6_qp);

    /// The most raw Ethertype queue pairs.
    max_raw_ethy_qp: u32 => limit(self.0.orig_attr.max_raw_ethy_qp);

    /// The most memory windows.
    max_mw: u32 => limit(self.0.orig_attr.max_mw);

    /// The most multicast groups.
    max_mcast_grp: u32 => limit(self.0.orig_attr.max_mcast_grp);

    /// The most queue pairs in a multicast group.
    max_mcast_qp_attach: u32 => limit(self.0.orig_attr.max_mcast_qp_attach);

    /// The most queue pairs in all multicast groups together.
    max_total_mcast_qp_attach: u32 => limit(self.0.orig_attr.max_total_mcast_qp_attach);

    /// The most address handles.
    max_ah: u32 => limit(self.0.orig_attr.max_ah);

    /// The most fast memory regions (no longer in the kernel).
    max_fmr: u32 => limit(self.0.orig_attr.max_fmr);

    /// The most maps of a fast memory region.
    max_map_per_fmr: u32 => limit(self.0.orig_attr.max_map_per_fmr);

    /// The most shared receive queues.
    max_srq: u32 => limit(self.0.orig_attr.max_srq);

    /// The most requests of a shared receive queue.
    max_srq_wr: u32 => limit(self.0.orig_attr.max_srq_wr);

    /// The most scatter elements of a request on a shared receive queue.
    max_srq_sge: u32 => limit(self.0.orig_attr.max_srq_sge);

    /// The device's GUID as a node of the fabric.
    node_guid: Guid => Guid::from_be(self.0.orig_attr.node_guid);

    /// The GUID of the device's system.
    system_image_guid: Guid => Guid::from_be(self.0.orig_attr.sys_image_guid);

    /// The largest region, in bytes.
    max_mr_size: u64 => self.0.orig_attr.max_mr_size;

    /// The page sizes: each set bit is a size in bytes.
    page_sizes: u64 => self.0.orig_attr.page_size_cap;

    /// The vendor's IEEE OUI.
    vendor_id: u32 => self.0.orig_attr.vendor_id;

    /// The vendor's number for the model.
    vendor_part_id: u32 => self.0.orig_attr.vendor_part_id;

    /// The vendor's number for the hardware version.
    hardware_version: u32 => self.0.orig_attr.hw_ver;

    /// The number of ports.
    phys_port_cnt: u8 => self.0.orig_attr.phys_port_cnt;

    /// The most P_Keys of a port.
    max_pkeys: u16 => self.0.orig_attr.max_pkeys;

    /// The longest time to an answer, encoded: 4.096 µs · 2ⁿ.
    local_ca_ack_delay: u8 => self.0.orig_attr.local_ca_ack_delay;

    /// The accesses that the device's atomics are atomic with respect to.
    atomic_capability: AtomicCapability => self.0.orig_attr.atomic_cap.into();

    /// The most receive work queues.
    max_wq_type_rq: u32 => self.0.max_wq_type_rq;

    /// The device memory that programs can allocate, in bytes.
    max_device_memory: u64 => self.0.max_dm_size;

    /// The valid bits of a completion's time stamp; 0 if there are none.
    completion_timestamp_mask: u64 => self.0.completion_timestamp_mask;

    /// The frequency of the device's clock in kHz; 0 if it cannot be read.
    core_clock: u64 => self.0.hca_core_clock;

    /// The firmware version, as the vendor writes it.
    firmware_version: String => {
        let text = self.0.orig_attr.fw_ver.map(|c| c.to_ne_bytes()[0]);
        let end = text.iter().position(|&c| c == 0).unwrap_or(text.len());
        String::from_utf8_lossy(&text[..end]).into_owned()
    };
}

impl DeviceAttributes {
    /// The capability flags.
    pub fn capabilities(&self) -> DeviceCapabilities {
        let classic = u64::from(self.0.orig_attr.device_cap_flags);
        DeviceCapabilities::from_bits_retain(self.0.device_cap_flags_ex | classic)
    }

    /// On-demand paging.
    pub fn on_demand_paging(&self) -> OnDemandPagingCapabilities {
        let by_transport = self.0.odp_caps.per_transport_caps;
        let operations = OnDemandPagingOperations::from_bits_retain;
        OnDemandPagingCapabilities {
            general: OnDemandPaging::from_bits_retain(self.0.odp_caps.general_caps),
            rc: operations(by_transport.rc_odp_caps),
            uc: operations(by_transport.uc_odp_caps),
            ud: operations(by_transport.ud_odp_caps),
            xrc: operations(self.0.xrc_odp_caps),
        }
    }

    /// TCP segmentation offload.
    pub fn segmentation(&self) -> SegmentationCapabilities {
        let raw = &self.0.tso_caps;
        SegmentationCapabilities {
            max_tso: raw.max_tso,
            supported_types: QueuePairTypes::from_bits(raw.supported_qpts),
        }
    }

    /// Receive-side scaling: the spreading of packets over work queues.
    pub fn receive_scaling(&self) -> ReceiveScalingCapabilities {
        let raw = &self.0.rss_caps;
        ReceiveScalingCapabilities {
            supported_types: QueuePairTypes::from_bits(raw.supported_qpts),
            max_rwq_indirection_tables: raw.max_rwq_indirection_tables,
            max_rwq_indirection_table_size: raw.max_rwq_indirection_table_size,
            rx_hash_fields_mask: raw.rx_hash_fields_mask,
            rx_hash_function: raw.rx_hash_function,
        }
    }

    /// Packet pacing: rate limits of single queue pairs.
    pub fn packet_pacing(&self) -> PacketPacingCapabilities {
        let raw = &self.0.packet_pacing_caps;
        PacketPacingCapabilities {
            min_rate: raw.qp_rate_limit_min,
            max_rate: raw.qp_rate_limit_max,
            supported_types: QueuePairTypes::from_bits(raw.supported_qpts),
        }
    }

    /// Raw packet queue pairs.
    pub fn raw_packet(&self) -> RawPacketCapabilities {
        RawPacketCapabilities::from_bits_retain(self.0.raw_packet_caps)
    }

    /// Tag matching.
    pub fn tag_matching(&self) -> TagMatchingCapabilities {
        let raw = &self.0.tm_caps;
        TagMatchingCapabilities {
            max_rendezvous_header: raw.max_rndv_hdr_size,
            max_tags: raw.max_num_tags,
            flags: TagMatchingFlags::from_bits_retain(raw.flags),
            max_operations: raw.max_ops,
            max_sge: raw.max_sge,
        }
    }

    /// Completion event moderation.
    pub fn moderation(&self) -> ModerationCapabilities {
        let raw = &self.0.cq_mod_caps;
        ModerationCapabilities { max_count: raw.max_cq_count, max_period: raw.max_cq_period }
    }

    /// The sizes of atomic operations over PCI.
    pub fn pci_atomics(&self) -> PciAtomicCapabilities {
        let raw = &self.0.pci_atomic_caps;
        PciAtomicCapabilities {
            fetch_add: raw.fetch_add,
            swap: raw.swap,
            compare_swap: raw.compare_swap,
        }
    }

    /// The C struct.
    pub fn as_raw(&self) -> &ffi::ibv_device_attr_ex {
        &self.0
    }
}

debug! {
    DeviceAttributes, self,
    firmware_version: self.firmware_version(), node_guid: self.node_guid(),
    vendor_id: self.vendor_id(), vendor_part_id: self.vendor_part_id(),
    phys_port_cnt: self.phys_port_cnt(), ..
}

c_enum! {
    /// `enum ibv_atomic_cap`: what a device's atomics are atomic with.
    #[doc(alias = "ibv_atomic_cap")]
    pub enum AtomicCapability: ibv_atomic_cap(u32) {
        /// The device has no atomics.
        None = IBV_ATOMIC_NONE,
        /// Other atomics of this device.
        Device = IBV_ATOMIC_HCA,
        /// Atomics of this device, of other devices and of the CPU.
        Global = IBV_ATOMIC_GLOB,
    }
}

#[cfg(all(test, feature = "serde"))]
mod tests {
    use super::*;

    #[test]
    fn attributes_serialise_by_the_names_of_their_methods() {
        let mut raw = ffi::ibv_device_attr_ex::default();
        raw.orig_attr.max_qp = 77;
        raw.orig_attr.max_sge = -1;
        raw.orig_attr.fw_ver[0] = b'4' as _;
        raw.orig_attr.atomic_cap = ffi::ibv_atomic_cap::IBV_ATOMIC_HCA;
        let json = serde_json::to_value(DeviceAttributes::from(raw)).unwrap();
        assert_eq!((&json["max_qp"], &json["max_sge"]), (&77.into(), &0.into()));
        assert_eq!(
            (&json["firmware_version"], &json["atomic_capability"]),
            (&"4".into(), &"Device".into())
        );
    }
}
