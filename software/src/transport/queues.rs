//! Completion queues and shared receive queues.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::timers::Time;
use super::work::{Completion, Receive};
use crate::ffi::ibv_wc_status;

/// What a completion queue gives its next event for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Armed {
    No,
    Solicited,
    Any,
}

#[derive(Debug)]
pub(crate) struct CompletionQueue {
    /// What an event names it by: the address of the C object.
    pub(crate) handle: u64,
    pub(crate) context: u32,
    pub(crate) capacity: u32,
    pub(crate) ready: VecDeque<Completion>,
    /// How many are ready, for those who look without the lock.
    pub(crate) depth: Arc<AtomicUsize>,
    pub(crate) armed: Armed,
    /// The file of its completion channel.
    pub(crate) channel: Option<c_int>,
    /// How many queue pairs and shared receive queues use it.
    pub(crate) users: u32,
    /// It was full, and has lost a completion.
    pub(crate) overrun: bool,
    /// An event is held back until there are as many completions, or so much time (ns) has passed.
    pub(crate) moderation: (u32, Time),
    /// How many completions wait for such an event, and when it is due at the latest.
    pub(crate) held_back: u32,
    pub(crate) due: Option<Time>,
    pub(crate) scheduled: Option<Time>,
    /// How many events were raised, less those that were taken back.
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

    /// To be called when `ready` has changed.
    pub(crate) fn publish(&self) {
        self.depth.store(self.ready.len(), Ordering::Release);
    }

    /// Whether a completion is one that an event was asked for.
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
}
