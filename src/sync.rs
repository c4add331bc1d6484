//! The locks and flags of what several threads use at once: those of the standard library, except in unit tests, which
//! [explore](crate::explore) all orders in which the threads use them.

pub(crate) use std::sync::atomic::{Ordering, fence};

#[cfg(not(test))]
pub(crate) use std::sync::atomic::AtomicBool;
#[cfg(not(test))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

#[cfg(test)]
pub(crate) use crate::explore::{AtomicBool, Condvar, Mutex, MutexGuard};
