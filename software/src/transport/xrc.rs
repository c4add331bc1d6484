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
use std::os::fd::OwnedFd;

use super::Engine;
use super::core::Core;
use super::queue_pair::{Owner, QueuePair, Transport};
use super::responder::Refusal;
use crate::wire::header::Reader;

/// The file that an XRC domain belongs to.
#[derive(Debug)]
pub(crate) struct XrcFile {
    /// The file system, and the inode in it.
    pub(crate) inode: (u64, u64),
    /// Keeps the inode, so that no other file gets its number.
    pub(crate) _open: OwnedFd,
}

/// A handle of an XRC domain. Those of the same file are handles of one domain.
#[derive(Debug)]
pub(crate) struct XrcDomain {
    domain: u64,
    file: Option<XrcFile>,
    /// How many queue pairs and shared receive queues were made with this handle.
    users: u32,
}

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

impl Core {
    /// Counts a queue pair or a shared receive queue that is made with a handle, and returns which domain it is.
    pub(crate) fn use_xrc_domain(&mut self, handle: u32) -> Option<u64> {
        let handle = self.xrc_domains.get_mut(handle)?;
        handle.users += 1;
        Some(handle.domain)
    }

    pub(crate) fn leave_xrc_domain(&mut self, handle: u32) {
        if let Some(handle) = self.xrc_domains.get_mut(handle) {
            handle.users -= 1;
        }
    }
}

impl Engine {
    /// Opens the domain of a file, or a private one.
    pub(crate) fn open_xrc_domain(
        &mut self,
        file: Option<XrcFile>,
        create: bool,
        exclusive: bool,
    ) -> Result<u32, c_int> {
        let found = file.as_ref().and_then(|file| {
            let inode = |handle: &XrcDomain| handle.file.as_ref().map(|file| file.inode);
            let mut handles = self.core.xrc_domains.iter();
            handles.find(|(_, handle)| inode(handle) == Some(file.inode)).map(|(_, h)| h.domain)
        });
        match found {
            Some(_) if exclusive => return Err(libc::EINVAL),
            None if file.is_some() && !create => return Err(libc::EAGAIN),
            _ => {}
        }
        let domain = found.unwrap_or_else(|| {
            self.core.last_xrc_domain += 1;
            self.core.last_xrc_domain
        });
        let handle = XrcDomain { domain, file, users: 0 };
        self.core.xrc_domains.insert(|_| handle).ok_or(libc::ENOMEM)
    }

    pub(crate) fn close_xrc_domain(&mut self, handle: u32) -> Result<(), c_int> {
        if self.core.xrc_domains.get(handle).ok_or(libc::EINVAL)?.users > 0 {
            return Err(libc::EBUSY);
        }
        self.core.xrc_domains.remove(handle).map(|_| ()).ok_or(libc::EINVAL)
    }

    /// `ibv_open_qp`: adds an owner to a receiving queue pair of the domain.
    pub(crate) fn open_qp(&mut self, number: u32, owner: Owner) -> Result<(), c_int> {
        let handle = owner.xrc_domain.ok_or(libc::EINVAL)?;
        let domain = self.core.xrc_domains.get(handle).ok_or(libc::EINVAL)?.domain;
        let qp = self.qps.get_mut(number).ok_or(libc::EINVAL)?;
        if qp.transport != Transport::XrcReceive || qp.xrc_domain != domain {
            return Err(libc::EINVAL);
        }
        qp.owners.push(owner);
        self.core.use_xrc_domain(handle);
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
