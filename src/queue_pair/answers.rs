//! How many reads and atomics of peers a queue pair answers at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::device::{Context, DeviceAttributes};
use crate::queue_pair_state::QueuePairType;

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
