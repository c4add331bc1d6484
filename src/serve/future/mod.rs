//! Channels whose operations are futures that own their buffers, on any runtime.
//!
//! [`AsyncChannel`] and [`Reactor`] have examples; [the guide](crate::_guide::servers#in-an-async-program) has a
//! server.
//!
//! | | |
//! |---|---|
//! | [`Reactor`] | polls the completions of many channels and wakes their tasks: by turns, on tokio, or on a thread |
//! | [`AsyncChannel`], [`PreparedAsyncChannel`] | a channel of a reactor, and before it is connected |
//! | [`AsyncOperation`], [`AsyncReceive`], [`AsyncRequest`] | its futures, and what they carry out |
//! | [`AsyncDatagrams`] | sends to any peer, and to groups |
//! | [`SharedReceives`] | receives for many channels |
//! | [`Locked`], [`Local`], [`Share`] | whether tasks of one thread or of several use the reactor |

mod async_channel;
#[cfg(feature = "rdmacm")]
mod connection_manager;
mod datagrams;
mod locked_loop;
mod operation;
mod operations;
mod reactor;
mod receive;
mod request;
mod run;
#[cfg(feature = "tokio")]
mod run_on_tokio;
mod stall_warning;
mod timer;

pub use async_channel::AsyncChannel;
pub use datagrams::AsyncDatagrams;
pub use locked_loop::{Local, Locked, Share};
pub use operation::AsyncOperation;
pub use reactor::Reactor;
pub use receive::{AsyncReceive, SharedReceives};
pub use request::{AsyncRequest, PreparedAsyncChannel};
#[cfg(feature = "tokio")]
pub use run_on_tokio::SpawnedReactor;

#[cfg(not(feature = "tokio"))]
crate::base::features::methods_of_feature! {
    crate::base::features::FeatureTokio:
    impl[S: Share] Reactor<S> { run_on_tokio(), spawn_on_tokio() }
}
