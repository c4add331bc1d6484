//! Requests that name their destination: datagram ends post them.

use std::ffi::c_int;

use super::error::TransportResult;
use super::operation::{Limits, Operation, Queue, Target, Templates, check_send};
use crate::base::ffi::ibv_wr_opcode as Opcode;
use crate::base::{Error, Result, ffi};
use crate::verbs::memory::GatherBuffer;
use crate::verbs::operation::encode::encode;
use crate::verbs::operation::sealed::{Kind, Request};
use crate::verbs::operation::{
    DatagramDestination, DatagramPeer, Destination, SIGNALED, SendQueueRequest, To,
    post_by_functions, takes_receive,
};
#[cfg(feature = "mlx5")]
use crate::verbs::operation::{DcDestination, DcPeer};
use crate::verbs::queue_pair::{AddressHandle, AddressVector};

/// Where a datagram end sends to: a [`DatagramDestination`], or for a DC initiator a `DcDestination`. Sealed.
pub trait EndDestination: sealed::EndDestination {}

impl EndDestination for DatagramDestination {}
#[cfg(feature = "mlx5")]
impl EndDestination for DcDestination {}

pub(crate) mod sealed {
    use super::*;

    pub trait EndDestination: Copy {
        /// The destination with an address handle.
        type Peer<'p>: Destination;

        /// Whether ends of DC alone send there.
        const IS_DC: bool;

        fn path(&self) -> &AddressVector;

        fn peer<'p>(&self, handle: &'p AddressHandle<'p>) -> Self::Peer<'p>;
    }

    impl EndDestination for DatagramDestination {
        type Peer<'p> = DatagramPeer<'p>;

        const IS_DC: bool = false;

        #[inline(always)]
        fn path(&self) -> &AddressVector {
            &self.path
        }

        #[inline(always)]
        fn peer<'p>(&self, handle: &'p AddressHandle<'p>) -> DatagramPeer<'p> {
            self.by(handle)
        }
    }

    #[cfg(feature = "mlx5")]
    impl EndDestination for DcDestination {
        type Peer<'p> = DcPeer<'p>;

        const IS_DC: bool = true;

        fn path(&self) -> &AddressVector {
            &self.path
        }

        fn peer<'p>(&self, path: &'p AddressHandle<'p>) -> DcPeer<'p> {
            let &Self { number, access_key, .. } = self;
            DcPeer { path, number, access_key, stream: None }
        }
    }
}

/// A request for an end that posts by these functions of the extended interface, or by `ibv_post_send` if there are none.
pub(crate) struct Directed<R> {
    request: R,
    functions: u64,
}

impl<R, P: Destination> Directed<To<R, P>> {
    /// The caller keeps the handle of the destination while the device has the request.
    pub(crate) fn new(request: R, destination: P, functions: u64) -> Self {
        Self { request: To::new(request, destination), functions }
    }

    pub(crate) fn into_request(self) -> R {
        self.request.into_request()
    }
}

#[derive(Clone, Copy)]
pub(crate) struct DirectedOperation<K>(K, u64);

impl<R: SendQueueRequest> Request for Directed<R> {
    type Operation = DirectedOperation<R::Operation>;
    type Buffer = R::Buffer;

    fn split(self) -> (Self::Operation, R::Buffer) {
        let (operation, buffer) = self.request.split();
        (DirectedOperation(operation, self.functions), buffer)
    }

    fn join(DirectedOperation(kind, functions): Self::Operation, buffer: R::Buffer) -> Self {
        Self { request: R::join(kind, buffer), functions }
    }

    fn list(buffer: &mut R::Buffer) -> Result<<R::Buffer as GatherBuffer>::List> {
        R::list(buffer)
    }
}

impl<K: Kind> Operation for DirectedOperation<K> {
    const QUEUE: Queue = Queue::Send;
    const WRITES: bool = K::WRITES;
    const TAKES_RECEIVE: bool = takes_receive(K::OPCODE);
    const VERB: &'static str = "ibv_post_send";

    #[inline]
    fn check(&self, limits: &Limits, list: &[ffi::ibv_sge]) -> TransportResult<()> {
        check_send(&self.0, limits, list)
    }

    #[cold]
    fn explain_buffer(limits: &Limits, error: Error) -> Error {
        limits.messages.explain(K::OPCODE, error)
    }

    #[inline]
    unsafe fn post(
        self,
        target: &Target,
        prepared: *mut Templates,
        wr_id: u64,
        list: &mut [ffi::ibv_sge],
    ) -> c_int {
        let Self(kind, functions) = self;
        let queue_pair = target.queue_pair();
        // SAFETY: the caller vouches for the pointers and the memory, and for the handle of the destination. The request is
        // encoded here. It has a completion always, as the loop waits for it.
        unsafe {
            let refused = &raw mut (*prepared).bad_send;
            if functions != 0 {
                let posted = post_by_functions(queue_pair, kind, functions, wr_id, list);
                if posted != 0 {
                    *refused = &raw mut (*prepared).sends[0];
                }
                return posted;
            }
            if const { !is_message::<K>() } {
                *refused = &raw mut (*prepared).sends[0];
                return libc::EOPNOTSUPP;
            }
            let mut request = encode(&kind, wr_id, list);
            (*request.as_mut_ptr()).send_flags |= SIGNALED;
            ffi::ibv_post_send(queue_pair, request.as_mut_ptr(), refused)
        }
    }
}

/// Whether UD has the operation.
const fn is_message<K: Kind>() -> bool {
    matches!(K::OPCODE, Opcode::IBV_WR_SEND | Opcode::IBV_WR_SEND_WITH_IMM)
}
