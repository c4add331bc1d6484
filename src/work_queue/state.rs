//! The states and the options of work queues.

use crate::ffi;
use crate::foreign_enum::foreign_enum;

foreign_enum! {
    /// `enum ibv_wq_state`: the state of a work queue.
    #[doc(alias = "ibv_wq_state")]
    pub enum State: ibv_wq_state(u32), "state" {
        /// New, or reset: it receives nothing, and has no receives.
        Reset = IBV_WQS_RESET, "RESET";
        /// It receives.
        Ready = IBV_WQS_RDY, "RDY";
        /// Failed, or moved here: receives complete as [`Flushed`](crate::WorkStatus::Flushed).
        Error = IBV_WQS_ERR, "ERR";
    }
}

impl State {
    /// Whether a queue can go from this state to the other.
    pub(super) fn leads_to(self, to: Self) -> bool {
        !matches!(
            (self, to),
            (Self::Unknown(_), _)
                | (_, Self::Unknown(_))
                | (Self::Reset, Self::Error)
                | (Self::Error, Self::Ready)
        )
    }
}

bitflags::bitflags! {
    /// `enum ibv_wq_flags`: options of a work queue that few devices have.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    #[doc(alias = "ibv_wq_flags")]
    pub struct Flags: u32 {
        /// The VLAN tag of an Ethernet frame is removed and reported in the completion.
        const CVLAN_STRIPPING = ffi::ibv_wq_flags::IBV_WQ_FLAGS_CVLAN_STRIPPING.0;
        /// The checksum of an Ethernet frame is received with it.
        const SCATTER_FCS = ffi::ibv_wq_flags::IBV_WQ_FLAGS_SCATTER_FCS.0;
        /// A packet that finds no receive waits a while instead of being dropped.
        const DELAY_DROP = ffi::ibv_wq_flags::IBV_WQ_FLAGS_DELAY_DROP.0;
        /// Writes to memory are padded to whole cache lines.
        const PCI_WRITE_END_PADDING = ffi::ibv_wq_flags::IBV_WQ_FLAGS_PCI_WRITE_END_PADDING.0;
    }
}

#[cfg(test)]
mod tests {
    use super::State as S;

    #[test]
    fn a_failed_queue_is_reset_before_it_is_used_again() {
        for (from, to, possible) in [
            (S::Reset, S::Ready, true),
            (S::Ready, S::Error, true),
            (S::Ready, S::Reset, true),
            (S::Error, S::Reset, true),
            (S::Error, S::Ready, false),
            (S::Reset, S::Error, false),
            (S::Ready, S::Unknown(3), false),
        ] {
            assert_eq!(from.leads_to(to), possible, "{from} to {to}");
        }
    }
}
