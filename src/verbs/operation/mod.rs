//! Work requests: the operations of a device, as values, and what posts them to queue pairs.
//!
//! A request is an operation and a buffer.
#![cfg_attr(
    feature = "channel",
    doc = "The same request goes to a [`Channel`](crate::Channel), a
[`Loop`](crate::Loop), a future or a queue pair: [`SendWorkRequest`] has an example of each."
)]
//!
//! ```
//! # fn main() -> ibverbs::TransportResult<()> {
//! # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
//! # rxe0.register();
//! # let context = ibverbs::open_first()?;
//! # let domain = context.alloc_pd()?;
//! # let prepared = domain.create_channel().build()?;
//! # let itself = prepared.endpoint();
//! # let mut channel = prepared.handshake(itself).map_err(|failed| failed.error)?;
//! use ibverbs::{SendWorkRequest, TransportError};
//!
//! let mut region = domain.allocate::<u8>(10)?;
//! let (message, room) = region.slice_mut(..)?.split_at(5)?;
//! channel.scope(|scope| {
//!     let receive = scope.post_receive(room)?;
//!     scope.post(SendWorkRequest::new(message).immediate(7).solicited())?.wait()?;
//!     assert_eq!(receive.wait()?.1.immediate(), Some(7));
//!     Ok::<_, TransportError>(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! | to | |
//! |---|---|
//! | send and receive | [`SendWorkRequest`], [`ReceiveWorkRequest`], [`SegmentedSendWorkRequest`] |
//! | access memory of the peer | [`WriteWorkRequest`], [`ReadWorkRequest`], [`CompareSwapWorkRequest`], [`FetchAddWorkRequest`], [`AtomicWriteWorkRequest`], [`FlushWorkRequest`] |
//! | take rights away, or give them | [`LocalInvalidateWorkRequest`], [`WindowBinding`] |
//! | name a destination | [`DatagramPeer`], [`DatagramDestination`], [`XrcPeer`], [`Destination`], [`To`] |
//! | add something | [`Immediate`], [`Invalidate`], by the methods of a request |
//! | post one by one | [`QueuePair::post`](crate::QueuePair::post) and its short forms; from two threads [`SendHalf`] and [`ReceiveHalf`], or [`OwnedSendHalf`] and [`OwnedReceiveHalf`] |
//! | post many at once | [`SendList`], [`ReceiveList`]; a [`Batch`] on the device's own queue |
//! | post the same again | [`PreparedRequest`], [`PreparedReceive`] |
//
// `sealed::Request::split` takes a request apart. The operation is `Copy`, so the cold paths get it by value: a
// reference to the request would force it from registers into memory on the hot path.
//
// The table in `requests` defines each operation of the send queue once. Channels (`channel/operation.rs`), queue pairs
// (`encode`, `post`) and batches (`batch`) use it.

#[cfg(test)]
mod agreement;
mod batch;
mod bind_window;
pub(crate) mod destination;
pub(crate) mod encode;
pub(crate) mod explain;
mod extra;
mod halves;
mod list;
mod post;
mod prepared_request;
mod receive;
mod requests;

pub use batch::Batch;
#[cfg(feature = "channel")]
pub(crate) use batch::post_by_functions;
pub use bind_window::WindowBinding;
pub use destination::{DatagramDestination, DatagramPeer, Destination, To, XrcPeer};
#[cfg(feature = "mlx5")]
pub use destination::{DcDestination, DcPeer};
pub(crate) use encode::{check, check_receive};
pub use extra::{Extra, Immediate, Invalidate, WriteExtra};
pub use halves::{OwnedReceiveHalf, OwnedSendHalf, ReceiveHalf, SendHalf};
pub use list::{ListError, ReceiveList, SendList, WorkRequestList};
pub(crate) use post::post_by;
pub use prepared_request::{ElementSlice, Prepared, PreparedReceive, PreparedRequest};
pub(crate) use receive::Receive;
pub use receive::ReceiveWorkRequest;
pub use requests::{
    AtomicWriteWorkRequest, CompareSwapWorkRequest, FetchAddWorkRequest, FlushWorkRequest,
    LocalInvalidateWorkRequest, ReadWorkRequest, SegmentedSendWorkRequest, SendWorkRequest,
    WriteWorkRequest,
};

use crate::base::ffi;
use crate::verbs::queue_pair::{LONGEST_MESSAGE, Transport};

/// The longest message that a request can carry: 2 GiB. A port may have a lower limit:
/// [`PortAttributes::max_message_size`](crate::device::PortAttributes::max_message_size).
pub const MAX_MESSAGE_LENGTH: u64 = LONGEST_MESSAGE as u64;

pub(crate) const SIGNALED: u32 = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
pub(crate) const INLINE: u32 = ffi::ibv_send_flags::IBV_SEND_INLINE.0;

pub(crate) mod sealed {
    use std::ffi::c_int;

    use crate::base::{Error, QueuePairType, Result, ffi};
    use crate::verbs::memory::GatherBuffer;
    use crate::verbs::queue_pair::{MessageLimits, QueuePair, SendOperations};

    pub trait Request: Sized {
        type Operation: Copy;
        type Buffer: GatherBuffer;

        fn split(self) -> (Self::Operation, Self::Buffer);

        fn join(operation: Self::Operation, buffer: Self::Buffer) -> Self;

        fn list(buffer: &mut Self::Buffer) -> Result<<Self::Buffer as GatherBuffer>::List>;
    }

    pub trait Kind: Copy {
        const OPCODE: ffi::ibv_wr_opcode;
        /// In the extended interface.
        const EXTENDED: SendOperations;
        /// A batch sets the data by a separate function.
        const HAS_DATA: bool;
        const NEEDS_PEER: bool;
        /// The device writes the memory.
        const WRITES: bool;
        /// Only on a reliable connection.
        const RELIABLE: bool;

        /// The bits of `ibv_send_flags` that differ from those of a request with a completion.
        fn flags(&self) -> u32;

        /// `private_reads`: reads may fill memory that peers may not write (not on iWARP).
        #[inline(always)]
        fn is_allowed(&self, reliable: bool, _private_reads: bool) -> bool {
            !Self::RELIABLE || reliable
        }

        /// Checks the peer's memory.
        fn fits(&self, bytes: u64) -> Result<()>;

        /// # Safety
        ///
        /// The pointer is to a request, which may be uninitialised.
        unsafe fn fill(&self, request: *mut ffi::ibv_send_wr);

        /// # Safety
        ///
        /// The queue pair is live, in a batch, and has the functions of [`EXTENDED`](Self::EXTENDED).
        unsafe fn emit(&self, queue_pair: *mut ffi::ibv_qp_ex);

        /// The setter, or [`READY`](crate::queue_pair::function::READY) if the queue pair must have a peer.
        #[inline(always)]
        fn destination_function(&self) -> u64 {
            if Self::NEEDS_PEER { crate::verbs::queue_pair::function::READY } else { 0 }
        }

        /// # Safety
        ///
        /// As for [`emit`](Self::emit), with [`destination_function`](Self::destination_function).
        #[inline(always)]
        unsafe fn emit_destination(&self, _queue_pair: *mut ffi::ibv_qp_ex) {}
    }

    pub trait Posted: Kind {}

    /// The transport has the operation, with a destination where it needs one.
    pub trait AddedOn<T> {}

    /// `ibv_post_send` of the transport has the operation.
    pub trait PostedOn<T> {}

    /// An operation without a destination, for channels.
    #[cfg_attr(
        not(feature = "channel"),
        expect(unreachable_pub, reason = "only channels have it in their bounds")
    )]
    pub trait Undirected: Posted {}

    #[diagnostic::on_unimplemented(
        message = "on a `Dci` queue pair, every request is posted in a batch",
        label = "this request is for a batch",
        note = "`queue_pair.batch(|batch| batch.add(..))`"
    )]
    pub trait Post: Copy {
        const NEEDS_PEER: bool;

        /// # Errors
        ///
        ///  - `EINVAL`: the peer's memory is too short, or not aligned for an atomic; there is too much data.
        fn check(&self, limits: &MessageLimits, list: &[ffi::ibv_sge]) -> Result<()>;

        fn explain_buffer(_limits: &MessageLimits, error: Error) -> Error {
            error
        }

        /// Returns the verb's return value.
        ///
        /// # Safety
        ///
        /// The queue pair is live, and the caller keeps the contract of posting.
        unsafe fn post(
            self,
            queue_pair: *mut ffi::ibv_qp,
            wr_id: u64,
            list: &mut [ffi::ibv_sge],
        ) -> c_int;

        fn explain(
            self,
            queue_pair: &QueuePair<'_, QueuePairType>,
            list: &[ffi::ibv_sge],
            returned: c_int,
        ) -> Error;
    }
}

use sealed::{Kind, Post, Request};

/// A request that [`QueuePair::post`](crate::QueuePair::post) posts on this [transport](crate::queue_pair::Transport):
/// `ibv_post_send` or `ibv_post_recv` has it. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be posted alone",
    label = "a request is needed here, such as `SendWorkRequest::new(buffer)`",
    note = "flushes, atomic writes and all requests of a `Dci` queue pair are posted in batches: `queue_pair.batch(|batch| batch.add(..))`"
)]
pub trait Posts<T: Transport>: Request<Operation: Post> {}

/// A request that [`Batch::add`](crate::operation::Batch::add) adds on this [transport](crate::queue_pair::Transport):
/// `ibv_wr_*` has it. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be added to a batch",
    label = "a batch has requests of the send queue, such as `SendWorkRequest::new(buffer)`"
)]
pub trait Adds<T: Transport>: SendQueueRequest {}

/// A request of the send queue. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a request of the send queue",
    label = "a request of the send queue is needed here, such as `SendWorkRequest::new(buffer)`"
)]
pub trait SendQueueRequest: Request<Operation: Kind> {}

#[diagnostic::do_not_recommend]
impl<R: Request<Operation: Kind>> SendQueueRequest for R {}

#[inline]
pub(crate) fn total(list: &[ffi::ibv_sge]) -> u64 {
    list.iter().map(|element| u64::from(element.length)).sum()
}

/// mlx4 and mthca take a length of 0 for 2 GiB: the peer's data would overwrite the rest of the region, and mthca would
/// also send that much.
#[inline]
pub(crate) fn without_empty(list: &mut [ffi::ibv_sge]) -> usize {
    let mut count = 0;
    for index in 0..list.len() {
        if list[index].length != 0 {
            list[count] = list[index];
            count += 1;
        }
    }
    count
}

/// How many pieces [`without_empty`] leaves, for a list that seems to have too many.
#[cold]
#[inline(never)]
pub(crate) fn count_filled(list: &[ffi::ibv_sge]) -> usize {
    list.iter().filter(|piece| piece.length != 0).count()
}

pub(crate) const fn takes_receive(opcode: ffi::ibv_wr_opcode) -> bool {
    use ffi::ibv_wr_opcode as Opcode;

    opcode.0 == Opcode::IBV_WR_SEND.0
        || opcode.0 == Opcode::IBV_WR_SEND_WITH_IMM.0
        || opcode.0 == Opcode::IBV_WR_SEND_WITH_INV.0
        || opcode.0 == Opcode::IBV_WR_RDMA_WRITE_WITH_IMM.0
}
