//! Counters of a hub.

/// Counters of a [`Hub`](crate::Hub) since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Stats {
    /// The streams that there are now, with those that are being connected or that linger.
    pub connections: u32,
    /// Clients of listeners that were [refused](crate::Refusal).
    pub refused: u64,
    /// Messages with data that were sent.
    pub messages: u64,
    /// Messages without data that were sent.
    pub controls: u64,
    /// Bytes that were written.
    pub copied: u64,
    /// Operations that have ended.
    pub completions: u64,
    /// How often a thread or a task has slept.
    pub sleeps: u64,
}
