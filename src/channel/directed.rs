//! Posting to a queue pair without a peer: each send names its destination.

use std::ffi::c_int;

use super::error::{TransportError, TransportResult};
use super::operation::{Limits, Operation, Queue, Target, Templates};
use super::posting::WorkRequest;
use crate::error::{Error, Result};
use crate::ffi;
use crate::ffi::ibv_wr_opcode as Opcode;
use crate::memory::GatherBuffer;
use crate::operation::DatagramDestination;
use crate::operation::sealed::Request;
use crate::queue_pair::{AddressHandle, GlobalRouteHeader};

/// A request with its destination.
pub(crate) struct Directed<R> {
    request: R,
    peer: Peer,
}

#[derive(Clone, Copy)]
struct Peer {
    handle: *mut ffi::ibv_ah,
    number: u32,
    qkey: u32,
}

impl<R> Directed<R> {
    /// The caller keeps the handle while the device has the request.
    pub(super) fn new(
        request: R,
        handle: &AddressHandle<'_>,
        destination: &DatagramDestination,
    ) -> Self {
        let &DatagramDestination { number, qkey, .. } = destination;
        Self { request, peer: Peer { handle: handle.as_raw(), number, qkey } }
    }

    pub(super) fn into_request(self) -> R {
        self.request
    }
}

/// The operation of a request with its destination.
#[derive(Clone, Copy)]
pub(crate) struct DirectedOperation<O>(O, Peer);

impl<R: WorkRequest> Request for Directed<R> {
    type Operation = DirectedOperation<R::Operation>;
    type Buffer = R::Buffer;

    fn split(self) -> (Self::Operation, R::Buffer) {
        let (operation, buffer) = self.request.split();
        (DirectedOperation(operation, self.peer), buffer)
    }

    fn join(DirectedOperation(operation, peer): Self::Operation, buffer: R::Buffer) -> Self {
        Self { request: R::join(operation, buffer), peer }
    }

    fn list(buffer: &mut R::Buffer) -> Result<<R::Buffer as GatherBuffer>::List> {
        R::list(buffer)
    }
}

impl<O: Operation> Operation for DirectedOperation<O> {
    const QUEUE: Queue = O::QUEUE;
    const WRITES: bool = O::WRITES;
    const TAKES_RECEIVE: bool = O::TAKES_RECEIVE;
    const VERB: &'static str = O::VERB;

    fn check(&self, limits: &Limits, list: &[ffi::ibv_sge]) -> TransportResult<()> {
        let what = "the number of the remote queue pair";
        Error::within(O::VERB, what, self.1.number, 0, DatagramDestination::MEMBERS)?;
        self.0.check(limits, list)
    }

    fn explain_buffer(limits: &Limits, error: Error) -> Error {
        O::explain_buffer(limits, error)
    }

    unsafe fn post(
        self,
        target: Target,
        prepared: *mut Templates,
        wr_id: u64,
        list: &mut [ffi::ibv_sge],
    ) -> c_int {
        let mut addressed = Addressed { queue_pair: target.queue_pair(), peer: self.1 };
        let this = (&raw mut addressed).cast();
        // SAFETY: the caller vouches for the rest; the function takes what it is given here.
        unsafe { self.0.post(Target::with(this, send_to, post_receive), prepared, wr_id, list) }
    }
}

/// What [`send_to`] posts to.
struct Addressed {
    queue_pair: *mut ffi::ibv_qp,
    peer: Peer,
}

/// As `ibv_post_send`, of one request, to a peer.
///
/// # Safety
///
/// `this` is an [`Addressed`], whose queue pair and handle are live. The rest is as for `ibv_post_send`.
unsafe extern "C" fn send_to(
    this: *mut ffi::ibv_qp,
    request: *mut ffi::ibv_send_wr,
    refused: *mut *mut ffi::ibv_send_wr,
) -> c_int {
    // SAFETY: the caller vouches for it.
    let &Addressed { queue_pair, peer } = unsafe { &*this.cast() };
    // SAFETY: as above.
    unsafe {
        if !matches!((*request).opcode, Opcode::IBV_WR_SEND | Opcode::IBV_WR_SEND_WITH_IMM) {
            *refused = request;
            return libc::EOPNOTSUPP;
        }
        (*request).wr.ud = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_3 {
            ah: peer.handle,
            remote_qpn: peer.number,
            remote_qkey: peer.qkey,
        };
        let returned = ffi::ibv_post_send(queue_pair, request, refused);
        (*request).wr.ud = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_3::default();
        returned
    }
}

/// Refuses what has no destination.
///
/// # Safety
///
/// As for `ibv_post_send`.
pub(super) unsafe extern "C" fn refuse_send(
    _: *mut ffi::ibv_qp,
    request: *mut ffi::ibv_send_wr,
    refused: *mut *mut ffi::ibv_send_wr,
) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { *refused = request };
    libc::EDESTADDRREQ
}

/// As `ibv_post_recv`, of one request that has room for what precedes the message.
///
/// # Safety
///
/// As for `ibv_post_recv`.
pub(super) unsafe extern "C" fn post_receive(
    queue_pair: *mut ffi::ibv_qp,
    request: *mut ffi::ibv_recv_wr,
    refused: *mut *mut ffi::ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller vouches for the request and its list.
    let room: u64 = unsafe {
        let ffi::ibv_recv_wr { sg_list, num_sge, .. } = *request;
        (0..num_sge as usize).map(|piece| u64::from((*sg_list.add(piece)).length)).sum()
    };
    if room < GlobalRouteHeader::LEN as u64 {
        // SAFETY: as above.
        unsafe { *refused = request };
        return libc::EMSGSIZE;
    }
    // SAFETY: the caller vouches for everything.
    unsafe { ffi::ibv_post_recv(queue_pair, request, refused) }
}

/// The error of a post that has failed, with what the functions above mean.
#[cold]
pub(super) fn explain(verb: &'static str, returned: c_int) -> TransportError {
    let reason = match returned {
        libc::EDESTADDRREQ => {
            "a datagram names its destination: send each with send_to; a datagram end has no windows, writes and reads"
        }
        libc::EMSGSIZE if verb == "ibv_post_recv" => {
            "40 bytes precede each datagram: the buffer of a receive must have room for them and the message"
        }
        _ => return ffi::failed(verb, returned).into(),
    };
    Error::with_reason(verb, returned, reason).into()
}
