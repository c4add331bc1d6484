use std::marker::PhantomData;
use std::mem;
use std::time::Instant;

use super::Channel;
use super::core::{Core, OneThread};
use super::error::{ScopeError, TransportResult};
use super::operation::{Operation, Queue};
use super::posting::{IntoReceive, IntoSend, KeptReceive, KeptSend, WorkRequest};
use super::scoped_work::ScopedPendingWork;
use super::slot::State;
use super::stop::ScopeExit;
use crate::base::{debug, err_from_call};
use crate::verbs::memory::{BorrowedBuffer, GatherBuffer, RemoteMemoryRegion, ScatterBuffer, keep};
use crate::verbs::operation::{ReadWorkRequest, WriteWorkRequest};

/// Posts operations that end with the scope at the latest: see [`Channel::scope`](crate::Channel::scope).
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
///  - [`Verbs`](crate::TransportError::Verbs): in debug builds, memory of another protection domain or device. Release
///    builds do not look: there the operation ends with an error.
///  - [`Stopped`](crate::TransportError::Stopped), [`Closed`](crate::TransportError::Closed): an
///    earlier failure has stopped the channel.
///  - [`NotConnected`](crate::TransportError::NotConnected): the connection manager has not established the
///    connection yet.
pub struct Scope<'scope, 'env: 'scope> {
    pub(super) core: &'scope Core,
    /// Makes both lifetimes invariant. Shortened, they would admit a buffer that is local to the closure.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
    _one_thread: OneThread,
}

impl<'scope> Scope<'scope, '_> {
    /// The caller calls [`Core::end_scope`] before `'scope` ends.
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
    /// # use ibverbs::{Channel, RemoteMemoryRegion, TransportError, memory::MemorySlice};
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
    ///  - [`Cancelled`](crate::TransportError::Cancelled): a [cancel handle](crate::channel::CancelHandle) was used. The channel
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
    pub fn wait_all_until(&self, deadline: Instant) -> TransportResult<()> {
        self.core.wait_for_all(Some(deadline))
    }

    /// `ibv_post_send`, `ibv_post_recv`: posts any request. Its handle gives the buffer back. (An operation keeps nothing of
    /// [`Inline`](crate::Inline) data, which may be local to the closure.)
    ///
    /// A read that the device repeats, because the answer was lost, finds what writes posted after it have written. To
    /// know what it finds, wait for it before you post them.
    ///
    /// # Errors
    ///
    /// [Those of posting](Self#errors).
    #[doc(alias = "ibv_post_send")]
    #[doc(alias = "ibv_post_recv")]
    #[inline(always)]
    pub fn post<R: WorkRequest>(
        &self,
        request: R,
    ) -> TransportResult<ScopedPendingWork<'scope, R::Kept>>
    where
        R::Kept: BorrowedBuffer + 'scope,
    {
        let (operation, mut buffer) = request.split();
        let mut list = match R::list(&mut buffer) {
            Ok(list) => list,
            Err(error) => {
                let limits = &self.core.settings.limits;
                return err_from_call(R::Operation::explain_buffer(limits, error).into());
            }
        };
        // SAFETY: what is kept of the buffer has its memory valid and exclusive for its lifetime, even if it is moved
        // or forgotten. That contains `'scope`, before whose end `Core::end_scope` ends the operation. The post
        // copied the rest.
        let slot = unsafe { self.core.post(operation, list.as_mut(), State::Scoped) }?;
        Ok(ScopedPendingWork::new(self.core, slot, keep(buffer)))
    }

    /// `ibv_post_send`: posts a send of a buffer or a [`SendWorkRequest`](crate::SendWorkRequest): see
    /// [`post`](Self::post).
    ///
    /// # Errors
    ///
    /// [Those of posting](Self#errors).
    #[inline(always)]
    pub fn post_send<M: IntoSend>(
        &self,
        message: M,
    ) -> TransportResult<ScopedPendingWork<'scope, KeptSend<M>>>
    where
        KeptSend<M>: BorrowedBuffer + 'scope,
    {
        self.post(message.into_send())
    }

    /// `ibv_post_recv`: posts a receive: see [`post`](Self::post).
    ///
    /// # Errors
    ///
    /// [Those of posting](Self#errors).
    #[inline(always)]
    pub fn post_receive<M: IntoReceive>(
        &self,
        room: M,
    ) -> TransportResult<ScopedPendingWork<'scope, KeptReceive<M>>>
    where
        KeptReceive<M>: BorrowedBuffer + 'scope,
    {
        self.post(room.into_receive())
    }

    /// `ibv_post_send`: posts an RDMA write: see [`post`](Self::post).
    ///
    /// # Errors
    ///
    /// [Those of posting](Self#errors).
    #[inline(always)]
    pub fn post_write<D: GatherBuffer>(
        &self,
        data: D,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> TransportResult<ScopedPendingWork<'scope, D::Kept>>
    where
        D::Kept: BorrowedBuffer + 'scope,
    {
        self.post(WriteWorkRequest::new(data, remote))
    }

    /// `ibv_post_send`: posts an RDMA read: see [`post`](Self::post).
    ///
    /// # Errors
    ///
    /// [Those of posting](Self#errors).
    #[inline(always)]
    pub fn post_read<D: ScatterBuffer>(
        &self,
        buffer: D,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> TransportResult<ScopedPendingWork<'scope, D::Kept>>
    where
        D::Kept: BorrowedBuffer + 'scope,
    {
        self.post(ReadWorkRequest::new(buffer, remote))
    }
}

debug! { Scope<'_, '_>, self, core: self.core, .. }

impl Channel<'_> {
    /// Calls `f` with a scope, on which `f` can post operations that are in flight together.
    ///
    /// When `f` returns `Ok`, the operations that it has not waited for are polled to completion, without
    /// a time limit. When it returns an error or panics while operations are in flight, the channel is
    /// stopped, and must be [reset](Channel::reset). Either way no operation of the scope is in flight
    /// when this returns, and all buffers are free again.
    ///
    /// A handle gives its buffer back when it is [waited for](crate::channel::ScopedPendingWork::wait), so a scope can
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
    pub fn scope_until<'env, T, E, F>(
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
        // An unpolled operation is a mistake of the caller.
        let _ = core.end_scope(ScopeExit::Stop);
        assert!(
            result.is_err() || !unpolled,
            "a manual_scope has succeeded with operations that it did not poll"
        );
        result
    }
}

/// If `f` panics, this ends the scope. Otherwise the caller calls [`Core::end_scope`] before anything else.
#[inline]
fn run_in_scope<'env, T, F>(core: &Core, f: F) -> T
where
    F: for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> T,
{
    /// Only on this function's stack, so no code can forget it.
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
