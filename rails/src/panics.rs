//! Code of the program's, which may panic.

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs code of the program's, such as a waker: if it panics, that is its own loss, and no other task's or peer's.
pub(crate) fn caught(code: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(code)) {
        // Its drop may panic again.
        mem::forget(payload);
    }
}
