//! Work requests, which are prepared once and posted to a queue pair any number of times.

mod batch;
mod batch_data;
mod batch_list;
mod batch_requests;
mod bind_window;
mod explain;
mod extended_operations;
mod list;
mod rdma;
pub(crate) mod remote;
mod send;

pub use batch::Batch;
pub(super) use batch_data::GATHERED;
pub use batch_data::{BatchData, Inline, InlineList};
pub use bind_window::{WindowBinding, WindowMemory};
use explain::elements;
pub(super) use explain::{explain_elements, explain_receive, explain_send};
pub(crate) use extended_operations::function;
pub use extended_operations::{FlushPlacement, SendFlags, SendOperations};
pub use list::{
    ListEntry, ListError, ReceiveList, ReceiveListEntry, SendList, SendListEntry, WorkRequestList,
};
pub use rdma::{CompareSwapWorkRequest, FetchAddWorkRequest, ReadWorkRequest, WriteWorkRequest};
pub use send::{LocalInvalidateWorkRequest, SendWorkRequest};

use std::ffi::c_int;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

use crate::error::{Error, Result};
use crate::ffi;
use crate::foreign_enum::foreign_enum;
use crate::memory::{GatherElement, ScatterElement};
use crate::queue_pair::QueuePair;

/// The longest message that a request can carry: 2 GiB. The limit of a port may be lower:
/// [`PortAttributes::max_message_size`](crate::PortAttributes::max_message_size).
pub const MAX_MESSAGE_LENGTH: u64 = 1 << 31;

foreign_enum! {
    /// `enum ibv_wr_opcode`: the operation of a request on the send queue.
    #[doc(alias = "ibv_wr_opcode")]
    pub enum WorkRequestOpcode: ibv_wr_opcode(u32) {
        /// An RDMA write.
        Write = IBV_WR_RDMA_WRITE,
        /// An RDMA write that consumes a receive, whose completion carries an immediate.
        WriteWithImmediate = IBV_WR_RDMA_WRITE_WITH_IMM,
        /// A send.
        Send = IBV_WR_SEND,
        /// A send with an immediate.
        SendWithImmediate = IBV_WR_SEND_WITH_IMM,
        /// An RDMA read.
        Read = IBV_WR_RDMA_READ,
        /// A compare-and-swap.
        CompareSwap = IBV_WR_ATOMIC_CMP_AND_SWP,
        /// A fetch-and-add.
        FetchAdd = IBV_WR_ATOMIC_FETCH_AND_ADD,
        /// Invalidating a local key.
        LocalInvalidate = IBV_WR_LOCAL_INV,
        /// Binding a memory window.
        BindMemoryWindow = IBV_WR_BIND_MW,
        /// A send that invalidates an rkey of the peer.
        SendWithInvalidate = IBV_WR_SEND_WITH_INV,
        /// A send that the device segments.
        Tso = IBV_WR_TSO,
        /// Defined by the provider.
        Driver1 = IBV_WR_DRIVER1,
        /// A flush.
        Flush = IBV_WR_FLUSH,
        /// An atomic write.
        AtomicWrite = IBV_WR_ATOMIC_WRITE,
    }
}

/// A request that [`QueuePair::post`] posts, to the send or to the receive queue.
///
/// The trait is sealed: only the requests of this crate have it.
pub trait WorkRequest: private::Post {}

/// A request that goes to the send queue.
///
/// The trait is sealed: only the requests of this crate have it.
pub trait SendQueueRequest: WorkRequest {
    /// The C struct.
    fn as_raw(&self) -> &ffi::ibv_send_wr;
}

pub(crate) mod private {
    use std::ffi::c_int;

    use crate::error::Error;
    use crate::ffi;
    use crate::queue_pair::QueuePair;

    /// The methods for posting, hidden from users.
    pub trait Post {
        /// Sets the number of the request and posts it. Returns the verb's return value.
        ///
        /// # Safety
        ///
        /// The queue pair is live, and the caller keeps the contract of `QueuePair::post`.
        unsafe fn post(&mut self, queue_pair: *mut ffi::ibv_qp, wr_id: u64) -> c_int;

        /// The error for the return value of a post.
        fn explain(&self, queue_pair: &QueuePair<'_>, returned: c_int) -> Error;
    }
}

/// Posts one send request.
///
/// # Safety
///
/// The queue pair is live, and the caller keeps the contract of `QueuePair::post`.
#[inline]
pub(super) unsafe fn post_send(qp: *mut ffi::ibv_qp, request: *mut ffi::ibv_send_wr) -> c_int {
    // Only a list needs to know where the verb stopped; ignoring it here avoids clearing it.
    let mut bad = MaybeUninit::uninit();
    // SAFETY: the caller vouches for the queue pair and the request; `bad` is writable.
    unsafe { ffi::ibv_post_send(qp, request, bad.as_mut_ptr()) }
}

/// Posts one receive request.
///
/// # Safety
///
/// As for `post_send`.
#[inline]
pub(super) unsafe fn post_receive(qp: *mut ffi::ibv_qp, request: &mut ffi::ibv_recv_wr) -> c_int {
    let mut bad = MaybeUninit::uninit();
    // SAFETY: the caller vouches for the queue pair and the request; `bad` is writable.
    unsafe { ffi::ibv_post_recv(qp, request, bad.as_mut_ptr()) }
}

/// The number of bytes of all elements together.
#[inline]
fn total(elements: &[ffi::ibv_sge]) -> u64 {
    elements.iter().map(|element| u64::from(element.length)).sum()
}

/// A list of elements in C's form, whose number and length were checked.
struct List {
    first: *mut ffi::ibv_sge,
    count: c_int,
    pub(crate) length: u64,
}

impl List {
    #[inline]
    fn new(verb: &'static str, elements: &[ffi::ibv_sge]) -> Result<Self> {
        let length = total(elements);
        let Ok(count) = c_int::try_from(elements.len()) else {
            return Err(too_many(verb, elements.len()));
        };
        if length > MAX_MESSAGE_LENGTH {
            return Err(too_long(verb, length));
        }
        Ok(Self { first: elements.as_ptr().cast_mut(), count, length })
    }

    #[inline]
    fn gather(elements: &[GatherElement<'_>]) -> Result<Self> {
        Self::new("ibv_post_send", GatherElement::raw_list(elements))
    }

    #[inline]
    fn scatter(verb: &'static str, elements: &mut [ScatterElement<'_>]) -> Result<Self> {
        Self::new(verb, ScatterElement::raw_list(elements))
    }

    /// The send request for it, with a completion.
    #[inline]
    fn request(&self, opcode: ffi::ibv_wr_opcode) -> ffi::ibv_send_wr {
        ffi::ibv_send_wr {
            sg_list: self.first,
            num_sge: self.count,
            opcode,
            send_flags: ffi::ibv_send_flags::IBV_SEND_SIGNALED.0,
            ..Default::default()
        }
    }
}

#[cold]
fn too_many(verb: &'static str, count: usize) -> Error {
    Error::out_of_range(verb, "the number of elements", count as u64, 0, c_int::MAX as u64)
}

#[cold]
fn too_long(verb: &'static str, length: u64) -> Error {
    Error::out_of_range(verb, "the length of the message", length, 0, MAX_MESSAGE_LENGTH)
}

/// `struct ibv_recv_wr`: receives one message.
///
/// ```
/// use ibverbs::{QueuePairType, ReceiveWorkRequest};
///
/// # fn main() -> ibverbs::Result<()> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// # let context = ibverbs::open("rxe0")?;
/// # let domain = context.alloc_pd()?;
/// let (mut header, mut body) = (domain.allocate::<u64>(2)?, domain.allocate::<u8>(1024)?);
/// # let queue = context.create_cq(16)?;
/// let prepared = domain
///     .create_qp(&queue, &queue, QueuePairType::ReliableConnected)
///     .max_recv_sge(2) // a message can then go to two elements
///     .build()?;
/// # let remote = prepared.endpoint();
/// let mut queue_pair = prepared.handshake(remote)?;
///
/// let mut elements = [header.scatter_element(..)?, body.scatter_element(..)?];
/// let mut request = ReceiveWorkRequest::new(&mut elements)?;
/// // SAFETY: the regions are not touched until the completion of 7 was polled, and dropped after the
/// // queue pair.
/// unsafe { queue_pair.post(&mut request, 7)? };
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[doc(alias = "ibv_recv_wr")]
#[repr(transparent)]
#[must_use = "it is to be posted"]
pub struct ReceiveWorkRequest<'wr> {
    raw: ffi::ibv_recv_wr,
    elements: PhantomData<&'wr mut ()>,
}

// SAFETY: its pointer is an exclusive borrow of elements, which are plain numbers.
unsafe impl Send for ReceiveWorkRequest<'_> {}
// SAFETY: as above, and a shared request is only read.
unsafe impl Sync for ReceiveWorkRequest<'_> {}

impl<'wr> ReceiveWorkRequest<'wr> {
    /// A receive into `elements`, one after the other. The slice itself is the scatter list; it may be
    /// empty, for messages without data.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there are more elements than C's `int` can count, or more than [`MAX_MESSAGE_LENGTH`]
    ///    bytes.
    #[inline]
    pub fn new<'buf: 'wr>(elements: &'wr mut [ScatterElement<'buf>]) -> Result<Self> {
        let list = List::scatter("ibv_post_recv", elements)?;
        let raw =
            ffi::ibv_recv_wr { sg_list: list.first, num_sge: list.count, ..Default::default() };
        Ok(Self { raw, elements: PhantomData })
    }

    /// The C struct.
    pub fn as_raw(&self) -> &ffi::ibv_recv_wr {
        &self.raw
    }

    /// The C struct, with this number.
    #[inline]
    pub(crate) fn numbered(&mut self, wr_id: u64) -> &mut ffi::ibv_recv_wr {
        self.raw.wr_id = wr_id;
        &mut self.raw
    }
}

impl private::Post for ReceiveWorkRequest<'_> {
    #[inline]
    unsafe fn post(&mut self, queue_pair: *mut ffi::ibv_qp, wr_id: u64) -> c_int {
        self.raw.wr_id = wr_id;
        // SAFETY: the caller vouches for the queue pair and the memory.
        unsafe { post_receive(queue_pair, &mut self.raw) }
    }

    fn explain(&self, queue_pair: &QueuePair<'_>, returned: c_int) -> Error {
        explain_receive(queue_pair, &self.raw, returned)
    }
}

impl WorkRequest for ReceiveWorkRequest<'_> {}

/// Defines a request of the send queue: a wrapper of the C struct that borrows for `'wr`.
macro_rules! send_queue_request {
    ($(#[$meta:meta])* pub struct $name:ident;) => {
        $(#[$meta])*
        #[doc(alias = "ibv_send_wr")]
        #[repr(transparent)]
        #[must_use = "it is to be posted"]
        pub struct $name<'wr> {
            raw: $crate::ffi::ibv_send_wr,
            borrows: std::marker::PhantomData<&'wr ()>,
        }

        // SAFETY: its pointers are borrows of elements, which are plain numbers, and of objects that
        // any thread may use.
        unsafe impl Send for $name<'_> {}
        // SAFETY: as above, and a shared request is only read.
        unsafe impl Sync for $name<'_> {}

        impl $name<'_> {
            #[inline]
            fn from_raw(raw: $crate::ffi::ibv_send_wr) -> Self {
                Self { raw, borrows: std::marker::PhantomData }
            }

            /// Has no completion of its own if it succeeds, unless the queue pair was built with
            /// [`signal_all`](crate::QueuePairBuilder::signal_all). It holds its place in the queue
            /// until a later request completes.
            #[inline]
            pub fn unsignaled(mut self) -> Self {
                self.raw.send_flags &= !$crate::ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
                self
            }

            /// The device begins it only when all earlier reads and atomics have completed.
            #[inline]
            pub fn fence(mut self) -> Self {
                self.raw.send_flags |= $crate::ffi::ibv_send_flags::IBV_SEND_FENCE.0;
                self
            }
        }

        impl $crate::queue_pair::work_request::private::Post for $name<'_> {
            #[inline]
            unsafe fn post(
                &mut self,
                queue_pair: *mut $crate::ffi::ibv_qp,
                wr_id: u64,
            ) -> std::ffi::c_int {
                self.raw.wr_id = wr_id;
                // SAFETY: the caller vouches for the queue pair and the memory.
                unsafe { $crate::queue_pair::work_request::post_send(queue_pair, &mut self.raw) }
            }

            fn explain(
                &self,
                queue_pair: &$crate::queue_pair::QueuePair<'_>,
                returned: std::ffi::c_int,
            ) -> $crate::error::Error {
                $crate::queue_pair::work_request::explain_send(queue_pair, &self.raw, returned)
            }
        }

        impl $crate::queue_pair::work_request::WorkRequest for $name<'_> {}

        impl $crate::queue_pair::work_request::SendQueueRequest for $name<'_> {
            fn as_raw(&self) -> &$crate::ffi::ibv_send_wr {
                &self.raw
            }
        }

        impl<'wr> From<$name<'wr>> for $crate::queue_pair::work_request::SendListEntry<'wr> {
            #[inline]
            fn from(request: $name<'wr>) -> Self {
                Self::new(request.raw)
            }
        }

        impl<'wr> From<&$name<'wr>> for $crate::queue_pair::work_request::SendListEntry<'wr> {
            #[inline]
            fn from(request: &$name<'wr>) -> Self {
                Self::new(request.raw)
            }
        }

        impl std::fmt::Debug for $name<'_> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                $crate::queue_pair::work_request::debug_send(stringify!($name), &self.raw, f)
            }
        }
    };
}

pub(super) use send_queue_request;

/// Adds the options that only requests with data have.
macro_rules! data_request {
    ($name:ident) => {
        impl $name<'_> {
            /// Carries its data inline: the device copies it when the request is posted. The memory need
            /// not be registered, and may be reused immediately. `max_inline_data` is that of the queue
            /// pair ([`QueuePair::max_inline_data`](crate::QueuePair::max_inline_data)).
            ///
            /// # Errors
            ///
            ///  - `EINVAL`: there is more data than `max_inline_data`.
            #[inline]
            pub fn inline(mut self, max_inline_data: u32) -> $crate::error::Result<Self> {
                $crate::queue_pair::work_request::check_inline(&self.raw, max_inline_data)?;
                self.raw.send_flags |= $crate::ffi::ibv_send_flags::IBV_SEND_INLINE.0;
                Ok(self)
            }

            /// Raises an event at the peer, if the peer waits for solicited events only. For a write, this
            /// requires an [`immediate`](Self::immediate).
            #[inline]
            pub fn solicited(mut self) -> Self {
                self.raw.send_flags |= $crate::ffi::ibv_send_flags::IBV_SEND_SOLICITED.0;
                self
            }
        }
    };
}

pub(super) use data_request;

/// Whether the data of a request made from a borrowed list fits inline.
#[inline]
fn check_inline(request: &ffi::ibv_send_wr, max_inline_data: u32) -> Result<()> {
    // SAFETY: all requests are made from a list of that length, which they still borrow.
    let length = total(unsafe { elements(request) });
    if length > max_inline_data.into() {
        return Err(too_long_inline(length, max_inline_data));
    }
    Ok(())
}

#[cold]
pub(super) fn too_long_inline(length: u64, most: u32) -> Error {
    Error::out_of_range("ibv_post_send", "the length of inline data", length, 0, most.into())
}

fn debug_send(
    name: &str,
    raw: &ffi::ibv_send_wr,
    f: &mut std::fmt::Formatter<'_>,
) -> std::fmt::Result {
    f.debug_struct(name)
        .field("opcode", &WorkRequestOpcode::from(raw.opcode))
        .field("flags", &crate::queue_pair::work_request::SendFlags::from_c(raw.send_flags))
        .field("elements", &raw.num_sge)
        .finish_non_exhaustive()
}
