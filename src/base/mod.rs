//! The base of every room: the C interface, and how resources, panics, locks and traces are handled.

pub(crate) mod c_enum;
pub(crate) mod debug;
pub(crate) mod device_access;
#[cfg(any(feature = "efa", feature = "mlx5"))]
pub(crate) mod direct;
pub(crate) mod error;
pub(crate) mod event_acks;
pub(crate) mod features;
pub mod ffi;
pub(crate) mod gid_class;
pub(crate) mod handle;
pub(crate) mod hooks;
pub(crate) mod linux;
pub(crate) mod mr_tracker;
pub(crate) mod panics;
pub(crate) mod parent;
pub(crate) mod queue_pair_state;
pub(crate) mod sync;
pub(crate) mod trace;

// The rooms above import these names from here, so that they name no file of this room. Functions that say little
// without their module, such as `trace::verb_failed`, are imported with it.
pub(crate) use c_enum::{c_enum, display_texts, getters, serialized_getters, setters};
pub(crate) use debug::debug;
pub(crate) use error::{Detail, Error, ErrorKind, Result, StateError, err_from_call};
pub(crate) use gid_class::GidClass;
pub(crate) use handle::{Handle, Leak, Object, object, resource};
pub(crate) use parent::Parent;
pub(crate) use queue_pair_state::{Problem, QueuePairState, QueuePairType};
