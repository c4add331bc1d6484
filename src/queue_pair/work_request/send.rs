//! Requests that send, and requests that only affect this side.

use super::{List, data_request, send_queue_request};
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::GatherElement;
use crate::queue_pair::AddressHandle;

send_queue_request! {
    /// `struct ibv_send_wr`: sends one message to a receive of the peer.
    ///
    /// ```
    /// use ibverbs::{QueuePairType, SendWorkRequest};
    ///
    /// # fn main() -> ibverbs::Result<()> {
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// # let context = ibverbs::open("rxe0")?;
    /// # let domain = context.alloc_pd()?;
    /// let (header, body) = (domain.allocate::<u64>(2)?, domain.allocate::<u8>(1024)?);
    /// # let queue = context.create_cq(16)?;
    /// let prepared = domain
    ///     .create_qp(&queue, &queue, QueuePairType::ReliableConnected)
    ///     .max_send_sge(2) // a message can then have two elements
    ///     .build()?;
    /// # let remote = prepared.endpoint();
    /// let mut queue_pair = prepared.handshake(remote)?;
    ///
    /// let elements = [header.gather_element(..)?, body.gather_element(..100)?];
    /// let mut request = SendWorkRequest::new(&elements)?.immediate(3).solicited();
    /// // SAFETY: the regions are not written until the completion of 7 was polled, and dropped after
    /// // the queue pair.
    /// unsafe { queue_pair.post(&mut request, 7)? };
    /// # Ok(())
    /// # }
    /// ```
    pub struct SendWorkRequest;
}

data_request!(SendWorkRequest);

impl<'wr> SendWorkRequest<'wr> {
    /// A message of `elements`, one after the other, with a completion. The slice itself is the gather
    /// list; it may be empty, for a message without data.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there are more elements than C's `int` can count, or more than
    ///    [`MAX_MESSAGE_LENGTH`](crate::MAX_MESSAGE_LENGTH) bytes.
    #[inline]
    pub fn new(elements: &'wr [GatherElement<'wr>]) -> Result<Self> {
        let list = List::gather(elements)?;
        Ok(Self::from_raw(list.request(ffi::ibv_wr_opcode::IBV_WR_SEND)))
    }

    /// Sends 32 bits for the completion of the receive
    /// ([`WorkSuccess::immediate`](crate::WorkSuccess::immediate)). Replaces
    /// [`invalidate`](Self::invalidate).
    #[inline]
    pub fn immediate(mut self, immediate: u32) -> Self {
        self.raw.opcode = ffi::ibv_wr_opcode::IBV_WR_SEND_WITH_IMM;
        self.raw.__bindgen_anon_1.imm_data = immediate.to_be();
        self
    }

    /// Invalidates an rkey of the peer: that of a type 2 memory window, which must then be bound again.
    /// Replaces [`immediate`](Self::immediate).
    #[inline]
    pub fn invalidate(mut self, rkey: u32) -> Self {
        self.raw.opcode = ffi::ibv_wr_opcode::IBV_WR_SEND_WITH_INV;
        self.raw.__bindgen_anon_1.invalidate_rkey = rkey;
        self
    }

    /// The destination of a datagram: the path, and the number and the Q_Key of the peer's queue pair. UD
    /// queue pairs need it; others ignore it.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the number has more than 24 bits.
    #[inline]
    pub fn to(mut self, path: &'wr AddressHandle<'_>, number: u32, qkey: u32) -> Result<Self> {
        check_number(number)?;
        self.raw.wr.ud = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_3 {
            ah: path.as_raw(),
            remote_qpn: number,
            remote_qkey: qkey,
        };
        Ok(self)
    }

    /// The number of the peer's shared receive queue
    /// ([`SharedReceiveQueue::number`](crate::SharedReceiveQueue::number)); sending XRC queue pairs
    /// need it.
    #[inline]
    pub fn shared_receive_queue(mut self, number: u32) -> Self {
        self.raw.qp_type.xrc.remote_srqn = number;
        self
    }

    /// Makes the device compute the checksums of IPv4 and of TCP or UDP, on UD and raw packet queue pairs
    /// of devices that support it.
    #[inline]
    pub fn ip_checksum(mut self) -> Self {
        self.raw.send_flags |= ffi::ibv_send_flags::IBV_SEND_IP_CSUM.0;
        self
    }
}

/// Checks that it is the number of a queue pair.
#[inline]
pub(super) fn check_number(number: u32) -> Result<()> {
    if number > 0xff_ffff {
        return Err(no_number(number));
    }
    Ok(())
}

#[cold]
fn no_number(number: u32) -> Error {
    let what = "the number of the remote queue pair";
    Error::out_of_range("ibv_post_send", what, number.into(), 0, 0xff_ffff)
}

send_queue_request! {
    /// `struct ibv_send_wr`: invalidates a local key, so that requests of this program and of peers
    /// can no longer use it: that of a type 2 memory window, or of a region that was registered by a
    /// request.
    pub struct LocalInvalidateWorkRequest;
}

impl LocalInvalidateWorkRequest<'_> {
    /// Invalidates the rkey.
    #[inline]
    pub fn new(rkey: u32) -> Self {
        let mut raw = ffi::ibv_send_wr {
            opcode: ffi::ibv_wr_opcode::IBV_WR_LOCAL_INV,
            send_flags: ffi::ibv_send_flags::IBV_SEND_SIGNALED.0,
            ..Default::default()
        };
        raw.__bindgen_anon_1.invalidate_rkey = rkey;
        Self::from_raw(raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue_pair::work_request::SendQueueRequest;

    fn element(length: u32) -> GatherElement<'static> {
        // SAFETY: the element is never posted.
        unsafe { GatherElement::from_raw(ffi::ibv_sge { addr: 0x1000, length, lkey: 5 }) }
    }

    #[test]
    fn the_slice_is_the_list() {
        let elements = [element(8), element(16)];
        let request = SendWorkRequest::new(&elements).unwrap();
        let raw = request.as_raw();
        assert_eq!(raw.sg_list.cast_const(), elements.as_ptr().cast());
        assert_eq!((raw.num_sge, raw.opcode.0, raw.send_flags), (2, 2, 2));
        assert!(raw.next.is_null());
        let empty = SendWorkRequest::new(&[]).unwrap();
        assert_eq!(empty.as_raw().num_sge, 0);
    }

    #[test]
    fn each_option_is_where_c_has_it() {
        let elements = [element(8)];
        let plain = || SendWorkRequest::new(&elements).unwrap();
        let request = plain().immediate(0x0102_0304);
        assert_eq!(request.as_raw().opcode, ffi::ibv_wr_opcode::IBV_WR_SEND_WITH_IMM);
        // SAFETY: the arm was just written.
        let bytes = unsafe { request.as_raw().__bindgen_anon_1.imm_data }.to_ne_bytes();
        assert_eq!(bytes, [1, 2, 3, 4], "network order");
        let request = plain().immediate(1).invalidate(77);
        assert_eq!(request.as_raw().opcode, ffi::ibv_wr_opcode::IBV_WR_SEND_WITH_INV);
        // SAFETY: the arm was just written.
        assert_eq!(unsafe { request.as_raw().__bindgen_anon_1.invalidate_rkey }, 77);
        assert_eq!(plain().fence().solicited().as_raw().send_flags, 1 | 2 | 4);
        assert_eq!(plain().unsignaled().ip_checksum().as_raw().send_flags, 16);
        assert_eq!(plain().inline(8).unwrap().as_raw().send_flags, 2 | 8);
        let request = plain().shared_receive_queue(9);
        // SAFETY: the arm was just written.
        assert_eq!(unsafe { request.as_raw().qp_type.xrc.remote_srqn }, 9);
        let text = format!("{:?}", plain().immediate(1).fence());
        assert!(text.contains("SendWithImmediate") && text.contains("FENCE"), "{text}");
        let invalidate = LocalInvalidateWorkRequest::new(0x99).fence();
        assert_eq!((invalidate.as_raw().opcode.0, invalidate.as_raw().send_flags), (7, 3));
        // SAFETY: the arm was just written.
        assert_eq!(unsafe { invalidate.as_raw().__bindgen_anon_1.invalidate_rkey }, 0x99);
    }

    #[test]
    fn what_is_too_much_is_refused() {
        let elements = [element(1 << 30), element(1 << 30), element(1)];
        assert!(SendWorkRequest::new(&elements[..2]).is_ok());
        let error = SendWorkRequest::new(&elements).unwrap_err();
        assert!(error.to_string().contains("the length of the message is 2147483649"), "{error}");
        let elements = [element(30), element(3)];
        let error = SendWorkRequest::new(&elements).unwrap().inline(32).unwrap_err();
        assert!(error.to_string().contains("inline data is 33, and must be within 0..=32"));
        assert!(check_number(0xff_ffff).is_ok() && check_number(0x100_0000).is_err());
    }
}
