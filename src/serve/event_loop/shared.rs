//! Receives that channels of a loop share.
//!
//! They have an entry and slots, but no queue pair: a message names the one that it came on. A slot is freed when its
//! completion is polled, or when the shared queue is destroyed. Removing a channel frees none, because the device does
//! not say which receives it has taken for that channel.

use std::ffi::c_int;
use std::sync::Arc;

use super::Loop;
use super::ended::{ChannelId, Ended, Failed, REMOVED};
use super::members::unknown;
use super::slots::{SHARED, State, index_of, no_memory};
use super::table::Table;
use crate::base::{Error, Result, ffi};
use crate::channel::ChannelBuilder;
use crate::channel::parts::{Limits, Target, check_context, refuse_send};
use crate::verbs::completion::CompletionQueue;
use crate::verbs::domain::DomainRef;
use crate::verbs::queue_pair::{MessageLimits, SharedReceiveQueue};

impl<'res, B> Loop<'res, B> {
    /// `ibv_create_srq`: adds a queue of at most `capacity` receives that channels
    /// [share](Self::create_sharing_channel). It takes that much [room](Self::capacity).
    ///
    /// [Post](Self::post) receives to it as to a channel. A message on any of these channels takes the next one, and
    /// [`next_ended`](Self::next_ended) returns it with that channel. So a server needs buffers only for the messages
    /// that arrive at one time, however many peers it has. Post a new receive for each message: if there is none, peers
    /// retry ([`max_rnr_retries`](ChannelBuilder::max_rnr_retries)), and then their connections fail.
    ///
    /// [`remove`](Self::remove) its channels first, then the queue. A receive that the device had taken for a removed
    /// channel may stay posted until the queue is removed.
    ///
    /// # Errors
    ///
    ///  - Those of [`SharedReceiveQueue::new`].
    ///  - `EINVAL`: the loop has not enough room, or the domain belongs to another context.
    #[doc(alias = "ibv_create_srq")]
    pub fn add_shared_receives(
        &mut self,
        domain: impl Into<DomainRef<'res>>,
        capacity: u32,
    ) -> Result<ChannelId> {
        let queue = shared_queue(&self.queue, domain.into(), capacity)?;
        self.place_shared(&queue, capacity)
    }

    /// Makes a place for receives of one element each.
    pub(crate) fn place_shared(
        &mut self,
        queue: &Arc<SharedReceiveQueue<'res>>,
        capacity: u32,
    ) -> Result<ChannelId> {
        // No send is posted: that queue has no slot.
        let target = Target::with(queue.as_raw().cast(), refuse_send, post_srq_recv);
        let limits = Limits {
            max_send_sge: 1,
            max_recv_sge: 1,
            messages: MessageLimits::new(0, 0).of_domain(queue.protection_domain()),
            reliable: true,
            private_reads: true,
        };
        let shared = &mut self.members.shared;
        shared.try_reserve(1).map_err(|_| no_memory())?;
        let id = self.take_place([0, capacity, 0], target, limits)?;
        for index in self.table.entries[id.index()].slots() {
            let slot = &mut self.table.slots[index as usize];
            slot.number |= SHARED;
            slot.queue_pair = 0;
        }
        self.table.cold[id.index()].is_shared = true;
        self.open(id, false);
        self.members.shared.push((id, queue.clone()));
        Ok(id)
    }

    #[cfg(feature = "async")]
    pub(crate) fn shares(
        &self,
        receives: ChannelId,
        queue: &Arc<SharedReceiveQueue<'res>>,
    ) -> bool {
        self.members.shared_receives(receives).is_some_and(|known| Arc::ptr_eq(known, queue))
    }

    /// As [`create_channel`](Self::create_channel), for a channel without receives of its own, which takes them from
    /// [shared ones](Self::add_shared_receives).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the loop has no such receives (any more).
    #[doc(alias = "ibv_create_qp")]
    pub fn create_sharing_channel(
        &self,
        domain: impl Into<DomainRef<'res>>,
        receives: ChannelId,
    ) -> Result<ChannelBuilder<'res>> {
        let queue = self.members.shared_receives(receives).ok_or(unknown("ibv_create_qp"))?;
        Ok(ChannelBuilder::new(domain).of_loop(&self.queue, Some(queue.clone())))
    }

    /// The queue of [shared receives](Self::add_shared_receives), for its [limit](SharedReceiveQueue::set_limit) and
    /// its token. `None`: the loop has no such receives (any more). Do not post to it.
    pub fn shared_receive_queue(&self, receives: ChannelId) -> Option<&SharedReceiveQueue<'res>> {
        self.members.shared_receives(receives).map(|queue| &**queue)
    }

    #[cold]
    pub(super) fn remove_shared(&mut self, receives: ChannelId) -> Result<()> {
        const VERB: &str = "ibv_destroy_srq";
        let Self { table, members, .. } = self;
        let place = members.shared.iter().position(|shared| shared.0 == receives);
        let Some(place) = place else { return Err(unknown(VERB)) };
        let (id, queue) = members.shared.swap_remove(place);
        let queue = match Arc::try_unwrap(queue) {
            Ok(queue) => queue,
            Err(queue) => {
                members.shared.push((id, queue));
                let reason = "a channel that uses the shared receives still exists";
                return Err(Error::with_reason(VERB, libc::EBUSY, reason));
            }
        };
        let entry = &mut table.entries[id.index()];
        entry.generation = entry.generation.wrapping_add(1);
        let slots = entry.slots();
        let destroyed = queue.close();
        if destroyed.is_ok() {
            members.give_back(id.index(), slots.len() as u32);
            table.end_without_completions(slots, REMOVED);
        } else {
            table.leak(slots);
        }
        destroyed
    }
}

/// `ibv_create_srq`: makes receives for channels that complete on this queue.
pub(crate) fn shared_queue<'res>(
    completions: &CompletionQueue<'res>,
    domain: DomainRef<'res>,
    capacity: u32,
) -> Result<Arc<SharedReceiveQueue<'res>>> {
    check_context("ibv_create_srq", &domain, completions)?;
    Ok(Arc::new(SharedReceiveQueue::new(domain, capacity, 1)?))
}

impl<B> Table<B> {
    /// Finds the channel with this queue pair, if it shares receives.
    #[inline]
    pub(super) fn sharing(&self, queue_pair: u32) -> Option<ChannelId> {
        let index = self.numbers.get(queue_pair).filter(|&index| self.cold[index].shares)?;
        let generation = self.entries.get(index)?.generation;
        Some(ChannelId { index: index as u32, generation })
    }

    /// Takes a message of shared receives that is for `next_ended`.
    #[inline]
    pub(super) fn take_shared(&mut self, completion: &ffi::ibv_wc) -> Option<Ended<B>> {
        let channel = self.sharing(completion.qp_num)?;
        let slot = self.slots.get_mut(index_of(completion.wr_id) as usize)?;
        if slot.number != completion.wr_id || slot.state != State::Token || !slot.is_shared() {
            return None;
        }
        Some(Ended { channel, ..slot.take(Failed::of(completion), completion) })
    }
}

/// `ibv_post_srq_recv`, under the type of `ibv_post_recv`.
///
/// # Safety
///
/// As for `ibv_post_srq_recv`.
unsafe extern "C" fn post_srq_recv(
    queue: *mut ffi::ibv_qp,
    list: *mut ffi::ibv_recv_wr,
    bad: *mut *mut ffi::ibv_recv_wr,
) -> c_int {
    // SAFETY: the arguments are valid by the caller's contract. The queue is a shared receive queue, behind another
    // type.
    unsafe { ffi::ibv_post_srq_recv(queue.cast(), list, bad) }
}
