//! RDMA verbs with borrowed lifetimes, at the cost of C: rdma-core is built from source and linked statically.
//!
//! A whole program, which runs on any machine (`cargo run --example hello`):
//!
//! ```
#![doc = include_str!("../examples/hello.rs")]
//! ```
//!
//! | to post | use | who keeps the buffers valid |
//! |---|---|---|
//! | as in C | the verbs: [`QueuePair`], [`CompletionQueue`]; [how](#with-a-queue-pair) | the program: posting is `unsafe` |
//! | safely, and wait | [`Channel`], [`Scope`]; [how](#with-a-channel), [a server](#a-server-of-many-clients) | the compiler, or the operation owns them |
//! | safely, and await | [`AsyncChannel`] on a [`Reactor`]; [how](#in-an-async-program) | the operation owns them |
//!
//! The [index](#index-by-task) lists every item by what it is for.
//!
#![doc = include_str!("guide.md")]
#![doc = include_str!("index.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
// The layers above use what the verbs layer has for them, and its documentation names them.
#![cfg_attr(not(feature = "async"), allow(dead_code, unused_imports))]
#![cfg_attr(not(feature = "async"), allow(rustdoc::broken_intra_doc_links))]

#[cfg(feature = "channel")]
mod channel;
mod completion;
mod connect;
mod debug;
mod device;
mod domain;
mod error;
mod event_subjects;
pub mod ffi;
mod fields;
mod flow;
mod foreign_enum;
mod gid_class;
mod handle;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod harness;
mod hooks;
mod importable_handle;
mod linux;
#[cfg(feature = "channel")]
mod many;
mod memory;
mod operation;
mod panics;
mod parent;
mod queue_pair;
mod queue_pair_state;
mod settings;
mod state_error;
mod sync;
mod trace;
mod work_queue;

/// The hooks for a device of software, and what it needs of this crate. Not part of the stable interface.
#[doc(hidden)]
pub mod provider {
    pub use crate::device::open_pointer as open;
    pub use crate::hooks::*;
    pub use crate::memory::shared_copy::{load, store};
}

#[cfg(feature = "channel")]
pub use channel::{
    AnyBuffer, ArmedWaiter, CancelHandle, Channel, ChannelBuilder, ChannelClosed, ChannelId,
    ChannelSet, ChannelUntil, DestroyedChannel, DetachedChannel, Ended, IntoReceive, IntoSend,
    Loop, LoopBuffer, LoopWaiter, LoopWaker, OperationError, OwnedBuffer, OwnedResult, OwnedWork,
    PeerResults, PendingWork, PreparedChannel, PreparedWindow, Scope, ScopeError,
    ScopedPendingWork, ScopedWindow, SetScope, TransportError, TransportResult, WindowError,
    WindowRequests, WorkRequest,
};
pub use completion::{
    CompletionChannel, CompletionEvent, CompletionFields, CompletionQueue, CompletionQueueBuilder,
    ExtendedCompletion, ExtendedCompletions, ExtendedPoller, ExtendedSuccess, TagMatch,
    WorkCompletion, WorkError, WorkErrorClass, WorkOpcode, WorkResult, WorkStatus, WorkSuccess,
};
#[cfg(rdma_core_65)]
pub use completion::{
    CompletionCounter, CompletionCounterCapabilities, CompletionCounterUnit, CountedOperations,
};
#[cfg(any(feature = "channel", feature = "rdmacm"))]
pub use connect::Step;
#[cfg(feature = "rdmacm")]
pub use connect::rdmacm::{
    Connectable, Connecting, Connection, ConnectionControl, ConnectionError, ConnectionEvent,
    ConnectionEventKind, ConnectionRequest, DatagramAddress, DatagramListener, DatagramRequest,
    DatagramRoute, Listener, ListenerBuilder, MulticastMembership, PendingAccept,
    PendingConnection, PrivateData, RejectReason, Rejection, Route, RouteBuilder, RouteResolution,
};
#[cfg(feature = "async")]
pub use connect::tcp::AsyncStream;
#[cfg(feature = "channel")]
pub use connect::tcp::{
    DeadlineStream, Exchange, ExchangeError, ExchangeStage, MAX_PRIVATE_DATA, StreamWithDeadline,
    peer_has_closed, wait_until_peer_closes,
};
#[cfg(feature = "efa")]
pub use device::efa::{EfaAttributes, EfaCapabilities};
#[cfg(feature = "mlx5")]
pub use device::mlx5::Mlx5Attributes;
pub use device::{
    AsyncEvent, AsyncEventKind, AsyncEventSubject, AsyncEvents, AtomicCapability, Context, Counter,
    Counters, Device, DeviceAttributes, DeviceCapabilities, DeviceList, DeviceListIter, ForkStatus,
    Gid, GidEntry, GidType, Guid, LinkLayer, LinkSpeed, ModerationCapabilities, NodeType,
    OnDemandPaging, OnDemandPagingCapabilities, OnDemandPagingOperations, PacketPacingCapabilities,
    ParseGuidError, ParsePciAddressError, PciAddress, PciAtomicCapabilities, PciDistance,
    PciFunction, PhysicalState, PortAttributes, PortState, ProcessResources, QueuePairTypes,
    RawClock, RawPacketCapabilities, ReceiveScalingCapabilities, SegmentationCapabilities,
    TagMatchingCapabilities, TagMatchingFlags, TransportType, devices, fork_init,
    is_fork_initialized, open, open_first, process_resources,
};
#[cfg(rdma_core_65)]
pub use device::{DmaHandle, DmaHints, HintedMemory};
pub use domain::{
    DomainAllocation, DomainAllocator, ProtectionDomain, ThreadDomain, XrcDomain, XrcDomainScope,
};
pub use error::{Error, ErrorKind, Result};
pub use flow::{
    EspAction, EspFlags, EspMatch, EspParameters, EthernetMatch, FlowCounter, FlowCounters,
    FlowFlags, FlowId, FlowRule, GreMatch, HeaderMatch, Ipv4Match, Ipv6Match, MplsMatch, PortMatch,
    VxlanMatch,
};
#[cfg(feature = "async")]
pub use many::{
    AsyncChannel, AsyncOperation, AsyncReceive, AsyncRequest, Local, Locked, PreparedAsyncChannel,
    Reactor, Share, SharedReceives,
};
#[cfg(feature = "channel")]
pub use many::{BufferPool, PooledBuffer, SharedMemoryRange};
#[cfg(feature = "mlx5")]
pub use memory::MemoryKey;
pub use memory::{
    AccessFlags, AtomicElement, BorrowedBuffer, BorrowedMemoryRegion, DeviceMemory,
    DeviceMemoryRegion, Element, Field, GatherBuffer, GatherElement, HugePages,
    ImplicitMemoryRegion, Inline, InlineList, LocalMemory, LocalMemoryMut, MAX_SGE_LENGTH,
    MemoryAdvice, MemoryRegion, MemorySlice, MemorySliceMut, MemorySlicePart, MemoryWindow,
    MemoryWindowType, NullMemoryRegion, PinnedMemory, RawMemoryRegion, ReadOnlyMemoryRegion,
    Region, RegionBuffer, RegionOptions, RemoteElement, RemoteMemoryRegion, RemoteRegion,
    ReregisterError, ReregisteredState, Reregistration, ScatterBuffer, ScatterElement,
    SharedMemoryRegion, SharedMemorySlice,
};
#[cfg(feature = "mlx5")]
pub use operation::DcPeer;
pub use operation::{
    Adds, AtomicWriteWorkRequest, Batch, CompareSwapWorkRequest, DatagramPeer, Destination,
    ElementSlice, Extra, FetchAddWorkRequest, FlushWorkRequest, Immediate, Invalidate, ListError,
    LocalInvalidateWorkRequest, MAX_MESSAGE_LENGTH, Posts, Prepared, PreparedReceive,
    PreparedRequest, ReadWorkRequest, ReceiveHalf, ReceiveList, ReceiveWorkRequest,
    SegmentedSendWorkRequest, SendHalf, SendList, SendQueueRequest, SendWorkRequest, To,
    WindowBinding, WindowMemory, WorkRequestList, WriteExtra, WriteWorkRequest, XrcPeer,
};
pub use parent::Parent;
pub use queue_pair::{
    AddressHandle, AddressVector, AddressedBy, Atomics, AttributeMask, Connected,
    ConnectionSettings, CreateFlags, DataInOrder, Datagram, EnhancedConnection, FixedPeer,
    FlushPlacement, MigrationState, OpenedQueuePair, PostsRdma, PreparedQueuePair, QueuePair,
    QueuePairAttributes, QueuePairBuilder, QueuePairEndpoint, RateLimit, RawPacket, Rc, Reads,
    ReceiveQueue, Reliable, ResolvedEthernet, SendOperations, Sends, SharedReceiveQueue,
    SharedReceiveQueueAttributes, StateTransition, Tag, TagHandle, TagListSize, TagOperation,
    Transport, Uc, Ud, Unconnected, WorkRequestOpcode, Writes, XrcReceive, XrcSend,
};
#[cfg(feature = "mlx5")]
pub use queue_pair::{DcStreams, DcTarget, Dci};
#[cfg(feature = "efa")]
pub use queue_pair::{Srd, SrdOptions};
pub use queue_pair_state::{QueuePairState, QueuePairType};
pub use settings::{
    AckTimeout, FlowLabel, MaxAckRetries, MaxRnrRetries, MaximumTransferUnit, MinRnrTimer,
    PacketSequenceNumber, ServiceLevel, StaticRate,
};
pub use state_error::StateError;
pub use work_queue::{
    IndirectionTable, ReceiveHash, ReceiveHashFields, ReceiveScalingQueuePair, WorkQueue,
    WorkQueueFlags, WorkQueueState,
};
