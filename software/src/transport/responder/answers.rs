//! Answers to the peer's requests: they wait, and leave in the order of the requests.

use super::super::core::Core;
use super::super::queue_pair::QueuePair;
use super::super::sq_rq_state::Answer;
use crate::ffi::{ibv_access_flags as Access, ibv_event_type as Event};
use crate::wire::header::{Aeth, Bth, Nak, Syndrome};
use crate::wire::opcode;
use crate::wire::sequence::add;

/// Beyond the answers with data, this many acknowledgements and refusals wait at the most.
const MOST_REFUSALS: usize = 16;

impl QueuePair {
    pub(super) fn answer(&mut self, core: &mut Core, answer: Answer) {
        self.queue_answer(answer);
        self.send_answers(core);
    }

    /// The program that receives will now get a completion. If it posts, the answer goes with that.
    pub(super) fn answer_later(&mut self, core: &mut Core, answer: Answer) {
        self.queue_answer(answer);
        if !core.held.contains(&self.number) {
            core.held.push(self.number);
        }
    }

    fn queue_answer(&mut self, answer: Answer) {
        let both_acknowledge = |last: &Answer| {
            let is_ack = |answer: &Answer| {
                matches!(answer, Answer::Acknowledge { syndrome: Syndrome::Ack, .. })
            };
            is_ack(last) && is_ack(&answer)
        };
        let is_full = self.responder.answers.len() > self.most_fetches() + MOST_REFUSALS;
        match self.responder.answers.back_mut() {
            // The later acknowledgement covers both.
            Some(last) if both_acknowledge(last) => *last = answer,
            // The peer has asked before it had an answer. The last one tells the same.
            Some(last @ Answer::Acknowledge { .. }) if is_full => *last = answer,
            _ => self.responder.answers.push_back(answer),
        }
    }

    /// Sends answers, as many packets as one turn allows. In each round there is one turn, however many requests have
    /// come: other queue pairs wait for theirs, and the program for the device's lock.
    pub(crate) fn send_answers(&mut self, core: &mut Core) {
        if self.responder.turn.0 != core.round {
            self.responder.give_turn(core.round);
        }
        while let Some(&answer) = self.responder.answers.front() {
            if self.responder.turn.1 == 0 {
                return self.run_later(core);
            }
            self.responder.turn.1 -= 1;
            let rest = self.send_answer(core, answer);
            // A failure has dropped all answers.
            match (rest, self.responder.answers.front_mut()) {
                (Some(rest), Some(front)) => *front = rest,
                (None, Some(_)) => {
                    self.responder.answers.pop_front();
                    if answer.is_of_new_fetch() {
                        let arrives = core.now().saturating_add(core.link().latency());
                        self.responder.under_way.push_back((arrives, core.round));
                    }
                }
                (_, None) => return,
            }
        }
    }

    /// Sends the answers up to the last acknowledgement, in one more turn: the queue pair ends, which its program may decide as soon as
    /// it has all messages that it waits for, and the peer waits for the acknowledgement. No data is sent behind it.
    pub(crate) fn send_last_answers(&mut self, core: &mut Core) {
        let answers = &mut self.responder.answers;
        while answers.back().is_some_and(|it| !matches!(it, Answer::Acknowledge { .. })) {
            answers.pop_back();
        }
        self.responder.give_turn(core.round);
        self.send_answers(core);
    }

    /// Sends one packet; returns the rest of the answer.
    fn send_answer(&mut self, core: &mut Core, answer: Answer) -> Option<Answer> {
        let path = self.path?;
        let (qpn, msn) = (self.attr.dest_qp_num, self.responder.msn);
        let operation = match answer {
            Answer::Acknowledge { .. } => opcode::ACK,
            Answer::Value { .. } => opcode::ATOMIC_ACK,
            Answer::Read { left, begins, .. } => match (begins, left as usize <= self.mtu) {
                (true, true) => opcode::READ_ONLY,
                (true, false) => opcode::READ_FIRST,
                (false, true) => opcode::READ_LAST,
                (false, false) => opcode::READ_MIDDLE,
            },
        };
        let syndrome = match answer {
            Answer::Acknowledge { syndrome, .. } => syndrome,
            _ => Syndrome::Ack,
        };
        let aeth = Aeth { syndrome: syndrome.code(), msn };
        let bth = Bth::new(self.transport.bits() | operation, qpn, answer.psn());
        let (number, mtu) = (self.number, self.mtu);
        let sent = core.transmit(path, bth, |keys, packet| {
            if operation != opcode::READ_MIDDLE {
                packet.extend_from_slice(&aeth.bytes());
            }
            match answer {
                Answer::Value { value, .. } => packet.extend_from_slice(&value.to_be_bytes()),
                Answer::Read { pd, address, rkey, left, .. } if left > 0 => {
                    let who = (pd, number);
                    let part = mtu.min(left as usize);
                    let access = Access::IBV_ACCESS_REMOTE_READ;
                    keys.remote(who, rkey, address, part as u64, access)?.read(part, packet);
                }
                _ => {}
            }
            Ok(())
        });
        if sent.is_err() {
            // The right to read was revoked in the meantime.
            let syndrome = Syndrome::Nak(Nak::RemoteAccess);
            self.responder.answers.clear();
            self.send_answer(core, Answer::Acknowledge { psn: answer.psn(), syndrome });
            self.fail_responder(core, Event::IBV_EVENT_QP_ACCESS_ERR);
            return None;
        }
        match answer {
            Answer::Read { psn, pd, address, rkey, left, again, .. } if left as usize > mtu => {
                let (psn, address) = (add(psn, 1), address.wrapping_add(mtu as u64));
                let left = left - mtu as u32;
                Some(Answer::Read { psn, pd, address, rkey, left, begins: false, again })
            }
            _ => None,
        }
    }
}
