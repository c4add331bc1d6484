//! A queue pair: its state, errors and resets.

use std::collections::VecDeque;

use super::core::Core;
use super::sq_rq_state::{Responder, SendQueue};
use super::timers::Timer;
use super::work::{Completion, Flow, FlowStep, OutboundFlow, Path, Posted, Receive, Release};
use crate::ffi::{
    ibv_event_type, ibv_qp_attr, ibv_qp_cap, ibv_qp_state as State, ibv_wc_opcode, ibv_wc_status,
};
use crate::link::Time;
use crate::wire::opcode;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Rc,
    Uc,
    Ud,
    /// The sending half of an extended reliable connection: it only sends requests.
    XrcSend,
    /// The receiving half: it only answers. See [`xrc`](super::xrc).
    XrcReceive,
    /// These three send and receive by [`flows`](super::flows).
    Srd,
    DcInitiator,
    DcTarget,
    /// The engine's own.
    SrdFlow,
    DcFlow,
}

impl Transport {
    /// Its bits in an opcode.
    pub(crate) fn bits(self) -> u8 {
        match self {
            Self::Rc => opcode::RC,
            Self::Uc => opcode::UC,
            Self::Ud => opcode::UD,
            Self::XrcSend | Self::XrcReceive => opcode::XRC,
            Self::Srd | Self::SrdFlow => opcode::SRD,
            Self::DcInitiator | Self::DcTarget | Self::DcFlow => opcode::DC,
        }
    }

    /// Its requests name where they go, and flows carry them.
    pub(crate) fn has_flows(self) -> bool {
        matches!(self, Self::Srd | Self::DcInitiator | Self::DcTarget)
    }

    /// Whether requests are answered, and sent again if no answer comes.
    pub(crate) fn is_reliable(self) -> bool {
        !matches!(self, Self::Uc | Self::Ud)
    }
}

/// A C object of a queue pair. Receiving XRC queue pairs may have several of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    /// Its address, which identifies it in events.
    pub(crate) handle: u64,
    pub(crate) context: u32,
    /// The handle of the XRC domain that it was made with.
    pub(crate) xrc_domain: Option<u32>,
    /// The number of asynchronous events that were raised, minus those that were taken back.
    pub(crate) async_events: u32,
}

pub(crate) struct QueuePair {
    pub(crate) number: u32,
    pub(crate) owners: Vec<Owner>,
    /// These three are those of the shared receive queue that the current request names, if it is a receiving
    /// XRC queue pair; 0 or `None` before the first request.
    pub(crate) pd: u32,
    pub(crate) receive_cq: u32,
    pub(crate) srq: Option<u32>,
    pub(crate) transport: Transport,
    pub(crate) send_cq: u32,
    /// The XRC domain of a receiving XRC queue pair.
    pub(crate) xrc_domain: u64,
    /// All sends are signaled.
    pub(crate) all_signaled: bool,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) attr: ibv_qp_attr,
    pub(crate) state: State,
    /// How to reach the peer; none before RTR, and for datagrams.
    pub(crate) path: Option<Path>,
    pub(crate) mtu: usize,
    pub(crate) sq: SendQueue,
    pub(crate) rq: VecDeque<Receive>,
    /// Places of the receive queue that stay occupied until their completion is polled.
    pub(crate) rq_used: u32,
    pub(crate) responder: Responder,
    /// That peers must name to reach a DC target.
    pub(crate) access_key: u64,
    /// Those that it sends its requests by.
    pub(crate) flows: Vec<OutboundFlow>,
    /// It is a flow itself.
    pub(crate) flow: Option<Flow>,
    /// The send queue is draining (SQD). `drained_event`: the program asked for an event when that is done.
    pub(crate) draining: bool,
    pub(crate) drained_event: bool,
    pub(crate) scheduled: Option<Time>,
    pub(crate) is_runnable: bool,
}

impl std::fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { number, transport, state, .. } = self;
        write!(f, "QueuePair({number:#x}, {transport:?}, {state:?})")
    }
}

impl QueuePair {
    /// One without owners, objects and attributes, in RESET.
    pub(crate) fn new(number: u32, transport: Transport, mtu: usize) -> Self {
        Self {
            number,
            owners: Vec::new(),
            pd: 0,
            receive_cq: 0,
            srq: None,
            transport,
            send_cq: 0,
            xrc_domain: 0,
            all_signaled: false,
            cap: ibv_qp_cap::default(),
            attr: ibv_qp_attr::default(),
            state: State::IBV_QPS_RESET,
            path: None,
            mtu,
            sq: SendQueue::default(),
            rq: VecDeque::new(),
            rq_used: 0,
            responder: Responder::default(),
            access_key: 0,
            flows: Vec::new(),
            flow: None,
            draining: false,
            drained_event: false,
            scheduled: None,
            is_runnable: false,
        }
    }

    /// The number of the queue pair that completions name.
    pub(crate) fn named(&self) -> u32 {
        self.flow.map_or(self.number, |flow| flow.of)
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(self.state, State::IBV_QPS_RTS | State::IBV_QPS_SQD)
    }

    /// Whether it receives packets from the peer.
    pub(crate) fn receives(&self) -> bool {
        matches!(
            self.state,
            State::IBV_QPS_RTR | State::IBV_QPS_RTS | State::IBV_QPS_SQD | State::IBV_QPS_SQE
        )
    }

    pub(crate) fn raise(&mut self, core: &mut Core, kind: ibv_event_type) {
        for owner in &mut self.owners {
            owner.async_events += 1;
            core.raise(owner.context, kind, owner.handle);
        }
    }

    /// Requests another turn: there are more packets to send than fit in one turn.
    pub(crate) fn run_later(&mut self, core: &mut Core) {
        if !std::mem::replace(&mut self.is_runnable, true) {
            core.runnable.push_back(self.number);
        }
    }

    /// Sets the timer to the earliest time at which something is due.
    pub(crate) fn schedule(&mut self, core: &mut Core) {
        let due = [self.sq.deadline, self.sq.not_ready_until].into_iter().flatten().min();
        if let Some(due) = due {
            core.timers.set(Timer::QueuePair(self.number), due, &mut self.scheduled);
        }
    }

    /// Moves it to ERR after an error: everything that is outstanding is flushed.
    pub(crate) fn enter_error(&mut self, core: &mut Core) {
        self.send_last_answers(core);
        if self.state == State::IBV_QPS_ERR {
            return;
        }
        core.keep_out(self.number);
        self.state = State::IBV_QPS_ERR;
        self.sq.stop();
        self.responder.stop();
        self.flush_sends(core);
        self.flush_receives(core);
        if self.srq.is_some() && self.transport != Transport::XrcReceive && self.flow.is_none() {
            self.raise(core, ibv_event_type::IBV_EVENT_QP_LAST_WQE_REACHED);
        }
    }

    /// Moves it to SQE: the send queue stops, receiving goes on.
    pub(crate) fn enter_send_error(&mut self, core: &mut Core) {
        self.state = State::IBV_QPS_SQE;
        self.sq.stop();
        self.flush_sends(core);
    }

    /// Completes all sends with a flush error.
    pub(crate) fn flush_sends(&mut self, core: &mut Core) {
        while !self.sq.posted.is_empty() {
            self.complete_front(core, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
        }
        (self.sq.cursor, self.sq.offset) = (0, 0);
        (self.sq.unacknowledged, self.sq.high) = (self.sq.next, self.sq.next);
    }

    pub(crate) fn flush_receives(&mut self, core: &mut Core) {
        let begun = self.responder.receive.take();
        if self.flow.is_some() {
            // They are those of the queue pair that it serves.
            return self.give_back(core, begun);
        }
        for receive in begun.into_iter().chain(std::mem::take(&mut self.rq)) {
            self.complete_receive(core, receive.id, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
        }
    }

    fn give_back(&mut self, core: &mut Core, receive: Option<Receive>) {
        let Some(receive) = receive else { return };
        match self.srq {
            None => self.rq.push_front(receive),
            Some(number) => {
                core.srqs
                    .get_mut(number)
                    .iter_mut()
                    .for_each(|srq| srq.receives.push_front(receive.clone()));
            }
        }
    }

    /// Completes the oldest send.
    pub(crate) fn complete_front(&mut self, core: &mut Core, status: ibv_wc_status) {
        let Some(done) = self.sq.posted.pop_front() else { return };
        self.sq.cursor = self.sq.cursor.saturating_sub(1);
        match self.flow {
            Some(Flow { of, .. }) => {
                let flow = self.number;
                core.flow_steps.push_back(FlowStep::Done {
                    flow,
                    of,
                    posted: Box::new(done),
                    status,
                });
            }
            None => self.complete_send(core, done, status),
        }
    }

    /// Completes a send that has left its queue. A successful unsignaled send has no completion.
    pub(crate) fn complete_send(&mut self, core: &mut Core, done: Posted, status: ibv_wc_status) {
        self.sq.unsignaled += 1;
        let request = done.request;
        let now = || core.keys.seal(self.pd, &request);
        let is_changed = status == ibv_wc_status::IBV_WC_SUCCESS
            && done.seal.is_some_and(|seal| now().is_some_and(|now| now != seal));
        let status = if is_changed { ibv_wc_status::IBV_WC_GENERAL_ERR } else { status };
        if status == ibv_wc_status::IBV_WC_SUCCESS && !request.signaled && !self.all_signaled {
            return;
        }
        let opcode = request.operation.completion();
        let mut completion = Completion::new(request.id, self.number, status, opcode);
        completion.release = Release::Send(std::mem::take(&mut self.sq.unsignaled));
        if request.operation.returns_data() {
            completion.length = request.length;
        }
        core.complete(self.send_cq, completion);
        if is_changed {
            core.counters.changed_sends += 1;
            crate::say(format_args!(
                "ibverbs-software: queue pair {:#x}: the program has changed the data of a send before its completion \
                 (wr_id {:#x}): a device may send the old or the new",
                self.number, request.id
            ));
            self.enter_error(core);
        }
    }

    /// Completes a receive with an error.
    pub(crate) fn complete_receive(&mut self, core: &mut Core, id: u64, status: ibv_wc_status) {
        let opcode = ibv_wc_opcode::IBV_WC_RECV;
        let mut completion = Completion::new(id, self.named(), status, opcode);
        completion.release = self.receive_release();
        core.complete(self.receive_cq, completion);
    }

    /// The place that a completed receive releases; with a shared queue it is free already.
    pub(crate) fn receive_release(&self) -> Release {
        if self.srq.is_some() { Release::None } else { Release::Receive }
    }

    /// The receive that [`take_receive`](Self::take_receive) will take.
    pub(crate) fn next_receive<'a>(&'a self, core: &'a Core) -> Option<&'a Receive> {
        match self.srq {
            None => self.rq.front(),
            Some(number) => core.srqs.get(number)?.receives.front(),
        }
    }

    /// Takes the next receive, from the queue pair's own queue or the shared one.
    pub(crate) fn take_receive(&mut self, core: &mut Core) -> Option<Receive> {
        let Some(number) = self.srq else { return self.rq.pop_front() };
        let srq = core.srqs.get_mut(number)?;
        let receive = srq.receives.pop_front()?;
        if srq.limit != 0 && srq.receives.len() < srq.limit as usize {
            srq.limit = 0;
            srq.async_events += 1;
            let (context, handle) = (srq.context, srq.handle);
            core.raise(context, ibv_event_type::IBV_EVENT_SRQ_LIMIT_REACHED, handle);
        }
        Some(receive)
    }

    /// Fails the oldest send, and with it the queue pair.
    pub(crate) fn fail_front(&mut self, core: &mut Core, status: ibv_wc_status) {
        self.complete_front(core, status);
        if self.transport.is_reliable() {
            self.enter_error(core);
        } else {
            self.enter_send_error(core);
        }
    }

    /// A request of the peer was wrong: the peer has been answered, and its further requests are ignored.
    pub(crate) fn fail_responder(&mut self, core: &mut Core, event: ibv_event_type) {
        self.raise(core, event);
        self.enter_error(core);
    }

    /// Resets it to its initial state.
    pub(crate) fn reset(&mut self, core: &mut Core) {
        self.send_last_answers(core);
        core.timers.forget(Timer::QueuePair(self.number), &mut self.scheduled);
        self.state = State::IBV_QPS_RESET;
        self.sq = SendQueue::default();
        self.rq.clear();
        self.rq_used = 0;
        self.responder = Responder::default();
        if self.transport == Transport::XrcReceive {
            self.name_no_queue();
        }
        self.path = None;
        self.draining = false;
        core.answers -= u32::from(self.attr.max_dest_rd_atomic);
        self.attr = ibv_qp_attr::default();
    }
}
