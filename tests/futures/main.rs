//! Futures of channels on the function device: their buffers, when verbs fail, completions are false, and objects are
//! forgotten. `script/test memcheck` also runs them under valgrind.

mod failing_posts;
mod failing_verbs;
mod forget;
#[path = "../support/lost_doorbell.rs"]
mod lost_doorbell;
mod removed;
mod rig;
mod shares;
mod strangers;
