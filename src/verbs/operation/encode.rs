use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;

use super::explain::{explain_request, explain_send};
use super::sealed::{Kind, Post, Posted};
use super::{INLINE, MAX_MESSAGE_LENGTH, SIGNALED, count_filled, total, without_empty};
use crate::base::{Error, QueuePairType, Result, err_from_call, ffi};
use crate::verbs::queue_pair::{
    MessageLimits, QueuePair, SendOperations, WorkRequestOpcode, function,
};

/// Leaves out empty pieces. Fields that the opcode does not use stay uninitialised: zeroing them would dominate the
/// cost.
#[inline(always)]
pub(crate) fn encode<K: Kind>(
    kind: &K,
    wr_id: u64,
    list: &mut [ffi::ibv_sge],
) -> MaybeUninit<ffi::ibv_send_wr> {
    let mut request = MaybeUninit::uninit();
    // SAFETY: it is a request.
    unsafe { encode_at(request.as_mut_ptr(), kind, wr_id, list) };
    request
}

/// # Safety
///
/// `request` points to a request, maybe uninitialised.
#[inline(always)]
pub(crate) unsafe fn encode_at<K: Kind>(
    request: *mut ffi::ibv_send_wr,
    kind: &K,
    wr_id: u64,
    list: &mut [ffi::ibv_sge],
) {
    let num_sge = match list {
        [one] => c_int::from(one.length != 0),
        _ => without_empty(list) as c_int,
    };
    // SAFETY: the fields are within the request, and have nothing to drop.
    unsafe {
        (*request).wr_id = wr_id;
        (*request).next = ptr::null_mut();
        (*request).sg_list = list.as_mut_ptr();
        (*request).num_sge = num_sge;
        (*request).opcode = K::OPCODE;
        (*request).send_flags = SIGNALED ^ kind.flags();
        kind.fill(request);
    }
}

#[inline(always)]
pub(crate) fn check<K: Kind>(
    limits: &MessageLimits,
    kind: &K,
    list: &[ffi::ibv_sge],
) -> Result<()> {
    let length = total(list);
    kind.fits(length)?;
    if const { is_read::<K>() }
        && list.len() > 1
        && limits.check_pieces_of_read(list.len()).is_err()
    {
        limits.check_pieces_of_read(count_filled(list))?;
    }
    if kind.flags() & INLINE != 0 {
        limits.check_inline(length)
    } else {
        limits.check_domain("ibv_post_send", list)?;
        limits.check_length(K::OPCODE, length)
    }
}

const fn is_read<K: Kind>() -> bool {
    matches!(K::OPCODE, ffi::ibv_wr_opcode::IBV_WR_RDMA_READ)
}

/// The device checks a single piece itself.
#[inline(always)]
pub(crate) fn check_receive(limits: &MessageLimits, list: &[ffi::ibv_sge]) -> Result<()> {
    if list.len() > 1 && total(list) > MAX_MESSAGE_LENGTH {
        let about = &["ibv_post_recv", "the length of the message"];
        return err_from_call(Error::beyond(about, total(list), MAX_MESSAGE_LENGTH));
    }
    limits.check_domain("ibv_post_recv", list)
}

#[diagnostic::do_not_recommend]
impl<K: Posted> Post for K {
    const NEEDS_PEER: bool = <K as Kind>::NEEDS_PEER;

    #[inline(always)]
    fn check(&self, limits: &MessageLimits, list: &[ffi::ibv_sge]) -> Result<()> {
        check(limits, self, list)
    }

    #[cold]
    fn explain_buffer(limits: &MessageLimits, error: Error) -> Error {
        limits.explain(K::OPCODE, error)
    }

    #[inline(always)]
    unsafe fn post(
        self,
        queue_pair: *mut ffi::ibv_qp,
        wr_id: u64,
        list: &mut [ffi::ibv_sge],
    ) -> c_int {
        let mut request = encode(&self, wr_id, list);
        // Left uninitialised: only a list needs to know where the verb stopped.
        let mut bad = MaybeUninit::uninit();
        // SAFETY: the caller vouches for queue pair and memory; `bad` is writable.
        unsafe { ffi::ibv_post_send(queue_pair, request.as_mut_ptr(), bad.as_mut_ptr()) }
    }

    #[cold]
    fn explain(
        self,
        queue_pair: &QueuePair<'_, QueuePairType>,
        list: &[ffi::ibv_sge],
        returned: c_int,
    ) -> Error {
        explain_send(queue_pair, list, SIGNALED ^ self.flags(), returned)
    }
}

// Batches without the extended interface: requests are collected, and posted as a list.

const VERB: &str = "ibv_post_send";

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

/// A range, since the vectors grow.
enum Data {
    Elements(Range<usize>),
    Inline(Range<usize>),
}

pub(super) struct Collector {
    available: u64,
    requests: Vec<ffi::ibv_send_wr>,
    data: Vec<Data>,
    elements: Vec<ffi::ibv_sge>,
    bytes: Vec<u8>,
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

    pub(super) fn available(&self) -> u64 {
        self.available
    }

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
                // SAFETY: the buffer is live, and its bytes can be read: inline, or registered memory of the program.
                self.bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(bytes, length) });
            }
            Data::Inline(start..self.bytes.len())
        } else {
            let start = self.elements.len();
            self.elements.try_reserve(list.len()).map_err(no_memory)?;
            // See [`without_empty`].
            self.elements.extend(list.iter().filter(|element| element.length != 0));
            Data::Elements(start..self.elements.len())
        };
        let mut request = ffi::ibv_send_wr::default();
        // SAFETY: it is a request.
        unsafe { encode_at(&raw mut request, kind, wr_id, &mut []) };
        self.push(request, data)
    }

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
        // siw returns 0 when it posts a part of a list, but names the first refused request.
        if returned == 0 && bad.is_null() {
            return Ok(());
        }
        let refused = self.requests.iter().find(|request| ptr::eq(*request, bad));
        let refused = refused.unwrap_or(&self.requests[0]);
        Err(explain_request(queue_pair, refused, returned))
    }
}

fn functions(queue_pair: &QueuePair<'_, QueuePairType>) -> u64 {
    let kind = queue_pair.queue_pair_type();
    // A DC initiator always has the interface; SRD has reads and writes only there.
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
