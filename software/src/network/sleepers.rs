//! The sleeping threads of a network.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::files::Waker;

/// Each has its own descriptor, so that waking one cannot wake another
/// in its place.
#[derive(Debug, Default)]
pub(crate) struct Sleepers(Mutex<Vec<Arc<Waker>>>);

impl Sleepers {
    fn all(&self) -> MutexGuard<'_, Vec<Arc<Waker>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all sleepers: a verb has given the network something to do, or the thread that drove it has stopped.
    pub(crate) fn wake(&self) {
        self.all().iter().for_each(|waker| waker.wake());
    }

    pub(super) fn add(&self) -> io::Result<Sleeper<'_>> {
        let waker = Arc::new(Waker::new()?);
        self.all().push(waker.clone());
        Ok(Sleeper { sleepers: self, waker })
    }
}

pub(super) struct Sleeper<'a> {
    sleepers: &'a Sleepers,
    pub(super) waker: Arc<Waker>,
}

impl Drop for Sleeper<'_> {
    /// Another sleeping thread now drives the network instead of this one.
    fn drop(&mut self) {
        let mut all = self.sleepers.all();
        all.retain(|waker| !Arc::ptr_eq(waker, &self.waker));
        all.iter().for_each(|waker| waker.wake());
    }
}
