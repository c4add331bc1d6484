//! The sending side of reliable connections: handles the peer's answers.

use super::core::Core;
use super::queue_pair::QueuePair;
use super::work::{Data, Operation};
use crate::ffi::ibv_wc_status as Status;
use crate::link::Time;
use crate::wire::header::{Aeth, Bth, Nak, Reader, Syndrome};
use crate::wire::opcode;
use crate::wire::sequence::whole;

/// The times of the codes 0 to 31 of "receiver not ready", in units of 10 us.
const NOT_READY: [u64; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

pub(crate) fn not_ready_time(code: u8) -> Time {
    NOT_READY[usize::from(code & 0x1f)] * 10_000
}

impl QueuePair {
    /// Handles a packet of the peer's answers.
    pub(crate) fn response(&mut self, core: &mut Core, bth: &Bth, body: &[u8]) {
        let number = whole(bth.psn, self.sq.unacknowledged);
        // An answer to a request that was never sent, or was answered already.
        if !self.is_up() || number >= self.sq.high {
            return;
        }
        self.sq.late = false;
        let mut reader = Reader(body);
        match bth.opcode & !opcode::TRANSPORT {
            opcode::ACK => {
                let Some(aeth) = reader.aeth() else { return };
                self.acknowledgement(core, number, aeth);
            }
            opcode::ATOMIC_ACK => {
                let (Some(_), Some(value)) = (reader.aeth(), reader.u64()) else { return };
                self.fetched_value(core, number, value);
            }
            opcode::READ_MIDDLE => self.read_data(core, number, reader.rest()),
            opcode::READ_FIRST | opcode::READ_LAST | opcode::READ_ONLY => {
                if reader.aeth().is_some() {
                    self.read_data(core, number, reader.rest());
                }
            }
            _ => return,
        }
        if self.is_up() {
            self.complete_local(core);
            self.send_requests(core);
        }
    }

    fn acknowledgement(&mut self, core: &mut Core, number: u64, aeth: Aeth) {
        match aeth.meaning() {
            Syndrome::Ack => {
                if self.acknowledge(core, number) {
                    return;
                }
                self.ask_again(core);
            }
            Syndrome::NotReady(code) => {
                if !self.acknowledge_before(core, number) {
                    return self.ask_again(core);
                }
                // 7 means retry for ever.
                if self.attr.rnr_retry != 7 {
                    if self.sq.not_ready_retries >= self.attr.rnr_retry {
                        return self.fail_front(core, Status::IBV_WC_RNR_RETRY_EXC_ERR);
                    }
                    self.sq.not_ready_retries += 1;
                }
                self.sq.deadline = None;
                self.sq.not_ready_until = Some(core.now() + not_ready_time(code));
                self.schedule(core);
            }
            Syndrome::Nak(nak) => {
                if !self.acknowledge_before(core, number) {
                    return self.ask_again(core);
                }
                match nak {
                    Nak::Sequence => {
                        self.shrink_window();
                        self.retry(core);
                    }
                    Nak::InvalidRequest => {
                        self.fail_front(core, Status::IBV_WC_REM_INV_REQ_ERR);
                    }
                    Nak::RemoteAccess => self.fail_front(core, Status::IBV_WC_REM_ACCESS_ERR),
                    Nak::RemoteOperation => self.fail_front(core, Status::IBV_WC_REM_OP_ERR),
                    Nak::Destination => self.fail_front(core, Status::IBV_WC_REM_INV_RD_REQ_ERR),
                }
            }
            Syndrome::Reserved => {}
        }
    }

    /// Everything before this packet has arrived; false: answers with data are missing before it.
    fn acknowledge_before(&mut self, core: &mut Core, number: u64) -> bool {
        number == self.sq.unacknowledged || self.acknowledge(core, number - 1)
    }

    /// Everything up to this packet has arrived. False: an answer with data that should have come before it was
    /// lost.
    fn acknowledge(&mut self, core: &mut Core, number: u64) -> bool {
        let mut progress = false;
        let complete = loop {
            self.complete_local(core);
            if !self.is_up() || number < self.sq.unacknowledged {
                break true;
            }
            let Some(front) = self.sq.posted.front() else { break true };
            if front.request.operation.is_fetching() && !front.done {
                break false;
            }
            let end = front.end();
            progress = true;
            if number + 1 < end {
                self.sq.unacknowledged = number + 1;
                break true;
            }
            self.sq.unacknowledged = end;
            // The rest of a request that is being sent again need not be sent.
            if self.sq.cursor == 0 {
                self.sq.cursor = 1;
                self.sq.offset = 0;
            }
            self.complete_front(core, Status::IBV_WC_SUCCESS);
        };
        if progress {
            self.progress(core);
        }
        complete
    }

    /// The peer has answered: the retry counters start again.
    fn progress(&mut self, core: &mut Core) {
        self.sq.retries = 0;
        self.sq.not_ready_retries = 0;
        self.sq.not_ready_until = None;
        self.sq.starved_for = 0;
        self.sq.asked_again = false;
        self.grow_window();
        let unacknowledged = self.sq.unacknowledged;
        self.sq.fetching.retain(|&last| last >= unacknowledged);
        // Packets that were acknowledged in the meantime are not sent again.
        if let Some(posted) = self.sq.posted.get(self.sq.cursor) {
            let next = posted.first + u64::from(self.sq.offset);
            if next < unacknowledged && unacknowledged < posted.end() {
                self.sq.offset = (unacknowledged - posted.first) as u32;
            }
        }
        self.restart_timer(core);
    }

    /// Answers were lost: requests them again, once until the next answer arrives.
    fn ask_again(&mut self, core: &mut Core) {
        if self.is_up() && !self.sq.asked_again {
            self.shrink_window();
            self.retry(core);
            self.sq.asked_again = true;
        }
    }

    /// Handles a packet with data of a READ.
    fn read_data(&mut self, core: &mut Core, number: u64, payload: &[u8]) {
        if !self.acknowledge_before(core, number) || number != self.sq.unacknowledged {
            return self.ask_again(core);
        }
        if !self.is_up() {
            return;
        }
        let (pd, mtu) = (self.pd, self.mtu);
        let Some(front) = self.sq.posted.front_mut() else { return };
        if front.request.operation.is_remote_only() {
            if !payload.is_empty() {
                return self.fail_front(core, Status::IBV_WC_BAD_RESP_ERR);
            }
            front.done = true;
            self.acknowledge(core, number);
            return;
        }
        let (Operation::Read { .. }, Data::List(list)) =
            (front.request.operation, &front.request.data)
        else {
            return;
        };
        let from = front.received as usize * mtu;
        if payload.len() != mtu.min(front.request.length as usize - from) {
            return self.fail_front(core, Status::IBV_WC_BAD_RESP_ERR);
        }
        if core.keys.scatter(pd, list, from as u64, payload).is_err() {
            return self.fail_front(core, Status::IBV_WC_LOC_PROT_ERR);
        }
        front.received += 1;
        front.done = front.received == front.packets;
        if front.done {
            self.acknowledge(core, number);
        } else {
            self.sq.unacknowledged = number + 1;
            self.progress(core);
        }
    }

    /// Handles the answer of an atomic operation: the old value.
    fn fetched_value(&mut self, core: &mut Core, number: u64, value: u64) {
        if !self.acknowledge_before(core, number) || number != self.sq.unacknowledged {
            return self.ask_again(core);
        }
        if !self.is_up() {
            return;
        }
        let pd = self.pd;
        let Some(front) = self.sq.posted.front_mut() else { return };
        let Data::List(list) = &front.request.data else { return };
        let atomic = matches!(
            front.request.operation,
            Operation::FetchAdd { .. } | Operation::CompareSwap { .. }
        );
        if !atomic || front.first != number {
            return;
        }
        // Atomic values are in the byte order of the machine.
        if core.keys.scatter(pd, list, 0, &value.to_ne_bytes()).is_err() {
            return self.fail_front(core, Status::IBV_WC_LOC_PROT_ERR);
        }
        front.done = true;
        self.acknowledge(core, number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn not_ready_times_are_those_of_the_specification() {
        assert_eq!(not_ready_time(0), 655_360_000);
        assert_eq!(not_ready_time(1), 10_000);
        assert_eq!(not_ready_time(12), 640_000);
        assert_eq!(not_ready_time(31), 491_520_000);
    }
}
