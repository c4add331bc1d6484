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

Crates beside this one: `ibverbs-stream` (byte streams, as a `TcpStream`), `ibverbs-rails` (transfers over several adapters),
`ibverbs-transfer` (a registration cache, counted immediates) and `ibverbs-software` (a device of software, for tests and machines
without an adapter).

The [guide](_guide) has a page for each thing that a program does first. The names that most programs use are at the root.
Each module lists all its items by what they are for."
)]
#![cfg_attr(not(feature = "async"), doc = include_str!("guide/queue_pair.md"))]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(clippy::print_stderr, clippy::print_stdout)]
// The layers above use what the verbs layer has for them, and its documentation names them.
#![cfg_attr(not(feature = "async"), allow(dead_code, unused_imports))]
// Without futures, their links are broken in what the safe layers say. What the verbs say has no such link.
#![cfg_attr(
    all(any(feature = "channel", feature = "rdmacm"), not(feature = "async")),
    allow(rustdoc::broken_intra_doc_links)
)]

#[path = "guide/mod.rs"]
pub mod _guide;
mod base;
#[cfg(feature = "channel")]
pub mod channel;
#[cfg(any(feature = "channel", feature = "rdmacm", test, fuzzing))]
mod connect;
#[cfg(feature = "channel")]
mod serve;
mod verbs;

pub use base::ffi;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub use connect::harness;
#[cfg(feature = "rdmacm")]
pub use connect::rdmacm;
#[cfg(feature = "channel")]
pub use connect::tcp;
#[cfg(feature = "channel")]
pub use serve::event_loop::{self, ChannelId, Ended, Loop};
#[cfg(feature = "async")]
pub use serve::future;
#[cfg(feature = "channel")]
pub use serve::pool;
pub use verbs::{
    completion, device, domain, flow, memory, operation, queue_pair, settings, work_queue,
};

/// The hooks for a device of software, and what it needs of this crate. Not part of the stable interface.
#[doc(hidden)]
pub mod provider {
    pub use crate::base::hooks::*;
    pub use crate::verbs::device::open_pointer as open;
    pub use crate::verbs::memory::shared_copy::{load, store};
}

#[doc(inline)]
#[cfg(feature = "channel")]
pub use channel::{
    Channel, ChannelBuilder, OperationError, PreparedChannel, Scope, TransportError,
    TransportResult,
};
#[doc(inline)]
#[cfg(feature = "async")]
pub use future::{AsyncChannel, AsyncDatagrams, Reactor};
#[doc(inline)]
#[cfg(feature = "channel")]
pub use pool::{BufferPool, PooledBuffer};
#[doc(inline)]
pub use {
    base::error::{Error, ErrorKind, Result, StateError},
    base::parent::Parent,
    base::queue_pair_state::{QueuePairState, QueuePairType},
    completion::{
        CompletionChannel, CompletionQueue, CompletionQueueBuilder, WorkCompletion, WorkStatus,
    },
    device::{Context, Device, Gid, devices, open, open_first},
    domain::ProtectionDomain,
    memory::{
        AccessFlags, Inline, MemoryRegion, RegionOptions, RemoteMemoryRegion, SharedMemoryRegion,
    },
    operation::{
        CompareSwapWorkRequest, FetchAddWorkRequest, ReadWorkRequest, ReceiveWorkRequest,
        SendWorkRequest, WriteWorkRequest,
    },
    queue_pair::{
        AddressHandle, PreparedQueuePair, QueuePair, QueuePairBuilder, QueuePairEndpoint, Rc,
        SharedReceiveQueue, Uc, Ud,
    },
};
