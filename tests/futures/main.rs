//! Futures of channels on the function device: their buffers, when verbs fail, completions are false, and objects are
//! forgotten. `script/test memcheck` also runs them under valgrind.

#[path = "../support/by_hand.rs"]
mod by_hand;
mod datagrams;
mod driving;
mod failing_verbs;
#[path = "../support/lost_doorbell.rs"]
mod lost_doorbell;
mod operations;
mod places;
mod removed;
mod rig;
mod sharing;
