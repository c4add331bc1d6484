//! Tasks that wait for a chunk of a pool.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::free_chunks::FreeChunks;
use crate::base::panics;

/// The waiting tasks, in order. A wake-up says that a chunk may be there.
#[derive(Default)]
pub(super) struct Waiting {
    places: Mutex<Places>,
}

#[derive(Default)]
struct Places {
    next: u64,
    wakers: VecDeque<(u64, Waker)>,
}

impl Places {
    fn find(&self, number: u64) -> Option<usize> {
        self.wakers.binary_search_by_key(&number, |&(number, _)| number).ok()
    }

    /// Is called under the lock.
    fn tell(&self, free: &FreeChunks) {
        free.set_waited_for(!self.wakers.is_empty());
    }
}

/// Its holder [leaves](Waiting::leave) when it stops waiting.
#[derive(Default)]
pub(super) struct Place(Option<u64>);

impl Waiting {
    /// Gives the task a chunk, or a place until it is woken as the first.
    pub(super) fn poll_take(
        &self,
        free: &FreeChunks,
        place: &mut Place,
        cx: &Context<'_>,
    ) -> Poll<u32> {
        let taken = free.take().or_else(|| {
            self.keep(free, place, cx);
            // A chunk that came back before it had a place woke no task.
            free.take()
        });
        let Some(taken) = taken else { return Poll::Pending };
        self.remove(free, place);
        if free.is_waited_for() && free.count() > 0 {
            // The task that was woken for another chunk may never come.
            self.wake_one(free);
        }
        Poll::Ready(taken)
    }

    #[cold]
    #[inline(never)]
    fn wake_one(&self, free: &FreeChunks) {
        wake(self.next(free));
    }

    /// Takes out the task that has waited longest.
    pub(super) fn next(&self, free: &FreeChunks) -> Option<Waker> {
        let mut places = self.lock();
        let first = places.wakers.pop_front();
        places.tell(free);
        first.map(|(_, waker)| waker)
    }

    fn keep(&self, free: &FreeChunks, place: &mut Place, cx: &Context<'_>) {
        // Outside of the lock: wakers are the program's code.
        let waker = cx.waker().clone();
        let mut places = self.lock();
        let own = place.0.and_then(|number| places.find(number));
        let _before = match own {
            Some(own) => Some(std::mem::replace(&mut places.wakers[own].1, waker)),
            None if places.wakers.try_reserve(1).is_err() => {
                drop(places);
                // No memory for a place.
                waker.wake();
                return;
            }
            None => {
                let number = places.next;
                places.next += 1;
                places.wakers.push_back((number, waker));
                place.0 = Some(number);
                places.tell(free);
                None
            }
        };
        drop(places);
    }

    pub(super) fn leave(&self, free: &FreeChunks, place: &mut Place) {
        if self.remove(free, place) && free.count() > 0 {
            // It was woken for a chunk that it does not take.
            self.wake_one(free);
        }
    }

    /// Returns whether it had a place, and was woken since.
    fn remove(&self, free: &FreeChunks, place: &mut Place) -> bool {
        let Some(own) = place.0.take() else { return false };
        let mut places = self.lock();
        let at = places.find(own);
        let waker = at.and_then(|at| places.wakers.remove(at));
        places.tell(free);
        drop(places);
        let _ = panics::catch(|| drop(waker));
        at.is_none()
    }

    /// Ignores poison: what is behind the lock is always consistent.
    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Catches the waker's panic: a buffer may be dropped during another, which a second one would turn into an abort.
pub(super) fn wake(woken: Option<Waker>) {
    if let Some(waker) = woken {
        let _ = panics::catch(|| waker.wake());
    }
}

#[cfg(all(test, not(ibverbs_loom)))]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;
    use std::thread;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    struct World<const N: usize> {
        free: FreeChunks,
        waiting: Waiting,
        tasks: [Arc<Woken>; N],
        places: [Place; N],
    }

    impl<const N: usize> World<N> {
        fn new(chunks: u32) -> Self {
            let free = FreeChunks::new(chunks).unwrap();
            while free.take().is_some() {}
            let (tasks, places) =
                ([(); N].map(|()| Arc::default()), [(); N].map(|()| Place::default()));
            Self { free, waiting: Waiting::default(), tasks, places }
        }

        fn poll(&mut self, task: usize) -> Option<u32> {
            let waker = self.tasks[task].clone().into();
            let place = &mut self.places[task];
            match self.waiting.poll_take(&self.free, place, &Context::from_waker(&waker)) {
                Poll::Ready(chunk) => Some(chunk),
                Poll::Pending => None,
            }
        }

        fn give_back(&self, chunk: u32) {
            give_back(&self.free, &self.waiting, chunk);
        }

        fn leave(&mut self, task: usize) {
            self.waiting.leave(&self.free, &mut self.places[task]);
        }

        fn woken(&self) -> [usize; N] {
            std::array::from_fn(|task| self.tasks[task].0.load(Ordering::Relaxed))
        }

        fn is_waited_for(&self) -> bool {
            !self.waiting.lock().wakers.is_empty()
        }
    }

    fn give_back(free: &FreeChunks, waiting: &Waiting, chunk: u32) {
        // SAFETY: `free` is borrowed, and the chunk was taken.
        if !unsafe { FreeChunks::give_back(free, chunk) } {
            let mut woken = None;
            let next = || {
                woken = waiting.next(free);
                woken.is_some()
            };
            // SAFETY: as above.
            unsafe { FreeChunks::give_back_slowly(free, chunk, next) };
            wake(woken);
        }
    }

    #[test]
    fn tasks_are_woken_one_by_one_in_their_order() {
        let mut world = World::<3>::new(2);
        assert_eq!((world.poll(0), world.poll(1)), (None, None));
        assert_eq!((world.poll(0), world.poll(2)), (None, None));
        world.give_back(0);
        assert_eq!(world.woken(), [1, 0, 0]);
        world.give_back(1);
        assert_eq!(world.woken(), [1, 1, 0]);
        assert!(world.poll(1).is_some() && world.poll(0).is_some());
        // The first to take left one free. Its task may never come, so the next one looks too.
        assert_eq!((world.poll(2), world.woken()), (None, [1, 1, 1]));
    }

    #[test]
    fn who_finds_a_chunk_leaves_the_line() {
        let mut world = World::<2>::new(1);
        assert_eq!((world.poll(0), world.poll(1)), (None, None));
        world.give_back(0);
        // The second one takes no wake-up with it.
        assert_eq!(world.poll(1), Some(0));
        assert_eq!((world.poll(0), world.is_waited_for()), (None, true));
        world.give_back(0);
        assert_eq!((world.woken(), world.poll(0)), ([2, 0], Some(0)));
        assert!(!world.is_waited_for());
    }

    #[test]
    fn a_waker_that_panics_does_no_harm_where_a_buffer_is_dropped() {
        struct Bomb;

        impl Wake for Bomb {
            fn wake(self: Arc<Self>) {
                panic!("in a waker");
            }
        }

        let mut world = World::<1>::new(1);
        let waker = Arc::new(Bomb).into();
        let cx = Context::from_waker(&waker);
        assert!(world.waiting.poll_take(&world.free, &mut world.places[0], &cx).is_pending());
        world.give_back(0);
        assert!(!world.is_waited_for());
    }

    /// If one is, this never ends.
    #[test]
    fn no_wake_up_is_lost() {
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
            let mut place = Place::default();
            for _ in 0..2000 {
                let chunk = block_on(poll_fn(|cx| waiting.poll_take(&free, &mut place, cx)));
                give_back(&free, &waiting, chunk);
            }
        };
        thread::scope(|threads| {
            for _ in 0..5 {
                threads.spawn(use_chunks);
            }
        });
        assert_eq!((free.count(), waiting.lock().wakers.len()), (2, 0));
    }

    #[test]
    fn a_wake_up_of_a_task_that_gives_up_goes_to_the_next() {
        let mut world = World::<3>::new(1);
        assert_eq!([0, 1, 2].map(|task| world.poll(task)), [None; 3]);
        // It was not woken yet, so it passes nothing on.
        world.leave(1);
        world.give_back(0);
        assert_eq!(world.woken(), [1, 0, 0]);
        world.leave(0);
        assert_eq!(world.woken(), [1, 0, 1]);
        world.leave(2);
        assert!(!world.is_waited_for());
    }
}
