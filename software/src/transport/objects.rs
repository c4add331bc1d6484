//! Verbs: creating and destroying queues and queue pairs, posting and polling. Errors are errno values.

use std::ffi::c_int;
use std::net::IpAddr;

use super::Engine;
use super::queue_pair::{Owner, QueuePair, Transport};
use super::queues::{Armed, CompletionQueue, SharedReceiveQueue};
use super::timers::Timer;
use super::work::{Completion, Receive, Release, SendRequest};
use crate::ffi::{
    ibv_event_type as Event, ibv_qp_cap, ibv_qp_state as State, ibv_wc_opcode,
    ibv_wc_status as Status,
};

/// The number of an object's events that its owner has read or will read: the destroy verb waits until all
/// of them are acknowledged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EventsRead {
    pub(crate) completion: u32,
    pub(crate) asynchronous: u32,
}

/// A receiving XRC queue pair has no domain and no queues; a sending one has no receives.
pub(crate) struct NewQueuePair {
    pub(crate) handle: u64,
    pub(crate) context: u32,
    pub(crate) pd: Option<u32>,
    /// The handle of an XRC domain.
    pub(crate) xrc_domain: Option<u32>,
    pub(crate) transport: Transport,
    pub(crate) send_cq: Option<u32>,
    pub(crate) receive_cq: Option<u32>,
    pub(crate) srq: Option<u32>,
    pub(crate) all_signaled: bool,
    pub(crate) cap: ibv_qp_cap,
}

const QUEUE_PAIR_EVENTS: &[Event] = &[
    Event::IBV_EVENT_QP_FATAL,
    Event::IBV_EVENT_QP_REQ_ERR,
    Event::IBV_EVENT_QP_ACCESS_ERR,
    Event::IBV_EVENT_COMM_EST,
    Event::IBV_EVENT_SQ_DRAINED,
    Event::IBV_EVENT_PATH_MIG,
    Event::IBV_EVENT_PATH_MIG_ERR,
    Event::IBV_EVENT_QP_LAST_WQE_REACHED,
];

impl Engine {
    // ---- Completion queues ----

    pub(crate) fn create_cq(&mut self, cq: CompletionQueue) -> Result<u32, c_int> {
        if cq.capacity == 0 || cq.capacity > self.core.settings.max_cqe {
            return Err(libc::EINVAL);
        }
        self.core.cqs.insert(|_| cq).ok_or(libc::ENOMEM)
    }

    pub(crate) fn destroy_cq(&mut self, number: u32) -> Result<EventsRead, c_int> {
        let cq = self.core.cqs.get(number).ok_or(libc::EINVAL)?;
        if cq.users > 0 {
            return Err(libc::EBUSY);
        }
        let Some(mut cq) = self.core.cqs.remove(number) else { return Err(libc::EINVAL) };
        self.core.armed -= u32::from(cq.armed != Armed::No && !cq.is_attended);
        self.core.timers.forget(Timer::CompletionQueue(number), &mut cq.scheduled);
        let channel = self.core.take_back(cq.channel, cq.handle, &[]);
        let file = self.core.contexts.get(&cq.context).copied();
        let errors = self.core.take_back(file, cq.handle, &[Event::IBV_EVENT_CQ_ERR]);
        Ok(EventsRead {
            completion: cq.events.wrapping_sub(channel),
            asynchronous: cq.async_events.wrapping_sub(errors),
        })
    }

    pub(crate) fn resize_cq(&mut self, number: u32, capacity: u32) -> Result<(), c_int> {
        let most = self.core.settings.max_cqe;
        let cq = self.core.cqs.get_mut(number).ok_or(libc::EINVAL)?;
        if capacity == 0 || capacity > most || (capacity as usize) < cq.ready.len() {
            return Err(libc::EINVAL);
        }
        cq.capacity = capacity;
        Ok(())
    }

    /// Arms the queue for an event. "Solicited only" does not weaken an earlier request for any completion.
    pub(crate) fn arm(&mut self, number: u32, solicited_only: bool) -> Result<(), c_int> {
        let cq = self.core.cqs.get_mut(number).ok_or(libc::EINVAL)?;
        self.core.armed += u32::from(cq.armed == Armed::No && !cq.is_attended);
        if !solicited_only {
            cq.armed = Armed::Any;
        } else if cq.armed == Armed::No {
            cq.armed = Armed::Solicited;
        }
        // As adapters do: what has come since the last poll raises its event now. A program that arms first, and polls after
        // that, has had the event of what it has not polled yet. A thread that receives itself looks again before it sleeps.
        let is_told = cq.is_announced || cq.is_attended;
        if !is_told && cq.ready.iter().any(|completion| cq.wants(completion)) {
            self.core.completion_event(number);
        }
        Ok(())
    }

    /// A thread that waits for this queue's events receives packets itself.
    pub(crate) fn attend(&mut self, number: u32) {
        let Some(cq) = self.core.cqs.get_mut(number) else { return };
        let was = std::mem::replace(&mut cq.is_attended, true);
        self.core.armed -= u32::from(cq.armed != Armed::No && !was);
    }

    /// Nobody who waits for this queue's events receives packets any more.
    pub(crate) fn unattend(&mut self, number: u32) {
        let Some(cq) = self.core.cqs.get_mut(number) else { return };
        let was = std::mem::take(&mut cq.is_attended);
        self.core.armed += u32::from(cq.armed != Armed::No && was);
    }

    /// A thread that has found a completion queue empty is about to sleep for it. Returns false if there was something since
    /// then that raised no event: then it must look again.
    pub(crate) fn begin_sleep(&mut self, number: u32) -> bool {
        self.attend(number);
        let Some(cq) = self.core.cqs.get_mut(number) else { return false };
        let sleeps = !std::mem::take(&mut cq.missed);
        cq.sleepers += u32::from(sleeps);
        sleeps
    }

    /// The thread sleeps no more.
    pub(crate) fn end_sleep(&mut self, number: u32) {
        if let Some(cq) = self.core.cqs.get_mut(number) {
            cq.sleepers -= 1;
            cq.missed = false;
        }
    }

    /// Whether a completion queue had completions that raised no event, since the thread that sleeps for it has received
    /// them. Another thread may have polled them meanwhile: others still have to hear of them.
    pub(crate) fn has_missed(&self, number: u32) -> bool {
        self.core.cqs.get(number).is_some_and(|cq| cq.missed)
    }

    /// A poll of the program is over. Completions that it has left raise the event that they did not raise before: other
    /// threads may wait for it.
    pub(crate) fn polled(&mut self, number: u32) {
        let Some(cq) = self.core.cqs.get_mut(number) else { return };
        if std::mem::take(&mut cq.owes) && !cq.ready.is_empty() && cq.armed != Armed::No {
            self.core.completion_event(number);
        }
    }

    /// How many events a completion queue has raised.
    pub(crate) fn events(&self, number: u32) -> u32 {
        self.core.cqs.get(number).map_or(0, |cq| cq.events)
    }

    /// Removes the oldest completion.
    pub(crate) fn poll(&mut self, number: u32) -> Option<Completion> {
        let cq = self.core.cqs.get_mut(number)?;
        let mut completion = cq.ready.pop_front()?;
        cq.is_announced = false;
        cq.publish();
        if completion.release != Release::None
            && let Some(qp) = self.qps.get_mut(completion.qpn)
        {
            qp.release(completion.release);
        }
        if completion.status != Status::IBV_WC_SUCCESS && self.core.settings.garbles {
            // C leaves these fields undefined here, and hardware leaves anything in them.
            (completion.opcode, completion.length) = (ibv_wc_opcode(0xdead), u32::MAX);
        }
        Some(completion)
    }

    // ---- Shared receive queues ----

    pub(crate) fn create_srq(&mut self, mut srq: SharedReceiveQueue) -> Result<u32, c_int> {
        let settings = &self.core.settings;
        let fits = srq.max_wr > 0
            && srq.max_wr <= settings.max_srq_wr
            && srq.max_sge <= settings.max_sge
            && srq.limit <= srq.max_wr;
        let (pd, xrc) = (srq.pd, srq.xrc);
        let known = xrc.is_none_or(|xrc| self.core.cqs.get(xrc.cq).is_some());
        if !fits || !known || !self.core.use_pd(pd) {
            return Err(libc::EINVAL);
        }
        if let Some(xrc) = &mut srq.xrc {
            let Some(domain) = self.core.xrc_domains.enter(xrc.handle) else {
                self.core.leave_pd(pd);
                return Err(libc::EINVAL);
            };
            xrc.domain = domain;
        }
        let number = self.core.srqs.insert(|_| srq);
        let cq = xrc.map(|xrc| xrc.cq);
        match (number, xrc) {
            (Some(_), _) => self.count_users([cq, None], None, 1),
            (None, xrc) => {
                self.core.leave_pd(pd);
                xrc.iter().for_each(|xrc| self.core.xrc_domains.leave(xrc.handle));
            }
        }
        number.ok_or(libc::ENOMEM)
    }

    pub(crate) fn modify_srq(
        &mut self,
        number: u32,
        max_wr: Option<u32>,
        limit: Option<u32>,
    ) -> Result<(), c_int> {
        let most = self.core.settings.max_srq_wr;
        let srq = self.core.srqs.get_mut(number).ok_or(libc::EINVAL)?;
        let size = max_wr.unwrap_or(srq.max_wr);
        if size == 0 || size > most || (size as usize) < srq.receives.len() {
            return Err(libc::EINVAL);
        }
        if limit.unwrap_or(srq.limit) > size {
            return Err(libc::EINVAL);
        }
        srq.max_wr = size;
        srq.limit = limit.unwrap_or(srq.limit);
        Ok(())
    }

    pub(crate) fn destroy_srq(&mut self, number: u32) -> Result<EventsRead, c_int> {
        if self.core.srqs.get(number).ok_or(libc::EINVAL)?.users > 0 {
            return Err(libc::EBUSY);
        }
        let srq = self.core.srqs.remove(number).ok_or(libc::EINVAL)?;
        self.core.leave_pd(srq.pd);
        if let Some(xrc) = srq.xrc {
            self.core.xrc_domains.leave(xrc.handle);
            self.count_users([Some(xrc.cq), None], None, -1);
            self.forget_named_queue(number);
        }
        let file = self.core.contexts.get(&srq.context).copied();
        let kinds = [Event::IBV_EVENT_SRQ_ERR, Event::IBV_EVENT_SRQ_LIMIT_REACHED];
        let unread = self.core.take_back(file, srq.handle, &kinds);
        Ok(EventsRead { completion: 0, asynchronous: srq.async_events.wrapping_sub(unread) })
    }

    pub(crate) fn post_srq(&mut self, number: u32, receive: Receive) -> Result<(), c_int> {
        let srq = self.core.srqs.get_mut(number).ok_or(libc::EINVAL)?;
        if receive.list.len() > srq.max_sge as usize {
            return Err(libc::EINVAL);
        }
        if srq.receives.len() >= srq.max_wr as usize {
            return Err(libc::ENOMEM);
        }
        srq.receives.push_back(receive);
        Ok(())
    }

    // ---- Queue pairs ----

    pub(crate) fn create_qp(&mut self, new: NewQueuePair) -> Result<u32, c_int> {
        let settings = &self.core.settings;
        let cap = &new.cap;
        let receives = new.srq.is_none();
        if cap.max_send_wr > settings.max_qp_wr
            || (receives && cap.max_recv_wr > settings.max_qp_wr)
            || cap.max_send_sge > settings.max_sge
            || (receives && cap.max_recv_sge > settings.max_sge)
            || cap.max_inline_data > settings.max_inline
        {
            return Err(libc::EINVAL);
        }
        let cqs = [new.send_cq, new.receive_cq];
        let srq = new.srq.map(|srq| self.core.srqs.get(srq));
        let known = cqs.iter().flatten().all(|cq| self.core.cqs.get(*cq).is_some())
            // Shared queues of XRC domains serve no particular queue pair.
            && srq.is_none_or(|srq| srq.is_some_and(|srq| srq.xrc.is_none()))
            && new.xrc_domain.is_none_or(|domain| self.core.xrc_domains.domain(domain).is_some());
        if !known || !new.pd.is_none_or(|pd| self.core.use_pd(pd)) {
            return Err(libc::EINVAL);
        }
        let handle = new.xrc_domain;
        let xrc_domain = handle.and_then(|handle| self.core.xrc_domains.enter(handle)).unwrap_or(0);
        let mtu = 128 << self.core.settings.mtu.0;
        let (pd, srq) = (new.pd, new.srq);
        let owner = Owner {
            handle: new.handle,
            context: new.context,
            xrc_domain: new.xrc_domain,
            async_events: 0,
        };
        let has_room = self.program_queue_pairs() < self.core.settings.max_qp as usize;
        let make = |number| QueuePair {
            owners: vec![owner],
            pd: new.pd.unwrap_or(0),
            receive_cq: new.receive_cq.unwrap_or(0),
            srq: new.srq,
            send_cq: new.send_cq.unwrap_or(0),
            xrc_domain,
            all_signaled: new.all_signaled,
            cap: new.cap,
            ..QueuePair::new(number, new.transport, mtu)
        };
        let number = has_room.then(|| self.qps.insert(make)).flatten();
        match number {
            Some(_) => self.count_users(cqs, srq, 1),
            None => {
                pd.iter().for_each(|pd| self.core.leave_pd(*pd));
                handle.iter().for_each(|handle| self.core.xrc_domains.leave(*handle));
            }
        }
        number.ok_or(libc::ENOMEM)
    }

    fn count_users(&mut self, cqs: [Option<u32>; 2], srq: Option<u32>, by: i32) {
        for cq in cqs.into_iter().flatten() {
            if let Some(cq) = self.core.cqs.get_mut(cq) {
                cq.users = cq.users.saturating_add_signed(by);
            }
        }
        if let Some(srq) = srq.and_then(|srq| self.core.srqs.get_mut(srq)) {
            srq.users = srq.users.saturating_add_signed(by);
        }
    }

    /// Removes the completions of a queue pair that is reset or destroyed.
    pub(crate) fn forget_completions(&mut self, number: u32, cqs: [u32; 2]) {
        self.core.completion_faults.forget(number);
        for cq in cqs {
            if let Some(cq) = self.core.cqs.get_mut(cq) {
                cq.ready.retain(|completion| completion.qpn != number);
                cq.publish();
            }
        }
    }

    /// Ends what the C object at the address `handle` has of a queue pair, which is destroyed with the last one.
    pub(crate) fn destroy_qp(&mut self, number: u32, handle: u64) -> Result<EventsRead, c_int> {
        self.release_answers();
        let qp = self.qps.get_mut(number).ok_or(libc::EINVAL)?;
        let at = qp.owners.iter().position(|owner| owner.handle == handle).ok_or(libc::EINVAL)?;
        if qp.owners.len() == 1 && self.core.groups.values().any(|group| group.contains(&number)) {
            return Err(libc::EBUSY);
        }
        let owner = qp.owners.remove(at);
        if qp.owners.is_empty() {
            self.remove_qp(number);
        }
        owner.xrc_domain.iter().for_each(|domain| self.core.xrc_domains.leave(*domain));
        let file = self.core.contexts.get(&owner.context).copied();
        let unread = self.core.take_back(file, owner.handle, QUEUE_PAIR_EVENTS);
        Ok(EventsRead { completion: 0, asynchronous: owner.async_events.wrapping_sub(unread) })
    }

    fn remove_qp(&mut self, number: u32) {
        self.end_flows(number);
        let Some(mut qp) = self.qps.remove(number) else { return };
        qp.send_last_answers(&mut self.core);
        self.core.keep_out(number);
        self.core.timers.forget(Timer::QueuePair(number), &mut qp.scheduled);
        self.core.answers -= u32::from(qp.attr.max_dest_rd_atomic);
        // A receiving XRC queue pair does not own the queue that it names. The completions of shared queues stay.
        if qp.transport != Transport::XrcReceive {
            self.forget_completions(number, [qp.send_cq, qp.receive_cq]);
            self.count_users([Some(qp.send_cq), Some(qp.receive_cq)], qp.srq, -1);
            self.core.leave_pd(qp.pd);
        }
        if self.core.windows > 0 {
            self.core.unbind_all_of(number);
        }
    }

    /// Adds a queue pair to a multicast group.
    pub(crate) fn attach(&mut self, number: u32, group: IpAddr) -> Result<(), c_int> {
        let qp = self.qps.get(number).ok_or(libc::EINVAL)?;
        if qp.transport != Transport::Ud || !group.is_multicast() {
            return Err(libc::EINVAL);
        }
        if !self.core.groups.contains_key(&group) {
            self.core.link().join(group).map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))?;
        }
        let members = self.core.groups.entry(group).or_default();
        if !members.contains(&number) {
            members.push(number);
        }
        Ok(())
    }

    pub(crate) fn detach(&mut self, number: u32, group: IpAddr) -> Result<(), c_int> {
        let members = self.core.groups.get_mut(&group).ok_or(libc::EINVAL)?;
        let at = members.iter().position(|&member| member == number).ok_or(libc::EINVAL)?;
        members.swap_remove(at);
        if members.is_empty() {
            self.core.groups.remove(&group);
            self.core.link().leave(group);
        }
        Ok(())
    }

    // ---- Posting ----

    /// Whether a queue pair has room for this many more sends.
    pub(crate) fn check_sends(&self, number: u32, count: usize) -> Result<&QueuePair, c_int> {
        let qp = self.qps.get(number).ok_or(libc::EINVAL)?;
        if matches!(qp.state, State::IBV_QPS_RESET | State::IBV_QPS_INIT | State::IBV_QPS_RTR) {
            return Err(libc::EINVAL);
        }
        if qp.sq.used as usize + count > qp.cap.max_send_wr as usize {
            let none = matches!(qp.transport, Transport::XrcReceive | Transport::DcTarget);
            return Err(if none { libc::EINVAL } else { libc::ENOMEM });
        }
        Ok(qp)
    }

    /// Queues a checked request. [`kick`](Self::kick) sends it.
    pub(crate) fn post_send(&mut self, number: u32, request: SendRequest) -> Result<(), c_int> {
        self.check_sends(number, 1)?;
        if let Some(qp) = self.qps.get_mut(number) {
            let is_sealed = self.core.settings.strict && !request.operation.is_fetching();
            let seal = if is_sealed { self.core.keys.seal(qp.pd, &request) } else { None };
            if self.core.settings.one_sided && qp.carry_out(&mut self.core, &request) {
                qp.push_done(&mut self.core, request);
            } else {
                qp.push_send(request, seal);
            }
        }
        Ok(())
    }

    /// Sends what was posted, or flushes it.
    pub(crate) fn kick(&mut self, number: u32) {
        let Some(qp) = self.qps.get_mut(number) else { return };
        match qp.state {
            State::IBV_QPS_ERR | State::IBV_QPS_SQE => qp.flush_sends(&mut self.core),
            _ => qp.send_requests(&mut self.core),
        }
        self.release_answers();
    }

    pub(crate) fn post_receive(&mut self, number: u32, receive: Receive) -> Result<(), c_int> {
        let qp = self.qps.get_mut(number).ok_or(libc::EINVAL)?;
        if qp.state == State::IBV_QPS_RESET
            || qp.srq.is_some()
            || matches!(
                qp.transport,
                Transport::XrcSend
                    | Transport::XrcReceive
                    | Transport::DcInitiator
                    | Transport::DcTarget
            )
            || receive.list.len() > qp.cap.max_recv_sge as usize
        {
            return Err(libc::EINVAL);
        }
        if qp.rq_used >= qp.cap.max_recv_wr {
            return Err(libc::ENOMEM);
        }
        qp.rq_used += 1;
        if qp.state == State::IBV_QPS_ERR {
            qp.complete_receive(&mut self.core, receive.id, Status::IBV_WC_WR_FLUSH_ERR);
        } else {
            qp.rq.push_back(receive);
        }
        Ok(())
    }
}
