//! Completion queues and shared receive queues.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::work::{Completion, Receive};
use crate::ffi::ibv_wc_status;
use crate::link::Time;

/// The completions that a completion queue raises its next event for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Armed {
    No,
    Solicited,
    Any,
}

#[derive(Debug)]
pub(crate) struct CompletionQueue {
    /// The address of the C object, which identifies it in events.
    pub(crate) handle: u64,
    pub(crate) context: u32,
    pub(crate) capacity: u32,
    pub(crate) ready: VecDeque<Completion>,
    /// The number of ready completions, readable without the lock.
    pub(crate) depth: Arc<AtomicUsize>,
    pub(crate) armed: Armed,
    /// A thread that waits for its events receives packets itself, and polls until the queue is empty before it sleeps. So what a poll
    /// receives raises no event, and the queue stays armed, unless others wait meanwhile.
    pub(crate) is_attended: bool,
    /// How many threads sleep until there is something in it, as far as they have told.
    pub(crate) sleepers: u32,
    /// Completions without an event may be there.
    pub(crate) owes: bool,
    /// Some were: a thread that sleeps, or begins to, looks once more.
    pub(crate) missed: bool,
    /// It has raised an event since the program took a completion from it.
    pub(crate) is_announced: bool,
    /// The program can ask when something completed.
    pub(crate) is_timed: bool,
    /// The file of its completion channel.
    pub(crate) channel: Option<c_int>,
    /// The number of queue pairs and shared receive queues that use it.
    pub(crate) users: u32,
    /// The queue was full, and has lost a completion.
    pub(crate) overrun: bool,
    /// Moderation: an event is delayed until there are this many completions, or this time (ns) has passed.
    pub(crate) moderation: (u32, Time),
    /// The number of completions that wait for a delayed event, and its latest time.
    pub(crate) held_back: u32,
    pub(crate) due: Option<Time>,
    pub(crate) scheduled: Option<Time>,
    /// The number of events that were raised, minus those that were taken back.
    pub(crate) events: u32,
    pub(crate) async_events: u32,
}

impl CompletionQueue {
    pub(crate) fn new(handle: u64, context: u32, capacity: u32, channel: Option<c_int>) -> Self {
        Self {
            handle,
            context,
            capacity,
            ready: VecDeque::new(),
            depth: Arc::default(),
            armed: Armed::No,
            is_attended: false,
            sleepers: 0,
            owes: false,
            missed: false,
            is_announced: false,
            is_timed: false,
            channel,
            users: 0,
            overrun: false,
            moderation: (0, 0),
            held_back: 0,
            due: None,
            scheduled: None,
            events: 0,
            async_events: 0,
        }
    }

    /// Must be called after `ready` has changed.
    pub(crate) fn publish(&self) {
        self.depth.store(self.ready.len(), Ordering::Release);
    }

    /// Whether a completion matches the requested event.
    pub(crate) fn wants(&self, completion: &Completion) -> bool {
        match self.armed {
            Armed::No => false,
            Armed::Any => true,
            Armed::Solicited => {
                completion.solicited || completion.status != ibv_wc_status::IBV_WC_SUCCESS
            }
        }
    }
}

/// Additional fields of a shared receive queue for XRC.
#[derive(Clone, Copy, Debug)]
pub(crate) struct XrcQueue {
    /// The handle of the XRC domain that it was made with, and which domain that is.
    pub(crate) handle: u32,
    pub(crate) domain: u64,
    /// The completion queue of its receives.
    pub(crate) cq: u32,
}

#[derive(Debug)]
pub(crate) struct SharedReceiveQueue {
    pub(crate) handle: u64,
    pub(crate) context: u32,
    pub(crate) pd: u32,
    pub(crate) receives: VecDeque<Receive>,
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    /// An event comes when fewer than this many receives are left; 0: none.
    pub(crate) limit: u32,
    pub(crate) users: u32,
    pub(crate) async_events: u32,
    pub(crate) xrc: Option<XrcQueue>,
}
