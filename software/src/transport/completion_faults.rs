//! Completions that are held back, dropped, reordered or made up.

use std::collections::{BTreeMap, VecDeque};

use ibverbs::WorkStatus;

use crate::ffi::{ibv_wc_opcode, ibv_wc_status};
use crate::random::Random;
use crate::transport::work::{Completion, Release};

/// A completion that no request has.
///
/// ```
/// use ibverbs_software::MadeUpCompletion;
///
/// let completion = MadeUpCompletion { wr_id: 7, ..MadeUpCompletion::of_queue_pair(0x11) };
/// assert_eq!(completion.queue_pair, 0x11);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MadeUpCompletion {
    /// The number of the queue pair that it names. It decides which completion queue gets it.
    pub queue_pair: u32,
    /// The work request that it names.
    pub wr_id: u64,
    /// How that ended.
    pub status: WorkStatus,
    /// Whether it is of a receive.
    pub is_receive: bool,
    /// The number of bytes, of a receive.
    pub byte_len: u32,
}

impl MadeUpCompletion {
    /// A successful send, number 0, of that queue pair.
    pub fn of_queue_pair(queue_pair: u32) -> Self {
        let status = WorkStatus::Success;
        Self { queue_pair, wr_id: 0, status, is_receive: false, byte_len: 0 }
    }

    pub(crate) fn completion(&self) -> Completion {
        let opcode =
            if self.is_receive { ibv_wc_opcode::IBV_WC_RECV } else { ibv_wc_opcode::IBV_WC_SEND };
        let status = ibv_wc_status::from(self.status);
        let mut completion = Completion::new(self.wr_id, self.queue_pair, status, opcode);
        completion.length = self.byte_len;
        completion
    }
}

/// The faults of a device's completions.
#[derive(Debug, Default)]
pub(crate) struct CompletionFaults {
    /// Held completions, with the number of their queue.
    held: Option<VecDeque<(u32, Completion)>>,
    /// How many of the next ones never come.
    drop: u32,
}

impl CompletionFaults {
    /// Takes a completion that is to be dropped or held.
    #[inline]
    pub(crate) fn take(&mut self, queue: u32, completion: &Completion) -> bool {
        if self.drop > 0 {
            self.drop -= 1;
            return true;
        }
        let Some(held) = &mut self.held else { return false };
        held.push_back((queue, *completion));
        true
    }

    /// Returns the held completions, in order or shuffled, and holds no more.
    pub(crate) fn release(&mut self, seed: Option<u64>) -> Vec<(u32, Completion)> {
        let held = self.held.take().unwrap_or_default();
        match seed {
            Some(seed) => shuffle(held, seed),
            None => held.into(),
        }
    }

    pub(crate) fn hold(&mut self) {
        self.held.get_or_insert_default();
    }

    pub(crate) fn drop_next(&mut self, count: u32) {
        self.drop = self.drop.saturating_add(count);
    }

    /// The completions of a queue pair that is reset or destroyed never come.
    pub(crate) fn forget(&mut self, queue_pair: u32) {
        if let Some(held) = &mut self.held {
            held.retain(|(_, completion)| completion.qpn != queue_pair);
        }
    }
}

/// Shuffles completions as hardware may: those of the send queue of a queue pair stay in order, as do those of its
/// receives; between these queues there is no order.
fn shuffle(held: VecDeque<(u32, Completion)>, seed: u64) -> Vec<(u32, Completion)> {
    let mut streams: BTreeMap<(u32, bool), VecDeque<(u32, Completion)>> = BTreeMap::new();
    for (queue, completion) in held {
        let is_receive = completion.is_receive();
        streams.entry((completion.qpn, is_receive)).or_default().push_back((queue, completion));
    }
    let mut streams: Vec<_> = streams.into_values().collect();
    let (mut random, mut all) = (Random::new(seed), Vec::new());
    while !streams.is_empty() {
        let chosen = random.below(streams.len() as u64) as usize;
        match streams[chosen].pop_front() {
            Some(next) => all.push(next),
            None => drop(streams.swap_remove(chosen)),
        }
    }
    all
}

impl Completion {
    fn is_receive(&self) -> bool {
        self.release == Release::Receive || self.opcode.0 & ibv_wc_opcode::IBV_WC_RECV.0 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffling_keeps_the_order_of_each_queue() {
        let mut held = VecDeque::new();
        for id in 0..40 {
            let made_up = MadeUpCompletion {
                wr_id: id,
                is_receive: id % 2 == 0,
                ..MadeUpCompletion::of_queue_pair(id as u32 / 2 % 3)
            };
            held.push_back((1, made_up.completion()));
        }
        let ids = |seed| -> Vec<u64> {
            shuffle(held.clone(), seed).iter().map(|(_, completion)| completion.id).collect()
        };
        let (one, other) = (ids(1), ids(2));
        assert_ne!(one, other);
        assert_eq!(one, ids(1));
        for queue in 0..6 {
            let of_queue: Vec<_> = one.iter().filter(|&&id| id % 6 == queue).collect();
            assert!(of_queue.is_sorted() && of_queue.len() >= 6);
        }
        assert_eq!(one.len(), 40);
    }
}
