//! The sending side: keeps within the window, and sends again what was lost.

mod packets;

use super::core::Core;
use super::memory::Denied;
use super::queue_pair::QueuePair;
use super::sq_rq_state::TURN;
use super::work::{FlowStep, Operation, Posted, Release, SendRequest};
use crate::ffi::{ibv_event_type, ibv_qp_state as State, ibv_wc_status as Status};
use crate::link::LITTLE_ROOM;
use crate::link::Time;

/// For how long a peer of this machine that receives nothing is waited for in addition, in nanoseconds.
pub(super) const STARVED_FOR: Time = 60_000_000_000;

fn packets(length: u32, mtu: usize) -> u32 {
    (length as usize).div_ceil(mtu).max(1) as u32
}

/// The outcome of an attempt to send at the cursor.
enum Step {
    /// The request, or a packet of it, was sent.
    Sent,
    /// The request waits for an answer or for its turn.
    Waits,
    Failed(Status),
}

impl QueuePair {
    /// Adds a request to the send queue, which has room. Nothing is sent yet.
    pub(crate) fn push_send(&mut self, request: SendRequest, seal: Option<u32>) {
        let packets = match request.operation {
            Operation::Bind(_) | Operation::Invalidate { .. } => 0,
            Operation::Send | Operation::Write { .. } | Operation::Read { .. } => {
                packets(request.length, self.mtu)
            }
            _ => 1,
        };
        let first = self.sq.next;
        self.sq.next += u64::from(packets);
        self.sq.used += 1;
        self.sq.posted.push_back(Posted {
            request,
            first,
            packets,
            received: 0,
            done: false,
            failed: None,
            seal,
        });
    }

    /// Sends as many packets as state, window and turn allow.
    pub(crate) fn send_requests(&mut self, core: &mut Core) {
        if self.transport.has_flows() {
            return core.flow_steps.push_back(FlowStep::Send(self.number));
        }
        let asked_for = self.sq.next - self.sq.unacknowledged;
        if asked_for > self.sq.window.into() && self.transport.is_reliable() {
            self.open_window(core);
        }
        let mut turn = if !self.transport.is_reliable() && self.is_parked(core) { 0 } else { TURN };
        while self.is_up()
            && self.sq.not_ready_until.is_none()
            && self.sq.cursor < self.sq.posted.len()
        {
            if turn == 0 {
                self.run_later(core);
                break;
            }
            turn -= 1;
            match self.step(core) {
                Step::Sent => {}
                Step::Waits => break,
                Step::Failed(status) => {
                    self.sq.posted[self.sq.cursor].failed = Some(status);
                    break;
                }
            }
            self.complete_local(core);
        }
        self.complete_local(core);
        self.start_timer(core);
        self.check_drained(core);
    }

    /// Whether it waits for room, since nobody would tell it that packets were lost for want of it.
    fn is_parked(&mut self, core: &mut Core) -> bool {
        let Some(next) = self.sq.posted.get(self.sq.cursor) else { return false };
        let to = next.request.destination.map(|to| to.path);
        let is_full = self.path.or(to).is_some_and(|path| core.is_full(path));
        if is_full && !std::mem::replace(&mut self.is_runnable, true) {
            core.park(self.number);
        }
        is_full
    }

    /// Whether anything waits for an answer.
    fn is_waiting(&self) -> bool {
        self.sq.high > self.sq.unacknowledged && !self.sq.posted.is_empty()
    }

    fn start_timer(&mut self, core: &mut Core) {
        if !self.transport.is_reliable() || !self.is_up() {
            return;
        }
        if !self.is_waiting() {
            self.sq.deadline = None;
        } else if self.sq.deadline.is_none() && self.sq.not_ready_until.is_none() {
            self.restart_timer(core);
        }
        self.schedule(core);
    }

    /// 4.096 us * 2^timeout; 0 means for ever.
    pub(crate) fn restart_timer(&mut self, core: &mut Core) {
        let limited = self.attr.timeout & 0x1f != 0 && self.is_waiting();
        self.sq.deadline = limited.then(|| core.now() + self.timeout(core));
        self.schedule(core);
    }

    fn timeout(&self, core: &Core) -> Time {
        core.timeout(4096 << (self.attr.timeout & 0x1f), self.sq.late)
    }

    fn step(&mut self, core: &mut Core) -> Step {
        let (index, offset) = (self.sq.cursor, self.sq.offset);
        let posted = &self.sq.posted[index];
        if posted.failed.is_some() {
            return Step::Waits;
        }
        let begins = offset == 0;
        if begins && self.state == State::IBV_QPS_SQD {
            // Requests that have begun are sent again where needed; no new one begins.
            let again = posted.first < self.sq.high;
            if !again {
                return Step::Waits;
            }
        }
        if begins && posted.request.fence && self.sq.is_fetch_before(index) {
            return Step::Waits;
        }
        match posted.request.operation {
            Operation::Bind(bind) => {
                self.local(core, |core, qp| core.bind_window(qp.pd, qp.number, bind))
            }
            Operation::Invalidate { rkey } => {
                self.local(core, |core, qp| core.invalidate_window((qp.pd, qp.number), rkey))
            }
            Operation::Send | Operation::Write { .. } => self.send_data(core),
            _ => self.send_fetch(core),
        }
    }

    fn local(
        &mut self,
        core: &mut Core,
        act: impl FnOnce(&mut Core, &QueuePair) -> Result<(), Denied>,
    ) -> Step {
        if !self.sq.posted[self.sq.cursor].done {
            if act(core, self).is_err() {
                return Step::Failed(Status::IBV_WC_MW_BIND_ERR);
            }
            self.sq.posted[self.sq.cursor].done = true;
        }
        self.sq.cursor += 1;
        self.sq.offset = 0;
        Step::Sent
    }

    /// Completes requests at the head of the queue that need no answer, or have failed.
    pub(crate) fn complete_local(&mut self, core: &mut Core) {
        while let Some(front) = self.sq.posted.front() {
            if let Some(status) = front.failed {
                return self.fail_front(core, status);
            }
            if !(front.request.operation.is_local() && front.done) {
                return;
            }
            self.complete_front(core, Status::IBV_WC_SUCCESS);
        }
    }

    /// Whether this many packets, from this number on, fit into the window.
    fn has_room(&self, number: u64, packets: u32) -> bool {
        let end = number + u64::from(packets);
        !self.transport.is_reliable()
            || end.saturating_sub(self.sq.unacknowledged) <= self.sq.window.into()
    }

    /// Goes back to send again from the oldest packet that is not acknowledged.
    pub(crate) fn go_back(&mut self, core: &mut Core) {
        core.counters.retransmissions += 1;
        let number = self.sq.unacknowledged;
        self.sq.fetching.clear();
        let mut posted = self.sq.posted.iter();
        if let Some(index) = posted.position(|posted| number < posted.end()) {
            self.sq.cursor = index;
            // A request has at most 2^23 packets.
            self.sq.offset = number.saturating_sub(self.sq.posted[index].first) as u32;
        }
        self.sq.deadline = None;
        self.send_requests(core);
    }

    /// Determines how large the window is for the current way to the peer, which may change.
    fn open_window(&mut self, core: &mut Core) {
        let bytes = match self.path {
            Some(path) => core.link().room(path.from, path.to),
            None => LITTLE_ROOM,
        };
        let full = (bytes / self.mtu).clamp(32, 128) as u32;
        if self.sq.window == self.sq.full_window {
            self.sq.window = full;
        }
        self.sq.full_window = full;
    }

    /// Shrinks the window after a loss; acknowledgements make it grow again.
    pub(crate) fn shrink_window(&mut self) {
        self.sq.window = (self.sq.window / 2).max(4);
    }

    pub(crate) fn grow_window(&mut self) {
        self.sq.window = (self.sq.window + 1).min(self.sq.full_window);
    }

    /// Handles the timer: an answer is overdue, or the peer may be ready now.
    pub(crate) fn timer(&mut self, core: &mut Core, now: Time) {
        self.scheduled = None;
        if self.sq.not_ready_until.is_some_and(|at| at <= now) {
            self.sq.not_ready_until = None;
            if self.sq.high == self.sq.unacknowledged {
                // A flow was held back: nothing is sent again.
                return self.send_requests(core);
            }
            return self.go_back(core);
        }
        if let Some(at) = self.sq.deadline.filter(|at| *at <= now) {
            self.sq.deadline = None;
            if self.is_waiting() {
                // This device itself had no processor for longer than the peer had for its answer.
                let is_overslept = now - at > self.timeout(core);
                self.sq.late = true;
                let is_unread = self.path.is_some_and(|it| core.link().is_unread(it.from, it.to));
                let is_excused = (is_unread || is_overslept) && self.waits_on(core);
                if is_unread && is_excused {
                    return self.restart_timer(core);
                }
                self.shrink_window();
                return if is_excused { self.go_back(core) } else { self.retry(core) };
            }
        }
        self.schedule(core);
    }

    /// Counts the time of a timer that tells nothing about the peer: whether it is waited for without taking a retry.
    fn waits_on(&mut self, core: &Core) -> bool {
        // A timer that expires late counts for no more.
        self.sq.starved_for = self.sq.starved_for.saturating_add(self.timeout(core));
        self.sq.starved_for <= STARVED_FOR
    }

    /// Sends again, if there is a retry left.
    pub(crate) fn retry(&mut self, core: &mut Core) {
        if self.sq.retries >= self.attr.retry_cnt {
            return self.fail_front(core, Status::IBV_WC_RETRY_EXC_ERR);
        }
        self.sq.retries += 1;
        self.sq.asked_again = false;
        self.go_back(core);
    }

    /// In SQD: whether all requests that had begun are complete.
    pub(crate) fn check_drained(&mut self, core: &mut Core) {
        if self.state == State::IBV_QPS_SQD
            && self.draining
            && self.sq.offset == 0
            && !self.is_waiting()
        {
            self.draining = false;
            if std::mem::take(&mut self.drained_event) {
                self.raise(core, ibv_event_type::IBV_EVENT_SQ_DRAINED);
            }
        }
    }

    /// Releases the places that a polled completion covers.
    pub(crate) fn release(&mut self, release: Release) {
        match release {
            Release::None => {}
            Release::Send(places) => self.sq.used = self.sq.used.saturating_sub(places),
            Release::Receive => self.rq_used = self.rq_used.saturating_sub(1),
        }
    }
}
