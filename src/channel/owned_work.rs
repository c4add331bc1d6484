//! Operations that own their buffers: no scope, no borrow, no `unsafe`.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Instant;

use super::Channel;
use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::in_flight::{Owner, State};
use super::operation::{
    CompareSwap, FetchAdd, Operation, Read, Receive, Request, Send, SendWithImmediate, Write,
    WriteWithImmediate,
};
use super::owned_buffer::{AnyBuffer, OwnedBuffer};
use super::wait::Wait;
use crate::completion::WorkSuccess;
use crate::memory::RemoteMemoryRegion;

/// An operation that owns its buffer, such as [`Channel::post_receive_owned`] posts.
///
/// The buffer is held by the channel. [`poll`](Self::poll) or [`wait`](Self::wait) gives it back when the
/// operation has ended. [`into_token`](Self::into_token) gives the handle up for a number of the
/// program's choice.
///
/// Dropping a handle discards the result, and the operation goes on. Once it has ended, the next use of the
/// channel for owned operations drops the buffer (a pooled buffer goes back to its pool). The buffer of a
/// forgotten handle is dropped when the channel is reset and connected again, or dropped. A handle may be
/// dropped on any thread.
#[must_use = "dropping it gives the buffer up"]
pub struct OwnedWork<B: OwnedBuffer> {
    core: Arc<Core>,
    wr_id: u64,
    /// The result was returned, or the handle given up.
    spent: bool,
    buffer: PhantomData<fn() -> B>,
}

/// An owned operation that has ended.
#[derive(Debug)]
pub struct OwnedResult<B> {
    /// The buffer. After a failure its contents are undefined where the operation writes it.
    pub buffer: B,
    /// The result of the operation: an error is [`Work`](TransportError::Work),
    /// [`Stopped`](TransportError::Stopped) or [`Closed`](TransportError::Closed).
    pub result: TransportResult<WorkSuccess>,
}

/// An owned operation that has ended and was known by a token: see [`Channel::poll_token`].
#[derive(Debug)]
pub struct TokenResult {
    /// What [`OwnedWork::into_token`] was given.
    pub token: u64,
    /// The buffer.
    pub buffer: AnyBuffer,
    /// As in [`OwnedResult`].
    pub result: TransportResult<WorkSuccess>,
}

/// Why an owned operation was not posted. It holds the operation's buffer.
pub struct PostError<B> {
    /// The reason: [those of posting](crate::Scope#errors).
    pub error: TransportError,
    /// The buffer.
    pub buffer: B,
}

impl<B> fmt::Debug for PostError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostError").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<B> fmt::Display for PostError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B> std::error::Error for PostError<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<B> From<PostError<B>> for TransportError {
    /// Drops the buffer.
    fn from(error: PostError<B>) -> Self {
        error.error
    }
}

impl<B: OwnedBuffer> Drop for OwnedWork<B> {
    fn drop(&mut self) {
        if !self.spent {
            self.core.table.entries.mark_dropped(self.wr_id);
        }
    }
}

impl<B: OwnedBuffer> OwnedWork<B> {
    /// Checks that the operation is of this connection of this channel, and not spent.
    fn check(&mut self, channel: &Channel<'_>) -> TransportResult<()> {
        if self.spent || self.core.identity != channel.core().identity {
            return Err(TransportError::UnknownWork);
        }
        // A reset replaces the channel's core, or at least its connection, and drops the buffer.
        if !std::ptr::eq(&raw const *self.core, channel.core())
            || !self.core.is_of_connection(self.wr_id)
        {
            self.spent = true;
            return Err(TransportError::Stopped);
        }
        Ok(())
    }

    /// Polls once, without waiting: the buffer and the result, or `None` if the operation is still in
    /// flight.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](TransportError::Verbs), [`UnknownCompletion`](TransportError::UnknownCompletion):
    ///    polling failed. The operation is still in flight.
    ///  - [`Stopped`](TransportError::Stopped): the operation was of an earlier connection; its buffer
    ///    was dropped.
    ///  - [`UnknownWork`](TransportError::UnknownWork): the operation is of another channel, or its
    ///    result was already returned.
    pub fn poll(&mut self, channel: &mut Channel<'_>) -> TransportResult<Option<OwnedResult<B>>> {
        self.check(channel)?;
        if let Some(ended) = self.ended()? {
            return Ok(Some(ended));
        }
        self.core.release_dropped();
        self.core.progress()?;
        self.ended()
    }

    /// Waits until the operation has ended, however long that takes.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll). Nothing is stopped.
    pub fn wait(&mut self, channel: &mut Channel<'_>) -> TransportResult<OwnedResult<B>> {
        match self.wait_with(channel, None)? {
            Some(ended) => Ok(ended),
            // Without a deadline there is no time-out.
            None => Err(TransportError::TimedOut),
        }
    }

    /// Waits until the operation has ended, or the deadline has passed. If the deadline passes, it returns
    /// `None`, and everything stays in flight.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll). Nothing is stopped.
    pub fn wait_deadline(
        &mut self,
        channel: &mut Channel<'_>,
        deadline: Instant,
    ) -> TransportResult<Option<OwnedResult<B>>> {
        self.wait_with(channel, Some(deadline))
    }

    fn wait_with(
        &mut self,
        channel: &mut Channel<'_>,
        deadline: Option<Instant>,
    ) -> TransportResult<Option<OwnedResult<B>>> {
        self.check(channel)?;
        self.core.release_dropped();
        let mut wait = None;
        loop {
            if let Some(ended) = self.ended()? {
                return Ok(Some(ended));
            }
            if !self.core.progress()? {
                let wait = wait.get_or_insert_with(|| Wait::new(deadline));
                match self.core.on_empty_poll(wait) {
                    Err(TransportError::TimedOut) => return Ok(None),
                    waited => waited?,
                }
            }
        }
    }

    /// The buffer and the result, if the operation has ended.
    fn ended(&mut self) -> TransportResult<Option<OwnedResult<B>>> {
        let core = &*self.core;
        let Some(slot) = core.table.slot(self.wr_id as u32 as usize) else {
            return Err(TransportError::UnknownWork);
        };
        match slot.state() {
            State::InFlight(Owner::Handle) => Ok(None),
            State::Done(Owner::Handle) | State::Discarded(Owner::Handle) => {
                self.spent = true;
                let Some(buffer) = core.table.entries.of(self.wr_id).buffer.take() else {
                    return Err(TransportError::UnknownWork);
                };
                let result = core.take_result(slot);
                Ok(Some(OwnedResult { buffer, result }))
            }
            _ => Err(TransportError::UnknownWork),
        }
    }

    /// Replaces the handle by `token`, which [`Channel::poll_token`] returns when the operation has ended.
    /// Tokens need not be distinct.
    ///
    /// # Errors
    ///
    /// Returns the handle if the operation is of another channel or an earlier connection.
    pub fn into_token(mut self, channel: &mut Channel<'_>, token: u64) -> Result<(), Self> {
        if self.check(channel).is_err() {
            return Err(self);
        }
        let Some(slot) = self.core.table.slot(self.wr_id as u32 as usize) else {
            return Err(self);
        };
        let state = match slot.state() {
            State::InFlight(Owner::Handle) => State::InFlight(Owner::OwnToken),
            State::Done(Owner::Handle) => State::Done(Owner::OwnToken),
            State::Discarded(Owner::Handle) => State::Discarded(Owner::OwnToken),
            _ => return Err(self),
        };
        slot.set_state(state);
        self.core.table.entries.of(self.wr_id).token.set(token);
        self.core.table.entries.any_token_ended.set(true);
        self.spent = true;
        Ok(())
    }
}

impl<B: OwnedBuffer> fmt::Debug for OwnedWork<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedWork").field("wr_id", &self.wr_id).finish_non_exhaustive()
    }
}

/// # Owned operations
///
/// Each posts one operation and moves its buffer into the channel until the operation has ended. Nothing
/// is borrowed, and nothing is allocated. The handle gives the buffer back: see [`OwnedWork`].
/// They may be in flight at the same time as a [`scope`](Self::scope) and blocking operations. A blocking
/// operation or scope that stops the channel ends them too.
///
/// When posting fails, the buffer comes back in the [`PostError`], with the reason, which is one
/// of [those of posting in a scope](crate::Scope#errors).
impl Channel<'_> {
    /// `ibv_post_recv`: posts a receive. See [`receive`](Self::receive).
    ///
    /// ```no_run
    /// # fn receive(channel: &mut ibverbs::Channel<'_>, pool: &ibverbs::BufferPool) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::{Duration, Instant};
    ///
    /// let buffer = pool.take().ok_or("all buffers are in use")?;
    /// let mut receive = channel.post_receive_owned(buffer).map_err(|error| error.error)?;
    /// let soon = Instant::now() + Duration::from_millis(10);
    /// match receive.wait_deadline(channel, soon)? {
    ///     Some(ended) => println!("{:?}", &ended.buffer[..ended.result?.byte_len() as usize]),
    ///     None => println!("nothing yet: the receive stays posted"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [Those of owned operations](Self#owned-operations).
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub fn post_receive_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
    ) -> Result<OwnedWork<B>, PostError<B>> {
        self.post_owned(buffer, Receive)
    }

    /// `ibv_post_send`: posts a send. See [`send`](Self::send).
    ///
    /// # Errors
    ///
    /// [Those of owned operations](Self#owned-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn post_send_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
    ) -> Result<OwnedWork<B>, PostError<B>> {
        self.post_owned(buffer, Request::new(Send {}))
    }

    /// `ibv_post_send`: posts a send with an immediate. See
    /// [`send_with_immediate`](Self::send_with_immediate).
    ///
    /// # Errors
    ///
    /// [Those of owned operations](Self#owned-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn post_send_with_immediate_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        immediate: u32,
    ) -> Result<OwnedWork<B>, PostError<B>> {
        self.post_owned(buffer, Request::new(SendWithImmediate { immediate }))
    }

    /// `ibv_post_send`: posts an RDMA write. See [`write`](Self::write).
    ///
    /// # Errors
    ///
    /// [Those of owned operations](Self#owned-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn post_write_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> Result<OwnedWork<B>, PostError<B>> {
        let remote = remote.into();
        self.post_owned(buffer, Request::new(Write { remote }))
    }

    /// `ibv_post_send`: posts an RDMA write with an immediate. See
    /// [`write_with_immediate`](Self::write_with_immediate).
    ///
    /// # Errors
    ///
    /// [Those of owned operations](Self#owned-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn post_write_with_immediate_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        remote: impl Into<RemoteMemoryRegion>,
        immediate: u32,
    ) -> Result<OwnedWork<B>, PostError<B>> {
        let remote = remote.into();
        self.post_owned(buffer, Request::new(WriteWithImmediate { remote, immediate }))
    }

    /// `ibv_post_send`: posts an RDMA read. See [`read`](Self::read).
    ///
    /// # Errors
    ///
    /// [Those of owned operations](Self#owned-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn post_read_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> Result<OwnedWork<B>, PostError<B>> {
        let remote = remote.into();
        self.post_owned(buffer, Request::new(Read { remote, shared: B::PEERS_MAY_WRITE }))
    }

    /// `ibv_post_send`: posts an atomic compare-and-swap, whose buffer has 8 bytes. See
    /// [`compare_swap`](Self::compare_swap).
    ///
    /// # Errors
    ///
    /// [Those of owned operations](Self#owned-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn post_compare_swap_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        remote: impl Into<RemoteMemoryRegion>,
        compare: u64,
        swap: u64,
    ) -> Result<OwnedWork<B>, PostError<B>> {
        let remote = remote.into();
        self.post_owned(buffer, Request::new(CompareSwap { remote, compare, swap }))
    }

    /// `ibv_post_send`: posts an atomic fetch-and-add, whose buffer has 8 bytes. See
    /// [`fetch_add`](Self::fetch_add).
    ///
    /// # Errors
    ///
    /// [Those of owned operations](Self#owned-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn post_fetch_add_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        remote: impl Into<RemoteMemoryRegion>,
        add: u64,
    ) -> Result<OwnedWork<B>, PostError<B>> {
        let remote = remote.into();
        self.post_owned(buffer, Request::new(FetchAdd { remote, add }))
    }

    #[inline]
    fn post_owned<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        operation: impl Operation,
    ) -> Result<OwnedWork<B>, PostError<B>> {
        post_owned(&self.link.core, buffer, operation)
    }

    /// Polls once, without waiting. Returns one ended operation among those that were given
    /// [tokens](OwnedWork::into_token), or `None`.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](TransportError::Verbs), [`UnknownCompletion`](TransportError::UnknownCompletion):
    ///    polling failed. What is in flight stays in flight.
    pub fn poll_token(&mut self) -> TransportResult<Option<TokenResult>> {
        let core = self.core();
        core.release_dropped();
        if let Some(ended) = core.next_token() {
            return Ok(Some(ended));
        }
        while core.progress()? {
            if let Some(ended) = core.next_token() {
                return Ok(Some(ended));
            }
        }
        Ok(None)
    }

    /// Waits until an operation with a [token](OwnedWork::into_token) has ended, or the deadline has
    /// passed. If the deadline passes, it returns `None`, and everything stays in flight.
    ///
    /// # Errors
    ///
    /// As [`poll_token`](Self::poll_token).
    pub fn wait_token(&mut self, deadline: Instant) -> TransportResult<Option<TokenResult>> {
        let mut wait = Wait::new(Some(deadline));
        loop {
            if let Some(ended) = self.poll_token()? {
                return Ok(Some(ended));
            }
            match self.core().on_empty_poll(&mut wait) {
                Err(TransportError::TimedOut) => return Ok(None),
                waited => waited?,
            }
        }
    }
}

/// Posts an operation that owns its buffer. The caller has the core's link for itself.
#[inline]
pub(super) fn post_owned<B: OwnedBuffer>(
    core: &Arc<Core>,
    mut buffer: B,
    operation: impl Operation,
) -> Result<OwnedWork<B>, PostError<B>> {
    core.release_dropped();
    let mut list = match buffer.element() {
        Ok(element) => [element],
        Err(error) => return Err(PostError { error: error.into(), buffer }),
    };
    // SAFETY: an `OwnedBuffer` keeps its memory until it is dropped. It goes to the slot's entry next,
    // with nothing in between that unwinds. It leaves the entry when the state of the slot says that
    // the operation has ended; a core that is dropped before that leaks it.
    match unsafe { core.post(operation, &mut list, Owner::Handle) } {
        Ok(slot) => {
            let wr_id = slot.wr_id();
            core.table.entries.begin(wr_id);
            core.table.entries.of(wr_id).buffer.put(buffer);
            Ok(OwnedWork { core: core.clone(), wr_id, spent: false, buffer: PhantomData })
        }
        Err(error) => Err(PostError { error, buffer }),
    }
}

impl Core {
    /// Processes the handles that were dropped: frees the slot and the buffer of an operation that has
    /// ended, and marks one in flight as having no owner.
    #[inline]
    fn release_dropped(&self) {
        if self.table.entries.take_any_dropped() {
            self.release_dropped_slots();
        }
    }

    #[cold]
    fn release_dropped_slots(&self) {
        for slot in self.table.slots() {
            if !self.table.entries.is_dropped(slot.wr_id()) {
                continue;
            }
            match slot.state() {
                State::InFlight(Owner::Handle) => slot.set_state(State::InFlight(Owner::Nobody)),
                State::Done(Owner::Handle) | State::Discarded(Owner::Handle) => {
                    self.table.entries.of(slot.wr_id()).buffer.clear();
                    self.release(slot);
                }
                _ => {}
            }
        }
    }

    /// After `discard_outstanding`: operations that own their buffers have ended without completions.
    pub(super) fn end_discarded_owned(&self) {
        self.table.entries.any_token_ended.set(true);
        for slot in self.table.slots() {
            if slot.state() == State::Discarded(Owner::Nobody) {
                self.table.entries.of(slot.wr_id()).buffer.clear();
                self.table.release(slot);
            }
        }
    }

    /// Drops all buffers of operations that have ended, and leaks the others.
    pub(super) fn drop_owned_buffers(&self) {
        for (slot, entry) in self.table.slots().iter().zip(self.table.entries.all()) {
            if slot.state().is_outstanding() { entry.buffer.leak() } else { entry.buffer.clear() }
        }
    }

    /// The first operation with a token that has ended.
    fn next_token(&self) -> Option<TokenResult> {
        if !self.table.entries.any_token_ended.get() {
            return None;
        }
        let ended = |state| {
            matches!(state, State::Done(Owner::OwnToken) | State::Discarded(Owner::OwnToken))
        };
        let Some(slot) = self.table.slots().iter().find(|slot| ended(slot.state())) else {
            self.table.entries.any_token_ended.set(false);
            return None;
        };
        let wr_id = slot.wr_id();
        let (token, buffer) =
            (self.table.entries.of(wr_id).token.get(), self.table.entries.take_any(wr_id));
        Some(TokenResult { token, buffer, result: self.take_result(slot) })
    }
}
