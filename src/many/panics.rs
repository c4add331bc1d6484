//! Panics of wakers, which are code of the program.

use std::any::Any;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// What code of the program has thrown: the first of it.
///
/// A waker that panics must take no wake-up from other tasks. So its panic is kept here, and goes on when the others are
/// woken; or, where something is dropped, does not go on: a second panic during a panic ends the process.
#[derive(Default)]
#[must_use]
pub(crate) struct Panics(Option<Box<dyn Any + Send>>);

impl Panics {
    /// Calls `f`, and keeps what it throws.
    pub(crate) fn catch(&mut self, f: impl FnOnce()) {
        // Nothing of ours is used after a panic that it could have changed.
        if let Err(thrown) = catch_unwind(AssertUnwindSafe(f)) {
            self.add(Self(Some(thrown)));
        }
    }

    /// Takes over what another one has.
    pub(crate) fn add(&mut self, other: Self) {
        if self.0.is_none() {
            *self = other;
        } else {
            other.forget();
        }
    }

    /// Lets the panic go on, if there was one.
    #[inline]
    pub(crate) fn resume(self) {
        if let Some(thrown) = self.0 {
            resume_unwind(thrown);
        }
    }

    /// Ends the panic, if there was one. It was printed when it began.
    pub(crate) fn forget(self) {
        // Dropping what was thrown may panic again.
        mem::forget(self.0);
    }
}
