//! READ and WRITE that the initiator carries out in the target's memory: see [`Builder::one_sided`](crate::Builder::one_sided).

use std::sync::Arc;

use super::core::Core;
use super::memory::Backing;
use super::queue_pair::{QueuePair, Transport};
use super::work::{Data, Extra, Operation, Posted, SendRequest};
use crate::ffi::{ibv_qp_state as State, ibv_wc_status as Status};
use crate::link::{DirectAccess, OneSided};

/// The most parts of a request's own memory.
const PARTS: usize = 32;

/// The target's side.
impl Core {
    pub(crate) fn direct_access(&self) -> Option<&Arc<DirectAccess>> {
        self.direct_access.as_ref()
    }

    /// Lets peers access a region, as far as it allows that.
    pub(crate) fn let_into(&self, key: u32) {
        if let (Some(direct_access), Some(region)) = (&self.direct_access, self.keys.region(key))
            && let Backing::Memory(start) = region.backing
        {
            let range = (start, region.iova, region.length);
            direct_access.add_region((key, region.pd), range, region.access);
        }
    }

    /// No peer comes into a region from here on. A thread that takes its memory away waits for peers that are in it, without
    /// the engine's lock.
    pub(crate) fn keep_out_of(&self, key: u32) -> Option<Arc<DirectAccess>> {
        self.direct_access.iter().for_each(|direct_access| direct_access.remove_region(key));
        self.direct_access.clone()
    }

    /// Lets the peer of a queue pair access memory, if the queue pair receives.
    pub(super) fn let_in(&self, qp: &QueuePair) {
        if let (Some(direct_access), Some(path)) = (&self.direct_access, qp.path)
            && qp.transport == Transport::Rc
            && qp.receives()
        {
            let peer = (path.to, qp.attr.dest_qp_num);
            direct_access.add_pair((qp.number, qp.pd), peer, qp.attr.qp_access_flags);
        }
    }

    /// The peer of a queue pair comes into no memory from here on.
    pub(super) fn keep_out(&self, number: u32) {
        self.direct_access.iter().for_each(|direct_access| direct_access.remove_pair(number));
    }
}

/// The initiator's side.
impl QueuePair {
    /// Carries a request out that would be the next one, if that is possible. Nothing may be under way before it.
    pub(super) fn carry_out(&self, core: &mut Core, request: &SendRequest) -> bool {
        let (writes, address, rkey) = match request.operation {
            Operation::Write { address, rkey } => (true, address, rkey),
            Operation::Read { address, rkey } => (false, address, rkey),
            _ => return false,
        };
        let is_first = self.sq.posted.is_empty() && self.sq.unacknowledged == self.sq.next;
        let Some(path) = self.path.filter(|path| core.is_up(path.from)) else { return false };
        if self.transport != Transport::Rc
            || self.state != State::IBV_QPS_RTS
            || !is_first
            || request.length == 0
            || !matches!(request.extra, Extra::None)
        {
            return false;
        }
        let mut parts = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PARTS];
        let count = match &request.data {
            Data::List(list) => {
                core.keys.parts((self.pd, !writes), list, request.length as usize, &mut parts)
            }
            Data::Inline(bytes) => {
                let iov_base = bytes.as_ptr().cast_mut().cast();
                parts[0] = libc::iovec { iov_base, iov_len: bytes.len() };
                writes.then_some(1)
            }
        };
        let Some(count) = count else { return false };
        let request = OneSided {
            writes,
            from: (path.from, self.number),
            to: self.attr.dest_qp_num,
            rkey,
            address,
            length: request.length.into(),
        };
        // SAFETY: a READ writes to memory of regions with that right, which the program lends to the device until the request has
        // ended; it stays registered for as long as the engine is locked.
        unsafe { core.link().carry_out(path.to, &request, &parts[..count]) }
    }

    /// Completes a request that was carried out.
    pub(super) fn push_done(&mut self, core: &mut Core, request: SendRequest) {
        let first = self.sq.next;
        self.sq.used += 1;
        self.sq.posted.push_back(Posted {
            request,
            first,
            packets: 0,
            received: 0,
            done: true,
            failed: None,
            seal: None,
        });
        core.counters.one_sided += 1;
        self.complete_front(core, Status::IBV_WC_SUCCESS);
    }
}
