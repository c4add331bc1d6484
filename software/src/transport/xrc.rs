//! Extended reliable connections (XRC): domains, and the shared receive queue that each request names.
//!
//! A connection has two halves. The sending queue pair is that of a reliable connection that receives nothing. The
//! receiving one has no protection domain, no receives and no completion queue: each packet of a request names
//! a shared receive queue, whose three apply to it. So the queue pair takes them over for each packet
//! ([`QueuePair::name_queue`]); the packets of one message must name the same queue, which must be of the
//! queue pair's XRC domain.
//!
//! The queue pair does not keep the shared receive queues that were named: they are destroyed while it lives.
//! Requests that name a queue which is gone are refused, and a receive that a message had begun to fill goes with
//! its queue.

use std::ffi::c_int;

use super::Engine;
use super::core::Core;
use super::queue_pair::{Owner, QueuePair, Transport};
use super::responder::Refusal;
use crate::wire::header::Reader;

/// A shared receive queue that a request names, and what applies to the request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamedQueue {
    srq: u32,
    pub(crate) pd: u32,
    cq: u32,
}

impl QueuePair {
    /// Reads which shared receive queue a request names. Returns it, and the bytes behind that header.
    pub(crate) fn named_queue<'a>(
        &self,
        core: &Core,
        body: &'a [u8],
    ) -> Result<(NamedQueue, &'a [u8]), Refusal> {
        let mut reader = Reader(body);
        let srq = reader.xrceth().ok_or(Refusal::Invalid)?;
        let queue = core.srqs.get(srq).ok_or(Refusal::Domain)?;
        let xrc = queue.xrc.filter(|xrc| xrc.domain == self.xrc_domain).ok_or(Refusal::Domain)?;
        if core.cqs.get(xrc.cq).is_none_or(|cq| cq.overrun) {
            return Err(Refusal::Overrun);
        }
        Ok((NamedQueue { srq, pd: queue.pd, cq: xrc.cq }, reader.rest()))
    }

    /// Takes over what applies to a request that is the next in order. Returns the bytes behind the header that
    /// names the queue.
    pub(crate) fn name_queue<'a>(
        &mut self,
        core: &Core,
        body: &'a [u8],
    ) -> Result<&'a [u8], Refusal> {
        let (named, rest) = self.named_queue(core, body)?;
        if self.responder.is_within_message() && self.srq != Some(named.srq) {
            return Err(Refusal::Invalid);
        }
        (self.pd, self.srq, self.receive_cq) = (named.pd, Some(named.srq), named.cq);
        Ok(rest)
    }

    /// Forgets the queue that was named last.
    pub(crate) fn name_no_queue(&mut self) {
        (self.pd, self.srq, self.receive_cq) = (0, None, 0);
    }
}

impl Engine {
    /// `ibv_open_qp`: adds an owner to a receiving queue pair of the domain.
    pub(crate) fn open_qp(&mut self, number: u32, owner: Owner) -> Result<(), c_int> {
        let handle = owner.xrc_domain.ok_or(libc::EINVAL)?;
        let domain = self.core.xrc_domains.domain(handle).ok_or(libc::EINVAL)?;
        let qp = self.qps.get_mut(number).ok_or(libc::EINVAL)?;
        if qp.transport != Transport::XrcReceive || qp.xrc_domain != domain {
            return Err(libc::EINVAL);
        }
        qp.owners.push(owner);
        self.core.xrc_domains.enter(handle);
        Ok(())
    }

    /// A shared receive queue is gone, and with it the receives that messages had begun to fill.
    pub(crate) fn forget_named_queue(&mut self, srq: u32) {
        for qp in self.qps.iter_mut() {
            if qp.transport == Transport::XrcReceive && qp.srq == Some(srq) {
                qp.responder.receive = None;
                qp.name_no_queue();
            }
        }
    }
}
