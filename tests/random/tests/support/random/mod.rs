//! Random programs: they create, connect, post, poll, forget, drop, close and reset in any order, and
//! keep the contract of what is unsafe.
//!
//! On queue pairs, in every state: a program consists of [`operations`], [`world`] runs it, [`books`] know
//! the allowed outcomes of each posted request, and [`family`] knows the objects that must be live. On channels:
//! [`episodes`], [`channels`], and [`scoped`] for the actions within a scope. A [`Bed`] is the device that
//! they run on.

pub(crate) mod books;
pub(crate) mod channels;
mod early;
mod ending;
pub(crate) mod episodes;
pub(crate) mod family;
pub(crate) mod operations;
mod posting;
mod scoped;
pub(crate) mod world;

use ibverbs::Context;
use proptest::test_runner::TestCaseError;

use family::Counts;

/// The devices of two sides. Both may be the same.
pub(crate) trait Bed {
    /// Another context on a side's device.
    fn open(&self, side: usize) -> Context<'static>;

    /// The next calls of a verb fail, this many times.
    fn disturb(&self, verb: &str, times: u32);

    /// Whether [`disturb`](Self::disturb) does anything.
    fn can_fail(&self) -> bool;

    /// Lets the calls of verbs succeed again.
    fn calm(&self);

    /// The number of requests in flight on a queue pair, if the device can tell.
    fn in_flight(&self, queue_pair: u32) -> Option<u32>;

    /// Lets the devices execute some of what is posted.
    fn run(&self);

    /// Whether completions that must come have to be waited for.
    fn is_slow(&self) -> bool;

    /// Called after each operation: `live` is what must exist.
    fn check(&self, live: &Counts) -> Result<(), TestCaseError>;

    /// Called at the end: what is still live was forgotten.
    fn check_end(&self, live: &Counts) -> Result<(), TestCaseError>;
}
