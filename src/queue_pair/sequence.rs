//! Unpredictable first packet sequence numbers.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::process;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use crate::device::EndpointGids;
use crate::settings::PacketSequenceNumber;
use crate::{ffi, hooks};

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
