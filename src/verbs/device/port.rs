use crate::base::{Error, Result, c_enum, display_texts, ffi, serialized_getters};
use crate::verbs::settings::MaximumTransferUnit;

/// `struct ibv_port_attr`: a port's attributes when [`Context::query_port`](crate::Context::query_port)
/// asked. With feature `serde` it serialises as a struct of what its methods say.
#[derive(Clone, Copy, Debug)]
#[doc(alias = "ibv_port_attr")]
pub struct PortAttributes(ffi::ibv_port_attr);

impl From<ffi::ibv_port_attr> for PortAttributes {
    fn from(raw: ffi::ibv_port_attr) -> Self {
        Self(raw)
    }
}

impl PortAttributes {
    /// Drivers report an unspecific error or none.
    pub(crate) fn check_pkey_index(&self, verb: &'static str, index: u16) -> Result<()> {
        let length = self.pkey_table_len();
        if index < length {
            return Ok(());
        }
        let (low, high) = if length == 0 { (1, 0) } else { (0, u64::from(length) - 1) };
        Err(Error::out_of_range(verb, "pkey_index", index.into(), low, high))
    }

    pub(crate) fn check_path_mtu(
        &self,
        verb: &'static str,
        mtu: MaximumTransferUnit,
    ) -> Result<()> {
        let most = self.active_mtu().unwrap_or(mtu);
        Error::within(verb, "path_mtu", mtu.bytes(), 256, most.bytes())
    }

    /// The C struct.
    pub fn as_raw(&self) -> &ffi::ibv_port_attr {
        &self.0
    }

    /// Whether every packet needs a global route header: always on Ethernet and EFA, and on some InfiniBand
    /// fabrics.
    pub fn grh_required(&self) -> bool {
        self.link_layer() != LinkLayer::InfiniBand || self.0.flags & GRH_REQUIRED != 0
    }
}

serialized_getters! { PortAttributes, self,
    /// The logical state. Only an [`Active`](PortState::Active) port carries traffic.
    state: PortState => self.0.state.into();

    /// The physical state.
    physical_state: PhysicalState => PhysicalState::from_raw(self.0.phys_state);

    /// InfiniBand or Ethernet.
    link_layer: LinkLayer => LinkLayer::from_raw(self.0.link_layer);

    /// The largest MTU that the port supports.
    max_mtu: Option<MaximumTransferUnit> => MaximumTransferUnit::from_raw(self.0.max_mtu);

    /// The MTU in use, the largest of a path through the port.
    active_mtu: Option<MaximumTransferUnit> => MaximumTransferUnit::from_raw(self.0.active_mtu);

    /// The length of its GID table.
    gid_table_len: u32 => u32::try_from(self.0.gid_tbl_len).unwrap_or(0);

    /// The length of its P_Key table.
    pkey_table_len: u16 => self.0.pkey_tbl_len;

    /// The LID from the subnet manager; 0 on Ethernet.
    lid: u16 => self.0.lid;

    /// How many low bits of the LID may vary by path.
    lmc: u8 => self.0.lmc;

    /// The LID of the subnet manager.
    sm_lid: u16 => self.0.sm_lid;

    /// The service level of the subnet manager.
    sm_sl: u8 => self.0.sm_sl;

    /// The largest message, in bytes.
    max_message_size: u32 => self.0.max_msg_sz;

    /// The most virtual lanes, encoded as in the specification.
    max_vl_num: u8 => self.0.max_vl_num;

    /// Packets received with a P_Key that the port does not have.
    bad_pkey_counter: u32 => self.0.bad_pkey_cntr;

    /// Packets received with a wrong Q_Key.
    qkey_violation_counter: u32 => self.0.qkey_viol_cntr;

    /// The subnet timeout, encoded: 4.096 µs · 2ⁿ.
    subnet_timeout: u8 => self.0.subnet_timeout;

    /// The subnet manager's reply to the initialisation that the port asked for.
    init_type_reply: u8 => self.0.init_type_reply;

    /// Capabilities: bits of `enum ibv_port_cap_flags`.
    capability_flags: u32 => self.0.port_cap_flags;

    /// Further capabilities: bits of `enum ibv_port_cap_flags2`.
    capability_flags2: u16 => self.0.port_cap_flags2;

    /// Flags such as `IBV_QPF_GRH_REQUIRED`.
    flags: u8 => self.0.flags;

    /// The number of lanes, or `None` for an unknown value.
    width: Option<u8> => match self.0.active_width {
        1 => Some(1),
        2 => Some(4),
        4 => Some(8),
        8 => Some(12),
        16 => Some(2),
        _ => None,
    };

    /// The signalling speed of one lane.
    speed: LinkSpeed => match self.0.active_speed_ex {
        0 => LinkSpeed::from_raw(self.0.active_speed.into()),
        extended => LinkSpeed::from_raw(extended),
    };
}

const GRH_REQUIRED: u8 = 1;

c_enum! {
    /// `enum ibv_port_state`: the logical state of a port.
    #[doc(alias = "ibv_port_state")]
    pub enum PortState: ibv_port_state(u32) {
        /// Reserved.
        Nop = IBV_PORT_NOP,
        /// No link.
        Down = IBV_PORT_DOWN,
        /// A link, but not set up by a subnet manager.
        Initialize = IBV_PORT_INIT,
        /// Set up, not yet in use.
        Armed = IBV_PORT_ARMED,
        /// In use.
        Active = IBV_PORT_ACTIVE,
        /// In use, with link errors that it may recover from.
        ActiveDefer = IBV_PORT_ACTIVE_DEFER,
    }
}

macro_rules! number_enum {
    ($(#[$outer:meta])* pub enum $name:ident: $repr:ty, $unknown:literal { $($(#[$inner:meta])* $variant:ident = $n:literal, $words:literal;)+ }) => {
        $(#[$outer])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$inner])* $variant,)+
            /// A value without a name here.
            Unknown($repr),
        }

        impl $name {
            fn from_raw(raw: $repr) -> Self {
                match raw {
                    $($n => Self::$variant,)+
                    other => Self::Unknown(other),
                }
            }
        }

        display_texts! { $name, $unknown: $($variant, $words;)+ }
    };
}

number_enum! {
    /// The layer below the transport of a port.
    #[doc(alias = "IBV_LINK_LAYER_INFINIBAND")]
    #[doc(alias = "IBV_LINK_LAYER_ETHERNET")]
    pub enum LinkLayer: u8, "link layer" {
        /// Not specified.
        Unspecified = 0, "unspecified";
        /// InfiniBand: LIDs, and a subnet manager.
        InfiniBand = 1, "InfiniBand";
        /// Ethernet: RoCE or iWARP.
        Ethernet = 2, "Ethernet";
    }
}

number_enum! {
    /// The physical state of a port.
    pub enum PhysicalState: u8, "physical state" {
        /// No state change.
        NoChange = 0, "no state change";
        /// Asleep.
        Sleep = 1, "sleep";
        /// Looking for a peer.
        Polling = 2, "polling";
        /// Switched off.
        Disabled = 3, "disabled";
        /// Training the link.
        Training = 4, "port configuration training";
        /// The link is up.
        LinkUp = 5, "link up";
        /// Recovering from a link error.
        ErrorRecovery = 6, "link error recovery";
        /// Testing the link.
        PhyTest = 7, "phy test";
    }
}

number_enum! {
    /// The signalling speed of one lane.
    pub enum LinkSpeed: u32, "speed" {
        /// 2.5 Gb/s.
        Sdr = 1, "2.5 Gb/s";
        /// 5 Gb/s.
        Ddr = 2, "5 Gb/s";
        /// 10 Gb/s.
        Qdr = 4, "10 Gb/s";
        /// 10.3125 Gb/s.
        Fdr10 = 8, "10.3125 Gb/s";
        /// 14.0625 Gb/s.
        Fdr = 16, "14.0625 Gb/s";
        /// 25.78125 Gb/s.
        Edr = 32, "25.78125 Gb/s";
        /// 53.125 Gb/s.
        Hdr = 64, "53.125 Gb/s";
        /// 106.25 Gb/s.
        Ndr = 128, "106.25 Gb/s";
        /// 212.5 Gb/s.
        Xdr = 256, "212.5 Gb/s";
    }
}

impl LinkSpeed {
    /// The speed in Mb/s, rounded down.
    pub fn megabits_per_second(self) -> Option<u32> {
        Some(match self {
            Self::Sdr => 2_500,
            Self::Ddr => 5_000,
            Self::Qdr => 10_000,
            Self::Fdr10 => 10_312,
            Self::Fdr => 14_062,
            Self::Edr => 25_781,
            Self::Hdr => 53_125,
            Self::Ndr => 106_250,
            Self::Xdr => 212_500,
            Self::Unknown(_) => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(change: impl FnOnce(&mut ffi::ibv_port_attr)) -> PortAttributes {
        let mut raw = ffi::ibv_port_attr::default();
        change(&mut raw);
        raw.into()
    }

    #[test]
    fn unknown_values_come_out_as_such() {
        let odd = port(|raw| {
            raw.state = ffi::ibv_port_state(4711);
            raw.active_mtu = ffi::ibv_mtu(9);
            raw.link_layer = 200;
            raw.phys_state = 77;
            raw.active_width = 3;
            raw.active_speed_ex = 1 << 20;
            raw.gid_tbl_len = -5;
        });
        assert_eq!(odd.state(), PortState::Unknown(4711));
        assert_eq!(odd.active_mtu(), None);
        assert_eq!(odd.link_layer(), LinkLayer::Unknown(200));
        assert_eq!(odd.physical_state(), PhysicalState::Unknown(77));
        assert_eq!((odd.width(), odd.gid_table_len()), (None, 0));
        assert_eq!(odd.speed(), LinkSpeed::Unknown(1 << 20));
    }

    #[test]
    fn the_extended_speed_wins() {
        let port = port(|raw| {
            raw.active_speed = 64;
            raw.active_speed_ex = 256;
            raw.active_width = 2;
        });
        assert_eq!((port.speed(), port.width()), (LinkSpeed::Xdr, Some(4)));
    }

    #[test]
    fn what_a_port_says_has_words() {
        assert_eq!(LinkLayer::Ethernet.to_string(), "Ethernet");
        assert_eq!(PhysicalState::LinkUp.to_string(), "link up");
        assert_eq!(LinkSpeed::Edr.to_string(), "25.78125 Gb/s");
        assert_eq!(LinkLayer::Unknown(9).to_string(), "link layer 9");
        assert_eq!(PhysicalState::Unknown(9).to_string(), "physical state 9");
        assert_eq!(LinkSpeed::Unknown(9).to_string(), "speed 9");
    }

    #[cfg(feature = "serde")]
    #[test]
    fn a_port_serialises_by_the_names_of_its_methods() {
        let json = serde_json::to_value(port(|raw| {
            raw.state = ffi::ibv_port_state::IBV_PORT_ACTIVE;
            raw.active_mtu = ffi::ibv_mtu::IBV_MTU_1024;
            (raw.link_layer, raw.phys_state, raw.lid) = (2, 77, 5);
            (raw.active_width, raw.active_speed) = (2, 32);
        }))
        .unwrap();
        assert_eq!((&json["state"], &json["link_layer"]), (&"Active".into(), &"Ethernet".into()));
        assert_eq!(json["physical_state"], serde_json::json!({ "Unknown": 77 }));
        assert_eq!(
            (&json["active_mtu"], &json["max_mtu"]),
            (&1024.into(), &serde_json::Value::Null)
        );
        assert_eq!(
            (&json["lid"], &json["width"], &json["speed"]),
            (&5.into(), &4.into(), &"Edr".into())
        );
    }

    #[test]
    fn ethernet_needs_a_grh() {
        assert!(port(|raw| raw.link_layer = 2).grh_required());
        assert!(port(|raw| (raw.link_layer, raw.flags) = (1, 1)).grh_required());
        assert!(!port(|raw| raw.link_layer = 1).grh_required());
        assert!(port(|raw| raw.link_layer = 0).grh_required(), "EFA");
    }
}
