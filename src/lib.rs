//! RDMA verbs with borrowed lifetimes, at the cost of C: rdma-core is built from source and linked statically.
//!
#![cfg_attr(
    feature = "async",
    doc = "A whole program, which runs on any machine (`cargo run --example hello`):

```"
)]
#![cfg_attr(feature = "async", doc = include_str!("../examples/hello.rs"))]
#![cfg_attr(
    feature = "async",
    doc = "```

| to post | use | who keeps the buffers valid |
|---|---|---|
| as in C | [`QueuePair`], [`CompletionQueue`]: [how](_guide::verbs) | the program: posting is `unsafe` |
| safely, and wait | [`Channel`], [`Scope`]: [how](_guide::getting_started#with-a-channel) | the compiler |
| safely, for many clients | [`Loop`]: [how](_guide::servers) | the operation owns them |
| safely, and await | [`AsyncChannel`] on a [`Reactor`]: [how](_guide::servers#in-an-async-program) | the operation owns them |

The [guide](_guide) has a page for each thing that a program does first. Each module lists its items by what they are for."
)]
#![cfg_attr(not(feature = "async"), doc = include_str!("guide/queue_pair.md"))]
#![cfg_attr(docsrs, feature(doc_cfg))]
// The layers above use what the verbs layer has for them, and its documentation names them.
#![cfg_attr(not(feature = "async"), allow(dead_code, unused_imports))]
// Without futures, their links are broken in what the safe layers say. What the verbs say has no such link.
#![cfg_attr(
    all(any(feature = "channel", feature = "rdmacm"), not(feature = "async")),
    allow(rustdoc::broken_intra_doc_links)
)]

pub mod _guide;
#[cfg(feature = "channel")]
pub mod channel;
pub mod completion;
mod debug;
pub mod device;
pub mod domain;
mod error;
mod event_subjects;
pub mod ffi;
pub mod flow;
mod foreign_enum;
#[cfg(feature = "async")]
pub mod future;
mod gid_class;
mod handle;
#[cfg(any(feature = "channel", feature = "rdmacm"))]
mod handshake;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod harness;
mod hooks;
mod linux;
pub mod memory;
pub mod operation;
mod panics;
mod parent;
#[cfg(feature = "channel")]
pub mod pool;
pub mod queue_pair;
mod queue_pair_state;
#[cfg(feature = "rdmacm")]
pub mod rdmacm;
mod registered;
pub mod settings;
mod sync;
#[cfg(feature = "channel")]
pub mod tcp;
mod trace;
mod unusable;
pub mod work_queue;

/// The hooks for a device of software, and what it needs of this crate. Not part of the stable interface.
#[doc(hidden)]
pub mod provider {
    pub use crate::device::open_pointer as open;
    pub use crate::hooks::*;
    pub use crate::memory::shared_copy::{load, store};
}

#[doc(inline)]
#[cfg(feature = "channel")]
pub use channel::{
    Channel, ChannelBuilder, ChannelId, Ended, Loop, OperationError, PreparedChannel, Scope,
    TransportError, TransportResult,
};
#[doc(inline)]
#[cfg(feature = "async")]
pub use future::{AsyncChannel, AsyncDatagrams, Reactor};
#[doc(inline)]
#[cfg(feature = "channel")]
pub use pool::{BufferPool, PooledBuffer};
#[doc(inline)]
pub use {
    completion::{
        CompletionChannel, CompletionQueue, CompletionQueueBuilder, WorkCompletion, WorkError,
        WorkErrorClass, WorkStatus, WorkSuccess,
    },
    device::{Context, Device, Gid, devices, open, open_first},
    domain::ProtectionDomain,
    error::{Error, ErrorKind, Result, StateError},
    memory::{
        AccessFlags, GatherElement, Inline, MemoryRegion, MemorySlice, MemorySliceMut,
        RegionOptions, RemoteMemoryRegion, ScatterElement, SharedMemoryRegion, SharedMemorySlice,
    },
    operation::{
        CompareSwapWorkRequest, DatagramDestination, DatagramPeer, FetchAddWorkRequest,
        PreparedRequest, ReadWorkRequest, ReceiveWorkRequest, SendWorkRequest, WriteWorkRequest,
    },
    parent::Parent,
    queue_pair::{
        AddressHandle, AddressVector, ConnectionSettings, PreparedQueuePair, QueuePair,
        QueuePairBuilder, QueuePairEndpoint, Rc, SharedReceiveQueue, Uc, Ud,
    },
    queue_pair_state::{QueuePairState, QueuePairType},
    settings::{
        AckTimeout, MaxAckRetries, MaxRnrRetries, MaximumTransferUnit, MinRnrTimer,
        PacketSequenceNumber,
    },
};
