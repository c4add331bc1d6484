//! The settings of a connection, and the defaults that depend on the device or chance.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::process;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use super::address_vector::AddressVector;
use crate::base::{QueuePairType, ffi, hooks};
use crate::verbs::device::{Context, DeviceAttributes, EndpointGids};
use crate::verbs::memory::AccessFlags;
use crate::verbs::settings::{
    AckTimeout, FlowLabel, MaxAckRetries, MaxRnrRetries, MaximumTransferUnit, MinRnrTimer,
    PacketSequenceNumber, ServiceLevel, StaticRate,
};

/// Calls `$define` with all settings: transports, name, type, stored type, default.
macro_rules! connection_settings {
    ($define:ident) => {
        $define! {
            any peer {
                /// The port, counted from 1 (1 unless set).
                [Transport] port: u8, u8 = 1;
                /// The index of our GID. Unless set, the handshake chooses the first class of address that both sides
                /// have, in the order of [`Context::routable_gid`](crate::Context::routable_gid).
                [Transport] gid_index: u8, Option<u8> = None;
                /// The index of the partition key (0 unless set).
                [Transport] pkey_index: u16, u16 = 0;
                /// The peer's rights through the queue pair (only to send unless set). The memory must allow it too.
                [Transport] access: AccessFlags, AccessFlags = AccessFlags::LOCAL_WRITE;
                /// The largest path MTU (our port's active MTU unless set). The handshake uses the smaller one of both
                /// sides.
                [Transport] path_mtu: MaximumTransferUnit, Option<MaximumTransferUnit> = None;
                /// The number of the first packet that we send, the peer's `receive_psn` (random unless set). The
                /// endpoint contains it. After a reset the number is random again, so that no packet of the old
                /// connection matches the new one.
                [Transport] send_psn: PacketSequenceNumber, Option<PacketSequenceNumber> = None;
                /// The number of the first packet that we receive, the peer's `send_psn` (from its endpoint unless
                /// set). It applies to the first connection only.
                [Transport] receive_psn: PacketSequenceNumber, Option<PacketSequenceNumber> = None;
                /// How often to resend a message that found no receive (6 unless set).
                [Transport] max_rnr_retries: MaxRnrRetries, MaxRnrRetries = MaxRnrRetries::default();
                /// The service level (0 unless set).
                [Transport] service_level: ServiceLevel, ServiceLevel = ServiceLevel::default();
                /// The traffic class of the global route header (0 unless set).
                [Transport] traffic_class: u8, u8 = 0;
                /// The flow label of the global route header (0 unless set).
                [Transport] flow_label: FlowLabel, FlowLabel = FlowLabel::default();
                /// How many routers a packet may pass (64 unless set).
                [Transport] hop_limit: u8, u8 = AddressVector::DEFAULT_HOP_LIMIT;
                /// The rate limit (none unless set).
                [Transport] static_rate: StaticRate, StaticRate = StaticRate::Max;
                /// Whether packets have a global route header on InfiniBand too, as they always have on RoCE (where the
                /// port requires it, unless set).
                [Transport] global_route: bool, bool = false;
                /// How many reads and atomics we may have outstanding (the device's maximum, at most 16, unless set).
                /// The handshake lowers it to what the peer answers at a time.
                [Reliable] max_rd_atomic: u8, Option<u8> = None;
                /// How many reads and atomics of the peer we answer at a time. Unless set: the device's maximum for a
                /// queue pair, at most 16, and at most half of what the context's other queue pairs leave of the total
                /// ([`max_res_rd_atom`](crate::device::DeviceAttributes::max_res_rd_atom)). If nothing is left, peers
                /// cannot read.
                [Reliable] max_dest_rd_atomic: u8, Option<u8> = None;
                /// How long the peer waits before it resends a message that found no receive (10.24 ms unless set).
                [Reliable] min_rnr_timer: MinRnrTimer, MinRnrTimer = MinRnrTimer::default();
                /// How long the peer has to answer a packet (67.1 ms unless set).
                [Reliable] ack_timeout: AckTimeout, AckTimeout = AckTimeout::default();
                /// How often to resend an unanswered packet (6 unless set).
                [Reliable] max_ack_retries: MaxAckRetries, MaxAckRetries = MaxAckRetries::default();
            }
            datagrams {
                /// The Q_Key that datagrams to a UD queue pair must carry (0x11111111 unless set).
                [Datagram] qkey: u32, u32 = 0x1111_1111;
            }
        }
    };
}
pub(crate) use connection_settings;

macro_rules! settings_struct {
    (any peer { $($peer:tt)+ } datagrams { $($datagrams:tt)+ }) => {
        settings_struct! { $($peer)+ $($datagrams)+ }
    };
    ($($(#[$meta:meta])* [$bound:ident] $name:ident: $type:ty, $stored:ty = $default:expr;)+) => {
        /// The settings of a connection, for all builders of [queue
        /// pairs](crate::QueuePairBuilder::connection_settings) and channels, whose method has the same name.
        ///
        /// The defaults work on RoCE, InfiniBand and Soft-RoCE; `None` leaves the choice to the queue pair. A transport
        /// ignores settings that it lacks.
        ///
        /// ```
        /// use ibverbs::{Rc, queue_pair::ConnectionSettings, settings::MaxRnrRetries};
        ///
        /// # fn main() -> ibverbs::Result<()> {
        /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
        /// # rxe0.register();
        /// # let context = ibverbs::open("rxe0")?;
        /// # let domain = context.alloc_pd()?;
        /// # let queue = context.create_cq(16)?;
        /// let max_rnr_retries = MaxRnrRetries::UNLIMITED;
        /// let settings = ConnectionSettings { max_rnr_retries, traffic_class: 0x60, ..Default::default() };
        /// let queue_pair = domain.create_qp(&queue, &queue, Rc).connection_settings(settings).build()?;
        /// let channel = domain.create_channel().connection_settings(settings).build()?;
        /// # Ok(())
        /// # }
        /// ```
        #[derive(Clone, Copy, Debug)]
        pub struct ConnectionSettings {
            $($(#[$meta])* pub $name: $stored,)+
        }

        impl Default for ConnectionSettings {
            fn default() -> Self {
                Self { $($name: $default,)+ }
            }
        }
    };
}
connection_settings!(settings_struct);

/// A part of `max_res_rd_atom`, as far as this context knows.
#[derive(Debug)]
pub(super) struct Answers {
    taken: Arc<AtomicU32>,
    count: u32,
}

impl Answers {
    pub(super) fn take(
        context: &Context<'_>,
        device: &DeviceAttributes,
        kind: QueuePairType,
        wanted: Option<u8>,
    ) -> Self {
        let most = device.max_qp_rd_atom().min(16);
        // Some devices report no total. Queue pairs of these types answer no reads.
        let all = match kind {
            QueuePairType::UnreliableDatagram
            | QueuePairType::UnreliableConnected
            | QueuePairType::RawPacket
            | QueuePairType::XrcSend => 0,
            _ => device.max_res_rd_atom(),
        };
        let share = |taken: u32| match wanted {
            Some(wanted) => wanted.into(),
            None if all == 0 => most,
            None => most.min(all.saturating_sub(taken).div_ceil(2)),
        };
        let taken = context.answers_taken().clone();
        let mut before = taken.load(Ordering::Relaxed);
        let count = loop {
            let count = share(before);
            let Some(after) = before.checked_add(count) else { break 0 };
            let order = Ordering::Relaxed;
            match taken.compare_exchange_weak(before, after, order, order) {
                Ok(_) => break count,
                Err(now) => before = now,
            }
        };
        Self { taken, count }
    }

    pub(super) fn count(&self) -> u8 {
        u8::try_from(self.count).unwrap_or(u8::MAX)
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// Unpredictable, unless a provider that simulates a network chooses it.
///
/// # Safety
///
/// `qp` is live.
pub(super) unsafe fn first_psn(qp: *mut ffi::ibv_qp, gids: &EndpointGids) -> PacketSequenceNumber {
    if let Some(hooks) = hooks::hooks() {
        // SAFETY: the caller vouches for the queue pair.
        let chosen = unsafe { (hooks.first_psn)(qp) };
        if let Some(psn) = chosen.and_then(|psn| PacketSequenceNumber::new(psn).ok()) {
            return psn;
        }
    }
    // SAFETY: as above.
    random_psn(unsafe { (*qp).qp_num }, gids)
}

/// The keys of [`RandomState`] come from the kernel (`getrandom`). Virtual machines started from one saved state share
/// them, as does a process after a fork. So the hash includes the best GID, the time, the process and a count.
fn random_psn(num: u32, gids: &EndpointGids) -> PacketSequenceNumber {
    static KEYS: OnceLock<RandomState> = OnceLock::new();
    static CALLS: AtomicU64 = AtomicU64::new(0);

    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let values = [
        gids.first().gid.to_ipv6().to_bits(),
        u128::from(num) << 32 | u128::from(process::id()),
        u128::from(CALLS.fetch_add(1, Ordering::Relaxed)) << 64 ^ now.as_nanos(),
    ];
    let mut hasher = KEYS.get_or_init(RandomState::new).build_hasher();
    hasher.write(zerocopy::IntoBytes::as_bytes(&values));
    let number = hasher.finish() as u32 & PacketSequenceNumber::MAX.value();
    PacketSequenceNumber::new(number).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Among 2000 calls, about 0.1 pairs are equal.
    #[test]
    fn every_bit_varies() {
        let gids = EndpointGids::default();
        let numbers: Vec<u32> = (0..2000).map(|_| random_psn(1, &gids).value()).collect();
        for bit in 0..24 {
            let set = numbers.iter().filter(|&&number| number >> bit & 1 == 1).count();
            assert!((700..1300).contains(&set), "bit {bit} was set {set} times");
        }
        let mut different = numbers.clone();
        different.sort_unstable();
        different.dedup();
        assert!(different.len() > 1990, "{}", different.len());
    }
}
