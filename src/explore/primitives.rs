//! What the threads of an exploration share.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{self, Ordering};
use std::sync::{self, LockResult, PoisonError, TryLockError, TryLockResult};
use std::time::Duration;

#[cfg(doc)]
use super::explore;
use super::{Run, current};

/// As [`std::sync::Mutex`], and a point of decision for [`explore`].
#[derive(Debug, Default)]
pub(crate) struct Mutex<T> {
    inner: sync::Mutex<T>,
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { inner: sync::Mutex::new(value) }
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        if let Some((run, me)) = current() {
            run.lock(me, self.address());
        }
        let guard = |inner| MutexGuard { inner: Some(inner), mutex: self };
        self.inner.lock().map(guard).map_err(|error| PoisonError::new(guard(error.into_inner())))
    }

    pub(crate) fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        if let Some((run, me)) = current()
            && !run.try_lock(me, self.address())
        {
            return Err(TryLockError::WouldBlock);
        }
        let guard = |inner| MutexGuard { inner: Some(inner), mutex: self };
        match self.inner.try_lock() {
            Ok(inner) => Ok(guard(inner)),
            Err(TryLockError::Poisoned(error)) => {
                Err(TryLockError::Poisoned(PoisonError::new(guard(error.into_inner()))))
            }
            Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
        }
    }
}

/// As [`std::sync::MutexGuard`].
#[derive(Debug)]
pub(crate) struct MutexGuard<'a, T> {
    /// `None` only while it is dropped or waits.
    inner: Option<sync::MutexGuard<'a, T>>,
    mutex: &'a Mutex<T>,
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.inner.as_ref().expect("it is locked")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_mut().expect("it is locked")
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        // Nothing if it waits.
        let Some(inner) = self.inner.take() else { return };
        let Some((run, me)) = current() else { return };
        if run.at_releases {
            run.switch(run.state(), Some(me));
        }
        drop(inner);
        run.unlock(self.mutex.address());
    }
}

/// As [`std::sync::atomic::AtomicBool`], and each access is a point of decision for [`explore`].
#[derive(Debug, Default)]
pub(crate) struct AtomicBool(atomic::AtomicBool);

impl AtomicBool {
    pub(crate) const fn new(value: bool) -> Self {
        Self(atomic::AtomicBool::new(value))
    }

    fn point() {
        if let Some((run, me)) = current() {
            run.switch(run.state(), Some(me));
        }
    }

    pub(crate) fn load(&self, order: Ordering) -> bool {
        Self::point();
        self.0.load(order)
    }

    pub(crate) fn store(&self, value: bool, order: Ordering) {
        Self::point();
        self.0.store(value, order);
    }

    pub(crate) fn swap(&self, value: bool, order: Ordering) -> bool {
        Self::point();
        self.0.swap(value, order)
    }
}

/// As [`std::sync::Condvar`], and a point of decision for [`explore`].
#[derive(Debug, Default)]
pub(crate) struct Condvar {
    inner: sync::Condvar,
    /// So that two have different addresses.
    _place: u8,
}

impl Condvar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    pub(crate) fn wait<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
    ) -> LockResult<MutexGuard<'a, T>> {
        let (mutex, inner) = (guard.mutex, guard.inner.take().expect("it is locked"));
        if let Some((run, me)) = current() {
            drop(inner);
            run.wait(me, self.address(), mutex.address());
            return mutex.lock();
        }
        let guard = |inner| MutexGuard { inner: Some(inner), mutex };
        self.inner
            .wait(inner)
            .map(guard)
            .map_err(|error| PoisonError::new(guard(error.into_inner())))
    }

    pub(crate) fn wait_timeout<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        timeout: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, sync::WaitTimeoutResult)> {
        assert!(current().is_none(), "time does not pass in an exploration");
        let (mutex, inner) = (guard.mutex, guard.inner.take().expect("it is locked"));
        let guard = |inner| MutexGuard { inner: Some(inner), mutex };
        self.inner
            .wait_timeout(inner, timeout)
            .map(|(inner, result)| (guard(inner), result))
            .map_err(|error| {
                let (inner, result) = error.into_inner();
                PoisonError::new((guard(inner), result))
            })
    }

    pub(crate) fn notify_all(&self) {
        if let Some((run, _)) = current() {
            Run::wake(&mut run.state(), self.address());
        }
        self.inner.notify_all();
    }
}
