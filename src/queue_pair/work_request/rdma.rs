//! Requests that access memory of the peer.

use super::remote::{self, check_atomic, check_remote, rdma};
use super::{List, data_request, send_queue_request};
use crate::error::Result;
use crate::ffi;
use crate::memory::{GatherElement, RemoteMemoryRegion, ScatterElement};

const VERB: &str = "ibv_post_send";

send_queue_request! {
    /// `struct ibv_send_wr`: an RDMA write: copies to the peer's memory without notifying the peer.
    ///
    /// With an [`immediate`](Self::immediate) it notifies the peer: the write then consumes a receive.
    pub struct WriteWorkRequest;
}

data_request!(WriteWorkRequest);

impl<'wr> WriteWorkRequest<'wr> {
    /// Writes `elements`, one after the other, to the beginning of `remote`, with a completion. The slice
    /// itself is the gather list; it may be empty.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the remote region is shorter than the elements, there are more elements than C's `int`
    ///    can count, or more than [`MAX_MESSAGE_LENGTH`](crate::MAX_MESSAGE_LENGTH) bytes.
    #[inline]
    pub fn new(
        elements: &'wr [GatherElement<'wr>],
        remote: impl Into<RemoteMemoryRegion>,
    ) -> Result<Self> {
        let remote = remote.into();
        let list = List::gather(elements)?;
        check_remote(&remote, list.length)?;
        let mut raw = list.request(ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE);
        raw.wr = ffi::ibv_send_wr__bindgen_ty_2 { rdma: rdma(&remote) };
        Ok(Self::from_raw(raw))
    }

    /// Consumes a receive of the peer, whose completion carries these 32 bits
    /// ([`WorkSuccess::immediate`](crate::WorkSuccess::immediate)).
    #[inline]
    pub fn immediate(mut self, immediate: u32) -> Self {
        self.raw.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
        self.raw.__bindgen_anon_1.imm_data = immediate.to_be();
        self
    }
}

send_queue_request! {
    /// `struct ibv_send_wr`: an RDMA read: copies from the peer's memory without notifying the peer.
    ///
    /// If the answer is lost, the device reads again, and then finds what later requests of this queue pair have
    /// written, unless they carry a [fence](WriteWorkRequest::fence).
    pub struct ReadWorkRequest;
}

impl<'wr> ReadWorkRequest<'wr> {
    /// Reads from the beginning of `remote` into `elements`, one after the other, with a completion. The
    /// slice itself is the scatter list; it may be empty.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the remote region is shorter than the elements, there are more elements than C's `int`
    ///    can count, or more than [`MAX_MESSAGE_LENGTH`](crate::MAX_MESSAGE_LENGTH) bytes.
    #[inline]
    pub fn new<'buf: 'wr>(
        elements: &'wr mut [ScatterElement<'buf>],
        remote: impl Into<RemoteMemoryRegion>,
    ) -> Result<Self> {
        let remote = remote.into();
        let list = List::scatter(VERB, elements)?;
        check_remote(&remote, list.length)?;
        let mut raw = list.request(ffi::ibv_wr_opcode::IBV_WR_RDMA_READ);
        raw.wr = ffi::ibv_send_wr__bindgen_ty_2 { rdma: rdma(&remote) };
        Ok(Self::from_raw(raw))
    }
}

/// The request for an atomic that stores its result in `result`.
#[inline]
fn atomic(
    opcode: ffi::ibv_wr_opcode,
    result: &mut ScatterElement<'_>,
    remote: &RemoteMemoryRegion,
    compare_add: u64,
    swap: u64,
) -> Result<ffi::ibv_send_wr> {
    let list = List::scatter(VERB, std::slice::from_mut(result))?;
    check_atomic(remote, list.length)?;
    let mut raw = list.request(opcode);
    raw.wr.atomic = remote::atomic(remote, compare_add, swap);
    Ok(raw)
}

send_queue_request! {
    /// `struct ibv_send_wr`: a compare-and-swap: replaces 64 bits of the peer's memory if they equal a
    /// given value, and returns their previous value.
    pub struct CompareSwapWorkRequest;
}

impl<'wr> CompareSwapWorkRequest<'wr> {
    /// Sets the first 8 bytes of `remote` to `swap` if they equal `compare`. Stores their previous value in
    /// `result`, in the byte order of this machine.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `result` is not 8 bytes, `remote` has fewer than 8, or its address is not a
    ///    multiple of 8.
    #[inline]
    pub fn new<'buf: 'wr>(
        result: &'wr mut ScatterElement<'buf>,
        remote: impl Into<RemoteMemoryRegion>,
        compare: u64,
        swap: u64,
    ) -> Result<Self> {
        let remote = remote.into();
        let opcode = ffi::ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP;
        atomic(opcode, result, &remote, compare, swap).map(Self::from_raw)
    }
}

send_queue_request! {
    /// `struct ibv_send_wr`: a fetch-and-add: adds to 64 bits of the peer's memory, and returns their
    /// previous value.
    pub struct FetchAddWorkRequest;
}

impl<'wr> FetchAddWorkRequest<'wr> {
    /// Adds `add` to the first 8 bytes of `remote`, wrapping around. Stores their previous value in
    /// `result`, in the byte order of this machine.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `result` is not 8 bytes, `remote` has fewer than 8, or its address is not a
    ///    multiple of 8.
    #[inline]
    pub fn new<'buf: 'wr>(
        result: &'wr mut ScatterElement<'buf>,
        remote: impl Into<RemoteMemoryRegion>,
        add: u64,
    ) -> Result<Self> {
        let remote = remote.into();
        let opcode = ffi::ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD;
        atomic(opcode, result, &remote, add, 0).map(Self::from_raw)
    }
}

macro_rules! names_a_shared_receive_queue {
    ($($request:ident),*) => {
        $(impl $request<'_> {
            /// The number of the peer's shared receive queue
            /// ([`SharedReceiveQueue::number`](crate::SharedReceiveQueue::number)); sending XRC queue pairs
            /// need it. The request may reach the memory of that queue's protection domain.
            #[inline]
            pub fn shared_receive_queue(mut self, number: u32) -> Self {
                self.raw.qp_type.xrc.remote_srqn = number;
                self
            }
        })*
    };
}

names_a_shared_receive_queue! {
    WriteWorkRequest, ReadWorkRequest, CompareSwapWorkRequest, FetchAddWorkRequest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue_pair::work_request::SendQueueRequest;

    fn gather(length: u32) -> GatherElement<'static> {
        // SAFETY: the element is never posted.
        unsafe { GatherElement::from_raw(ffi::ibv_sge { addr: 0x1000, length, lkey: 5 }) }
    }

    fn scatter(length: u32) -> ScatterElement<'static> {
        // SAFETY: the element is never posted.
        unsafe { ScatterElement::from_raw(ffi::ibv_sge { addr: 0x1000, length, lkey: 5 }) }
    }

    fn remote(length: u64) -> RemoteMemoryRegion {
        RemoteMemoryRegion::new(0x7000, length, 0xabc).unwrap()
    }

    #[test]
    fn writes_and_reads_are_as_c_has_them() {
        let elements = [gather(8), gather(16)];
        let request =
            WriteWorkRequest::new(&elements, remote(24)).unwrap().immediate(1).solicited();
        let raw = request.as_raw();
        assert_eq!((raw.opcode.0, raw.num_sge, raw.send_flags), (1, 2, 2 | 4));
        // SAFETY: the arm was just written.
        let rdma = unsafe { raw.wr.rdma };
        assert_eq!((rdma.remote_addr, rdma.rkey), (0x7000, 0xabc));
        // SAFETY: as above.
        assert_eq!(unsafe { raw.__bindgen_anon_1.imm_data }, 1_u32.to_be());
        let mut elements = [scatter(24)];
        let list = elements.as_ptr();
        let request = ReadWorkRequest::new(&mut elements, remote(24)).unwrap().unsignaled();
        let raw = request.as_raw();
        assert_eq!((raw.opcode.0, raw.num_sge, raw.send_flags), (4, 1, 0));
        assert_eq!(raw.sg_list.cast_const(), list.cast());
        // SAFETY: the arm was just written.
        assert_eq!(unsafe { raw.wr.rdma.rkey }, 0xabc);
    }

    #[test]
    fn atomics_are_as_c_has_them() {
        let mut result = scatter(8);
        let request = CompareSwapWorkRequest::new(&mut result, remote(8), 3, 4).unwrap();
        let raw = request.as_raw();
        assert_eq!((raw.opcode.0, raw.num_sge, raw.send_flags), (5, 1, 2));
        // SAFETY: the arm was just written.
        let atomic = unsafe { raw.wr.atomic };
        assert_eq!((atomic.remote_addr, atomic.rkey), (0x7000, 0xabc));
        assert_eq!((atomic.compare_add, atomic.swap), (3, 4));
        let request = FetchAddWorkRequest::new(&mut result, remote(8), 5).unwrap();
        assert_eq!(request.as_raw().opcode.0, 6);
        // SAFETY: the arm was just written.
        assert_eq!(unsafe { request.as_raw().wr.atomic.compare_add }, 5);
        let request = request.shared_receive_queue(9);
        // SAFETY: as above; the arms do not overlap.
        let raw = unsafe { (request.as_raw().qp_type.xrc.remote_srqn, request.as_raw().wr.atomic) };
        assert_eq!((raw.0, raw.1.compare_add), (9, 5));
    }

    #[test]
    fn the_remote_region_has_room() {
        let elements = [gather(8), gather(17)];
        let error = WriteWorkRequest::new(&elements, remote(24)).unwrap_err();
        let text = "the length, for the remote region, is 25, and must be within 0..=24";
        assert!(error.to_string().ends_with(text), "{error}");
        assert!(ReadWorkRequest::new(&mut [scatter(25)], remote(24)).is_err());
        assert!(ReadWorkRequest::new(&mut [], remote(0)).is_ok());
        let refused = |result: u32, remote| {
            FetchAddWorkRequest::new(&mut scatter(result), remote, 1).unwrap_err().to_string()
        };
        assert!(refused(4, remote(8)).contains("an atomic's buffer is 4"));
        assert!(refused(8, remote(7)).contains("must be within 0..=7"));
        let odd = RemoteMemoryRegion::new(0x7004, 8, 1).unwrap();
        assert!(refused(8, odd).contains("not a multiple of 8"));
    }
}
