//! The settings of a queue pair, as values that are checked when they are made.
//!
//! ```
//! use std::time::Duration;
//! use ibverbs::queue_pair::ConnectionSettings;
//! use ibverbs::settings::{AckTimeout, MaxAckRetries, MaxRnrRetries};
//!
//! let timeout = AckTimeout::from_duration(Duration::from_millis(60))?; // rounded up to what devices have
//! assert_eq!(timeout.duration(), Some(Duration::from_nanos(67_108_864)));
//! assert!(MaxRnrRetries::new(8).is_err());
//! let max_ack_retries = MaxAckRetries::new(3)?;
//! let settings = ConnectionSettings { ack_timeout: timeout, max_ack_retries, ..Default::default() };
//! # Ok::<(), ibverbs::Error>(())
//! ```
//!
//! | | |
//! |---|---|
//! | [`AckTimeout`], [`MaxAckRetries`] | when and how often an unanswered packet is sent again |
//! | [`MinRnrTimer`], [`MaxRnrRetries`] | the same for a message that found no receive |
//! | [`MaximumTransferUnit`] | how long packets are |
//! | [`PacketSequenceNumber`] | the number of the first packet |
//! | [`ServiceLevel`], [`FlowLabel`], [`StaticRate`] | what the network does with packets |

use std::fmt;
use std::time::Duration;

use crate::base::{Error, Result, c_enum, ffi};

/// A number with an upper limit.
macro_rules! bounded_number {
    ($(#[$outer:meta])* pub struct $name:ident($repr:ty) <= $max:literal, $verb:literal, $what:literal,
        $(#[$of_default:meta])* default $default:literal) => {
        $(#[$outer])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name($repr);

        impl $name {
            /// The largest value.
            pub const MAX: Self = Self($max);

            #[doc = concat!("Checks `value`.\n\n# Errors\n\n - `EINVAL`: it is more than ", stringify!($max), ".")]
            pub const fn new(value: $repr) -> Result<Self> {
                if value > $max {
                    return Err(Error::out_of_range($verb, $what, value as u64, 0, $max));
                }
                Ok(Self(value))
            }

            /// The value for the device.
            pub const fn value(self) -> $repr {
                self.0
            }
        }

        impl Default for $name {
            $(#[$of_default])*
            fn default() -> Self {
                Self($default)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), self.0)
            }
        }

        impl TryFrom<$repr> for $name {
            type Error = Error;

            fn try_from(value: $repr) -> Result<Self> {
                Self::new(value)
            }
        }

        impl From<$name> for $repr {
            fn from(value: $name) -> Self {
                value.0
            }
        }
    };
}

bounded_number! {
    /// `rnr_retry`: how often a send is retried while the peer has no receive posted; 7 means for ever. Reliable
    /// connections only.
    ///
    /// The *peer's* [`MinRnrTimer`] sets the time between two tries.
    #[doc(alias = "rnr_retry")]
    pub struct MaxRnrRetries(u8) <= 7, "ibv_modify_qp", "rnr_retry",
    /// 6: the largest finite number.
    default 6
}

impl MaxRnrRetries {
    /// Never try again.
    pub const NONE: Self = Self(0);
    /// Try for ever: the send completes only when the peer has posted a receive, or is gone.
    pub const UNLIMITED: Self = Self(7);
}

bounded_number! {
    /// `retry_cnt`: how often a packet is sent again when the peer does not answer within the [`AckTimeout`]. Reliable
    /// connections only.
    ///
    /// On Soft-RoCE, 7 means for ever.
    #[doc(alias = "retry_cnt")]
    pub struct MaxAckRetries(u8) <= 7, "ibv_modify_qp", "retry_cnt",
    /// 6.
    default 6
}

bounded_number! {
    /// `min_rnr_timer`: how long a peer waits before it retries a message for which this queue pair had no receive.
    /// Reliable connections only.
    ///
    /// There are 32 times, from 10 µs ([`SHORTEST`](Self::SHORTEST)) to 655.36 ms ([`LONGEST`](Self::LONGEST), encoded
    /// as 0).
    #[doc(alias = "min_rnr_timer")]
    pub struct MinRnrTimer(u8) <= 31, "ibv_modify_qp", "min_rnr_timer",
    /// 10.24 ms. With [6 retries](MaxRnrRetries::default), the receiver has 61 ms to post a receive. A busy one needs
    /// more than a few ms; a longer timer delays each message that comes just before its receive.
    default 20
}

/// The times of the encodings, in units of 10 µs.
const RNR_TIMES: [u32; 32] = [
    65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
];

impl MinRnrTimer {
    /// 10 µs.
    pub const SHORTEST: Self = Self(1);
    /// 655.36 ms.
    pub const LONGEST: Self = Self(0);

    /// The encoded time.
    pub const fn duration(self) -> Duration {
        Duration::from_micros(10 * RNR_TIMES[self.0 as usize] as u64)
    }

    /// The shortest time that is at least `duration`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `duration` is more than 655.36 ms.
    pub const fn from_duration(duration: Duration) -> Result<Self> {
        let mut code = 1;
        while code <= 32 {
            let timer = Self(code % 32);
            if timer.duration().as_nanos() >= duration.as_nanos() {
                return Ok(timer);
            }
            code += 1;
        }
        Err(Error::invalid("ibv_modify_qp", "min_rnr_timer is at most 655.36 ms"))
    }
}

bounded_number! {
    /// `timeout`: how long the device waits for an answer before it sends a packet again, 4.096 µs · 2ⁿ; 0 means for
    /// ever. Reliable connections only.
    ///
    /// A send to a peer that is gone fails after about [`MaxAckRetries`] + 1 times this time; devices may take up to
    /// four times as long.
    #[doc(alias = "timeout")]
    pub struct AckTimeout(u8) <= 31, "ibv_modify_qp", "timeout",
    /// 67.1 ms.
    default 14
}

impl AckTimeout {
    /// Wait for ever: a lost packet is never sent again.
    pub const UNLIMITED: Self = Self(0);

    /// The encoded time; `None` if it is unlimited.
    pub const fn duration(self) -> Option<Duration> {
        if self.0 == 0 { None } else { Some(Duration::from_nanos(4096 << self.0)) }
    }

    /// The shortest time that is at least `duration`, from 8.192 µs.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `duration` is more than 2 h 26 min, the longest time.
    pub const fn from_duration(duration: Duration) -> Result<Self> {
        let mut code = 1;
        while code < 32 {
            if 4096_u128 << code >= duration.as_nanos() {
                return Ok(Self(code));
            }
            code += 1;
        }
        Err(Error::invalid("ibv_modify_qp", "timeout is at most 8796 s"))
    }
}

bounded_number! {
    /// `sq_psn`, `rq_psn`: the 24-bit number of the first packet. A receiver's must equal its sender's.
    #[doc(alias = "sq_psn")]
    #[doc(alias = "rq_psn")]
    pub struct PacketSequenceNumber(u32) <= 0xff_ffff, "ibv_modify_qp", "psn",
    /// 0.
    default 0
}

bounded_number! {
    /// `sl`: the service level, which the fabric maps to virtual lanes, or RoCE to Ethernet priorities.
    #[doc(alias = "sl")]
    pub struct ServiceLevel(u8) <= 15, "ibv_modify_qp", "sl",
    /// 0.
    default 0
}

bounded_number! {
    /// `flow_label`: the 20-bit flow label of the global route header. On RoCE v2 it also selects the UDP source port,
    /// by which routers spread flows.
    #[doc(alias = "flow_label")]
    pub struct FlowLabel(u32) <= 0xf_ffff, "ibv_modify_qp", "flow_label",
    /// 0.
    default 0
}

/// `enum ibv_mtu`: the largest payload of a packet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[doc(alias = "ibv_mtu")]
pub enum MaximumTransferUnit {
    /// 256 bytes.
    Mtu256 = 1,
    /// 512 bytes.
    Mtu512 = 2,
    /// 1024 bytes.
    Mtu1024 = 3,
    /// 2048 bytes.
    Mtu2048 = 4,
    /// 4096 bytes.
    Mtu4096 = 5,
}

/// As the number of bytes.
#[cfg(feature = "serde")]
impl serde::Serialize for MaximumTransferUnit {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(self.bytes())
    }
}

impl MaximumTransferUnit {
    /// All, the smallest first.
    pub const ALL: [Self; 5] =
        [Self::Mtu256, Self::Mtu512, Self::Mtu1024, Self::Mtu2048, Self::Mtu4096];

    /// The size in bytes.
    pub const fn bytes(self) -> u32 {
        128 << self as u32
    }

    /// The MTU of this size.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: no MTU has that size.
    pub fn from_bytes(bytes: u32) -> Result<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.bytes() == bytes).ok_or(Error::invalid(
            "ibv_modify_qp",
            "path_mtu is one of 256, 512, 1024, 2048 and 4096 bytes",
        ))
    }

    pub(crate) fn from_raw(raw: ffi::ibv_mtu) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.as_raw() == raw)
    }

    /// The value in C.
    pub const fn as_raw(self) -> ffi::ibv_mtu {
        ffi::ibv_mtu(self as u32)
    }
}

c_enum! {
    /// `enum ibv_rate`: a limit on the rate of a connection's packets.
    #[doc(alias = "ibv_rate")]
    #[derive(Default)]
    pub enum StaticRate: ibv_rate(u32) {
        /// No limit.
        #[default]
        Max = IBV_RATE_MAX,
        /// 2.5 Gb/s.
        Gbps2_5 = IBV_RATE_2_5_GBPS,
        /// 5 Gb/s.
        Gbps5 = IBV_RATE_5_GBPS,
        /// 10 Gb/s.
        Gbps10 = IBV_RATE_10_GBPS,
        /// 14 Gb/s.
        Gbps14 = IBV_RATE_14_GBPS,
        /// 20 Gb/s.
        Gbps20 = IBV_RATE_20_GBPS,
        /// 25 Gb/s.
        Gbps25 = IBV_RATE_25_GBPS,
        /// 28 Gb/s.
        Gbps28 = IBV_RATE_28_GBPS,
        /// 30 Gb/s.
        Gbps30 = IBV_RATE_30_GBPS,
        /// 40 Gb/s.
        Gbps40 = IBV_RATE_40_GBPS,
        /// 50 Gb/s.
        Gbps50 = IBV_RATE_50_GBPS,
        /// 56 Gb/s.
        Gbps56 = IBV_RATE_56_GBPS,
        /// 60 Gb/s.
        Gbps60 = IBV_RATE_60_GBPS,
        /// 80 Gb/s.
        Gbps80 = IBV_RATE_80_GBPS,
        /// 100 Gb/s.
        Gbps100 = IBV_RATE_100_GBPS,
        /// 112 Gb/s.
        Gbps112 = IBV_RATE_112_GBPS,
        /// 120 Gb/s.
        Gbps120 = IBV_RATE_120_GBPS,
        /// 168 Gb/s.
        Gbps168 = IBV_RATE_168_GBPS,
        /// 200 Gb/s.
        Gbps200 = IBV_RATE_200_GBPS,
        /// 300 Gb/s.
        Gbps300 = IBV_RATE_300_GBPS,
        /// 400 Gb/s.
        Gbps400 = IBV_RATE_400_GBPS,
        /// 600 Gb/s.
        Gbps600 = IBV_RATE_600_GBPS,
        /// 800 Gb/s.
        Gbps800 = IBV_RATE_800_GBPS,
        /// 1200 Gb/s.
        Gbps1200 = IBV_RATE_1200_GBPS,
    }
}

impl StaticRate {
    /// `ibv_rate_to_mbps`: the rate in megabits per second; `None` for [`Max`](Self::Max) and unnamed rates.
    #[doc(alias = "ibv_rate_to_mbps")]
    pub fn megabits(self) -> Option<u32> {
        // SAFETY: a pure function of any number.
        u32::try_from(unsafe { ffi::ibv_rate_to_mbps(self.into()) }).ok()
    }

    /// `mbps_to_ibv_rate`: the rate of that many megabits per second, if there is one.
    #[doc(alias = "mbps_to_ibv_rate")]
    pub fn from_megabits(megabits: u32) -> Option<Self> {
        // SAFETY: a pure function of any number.
        let rate = Self::from(unsafe { ffi::mbps_to_ibv_rate(megabits.try_into().ok()?) });
        (rate != Self::Max).then_some(rate)
    }

    /// `ibv_rate_to_mult`: the rate as a multiple of 2.5 gigabits per second; `None` if it is not one.
    #[doc(alias = "ibv_rate_to_mult")]
    pub fn multiple(self) -> Option<u32> {
        // SAFETY: a pure function of any number.
        u32::try_from(unsafe { ffi::ibv_rate_to_mult(self.into()) }).ok()
    }

    /// `mult_to_ibv_rate`: the rate of that many times 2.5 gigabits per second, if there is one.
    #[doc(alias = "mult_to_ibv_rate")]
    pub fn from_multiple(multiple: u32) -> Option<Self> {
        // SAFETY: a pure function of any number.
        let rate = Self::from(unsafe { ffi::mult_to_ibv_rate(multiple.try_into().ok()?) });
        (rate != Self::Max).then_some(rate)
    }
}

impl FlowLabel {
    /// `ibv_flow_label_to_udp_sport`: the UDP source port of RoCE v2 packets with this flow label, by which routers
    /// choose a path.
    #[doc(alias = "ibv_flow_label_to_udp_sport")]
    pub fn udp_source_port(self) -> u16 {
        // SAFETY: a pure function of any number.
        unsafe { ffi::ibv_flow_label_to_udp_sport(self.value()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_convert_both_ways() {
        assert_eq!(StaticRate::from_megabits(100_000), None, "the rate of 4 lanes has 103 Gb/s");
        for (rate, megabits, multiple) in [
            (StaticRate::Gbps2_5, Some(2500), Some(1)),
            (StaticRate::Gbps40, Some(40_000), Some(16)),
            (StaticRate::Gbps14, Some(14_062), None),
            (StaticRate::Max, None, None),
            (StaticRate::Unknown(200), None, None),
        ] {
            assert_eq!((rate.megabits(), rate.multiple()), (megabits, multiple), "{rate:?}");
            if let Some(megabits) = megabits {
                assert_eq!(StaticRate::from_megabits(megabits), Some(rate));
            }
            if let Some(multiple) = multiple {
                assert_eq!(StaticRate::from_multiple(multiple), Some(rate));
            }
        }
        assert_eq!(StaticRate::from_multiple(u32::MAX), None);
        assert_eq!(StaticRate::from_megabits(7), None);
    }

    #[test]
    fn a_flow_label_chooses_the_udp_port() {
        for (label, port) in [(0, 0xc000), (1, 0xc001), (0x4000, 0xc001), (0xf_ffff, 0xffc0)] {
            assert_eq!(FlowLabel::new(label).unwrap().udp_source_port(), port, "{label:#x}");
        }
    }

    #[test]
    fn limits_are_checked() {
        assert_eq!(MaxRnrRetries::new(7), Ok(MaxRnrRetries::UNLIMITED));
        let error = MaxRnrRetries::new(8).unwrap_err();
        assert_eq!(error.to_string(), "ibv_modify_qp: rnr_retry is 8, and must be within 0..=7");
        assert!(MaxAckRetries::new(8).is_err() && AckTimeout::new(32).is_err());
        assert!(PacketSequenceNumber::new(1 << 24).is_err() && FlowLabel::new(1 << 20).is_err());
        assert!(MinRnrTimer::new(32).is_err() && ServiceLevel::new(16).is_err());
        const SETTING: Result<AckTimeout> = AckTimeout::new(18);
        assert_eq!(SETTING.unwrap().value(), 18);
    }

    #[test]
    fn rnr_timers_convert_both_ways() {
        for (code, micros) in [(1, 10), (5, 60), (12, 640), (16, 2560), (31, 491_520), (0, 655_360)]
        {
            let timer = MinRnrTimer::new(code).unwrap();
            assert_eq!(timer.duration(), Duration::from_micros(micros));
            assert_eq!(MinRnrTimer::from_duration(timer.duration()), Ok(timer));
        }
        let up = MinRnrTimer::from_duration(Duration::from_micros(41)).unwrap();
        assert_eq!(up.duration(), Duration::from_micros(60));
        assert_eq!(MinRnrTimer::from_duration(Duration::ZERO), Ok(MinRnrTimer::SHORTEST));
        assert!(MinRnrTimer::from_duration(Duration::from_millis(656)).is_err());
    }

    #[test]
    fn ack_timeouts_convert_both_ways() {
        for code in 1..=31 {
            let timeout = AckTimeout::new(code).unwrap();
            let duration = timeout.duration().unwrap();
            assert_eq!(duration.as_nanos(), 4096 << code);
            assert_eq!(AckTimeout::from_duration(duration), Ok(timeout));
        }
        assert_eq!(AckTimeout::UNLIMITED.duration(), None);
        assert!(AckTimeout::from_duration(Duration::from_secs(8797)).is_err());
    }

    #[test]
    fn mtus_convert_both_ways() {
        for mtu in MaximumTransferUnit::ALL {
            assert_eq!(MaximumTransferUnit::from_bytes(mtu.bytes()), Ok(mtu));
            assert_eq!(MaximumTransferUnit::from_raw(mtu.as_raw()), Some(mtu));
        }
        assert_eq!(MaximumTransferUnit::Mtu4096.bytes(), 4096);
        assert!(MaximumTransferUnit::from_bytes(1500).is_err());
        assert_eq!(MaximumTransferUnit::from_raw(ffi::ibv_mtu(6)), None);
    }
}
