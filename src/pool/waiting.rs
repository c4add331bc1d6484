//! Tasks that wait for a chunk of a pool.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::panics;

/// Those that wait, in the order in which they came. What they wait for is taken elsewhere: a wake-up says that it may be
/// there.
#[derive(Default)]
pub(super) struct Waiting {
    /// How many there are, which is looked at whenever something comes back.
    count: AtomicUsize,
    places: Mutex<Places>,
}

#[derive(Default)]
struct Places {
    /// The number of the next place.
    next: u64,
    /// By their numbers, which ascend.
    wakers: VecDeque<(u64, Waker)>,
}

impl Places {
    fn find(&self, number: u64) -> Option<usize> {
        self.wakers.binary_search_by_key(&number, |&(number, _)| number).ok()
    }
}

/// A place in the line, given up when it is dropped.
struct Place<'a> {
    waiting: &'a Waiting,
    number: Option<u64>,
}

impl Waiting {
    /// Waits until `take` returns something. `take` looks in an order that is one for all threads (`SeqCst`), and so does
    /// what makes it succeed, before it calls [`wake_one`](Self::wake_one).
    pub(super) async fn wait<T>(&self, take: impl Fn() -> Option<T>) -> T {
        let mut place = Place { waiting: self, number: None };
        poll_fn(|cx| {
            if let Some(taken) = take() {
                return Poll::Ready(taken);
            }
            place.keep(cx);
            // Once more: what came back before it had a place woke no task.
            take().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Wakes the task that has waited for the longest time. If its waker panics, the panic ends here.
    #[inline(always)]
    pub(super) fn wake_one(&self) {
        if self.count.load(Ordering::SeqCst) != 0 {
            self.wake_first();
        }
    }

    /// The same, if there is something for it.
    pub(super) fn wake_one_if(&self, is_there: impl FnOnce() -> bool) {
        if self.count.load(Ordering::SeqCst) != 0 && is_there() {
            self.wake_first();
        }
    }

    #[cold]
    #[inline(never)]
    fn wake_first(&self) {
        let mut places = self.lock();
        let first = places.wakers.pop_front();
        self.count.store(places.wakers.len(), Ordering::SeqCst);
        drop(places);
        if let Some((_, waker)) = first {
            // A buffer that goes back to its pool may be dropped during a panic: a second one would end the process.
            let _ = panics::catch(|| waker.wake());
        }
    }

    /// What is behind the lock is consistent at every moment.
    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place<'_> {
    /// Has the task woken when it is the first: from its old place, if it was not woken since it has had that.
    fn keep(&mut self, cx: &Context<'_>) {
        // Wakers are code of the program's: not under the lock.
        let waker = cx.waker().clone();
        let mut places = self.waiting.lock();
        let own = self.number.and_then(|number| places.find(number));
        let _before = match own {
            Some(own) => Some(std::mem::replace(&mut places.wakers[own].1, waker)),
            None if places.wakers.try_reserve(1).is_err() => {
                drop(places);
                // There is no memory to wait in: it asks again.
                waker.wake();
                return;
            }
            None => {
                let number = places.next;
                places.next += 1;
                places.wakers.push_back((number, waker));
                self.number = Some(number);
                self.waiting.count.store(places.wakers.len(), Ordering::SeqCst);
                None
            }
        };
        drop(places);
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let Some(own) = self.number else { return };
        let mut places = self.waiting.lock();
        let at = places.find(own);
        let waker = at.and_then(|at| places.wakers.remove(at));
        self.waiting.count.store(places.wakers.len(), Ordering::SeqCst);
        drop(places);
        let _ = panics::catch(|| drop(waker));
        if at.is_none() {
            // It was woken, and has perhaps taken nothing: the next one looks.
            self.waiting.wake_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::sync::Arc;
    use std::task::Wake;

    use super::*;

    /// Counts how often a task was woken.
    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Woken {
        fn poll<T>(self: &Arc<Self>, future: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
            future.poll(&mut Context::from_waker(&self.clone().into()))
        }

        fn times(&self) -> usize {
            self.0.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn tasks_are_woken_one_by_one_in_their_order() {
        let (waiting, there) = (Waiting::default(), Cell::new(0));
        let take = || (there.get() > 0).then(|| there.set(there.get() - 1));
        let tasks = [(); 3].map(|()| Arc::new(Woken::default()));
        let (mut one, mut two, mut three) =
            (pin!(waiting.wait(take)), pin!(waiting.wait(take)), pin!(waiting.wait(take)));
        assert!(tasks[0].poll(one.as_mut()).is_pending());
        assert!(tasks[1].poll(two.as_mut()).is_pending());
        // It keeps its place, though it is polled in between.
        assert!(tasks[0].poll(one.as_mut()).is_pending());
        assert!(tasks[2].poll(three.as_mut()).is_pending());
        for woken in [[1, 0, 0], [1, 1, 0]] {
            there.set(there.get() + 1);
            waiting.wake_one();
            assert_eq!([0, 1, 2].map(|task| tasks[task].times()), woken);
        }
        assert!(tasks[1].poll(two.as_mut()).is_ready());
        assert!(tasks[0].poll(one.as_mut()).is_ready());
        assert!(tasks[2].poll(three.as_mut()).is_pending());
    }

    #[test]
    fn a_waker_that_panics_does_no_harm_where_a_buffer_is_dropped() {
        struct Bomb;

        impl Wake for Bomb {
            fn wake(self: Arc<Self>) {
                panic!("in a waker");
            }
        }

        let waiting = Waiting::default();
        let mut future = pin!(waiting.wait(|| None::<()>));
        let waker = Arc::new(Bomb).into();
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        waiting.wake_one();
        assert_eq!(waiting.count.load(Ordering::Relaxed), 0);
    }

    /// If one is, this never ends.
    #[cfg(not(ibverbs_loom))]
    #[test]
    fn no_wake_up_is_lost() {
        use std::thread;

        use crate::pool::free_chunks::FreeChunks;

        /// A thread is a task.
        struct Unparked(thread::Thread);

        impl Wake for Unparked {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }

        fn block_on<T>(future: impl Future<Output = T>) -> T {
            let (mut future, waker) = (pin!(future), Arc::new(Unparked(thread::current())).into());
            loop {
                if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                    return done;
                }
                thread::park();
            }
        }

        let (free, waiting) = (FreeChunks::new(2).unwrap(), Waiting::default());
        let use_chunks = || {
            for _ in 0..2000 {
                let chunk = block_on(waiting.wait(|| free.take()));
                free.give_back(chunk);
                waiting.wake_one();
            }
        };
        thread::scope(|threads| {
            for _ in 0..5 {
                threads.spawn(use_chunks);
            }
        });
        assert_eq!((free.count(), waiting.count.load(Ordering::Relaxed)), (2, 0));
    }

    #[test]
    fn a_wake_up_of_a_task_that_gives_up_goes_to_the_next() {
        let waiting = Waiting::default();
        let tasks = [(); 3].map(|()| Arc::new(Woken::default()));
        let mut futures = [(); 3].map(|()| Some(Box::pin(waiting.wait(|| None::<()>))));
        for (task, future) in tasks.iter().zip(&mut futures) {
            assert!(task.poll(future.as_mut().unwrap().as_mut()).is_pending());
        }
        waiting.wake_one();
        // It was not woken yet, so nothing is passed on.
        futures[1] = None;
        assert_eq!([0, 1, 2].map(|task| tasks[task].times()), [1, 0, 0]);
        futures[0] = None;
        assert_eq!([0, 1, 2].map(|task| tasks[task].times()), [1, 0, 1]);
        futures[2] = None;
        assert_eq!(waiting.count.load(Ordering::Relaxed), 0);
    }
}
