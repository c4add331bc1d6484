//! Channels on devices of this process: data, errors, and above all that no buffer comes back while the device may
//! still use it.

mod blocking;
mod cancelling;
mod channel_sets;
mod datagrams;
mod every_fault;
mod faults;
#[path = "../support/figures.rs"]
mod figures;
mod foreign_memory;
mod forget;
mod lengths;
mod lists;
mod long_messages;
mod loop_detached;
mod loop_faults;
mod loop_flow;
mod loop_posts;
mod loop_senders;
mod loop_shared;
mod loop_unsignaled;
mod loop_unsignaled_orders;
mod loop_waking;
mod loops;
#[path = "../support/lost_doorbell.rs"]
mod lost_doorbell;
mod mistakes;
mod pair;
mod parts;
mod pools;
mod posting;
mod prepared;
mod removed;
mod reset;
mod rules;
mod scopes;
mod settling;
mod shared_pools;
mod sleeping;
#[path = "../support/software.rs"]
mod software;
mod unpolled;
mod wait_all;
