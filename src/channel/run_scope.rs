//! Running a closure with a scope.

use std::mem;
use std::time::Instant;

use super::Channel;
use super::core::Core;
use super::end_scope::ScopeExit;
use super::error::ScopeError;
use super::scope::Scope;

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
    /// It is on the stack of this function alone, so no code can forget it.
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
