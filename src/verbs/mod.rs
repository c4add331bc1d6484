//! The verbs as in C, with types: posting is `unsafe`.

pub mod completion;
pub mod device;
pub mod domain;
pub mod flow;
pub mod memory;
pub mod operation;
pub mod queue_pair;
pub mod settings;
pub mod work_queue;
