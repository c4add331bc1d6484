//! Completions that a reactor polls, on their way to its channels.
//!
//! They do not go through the inboxes. Meanwhile they are in nobody's reach, so the reactor must not wait for
//! a channel before it has [put them back](Router::put_back): another thread may have the channel, and wait
//! for these very completions.

use std::mem::MaybeUninit;

use super::router::Router;
use super::sink::BATCH;
use crate::ffi;

/// A completion, and the channel that it is for.
pub(crate) struct PolledCompletion {
    /// The index of its inbox.
    inbox: usize,
    token: u64,
    completion: ffi::ibv_wc,
}

impl PolledCompletion {
    #[inline]
    pub(super) fn inbox(&self) -> usize {
        self.inbox
    }

    #[inline]
    pub(super) fn completion(&self) -> &ffi::ibv_wc {
        &self.completion
    }
}

/// What a poll found.
pub(crate) enum Found {
    Nothing,
    /// The channel with this token has something, in its inbox or in its shared receive queue.
    Ready(u64),
    /// Completions: see [`Polled::next`].
    Completions,
}

/// See the [module](self). What is left when it is dropped goes to the inboxes.
pub(crate) struct Polled<'a> {
    router: &'a Router,
    /// The first `len` are initialised.
    entries: [MaybeUninit<PolledCompletion>; BATCH],
    /// Those before were taken.
    next: usize,
    len: usize,
    /// Whether the router was not told yet that they have been dealt with.
    is_under_way: bool,
}

impl<'a> Polled<'a> {
    #[inline]
    pub(super) fn new(router: &'a Router) -> Self {
        let entries = [const { MaybeUninit::uninit() }; BATCH];
        Self { router, entries, next: 0, len: 0, is_under_way: false }
    }

    /// Drops all completions.
    #[inline]
    pub(super) fn clear(&mut self) {
        (self.next, self.len) = (0, 0);
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.next == self.len
    }

    /// Whether there may be more in the completion queue than the poll had room for.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.len == BATCH
    }

    /// Adds a completion. There is room for `BATCH` after `clear`.
    #[inline]
    pub(super) fn push(&mut self, inbox: usize, token: u64, completion: ffi::ibv_wc) {
        self.entries[self.len].write(PolledCompletion { inbox, token, completion });
        self.len += 1;
        self.is_under_way = true;
    }

    /// To be called when the caller has dealt with all that [`next`](Self::next) has returned.
    #[inline]
    pub(crate) fn done(&mut self) {
        if std::mem::replace(&mut self.is_under_way, false) {
            self.router.poll_done();
        }
    }

    /// Takes the next completions that are for one channel: its token, and the completions.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<(u64, &[PolledCompletion])> {
        let next = self.next;
        let token = self.entries().get(next)?.token;
        let mut end = next + 1;
        while self.entries().get(end).is_some_and(|entry| entry.token == token) {
            end += 1;
        }
        self.next = end;
        Some((token, &self.entries()[next..end]))
    }

    #[inline]
    fn entries(&self) -> &[PolledCompletion] {
        // SAFETY: the first `len` are initialised. `MaybeUninit` has the layout of what it holds.
        unsafe { std::slice::from_raw_parts(self.entries.as_ptr().cast(), self.len) }
    }
}

impl Drop for Polled<'_> {
    #[inline]
    fn drop(&mut self) {
        // Only if a waker has panicked.
        if !self.is_empty() {
            let left = &self.entries()[self.next..];
            self.router.deliver(left.iter().map(PolledCompletion::completion));
        }
        self.done();
    }
}
