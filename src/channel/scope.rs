//! Scopes: many operations in flight, all of which have ended when the scope ends.

use std::fmt;
use std::marker::PhantomData;
use std::mem;
use std::time::Instant;

use super::Channel;
use super::core::{Core, OneThread};
use super::error::{ScopeError, TransportResult};
use super::in_flight::{Owner, Queue, State};
use super::kinds::{
    CompareSwap, FetchAdd, Kind, Read, Send, SendWithImmediate, Write, WriteWithImmediate,
};
use super::operation::{Operation, Receive, Request, inline_element};
use super::scoped_work::ScopedPendingWork;
use super::wait::Wait;
use crate::memory::RemoteMemoryRegion;
use crate::memory::{GatherBuffer, ScatterBuffer};

/// Posts operations that end with the scope at the latest: see [`Channel::scope`].
///
/// `'scope` is the time during which the scope's operations may be in flight: from when the closure
/// is called until `scope` returns. `'env` is the lifetime of what the closure borrows from outside; it
/// contains `'scope`. A buffer that is moved into an operation must be borrowed for `'scope` or longer,
/// so the compiler rejects a buffer that is local to the closure.
///
/// A scope and its handles stay on the thread that made them.
///
/// # Errors
///
/// When posting fails, nothing was posted:
///
///  - [`QueueFull`](crate::TransportError::QueueFull): as many operations as the channel was built for
///    are in flight, or have ended and were not waited for. The buffer stays borrowed until the scope
///    has ended; to avoid that, ask [`can_post_send`](Self::can_post_send) or
///    [`can_post_receive`](Self::can_post_receive) first.
///  - [`NoCredit`](crate::TransportError::NoCredit): the channel has
///    [flow control](crate::ChannelBuilder::flow_control), and the peer has no receive for the message.
///    The buffer stays borrowed as above; to avoid that,
///    [wait for a credit](Self::wait_for_credit) first.
///  - [`Verbs`](crate::TransportError::Verbs): an argument is wrong, or the device has refused it; or
///    the provider cannot tell whether the device has it (Soft-RoCE and Soft-iWARP, if the kernel could
///    not be told), and the channel was stopped.
///  - [`Stopped`](crate::TransportError::Stopped), [`Closed`](crate::TransportError::Closed): an
///    earlier failure has stopped the channel.
///  - [`NotConnected`](crate::TransportError::NotConnected): the connection manager has not established the
///    connection yet.
pub struct Scope<'scope, 'env: 'scope> {
    pub(super) core: &'scope Core,
    /// Makes both lifetimes invariant: if either could be shortened, a buffer that is local to the
    /// closure would be accepted.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
    _one_thread: OneThread,
}

impl<'scope> Scope<'scope, '_> {
    /// Begins a scope. The caller ends it with [`Core::end_scope`] before `'scope` ends, whatever happens.
    pub(super) fn begin(core: &'scope Core) -> Self {
        debug_assert!(!core.unreported.unpolled.get());
        Self { core, scope: PhantomData, env: PhantomData, _one_thread: OneThread::default() }
    }

    /// Whether there is room for one more send, write, read or atomic. With
    /// [flow control](crate::ChannelBuilder::flow_control), a send also needs a [credit](Self::credits).
    #[inline]
    pub fn can_post_send(&self) -> bool {
        self.core.table.has_room(Queue::Send)
    }

    /// Whether there is room for one more receive.
    #[inline]
    pub fn can_post_receive(&self) -> bool {
        self.core.table.has_room(Queue::Receive)
    }

    /// Waits until all operations of the scope have ended, however long that takes.
    ///
    /// A handle that still exists then has its result. An operation whose handle was dropped gives its place in the queue
    /// free, and its buffer stays borrowed until the scope has ended. So a program that needs no single results drops
    /// the handles, and waits for many operations at once:
    ///
    /// ```
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// # use ibverbs::{Channel, MemorySlice, RemoteMemoryRegion, TransportError};
    /// # fn write(channel: &mut Channel<'_>, parts: &[(MemorySlice<'_, u8>, RemoteMemoryRegion)]) -> Result<(), Box<dyn std::error::Error>> {
    /// channel.scope(|s| {
    ///     for &(part, remote) in parts {
    ///         if !s.can_post_send() {
    ///             s.wait_all()?;
    ///         }
    ///         s.post_write(part, remote)?;
    ///     }
    ///     // The end of the scope waits for the last of them.
    ///     Ok::<_, TransportError>(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    ///  - [`Work`](crate::TransportError::Work), [`Stopped`](crate::TransportError::Stopped),
    ///    [`Closed`](crate::TransportError::Closed): the first failure of an operation whose handle was dropped. All
    ///    operations have ended. The end of the scope does not report it again.
    ///  - [`Verbs`](crate::TransportError::Verbs),
    ///    [`UnknownCompletion`](crate::TransportError::UnknownCompletion): polling failed. Operations are still in
    ///    flight.
    ///  - [`Cancelled`](crate::TransportError::Cancelled): a [cancel handle](crate::CancelHandle) was used. The channel
    ///    was stopped, and all operations have ended.
    #[inline]
    pub fn wait_all(&self) -> TransportResult<()> {
        self.core.wait_for_all(None)
    }

    /// As [`wait_all`](Self::wait_all), until the deadline has passed at the latest.
    ///
    /// # Errors
    ///
    /// Those of [`wait_all`](Self::wait_all), and
    ///
    ///  - [`TimedOut`](crate::TransportError::TimedOut): the channel was stopped, and all operations have ended.
    pub fn wait_all_deadline(&self, deadline: Instant) -> TransportResult<()> {
        self.core.wait_for_all(Some(deadline))
    }

    /// `ibv_post_send`: posts a send. See [`Channel::send`].
    ///
    /// # Errors
    ///
    /// [Those of posting](Self#errors).
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn post_send<B: GatherBuffer + 'scope>(
        &self,
        buffer: B,
    ) -> TransportResult<ScopedPendingWork<'scope, B>> {
        self.gather(buffer, Send {})
    }

    /// `ibv_post_send`: posts a send with an immediate. See [`Channel::send_with_immediate`].
    ///
    /// # Errors
    ///
    /// [Those of posting](Self#errors).
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn post_send_with_immediate<B: GatherBuffer + 'scope>(
        &self,
        buffer: B,
        immediate: u32,
    ) -> TransportResult<ScopedPendingWork<'scope, B>> {
        self.gather(buffer, SendWithImmediate { immediate })
    }

    /// `ibv_post_send`: posts a send of bytes that are copied into the request. See [`Channel::send_inline`].
    ///
    /// # Errors
    ///
    /// [Those of posting](Self#errors).
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn post_send_inline(&self, bytes: &[u8]) -> TransportResult<ScopedPendingWork<'scope, ()>> {
        self.inline(bytes, Send {})
    }

    /// `ibv_post_recv`: posts a receive. See [`Channel::receive`].
    ///
    /// # Errors
    ///
    /// [Those of posting](Self#errors).
    #[doc(alias = "ibv_post_recv")]
    #[inline(always)]
    pub fn post_receive<B: ScatterBuffer + 'scope>(
        &self,
        buffer: B,
    ) -> TransportResult<ScopedPendingWork<'scope, B>> {
        self.scatter(buffer, Receive)
    }

    /// `ibv_post_send`: posts an RDMA write. See [`Channel::write`].
    ///
    /// # Errors
    ///
    /// [Those of posting](Self#errors).
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn post_write<B: GatherBuffer + 'scope>(
        &self,
        buffer: B,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> TransportResult<ScopedPendingWork<'scope, B>> {
        let remote = remote.into();
        self.gather(buffer, Write { remote })
    }

    /// `ibv_post_send`: posts an RDMA write with an immediate. See [`Channel::write_with_immediate`].
    ///
    /// # Errors
    ///
    /// [Those of posting](Self#errors).
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn post_write_with_immediate<B: GatherBuffer + 'scope>(
        &self,
        buffer: B,
        remote: impl Into<RemoteMemoryRegion>,
        immediate: u32,
    ) -> TransportResult<ScopedPendingWork<'scope, B>> {
        let remote = remote.into();
        self.gather(buffer, WriteWithImmediate { remote, immediate })
    }

    /// `ibv_post_send`: posts an RDMA write of bytes that are copied into the request. See [`Channel::write_inline`].
    ///
    /// # Errors
    ///
    /// [Those of posting](Self#errors).
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn post_write_inline(
        &self,
        bytes: &[u8],
        remote: impl Into<RemoteMemoryRegion>,
    ) -> TransportResult<ScopedPendingWork<'scope, ()>> {
        let remote = remote.into();
        self.inline(bytes, Write { remote })
    }

    /// `ibv_post_send`: posts an RDMA read. See [`Channel::read`].
    ///
    /// If the answer is lost, the device reads again, and then finds what writes posted after the read have written.
    /// To know what the read finds, wait for it before you post them.
    ///
    /// # Errors
    ///
    /// [Those of posting](Self#errors).
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn post_read<B: ScatterBuffer + 'scope>(
        &self,
        buffer: B,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> TransportResult<ScopedPendingWork<'scope, B>> {
        let remote = remote.into();
        self.scatter(buffer, Request::new(Read { remote, shared: B::PEERS_MAY_WRITE }))
    }

    /// `ibv_post_send`: posts an atomic compare-and-swap. See [`Channel::compare_swap`].
    ///
    /// # Errors
    ///
    /// [Those of posting](Self#errors).
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn post_compare_swap<B: ScatterBuffer + 'scope>(
        &self,
        buffer: B,
        remote: impl Into<RemoteMemoryRegion>,
        compare: u64,
        swap: u64,
    ) -> TransportResult<ScopedPendingWork<'scope, B>> {
        let remote = remote.into();
        self.scatter(buffer, Request::new(CompareSwap { remote, compare, swap }))
    }

    /// `ibv_post_send`: posts an atomic fetch-and-add. See [`Channel::fetch_add`].
    ///
    /// # Errors
    ///
    /// [Those of posting](Self#errors).
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn post_fetch_add<B: ScatterBuffer + 'scope>(
        &self,
        buffer: B,
        remote: impl Into<RemoteMemoryRegion>,
        add: u64,
    ) -> TransportResult<ScopedPendingWork<'scope, B>> {
        let remote = remote.into();
        self.scatter(buffer, Request::new(FetchAdd { remote, add }))
    }

    /// Posts an operation whose buffer the device reads.
    #[inline(always)]
    fn gather<B: GatherBuffer + 'scope>(
        &self,
        buffer: B,
        kind: impl Kind,
    ) -> TransportResult<ScopedPendingWork<'scope, B>> {
        let mut list = buffer.gather()?;
        // SAFETY: the buffer's type keeps its memory valid and exclusive for its lifetime, which contains
        // `'scope`, even if the value is moved or forgotten. `Core::end_scope` ends the operation before
        // `'scope` ends.
        let slot = unsafe { self.core.post(Request::new(kind), list.as_mut(), Owner::Scope) }?;
        Ok(ScopedPendingWork::new(self.core, slot, buffer))
    }

    /// Posts an operation whose buffer the device writes.
    #[inline(always)]
    fn scatter<B: ScatterBuffer + 'scope>(
        &self,
        mut buffer: B,
        operation: impl Operation,
    ) -> TransportResult<ScopedPendingWork<'scope, B>> {
        let mut list = buffer.scatter()?;
        // SAFETY: as in `gather`.
        let slot = unsafe { self.core.post(operation, list.as_mut(), Owner::Scope) }?;
        Ok(ScopedPendingWork::new(self.core, slot, buffer))
    }

    /// Posts an operation whose data the post itself copies.
    #[inline(always)]
    fn inline(
        &self,
        bytes: &[u8],
        kind: impl Kind,
    ) -> TransportResult<ScopedPendingWork<'scope, ()>> {
        let mut list = [inline_element(bytes)?];
        // SAFETY: the device does not use the bytes after the post, during which they are borrowed.
        let slot = unsafe { self.core.post(Request::inline(kind), &mut list, Owner::Scope) }?;
        Ok(ScopedPendingWork::new(self.core, slot, ()))
    }
}

impl fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("core", self.core).finish_non_exhaustive()
    }
}

impl Channel<'_> {
    /// Calls `f` with a scope, on which `f` can post operations that are in flight together.
    ///
    /// When `f` returns `Ok`, the operations that it has not waited for are polled to completion, without
    /// a time limit. When it returns an error or panics while operations are in flight, the channel is
    /// stopped, and must be [reset](Channel::reset). Either way no operation of the scope is in flight
    /// when this returns, and all buffers are free again.
    ///
    /// A handle gives its buffer back when it is [waited for](ScopedPendingWork::wait), so a scope can
    /// run for any time with a fixed number of buffers:
    ///
    /// ```
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// # use ibverbs::{Channel, MemoryRegion, TransportError};
    /// # fn stream(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>, mut next: impl FnMut(&mut [u8]) -> bool) -> Result<(), Box<dyn std::error::Error>> {
    /// let (one, two) = region.slice_mut(..)?.split_at(4096)?;
    /// channel.scope(|s| {
    ///     let mut flying = s.post_send(one)?;
    ///     let mut filling = two;
    ///     while next(&mut filling) {
    ///         let sending = s.post_send(filling)?;
    ///         (filling, _) = flying.wait()?;
    ///         flying = sending;
    ///     }
    ///     Ok::<_, TransportError>(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    ///  - [`ScopeError::Closure`]: what `f` returned.
    ///  - [`ScopeError::Exit`]: `f` succeeded, but an operation whose result it has not seen failed,
    ///    or completions could not be polled.
    ///
    /// # Panics
    ///
    /// If `f` does.
    #[inline]
    pub fn scope<'env, T, E, F>(&mut self, f: F) -> Result<T, ScopeError<E>>
    where
        F: for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<T, E>,
    {
        self.scope_with(f, None)
    }

    /// As [`scope`](Self::scope), but operations that are in flight when `f` returns are waited for until
    /// `deadline` only.
    ///
    /// # Errors
    ///
    /// As [`scope`](Self::scope); [`ScopeError::Exit`] with
    /// [`TimedOut`](crate::TransportError::TimedOut): the channel was stopped.
    ///
    /// # Panics
    ///
    /// If `f` does.
    #[inline]
    pub fn scope_deadline<'env, T, E, F>(
        &mut self,
        deadline: Instant,
        f: F,
    ) -> Result<T, ScopeError<E>>
    where
        F: for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<T, E>,
    {
        self.scope_with(f, Some(deadline))
    }

    #[inline]
    fn scope_with<'env, T, E, F>(
        &mut self,
        f: F,
        deadline: Option<Instant>,
    ) -> Result<T, ScopeError<E>>
    where
        F: for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<T, E>,
    {
        let core = self.core();
        match run_in_scope(core, f) {
            Ok(value) => match core.end_scope(ScopeExit::Wait(deadline)) {
                Ok(()) => Ok(value),
                Err(error) => Err(ScopeError::Exit(error)),
            },
            Err(error) => {
                let _ = core.end_scope(ScopeExit::Stop);
                Err(ScopeError::Closure(error))
            }
        }
    }

    /// As [`scope`](Self::scope), for closures that wait for everything that they post. The result is
    /// that of the closure.
    ///
    /// # Errors
    ///
    /// What `f` returned. If operations were in flight, the channel was stopped.
    ///
    /// # Panics
    ///
    /// If `f` does, or if it returns `Ok` and there is an operation whose result it has not seen. The
    /// panic comes after all operations have ended.
    #[inline]
    pub fn manual_scope<'env, T, E, F>(&mut self, f: F) -> Result<T, E>
    where
        F: for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<T, E>,
    {
        let core = self.core();
        let result = run_in_scope(core, f);
        let unpolled = core.has_unpolled();
        // An operation that was not polled is a mistake of the caller: it is not waited for.
        let _ = core.end_scope(ScopeExit::Stop);
        assert!(
            result.is_err() || !unpolled,
            "a manual_scope has succeeded with operations that it did not poll"
        );
        result
    }
}

/// Calls `f` with a scope. If `f` panics, all operations of the scope are ended. If it returns, the caller ends them with
/// [`Core::end_scope`] before anything else.
#[inline]
fn run_in_scope<'env, T, F>(core: &Core, f: F) -> T
where
    F: for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> T,
{
    /// It is on the stack of this function alone, so nobody can forget it.
    struct EndOnPanic<'a>(&'a Core);

    impl Drop for EndOnPanic<'_> {
        fn drop(&mut self) {
            let _ = self.0.end_scope(ScopeExit::Stop);
        }
    }

    let scope = Scope::begin(core);
    let end_on_panic = EndOnPanic(core);
    let result = f(&scope);
    mem::forget(end_on_panic);
    result
}

/// How the operations of a scope are ended.
#[derive(Clone, Copy)]
pub(super) enum ScopeExit {
    /// By waiting, until this deadline at the latest. What is in flight then is ended by stopping the channel.
    Wait(Option<Instant>),
    /// By stopping the channel, if any is in flight.
    Stop,
}

impl Core {
    /// Whether there is an operation of the scope whose result was not seen.
    fn has_unpolled(&self) -> bool {
        use State::{Abandoned, Discarded, Done, InFlight};

        let unseen = |state| {
            matches!(
                state,
                InFlight(Owner::Scope) | Done(Owner::Scope) | Discarded(Owner::Scope) | Abandoned
            )
        };
        self.unreported.unpolled.get()
            || self.table.any_in_scope()
                && self.table.slots().iter().any(|slot| unseen(slot.state()))
    }

    /// Ends all operations of the scope. Returns the first failure that no handle has reported.
    ///
    /// When it returns, no operation of the scope is in flight, and all its slots are free. It does not
    /// panic.
    #[inline(always)]
    pub(super) fn end_scope(&self, exit: ScopeExit) -> TransportResult<()> {
        let mut result = Ok(());
        if !self.is_scope_over() {
            result = self.poll_and_end_scope(exit);
        }
        self.tell_results();
        self.update_fast_path();
        result
    }

    /// Whether there is nothing to do at the end of a scope.
    #[inline]
    fn is_scope_over(&self) -> bool {
        !self.table.any_in_scope() && !self.unreported.unpolled.get()
    }

    /// As `end_scope`, if something is left.
    #[inline(never)]
    fn poll_and_end_scope(&self, exit: ScopeExit) -> TransportResult<()> {
        let mut polled = Ok(());
        if let ScopeExit::Wait(_) = exit {
            polled = self.poll_abandoned();
            if polled.is_ok() && self.is_scope_over() {
                return Ok(());
            }
        }
        self.end_scope_on(exit, polled)
    }

    /// The rest of `end_scope`, after polls with this result.
    #[inline(never)]
    fn end_scope_on(&self, exit: ScopeExit, polled: TransportResult<()>) -> TransportResult<()> {
        let mut result = match exit {
            ScopeExit::Wait(deadline) => polled.and_then(|()| self.wait_for_scope(deadline)),
            ScopeExit::Stop => self.dispatch_arrived(),
        };
        if self.table.any_in_scope() {
            if self.is_scope_outstanding() {
                self.stop();
            }
            result = result.and(self.release_scope_slots());
        }
        result.and(self.take_unreported())
    }

    /// Waits until all operations of the scope have ended.
    fn wait_for_scope(&self, deadline: Option<Instant>) -> TransportResult<()> {
        let mut wait = Wait::new(deadline);
        for slot in self.table.slots() {
            while slot.state().is_outstanding_in_scope() {
                if !self.progress()? {
                    self.on_empty_poll(&mut wait)?;
                }
            }
        }
        Ok(())
    }

    /// Waits until all operations of the scope have ended, and reports what no handle has seen.
    #[inline]
    fn wait_for_all(&self, deadline: Option<Instant>) -> TransportResult<()> {
        self.poll_abandoned()?;
        if self.is_scope_over() {
            return Ok(());
        }
        self.wait_for_all_on(deadline)
    }

    /// The rest of `wait_for_all`.
    #[inline(never)]
    fn wait_for_all_on(&self, deadline: Option<Instant>) -> TransportResult<()> {
        let mut wait = Wait::new(deadline);
        loop {
            self.dispatch_batch()?;
            if !self.table.any_in_scope() {
                break;
            }
            // What is in use may have ended, and have a handle.
            if !self.poll_batch()? {
                if !self.is_scope_outstanding() {
                    break;
                }
                if let Err(error) = self.on_empty_poll(&mut wait) {
                    self.stop();
                    return Err(error);
                }
            }
        }
        self.take_unreported()
    }

    /// The first failure of an operation whose handle was dropped, since the last call.
    fn take_unreported(&self) -> TransportResult<()> {
        // False if there is no error.
        if !self.unreported.unpolled.replace(false) {
            return Ok(());
        }
        self.unreported.error.take().map_or(Ok(()), Err)
    }

    /// Dispatches the completions that are already there, without waiting.
    fn dispatch_arrived(&self) -> TransportResult<()> {
        while self.is_scope_outstanding() && self.progress()? {}
        Ok(())
    }

    fn is_scope_outstanding(&self) -> bool {
        self.table.any_in_scope()
            && self.table.slots().iter().any(|slot| slot.state().is_outstanding_in_scope())
    }

    /// Frees the slots of the scope. Returns the first failure that no handle has reported.
    fn release_scope_slots(&self) -> TransportResult<()> {
        let mut result = Ok(());
        for slot in self.table.slots() {
            match slot.state() {
                State::Done(Owner::Scope) | State::Discarded(Owner::Scope) => {
                    result = result.and(self.take_result(slot).map(drop));
                }
                State::Seen => self.table.release_of(slot, Owner::Scope),
                _ => {}
            }
        }
        result
    }
}
