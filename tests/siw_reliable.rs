//! Channels and RC queue pairs on Soft-iWARP: the tests that Soft-RoCE runs too (`rxe_channel`, `rxe_queue_pair`).
//! To be run by `script/test siw`, in the machine that `script/vm --siw` starts.

#[path = "support/managed.rs"]
mod managed;
#[path = "support/vm/mod.rs"]
mod vm;

#[path = "support/reliable/channels.rs"]
mod channels;
#[path = "support/reliable/queue_pairs.rs"]
mod queue_pairs;
#[path = "support/reliable/by_manager.rs"]
mod transport;
