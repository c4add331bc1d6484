//! The requests of a batch whose queue pair does not have the extended posting interface: they are collected, and posted as
//! one list.

use std::ffi::c_int;
use std::ops::Range;
use std::ptr;

use super::explain::explain_request;
use crate::error::{Error, Result};
use crate::ffi;
use crate::operation::INLINE;
use crate::operation::encode::encode_at;
use crate::operation::sealed::Kind;
use crate::queue_pair::{QueuePair, SendOperations, WorkRequestOpcode, function};
use crate::queue_pair_state::QueuePairType;

const VERB: &str = "ibv_post_send";

/// What `ibv_post_send` has too, and a batch without the extended interface can do.
const OPERATIONS: SendOperations = SendOperations::WRITE
    .union(SendOperations::WRITE_WITH_IMMEDIATE)
    .union(SendOperations::SEND)
    .union(SendOperations::SEND_WITH_IMMEDIATE)
    .union(SendOperations::SEND_WITH_INVALIDATE)
    .union(SendOperations::READ)
    .union(SendOperations::COMPARE_SWAP)
    .union(SendOperations::FETCH_ADD)
    .union(SendOperations::LOCAL_INVALIDATE)
    .union(SendOperations::BIND_MEMORY_WINDOW);

/// The data of a collected request, in vectors that may move until all requests are there.
enum Data {
    Elements(Range<usize>),
    Inline(Range<usize>),
}

pub(super) struct Collector {
    /// The functions of the extended interface that the requests stand for.
    available: u64,
    requests: Vec<ffi::ibv_send_wr>,
    data: Vec<Data>,
    elements: Vec<ffi::ibv_sge>,
    bytes: Vec<u8>,
    /// The depth of the send queue.
    most: usize,
}

impl Collector {
    #[cold]
    pub(super) fn new(queue_pair: &QueuePair<'_, QueuePairType>) -> Box<Self> {
        Box::new(Self {
            available: functions(queue_pair),
            requests: Vec::new(),
            data: Vec::new(),
            elements: Vec::new(),
            bytes: Vec::new(),
            most: queue_pair.max_send_wr() as usize,
        })
    }

    /// The functions that a batch of the queue pair can use.
    #[inline]
    pub(super) fn available(&self) -> u64 {
        self.available
    }

    /// Adds a request that was checked.
    pub(super) fn add<K: Kind>(
        &mut self,
        kind: &K,
        wr_id: u64,
        list: &[ffi::ibv_sge],
    ) -> Result<()> {
        let data = if kind.flags() & INLINE != 0 {
            let start = self.bytes.len();
            for piece in list {
                let length = piece.length as usize;
                self.bytes.try_reserve(length).map_err(no_memory)?;
                let bytes = ptr::with_exposed_provenance::<u8>(piece.addr as usize);
                // SAFETY: the buffer of the request is live, and its bytes can be read: it is inline, or registered
                // memory whose address is the program's own.
                self.bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(bytes, length) });
            }
            Data::Inline(start..self.bytes.len())
        } else {
            let start = self.elements.len();
            self.elements.try_reserve(list.len()).map_err(no_memory)?;
            // Some devices take a length of 0 for 2 GiB.
            self.elements.extend(list.iter().filter(|element| element.length != 0));
            Data::Elements(start..self.elements.len())
        };
        let mut request = ffi::ibv_send_wr::default();
        // SAFETY: it is a request.
        unsafe { encode_at(&raw mut request, kind, wr_id, &mut []) };
        self.push(request, data)
    }

    /// Adds a request without data.
    pub(super) fn add_raw(&mut self, request: ffi::ibv_send_wr) -> Result<()> {
        self.push(request, Data::Elements(0..0))
    }

    fn push(&mut self, request: ffi::ibv_send_wr, data: Data) -> Result<()> {
        if self.requests.len() == self.most {
            return Err(Error::new(VERB, libc::ENOMEM));
        }
        self.requests.try_reserve(1).map_err(no_memory)?;
        self.data.try_reserve(1).map_err(no_memory)?;
        self.requests.push(request);
        self.data.push(data);
        Ok(())
    }

    /// Posts all that was collected.
    ///
    /// # Safety
    ///
    /// Nothing else posts sends to the queue pair meanwhile, and the caller keeps the contract of posting.
    #[cold]
    pub(super) unsafe fn post(&mut self, queue_pair: &QueuePair<'_, QueuePairType>) -> Result<()> {
        let mut inline = Vec::new();
        inline.try_reserve_exact(self.requests.len()).map_err(no_memory)?;
        for data in &self.data {
            let Data::Inline(range) = data else { continue };
            let addr = self.bytes[range.clone()].as_ptr() as u64;
            inline.push(ffi::ibv_sge { addr, length: range.len() as u32, lkey: 0 });
        }
        let mut next_inline = inline.iter_mut();
        for (request, data) in self.requests.iter_mut().zip(&self.data) {
            let elements = match data {
                Data::Elements(range) => &mut self.elements[range.clone()],
                Data::Inline(range) => match next_inline.next() {
                    Some(one) if !range.is_empty() => std::slice::from_mut(one),
                    _ => &mut [],
                },
            };
            (request.sg_list, request.num_sge) = (elements.as_mut_ptr(), elements.len() as c_int);
        }
        let (first, count) = (self.requests.as_mut_ptr(), self.requests.len());
        if count == 0 {
            return Ok(());
        }
        for n in 1..count {
            // SAFETY: both are within the vector.
            unsafe { (*first.add(n - 1)).next = first.add(n) };
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the list and its elements live until the call returns; the caller vouches for the rest.
        let returned = unsafe { ffi::ibv_post_send(queue_pair.as_raw(), first, &mut bad) };
        // If siw has posted a part of a list and refuses the rest, it returns 0, but names the first request that it has
        // refused.
        if returned == 0 && bad.is_null() {
            return Ok(());
        }
        let refused = self.requests.iter().find(|request| ptr::eq(*request, bad));
        let refused = refused.unwrap_or(&self.requests[0]);
        Err(explain_request(queue_pair, refused, returned))
    }
}

/// The functions that a batch of the queue pair can use.
fn functions(queue_pair: &QueuePair<'_, QueuePairType>) -> u64 {
    let kind = queue_pair.queue_pair_type();
    // A DC initiator has the interface: it is not built without. SRD reads and writes by the interface alone.
    let (operations, datagrams) = if queue_pair.is_srd() {
        (SendOperations::SEND | SendOperations::SEND_WITH_IMMEDIATE, true)
    } else {
        (OPERATIONS, kind == QueuePairType::UnreliableDatagram)
    };
    let mut found = operations.bits() | function::SET_SGE_LIST | function::SET_INLINE;
    for (there, function) in [
        (queue_pair.has_peer(), function::READY),
        (queue_pair.max_send_sge() > 0, function::SET_SGE),
        (datagrams, function::SET_UD_ADDRESS),
        (kind == QueuePairType::XrcSend, function::SET_XRC_SRQ),
    ] {
        if there {
            found |= function;
        }
    }
    found
}

#[cold]
fn no_memory(_: std::collections::TryReserveError) -> Error {
    Error::with_reason(VERB, libc::ENOMEM, "there is no memory")
}

impl std::fmt::Debug for Collector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let opcodes = self.requests.iter().map(|request| WorkRequestOpcode::from(request.opcode));
        f.debug_list().entries(opcodes).finish()
    }
}
