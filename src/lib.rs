//! RDMA verbs with borrowed lifetimes, at the cost of C.
//!
//! This crate builds rdma-core from source and links it statically: a program that uses it needs no
//! libibverbs, no provider plug-ins and no configuration on the machine that it runs on (unless
//! feature `system` is on). There are two layers. The **verbs layer** ([`QueuePair`],
//! [`CompletionQueue`], the regions) is libibverbs under Rust's ownership; to post is `unsafe`, as
//! it is up to the caller to keep the buffers. The **channel layer** ([`Channel`]) keeps them for
//! the caller and needs no `unsafe`.
//!
//! - [What is made from what](#what-is-made-from-what)
//! - [Lifetimes, or `Arc`](#lifetimes-or-arc)
//! - [A message from start to end](#a-message-from-start-to-end)
//! - [Memory that peers access](#memory-that-peers-access)
//! - [InfiniBand and RoCE](#infiniband-and-roce)
//! - [Choosing timeouts and retries](#choosing-timeouts-and-retries)
//! - [Errors](#errors)
//! - [Threads](#threads), [fork](#fork), [features](#features)
//!
//! # What is made from what
//!
//! ```text
//! devices() -> DeviceList
//!   Device<'list>                        open(); or by name: ibverbs::open("mlx5_0")
//!     Context<'a>
//!       AsyncEvents<'ctx>                AsFd; what happens to ports, queues and queue pairs
//!       CompletionChannel<'ctx>          AsFd; blocking and non-blocking waits
//!       CompletionQueue<'ctx>            poll into a slice, wait
//!         ExtendedPoller<'cq>            polls field by field: time stamps, tags ..
//!       SharedCompletionQueue<'ctx>      one queue for many channels
//!       DeviceMemory<'ctx>               memory on the device itself
//!       ThreadDomain<'ctx>               promises one thread, to save locks
//!       XrcDomain<'ctx>                  what receiving XRC queue pairs share
//!       ProtectionDomain<'ctx>
//!         MemoryRegion<'pd, T>           owns its buffer; local access only; derefs to [T]
//!         SharedMemoryRegion<'pd, T>     owns its buffer; peers access it; copy in, copy out
//!         BorrowedMemoryRegion, ReadOnlyMemoryRegion    a slice of the program's; local access only
//!         RawMemoryRegion                mapped files, dma-bufs, what other libraries own
//!         DeviceMemoryRegion             DeviceMemory, registered
//!         ImplicitMemoryRegion           the whole address space (on-demand paging)
//!         NullMemoryRegion               reads as zeros, swallows writes
//!         MemoryWindow<'res>             opens a part of a region to peers, for a time
//!         AddressHandle<'pd>             where a datagram goes
//!         SharedReceiveQueue<'pd>        receives for many queue pairs
//!         QueuePairBuilder -> PreparedQueuePair<'res> -> handshake(endpoint) -> QueuePair<'res>
//!           Batch<'q>                    many requests, one doorbell (extended posting)
//!           SendHalf, ReceiveHalf        the two sides, for two threads
//!         ChannelBuilder -> PreparedChannel<'res> -> handshake(endpoint) -> Channel<'res>
//!           Scope<'scope, 'env>          many operations in flight
//!             ScopedPendingWork          one of them; gives its buffer back
//!           PendingWork                  one of them outside of any scope (unsafe)
//! ```
//!
//! Each method that wraps a verb names it in the first line of its documentation, and the search
//! box finds it under that name too: try `ibv_reg_mr`. What is not wrapped is in [`ffi`], and
//! resources give out their C objects (`as_raw`).
//!
//! Dropping a resource destroys it in silence. `close()` does the same and says what went wrong; if
//! it fails, the resource comes back with the error. A resource that cannot be destroyed is leaked,
//! together with the memory that the device might still use. No `drop` panics.
//!
//! # Lifetimes, or `Arc`
//!
//! A resource holds the one that it was made from as a [`Parent`]: **borrowed** or **shared**. To
//! borrow costs nothing and suits what lives in one function, or in scoped threads. The compiler
//! refuses a wrong order of destruction:
//!
//! ```no_run
//! # fn main() -> ibverbs::Result<()> {
//! let context = ibverbs::open("rxe0")?;
//! let domain = context.alloc_pd()?; // borrows the context
//! let region = domain.allocate::<u64>(512)?; // borrows the domain
//! # Ok(())
//! # }
//! ```
//!
//! An [`Arc`](std::sync::Arc) keeps the parent alive instead. The child is then `'static`: it can
//! be returned, put into a struct, or moved to a thread.
//!
//! ```no_run
//! use std::sync::Arc;
//! use ibverbs::{Channel, MemoryRegion, ProtectionDomain, QueuePairEndpoint, Result};
//!
//! struct Peer {
//!     channel: Channel<'static>,
//!     region: MemoryRegion<'static, u8>,
//! }
//!
//! fn connect(
//!     device: &str,
//!     exchange: impl Fn(QueuePairEndpoint) -> QueuePairEndpoint,
//! ) -> Result<Peer> {
//!     let context = Arc::new(ibverbs::open(device)?);
//!     let domain = Arc::new(ProtectionDomain::new(context)?);
//!     let region = MemoryRegion::new(&domain, 1 << 20)?;
//!     let prepared = Channel::builder(domain).build()?;
//!     let remote = exchange(prepared.endpoint());
//!     Ok(Peer { channel: prepared.handshake(remote)?, region })
//! }
//! ```
//!
//! The two mix: each constructor takes a `&P`, an `Arc<P>` or a `&Arc<P>`. The methods of the
//! parent (`alloc_pd`, `create_cq`, `allocate` ..) borrow. The types are the same in both styles.
//!
//! # A message from start to end
//!
//! Both sides build a queue pair, tell each other its [`QueuePairEndpoint`] over some other
//! connection (TCP, say; it has a stable [`serde`](#features) form), and call `handshake`. Neither
//! has to wait for the other to have done so: what arrives too early is sent again, within the
//! limits [below](#choosing-timeouts-and-retries). The examples send from a queue pair to itself.
//!
//! ## With a channel
//!
//! An operation takes a slice of a region and keeps it until the device is done with it. A receive
//! has to be posted before the message arrives, so it is posted in a scope, along with the send:
//!
//! ```no_run
//! use ibverbs::TransportError;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let context = ibverbs::open("rxe0")?;
//! let domain = context.alloc_pd()?;
//! let prepared = domain.create_channel().build()?;
//! let remote = prepared.endpoint(); // here a peer's would come in
//! let mut channel = prepared.handshake(remote)?;
//!
//! let mut region = domain.allocate::<u8>(128)?;
//! region[..5].copy_from_slice(b"hello");
//! let (message, room) = region.slice_mut(..)?.split_at(5)?;
//! let length = channel.scope(|scope| {
//!     let receive = scope.post_receive(room)?;
//!     scope.post_send(message)?.wait()?;
//!     let (_room, completion) = receive.wait()?;
//!     Ok::<_, TransportError>(completion.byte_len() as usize)
//! })?;
//! assert_eq!(&region[5..5 + length], b"hello"); // the scope has given the region back
//! # Ok(())
//! # }
//! ```
//!
//! `channel.send(..)`, `receive`, `write`, `read` and the atomics do one thing and wait for it.
//! Each wait has a variant with a deadline (`receive_deadline` ..), without which a receive waits
//! for as long as the peer says nothing. See [`Channel`].
//!
//! ## With a queue pair
//!
//! The same as in C: post, poll, and keep the books. Completions say by `wr_id` which request has
//! ended; until then the device may use the buffer, also when a function returns early.
//!
//! ```no_run
//! use ibverbs::{QueuePairType, WorkCompletion};
//!
//! const RECEIVE: u64 = 1;
//! const SEND: u64 = 2;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let context = ibverbs::open("rxe0")?;
//! let domain = context.alloc_pd()?;
//! let mut outgoing = domain.allocate::<u8>(64)?;
//! let mut incoming = domain.allocate::<u8>(64)?;
//! outgoing[..5].copy_from_slice(b"hello");
//!
//! // Declared after the regions, the queue pair is dropped before them, whatever `?` does.
//! let queue = context.create_cq(16)?;
//! let prepared =
//!     domain.create_qp(&queue, &queue, QueuePairType::ReliableConnected).build()?;
//! let remote = prepared.endpoint(); // here a peer's would come in
//! let mut queue_pair = prepared.handshake(remote)?;
//!
//! // SAFETY: neither region is touched or dropped before both completions were polled, or the
//! // queue pair was destroyed; and the two numbers are not those of other requests.
//! unsafe {
//!     queue_pair.post_receive(&mut incoming, .., RECEIVE)?;
//!     queue_pair.post_send(&outgoing, ..5, SEND)?;
//! }
//!
//! let mut completions = [WorkCompletion::default(); 16];
//! let (mut open, mut length) = (2, 0);
//! while open > 0 {
//!     for completion in queue.poll(&mut completions)? {
//!         let success = completion.result()?;
//!         if completion.wr_id() == RECEIVE {
//!             length = success.byte_len() as usize;
//!         }
//!         open -= 1;
//!     }
//! }
//! assert_eq!(&incoming[..length], b"hello");
//! # Ok(())
//! # }
//! ```
//!
//! Other requests ([`SendWorkRequest`], [`WriteWorkRequest`], [`ReadWorkRequest`],
//! [`CompareSwapWorkRequest`], [`FetchAddWorkRequest`]) go through [`QueuePair::post`], prepared
//! lists of them through [`QueuePair::post_list`], and the extended interface is
//! [`QueuePair::batch`]. A thread that would rather sleep than poll uses [`CompletionQueue::wait`],
//! or a [`CompletionChannel`] in an event loop.
//!
//! # Memory that peers access
//!
//! By default a peer can send messages and nothing else. For a peer to read or write memory by
//! itself, two things have to allow it: the **region**, which has to be a [`SharedMemoryRegion`]
//! with the [`AccessFlags`] for it, and the **queue pair** ([`QueuePairBuilder::access`],
//! [`allow_remote_rw`](QueuePairBuilder::allow_remote_rw)). The peer also has to know address and
//! rkey, which is what [`RemoteMemoryRegion`] carries.
//!
//! A shared region never gives out a `&[T]`, as the peer may write at any time; it is copied from
//! and to. An rkey opens the whole region, even if
//! [`remote_range`](SharedMemoryRegion::remote_range) named a part of it; what opens a part, and
//! can be withdrawn, is a [`MemoryWindow`].
//!
//! # InfiniBand and RoCE
//!
//! The code is the same for both: an endpoint carries what either needs, and the builder looks up
//! the rest. What differs:
//!
//! | | InfiniBand | RoCE |
//! |---|---|---|
//! | a port's address | the LID, from the subnet manager | a GID, made from an IP address of its network interface |
//! | [`QueuePairEndpoint::lid`] | that LID | 0 |
//! | global route header (GRH) | where the port demands it ([`PortAttributes::grh_required`]), or with [`global_route`](QueuePairBuilder::global_route), which peers in other subnets need | always |
//! | which of our GIDs | entry 0 | [`Context::routable_gid`] picks RoCE v2 before v1, and an IPv4 address first; [`gid_index`](QueuePairBuilder::gid_index) overrides it |
//! | a port without an address | is not active | may be active: building then fails with `ENODATA` |
//! | who finds the way | the subnet manager | the kernel's neighbour and routing tables |
//!
//! A handshake with an endpoint of the other kind is an error that says so. The MTU is that of our
//! own port, unless [`path_mtu`](QueuePairBuilder::path_mtu) says otherwise; **it must be the same
//! on both sides**, and on RoCE it follows the MTU of the interface, so where two machines differ,
//! agree on one ([`PreparedQueuePair::path_mtu`] sets it after the exchange).
//!
//! Datagrams (UD) have two more peculiarities. A receive begins with **40 bytes** that belong to
//! the GRH, used or not ([`WorkSuccess::has_global_route`]): the message comes after them, the
//! buffer must be 40 bytes longer than it, and [`WorkSuccess::byte_len`] counts them. And each
//! needs an [`AddressHandle`]. On RoCE, making one means to find the peer's MAC address. Some
//! providers leave that to the kernel; others (rxe, mlx4, hns and more) do it in user space, for
//! which feature `neigh` has to be on. Connected queue pairs do not need it.
//!
//! `handshake` is not for iWARP, whose connections are set up by a connection manager (librdmacm).
//! This crate does not wrap that.
//!
//! # Choosing timeouts and retries
//!
//! A reliable connection has four settings. Two say when to give up on a peer that is silent, two
//! when to give up on one that is there, but has posted no receive ("receiver not ready", RNR).
//!
//! | setting | set on | default | says |
//! |---|---|---|---|
//! | [`AckTimeout`] | the sender | 14: 4.096 µs · 2¹⁴ = 67.1 ms | how long a packet may stay unanswered |
//! | [`MaxAckRetries`] | the sender | 6 | how often it is then sent again |
//! | [`MinRnrTimer`] | the **receiver** | 2.56 ms | how long a sender has to wait when it found no receive |
//! | [`MaxRnrRetries`] | the sender | 6 | how often it then tries again; 7 means for ever |
//!
//! A peer that is gone is noticed after the first try and all retries: (retries + 1) · timeout, at
//! the earliest. Devices may take up to four times as long for each. The request then fails with
//! [`WorkStatus::RetryExceeded`], and all that was posted after it is flushed.
//!
//! | `AckTimeout` | one try | with 6 retries, an unanswered send fails after |
//! |---|---|---|
//! | 10 | 4.19 ms | 29 ms to 0.12 s |
//! | 14 | 67.1 ms | 0.47 s to 1.9 s |
//! | 18 | 1.07 s | 7.5 s to 30 s |
//! | 20 | 4.29 s | 30 s to 2 min |
//!
//! The shorter the timeout, the sooner a lost packet is sent again, and the sooner a peer that is
//! merely slow, or behind a congested switch, is taken for dead. Never use
//! [`AckTimeout::UNLIMITED`] on a network that loses packets: a lost one is then never sent again.
//! Seven ack retries are finite on most devices; Soft-RoCE takes them as for ever.
//!
//! A peer without a receive is given up after (RNR retries) · (the *peer's* timer), at the
//! earliest: by default 6 · 2.56 ms = 15.4 ms. That is little for a peer that may be busy with
//! something else. Either post receives ahead, and as many as the peer may use up, or give it more
//! time:
//!
//! ```
//! use std::time::Duration;
//! use ibverbs::{AckTimeout, MaxAckRetries, MaxRnrRetries, MinRnrTimer};
//!
//! // The defaults.
//! let tries = u32::from(MaxAckRetries::default().value()) + 1;
//! let silent = AckTimeout::default().duration().unwrap() * tries;
//! assert_eq!(silent.as_millis(), 469);
//! let retries = u32::from(MaxRnrRetries::default().value());
//! assert_eq!(MinRnrTimer::default().duration() * retries, Duration::from_micros(15_360));
//!
//! // Durations are rounded up to what a device can do. One second for the receiver, at six retries:
//! let timer = MinRnrTimer::from_duration(Duration::from_secs(1) / 6)?;
//! assert_eq!(timer.duration(), Duration::from_micros(245_760));
//! assert_eq!(timer.duration() * retries, Duration::from_micros(1_474_560));
//! // Notice a silent peer within about a tenth of that, on a network that is never slow:
//! let timeout = AckTimeout::from_duration(Duration::from_millis(15))?;
//! assert_eq!(timeout.duration(), Some(Duration::from_nanos(16_777_216)));
//! # Ok::<(), ibverbs::Error>(())
//! ```
//!
//! None of this helps who only **receives**, or has nothing in flight: a dead peer does not answer,
//! but nobody asks it either. Use the deadlines of [`Channel`] or of
//! [`CompletionQueue::wait_deadline`], or send something now and then. And nothing of it applies to
//! unreliable types (UC, UD), whose sends complete when they have left.
//!
//! # Errors
//!
//! | type | says | then |
//! |---|---|---|
//! | [`Error`] | a verb failed, or was not called as its input is wrong | [`kind`](Error::kind), [`raw_os_error`](Error::raw_os_error), [`verb`](Error::verb); its text says what usually helps |
//! | [`WorkError`] | a request was posted, and its completion says that it failed | [`status`](WorkError::status), [`class`](WorkError::class), [`hint`](WorkError::hint), and the vendor's code |
//! | [`TransportError`] | either of the two, or a full queue, a deadline, a stopped channel | of several operations look for the one that is no [consequence](TransportError::is_consequence) |
//! | [`ScopeError`] | a scope's closure failed, or what it had left unpolled did | `?` turns it into a `TransportError` where that is the closure's |
//!
//! [`Error`], [`WorkError`] and [`TransportError`] are `Copy` and allocate nothing; [`Error`] and
//! [`TransportError`] convert into [`std::io::Error`].
//!
//! The first failure stops a connected queue pair: all else in its queues ends as
//! [`Flushed`](WorkStatus::Flushed). To go on, both sides reset ([`Channel::reset`],
//! [`QueuePair::reset`]) and shake hands again. An error of [`CompletionQueue::poll`] is not a
//! completion: the buffers still belong to the device.
//!
//! # Threads
//!
//! All resources are `Send`. Those of the verbs layer are `Sync` too, as libibverbs locks where it
//! has to: any number of threads can poll one [`CompletionQueue`] or make things from one
//! [`ProtectionDomain`]. What posts to a queue pair takes `&mut self`, so that a thread posts at a
//! time; [`QueuePair::split`] gives the two sides to two threads. A [`Channel`] moves from thread
//! to thread but is not shared, and a [`Scope`] stays where it was made. Channels on different
//! threads can share a [`SharedCompletionQueue`].
//!
//! # Fork
//!
//! A child must not use any resource of its parent, and nor should it run their destructors: let it
//! call `exec` soon. For the parent, on Linux 5.12 and later nothing is needed. On older kernels
//! its registered memory may part from what the device sees, unless [`fork_init`] was called before
//! anything else, which this crate never does by itself. [`is_fork_initialized`] tells how things
//! are.
//!
//! # Features
//!
//! - `serde` (default): `Serialize` and `Deserialize` for what peers exchange:
//!   [`QueuePairEndpoint`], [`RemoteMemoryRegion`], [`Gid`]. What comes in is checked.
//! - One for each provider, named as in rdma-core (`mlx5`, `rxe`, `efa` ..), all on by default. A
//!   device whose provider was left out is not listed.
//! - `neigh`: neighbour resolution in user space, see [above](#infiniband-and-roce).
//! - `system`: link the machine's libibverbs instead of building one. Its providers are then
//!   plug-ins.

mod access;
mod address_handle;
mod address_vector;
mod allocation;
mod async_event;
mod batch;
mod batch_data;
mod batch_requests;
mod borrowed_memory_region;
mod buffer;
mod byte_region;
mod channel;
mod channel_blocking;
mod channel_builder;
mod channel_core;
mod channel_link;
mod channel_poll;
mod clock;
mod completion_channel;
mod completion_queue;
mod completion_queue_builder;
mod completion_router;
mod context;
mod device;
mod device_attributes;
mod device_capabilities;
mod device_memory;
mod enhanced_connection;
mod error;
mod event_file;
mod extended_completion;
mod extended_operations;
mod extended_poller;
pub mod ffi;
mod foreign_enum;
mod fork;
mod gid;
mod handle;
mod implicit_memory_region;
mod import;
mod importable;
mod in_flight;
mod memory_advice;
mod memory_region;
mod memory_window;
mod multicast;
mod null_memory_region;
mod operation;
mod parent;
mod patience;
mod pending_work;
mod port;
mod protection_domain;
mod queue_pair;
mod queue_pair_attributes;
mod queue_pair_build;
mod queue_pair_builder;
mod queue_pair_endpoint;
mod queue_pair_halves;
mod queue_pair_modify;
mod queue_pair_post;
mod queue_pair_settings;
mod queue_pair_state;
mod queue_pair_transition;
mod raw_memory_region;
mod rdma_work_request;
mod region_options;
mod registered_buffer;
mod registration;
mod remote_memory_region;
mod scatter_gather;
mod scope;
mod scoped_pending_work;
mod send_work_request;
mod settle;
mod shared_copy;
mod shared_memory_region;
mod shared_memory_slice;
mod shared_receive_queue;
mod thread_domain;
mod transport_error;
mod waiters;
mod window_binding;
mod work_completion;
mod work_request;
mod work_request_list;
mod xrc_domain;

pub use access::AccessFlags;
pub use address_handle::AddressHandle;
pub use address_vector::AddressVector;
pub use allocation::HugePages;
pub use async_event::{AsyncEvent, AsyncEventKind, AsyncEventSubject, AsyncEvents};
pub use batch::Batch;
pub use batch_data::{BatchData, Inline, InlineList};
pub use borrowed_memory_region::{BorrowedMemoryRegion, ReadOnlyMemoryRegion};
pub use buffer::{GatherBuffer, ScatterBuffer};
pub use channel::{Channel, ChannelClosed};
pub use channel_builder::{ChannelBuilder, PreparedChannel};
pub use clock::RawClock;
pub use completion_channel::{CompletionChannel, CompletionEvent};
pub use completion_queue::CompletionQueue;
pub use completion_queue_builder::CompletionQueueBuilder;
pub use completion_router::SharedCompletionQueue;
pub use context::Context;
pub use device::{Device, DeviceList, DeviceListIter, NodeType, TransportType, devices, open};
pub use device_attributes::{AtomicCapability, DeviceAttributes};
pub use device_capabilities::{
    DeviceCapabilities, ModerationCapabilities, OnDemandPaging, OnDemandPagingCapabilities,
    OnDemandPagingOperations, PacketPacingCapabilities, PciAtomicCapabilities, QueuePairTypes,
    RawPacketCapabilities, ReceiveScalingCapabilities, SegmentationCapabilities,
    TagMatchingCapabilities, TagMatchingFlags,
};
pub use device_memory::{DeviceMemory, DeviceMemoryRegion};
pub use enhanced_connection::EnhancedConnection;
pub use error::{Error, ErrorKind, Result};
pub use extended_completion::{ExtendedCompletion, ExtendedSuccess, TagMatch};
pub use extended_operations::{FlushPlacement, SendFlags, SendOperations};
pub use extended_poller::{CompletionFields, ExtendedCompletions, ExtendedPoller};
pub use fork::{ForkStatus, fork_init, is_fork_initialized};
pub use gid::{Gid, GidEntry, GidType, Guid, ParseGuidError};
pub use implicit_memory_region::ImplicitMemoryRegion;
pub use memory_advice::MemoryAdvice;
pub use memory_region::MemoryRegion;
pub use memory_window::{MemoryWindow, MemoryWindowType};
pub use null_memory_region::NullMemoryRegion;
pub use parent::Parent;
pub use pending_work::PendingWork;
pub use port::{LinkLayer, LinkSpeed, PhysicalState, PortAttributes, PortState};
pub use protection_domain::ProtectionDomain;
pub use queue_pair::QueuePair;
pub use queue_pair_attributes::{AttributeMask, QueuePairAttributes};
pub use queue_pair_build::PreparedQueuePair;
pub use queue_pair_builder::{CreateFlags, QueuePairBuilder};
pub use queue_pair_endpoint::QueuePairEndpoint;
pub use queue_pair_halves::{ReceiveHalf, SendHalf};
pub use queue_pair_modify::{DataInOrder, RateLimit};
pub use queue_pair_settings::{
    AckTimeout, FlowLabel, MaxAckRetries, MaxRnrRetries, MaximumTransferUnit, MinRnrTimer,
    PacketSequenceNumber, QueuePairType, ServiceLevel, StaticRate,
};
pub use queue_pair_state::{MigrationState, QueuePairState};
pub use queue_pair_transition::StateTransition;
pub use raw_memory_region::RawMemoryRegion;
pub use rdma_work_request::{
    CompareSwapWorkRequest, FetchAddWorkRequest, ReadWorkRequest, WriteWorkRequest,
};
pub use region_options::RegionOptions;
pub use registration::{ReregisterError, ReregisteredState, Reregistration};
pub use remote_memory_region::RemoteMemoryRegion;
pub use scatter_gather::{
    Element, GatherElement, LocalMemory, MAX_SGE_LENGTH, MemorySlice, MemorySliceMut,
    ScatterElement,
};
pub use scope::Scope;
pub use scoped_pending_work::ScopedPendingWork;
pub use send_work_request::{LocalInvalidateWorkRequest, SendWorkRequest};
pub use shared_memory_region::SharedMemoryRegion;
pub use shared_memory_slice::{AtomicElement, SharedMemorySlice};
pub use shared_receive_queue::{SharedReceiveQueue, SharedReceiveQueueAttributes};
pub use thread_domain::ThreadDomain;
pub use transport_error::{ScopeError, TransportError, TransportResult};
pub use window_binding::{WindowBinding, WindowMemory};
pub use work_completion::{
    WorkCompletion, WorkError, WorkErrorClass, WorkOpcode, WorkResult, WorkStatus, WorkSuccess,
};
pub use work_request::{
    MAX_MESSAGE_LENGTH, ReceiveWorkRequest, SendQueueRequest, WorkRequest, WorkRequestOpcode,
};
pub use work_request_list::{
    ListEntry, ListError, ReceiveList, ReceiveListEntry, SendList, SendListEntry, WorkRequestList,
};
pub use xrc_domain::{XrcDomain, XrcDomainScope};
