//! RDMA verbs with borrowed lifetimes, at the cost of C.
//!
//! This crate builds rdma-core from source and links it statically: a program that uses it needs no
//! libibverbs, no provider plug-ins and no configuration on the machine that it runs on (unless
//! feature `system` is on). There are two layers. The **verbs layer** ([`QueuePair`],
//! [`CompletionQueue`], the regions) is libibverbs under Rust's ownership; posting is `unsafe`,
//! because the caller has to leave the buffers alone until the device is done with them. The
//! **channel layer** ([`Channel`]) sees to that itself and needs no `unsafe`.
//!
#![doc = include_str!("guide.md")]

mod access;
mod address_handle;
mod address_vector;
mod allocation;
mod async_event;
mod atomic_element;
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
mod memory_slice_part;
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
pub use atomic_element::AtomicElement;
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
pub use memory_slice_part::MemorySlicePart;
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
pub use shared_memory_slice::SharedMemorySlice;
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
