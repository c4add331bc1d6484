//! Futures that a test polls by hand.
#![allow(dead_code)] // each program uses a part of it

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Counts how often it is woken.
#[derive(Default)]
pub(crate) struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Count {
    pub(crate) fn get(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

pub(crate) fn poll_with<F: Future + Unpin>(future: &mut F, waker: &Waker) -> Option<F::Output> {
    match Pin::new(future).poll(&mut Context::from_waker(waker)) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// Polls once, in a task whose wake-ups the count counts.
pub(crate) fn poll_in<F: Future + Unpin>(future: &mut F, count: &Arc<Count>) -> Option<F::Output> {
    poll_with(future, &Waker::from(count.clone()))
}

/// Polls once, in a task that is never woken.
pub(crate) fn poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    poll_with(future, Waker::noop())
}
