//! The locks of what several threads use at once: those of the standard library, except in unit tests, which
//! [explore](crate::explore) all orders in which the threads take them.

#[cfg(not(test))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

#[cfg(test)]
pub(crate) use crate::explore::{Condvar, Mutex, MutexGuard};
