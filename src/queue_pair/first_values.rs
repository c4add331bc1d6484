//! What a new queue pair chooses: how many reads and atomics of peers it answers, and its first packet sequence number,
//! which is unpredictable.

use crate::device::{Context, DeviceAttributes, EndpointGids};
use crate::queue_pair_state::QueuePairType;
use crate::settings::PacketSequenceNumber;
use crate::{ffi, hooks};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::process;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

/// What a queue pair takes of its device's `max_res_rd_atom`, as far as this context knows.
#[derive(Debug)]
pub(super) struct Answers {
    taken: Arc<AtomicU32>,
    count: u32,
}

impl Answers {
    /// Takes `wanted`; or, if that is not set, as many as the device allows a queue pair, at most 16 and at most half of
    /// what is left.
    pub(super) fn take(
        context: &Context<'_>,
        device: &DeviceAttributes,
        kind: QueuePairType,
        wanted: Option<u8>,
    ) -> Self {
        let most = device.max_qp_rd_atom().min(16);
        // Some devices report no total. Queue pairs of these types answer none.
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
        // Either the caller's, or at most 16.
        u8::try_from(self.count).unwrap_or(u8::MAX)
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// The first number of a queue pair: unpredictable, unless a provider that simulates a network chooses it.
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

/// A random number for the queue pair `num`, different each time.
///
/// The keys of [`RandomState`] are random numbers of the kernel (`getrandom`). Two virtual machines that
/// were started from one saved state have the same keys, as does a process after a fork. So the hash also
/// includes values that differ between machines (the best GID and the time), processes and calls.
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

    /// All 24 bits vary, and each call gives another number (of 2000 random ones, about 0.1 pairs are
    /// equal).
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
