//! Requests that are answered as one, in order, and counted: READ, atomic operations, atomic WRITE and FLUSH.

use super::super::core::Core;
use super::super::memory::Atomic;
use super::super::queue_pair::QueuePair;
use super::super::sq_rq_state::Answer;
use super::{KEPT_RESULTS, MAX_MESSAGE, Refusal};
use crate::ffi::{ibv_access_flags as Access, ibv_placement_type};
use crate::wire::header::{Reader, Reth};
use crate::wire::opcode;
use crate::wire::sequence::add;

impl QueuePair {
    pub(super) fn may_read(&self, core: &Core, pd: u32, reth: Reth) -> Result<(), Refusal> {
        if self.attr.qp_access_flags & Access::IBV_ACCESS_REMOTE_READ.0 == 0 {
            return Err(Refusal::Invalid);
        }
        if reth.length == 0 {
            return Ok(());
        }
        let who = (pd, self.number);
        let access = Access::IBV_ACCESS_REMOTE_READ;
        core.keys
            .remote(who, reth.rkey, reth.address, reth.length.into(), access)
            .map(|_| ())
            .map_err(|_| Refusal::Access)
    }

    /// Whether the peer may have one more READ or atomic request outstanding. Those count whose answers it cannot have
    /// yet, since they have not left, or are on their way for less time than the network takes.
    fn check_fetches(&mut self, core: &Core) -> Result<(), Refusal> {
        let (now, round) = (core.now(), core.round);
        let responder = &mut self.responder;
        responder.under_way.retain(|&(until, left_in)| until > now || left_in == round);
        let waiting = responder.answers.iter().filter(|answer| answer.is_of_new_fetch()).count();
        let outstanding = waiting + responder.under_way.len();
        if responder.message.is_some() || outstanding >= self.most_fetches() {
            return Err(Refusal::Invalid);
        }
        Ok(())
    }

    pub(super) fn read(&mut self, core: &mut Core, psn: u32, body: &[u8]) -> Result<u32, Refusal> {
        self.check_fetches(core)?;
        let reth = Reader(body).reth().ok_or(Refusal::Invalid)?;
        if reth.length > MAX_MESSAGE {
            return Err(Refusal::Invalid);
        }
        self.may_read(core, self.pd, reth)?;
        self.responder.msn = add(self.responder.msn, 1);
        self.responder.answers.push_back(Answer::read(psn, self.pd, reth, false));
        Ok(self.packets_of(reth.length))
    }

    pub(super) fn atomic(
        &mut self,
        core: &mut Core,
        psn: u32,
        operation: u8,
        body: &[u8],
    ) -> Result<u32, Refusal> {
        self.check_fetches(core)?;
        let header = Reader(body).atomic().ok_or(Refusal::Invalid)?;
        let access = Access::IBV_ACCESS_REMOTE_ATOMIC;
        if self.attr.qp_access_flags & access.0 == 0 || header.address % 8 != 0 {
            return Err(Refusal::Invalid);
        }
        let who = (self.pd, self.number);
        let target = core
            .keys
            .remote(who, header.rkey, header.address, 8, access)
            .map_err(|_| Refusal::Access)?;
        let operation = if operation == opcode::FETCH_ADD {
            Atomic::FetchAdd(header.swap_add)
        } else {
            Atomic::CompareSwap { compare: header.compare, swap: header.swap_add }
        };
        let value = target.atomic(operation).map_err(|_| Refusal::Access)?;
        let most = self.most_fetches().max(KEPT_RESULTS);
        let responder = &mut self.responder;
        responder.msn = add(responder.msn, 1);
        responder.results.push_back((psn, value));
        if responder.results.len() > most {
            responder.results.pop_front();
        }
        responder.answers.push_back(Answer::Value { psn, value, again: false });
        Ok(1)
    }

    pub(super) fn atomic_write(
        &mut self,
        core: &mut Core,
        psn: u32,
        body: &[u8],
    ) -> Result<u32, Refusal> {
        self.check_fetches(core)?;
        let mut reader = Reader(body);
        let reth = reader.reth().ok_or(Refusal::Invalid)?;
        let value: [u8; 8] = reader.rest().try_into().map_err(|_| Refusal::Invalid)?;
        let access = Access::IBV_ACCESS_REMOTE_WRITE;
        let is_allowed = self.attr.qp_access_flags & access.0 != 0;
        if !is_allowed || reth.length != 8 || reth.address % 8 != 0 {
            return Err(Refusal::Invalid);
        }
        let who = (self.pd, self.number);
        let target = core.keys.remote(who, reth.rkey, reth.address, 8, access);
        let target = target.map_err(|_| Refusal::Access)?;
        target.atomic(Atomic::Write(u64::from_ne_bytes(value))).map_err(|_| Refusal::Access)?;
        self.responder.msn = add(self.responder.msn, 1);
        self.responder.answers.push_back(Answer::done(psn, false));
        Ok(1)
    }

    /// The written bytes are in memory already, where all see them.
    pub(super) fn flush(&mut self, core: &mut Core, psn: u32, body: &[u8]) -> Result<u32, Refusal> {
        self.check_fetches(core)?;
        let mut reader = Reader(body);
        let feth = reader.feth().ok_or(Refusal::Invalid)?;
        let reth = reader.reth().ok_or(Refusal::Invalid)?;
        let global = feth.placement & ibv_placement_type::IBV_FLUSH_GLOBAL.0;
        let persistent = feth.placement & ibv_placement_type::IBV_FLUSH_PERSISTENT.0;
        let who = (self.pd, self.number);
        for (wanted, access) in [
            (global, Access::IBV_ACCESS_FLUSH_GLOBAL),
            (persistent, Access::IBV_ACCESS_FLUSH_PERSISTENT),
        ] {
            if wanted == 0 {
                continue;
            }
            if self.attr.qp_access_flags & access.0 == 0 {
                return Err(Refusal::Invalid);
            }
            let range = match core.keys.region(reth.rkey).filter(|_| feth.whole_region) {
                Some(region) => (region.iova, 0),
                None => (reth.address, reth.length.into()),
            };
            core.keys
                .remote(who, reth.rkey, range.0, range.1, access)
                .map_err(|_| Refusal::Access)?;
        }
        self.responder.msn = add(self.responder.msn, 1);
        self.responder.answers.push_back(Answer::done(psn, false));
        Ok(1)
    }
}
