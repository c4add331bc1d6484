//! The settings of a network.

use super::conditions::Conditions;

#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) seed: u64,
    pub(super) conditions: Conditions,
    pub(super) manual: bool,
    pub(super) trace_bytes: usize,
    pub(super) queue: usize,
}
