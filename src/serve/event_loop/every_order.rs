//! A sender and the loop at one ring, in every order.

use loom::cell::UnsafeCell;

use super::ring::Ring;
use super::slots::ONE;
use crate::base::sync::{AtomicU32, Ordering, in_every_order};

/// Of one place, which is slot 1. Loom finds what one thread writes while another reads it.
struct World {
    ring: Ring<UnsafeCell<u32>>,
    /// The buffer of the thread that has the place.
    place: UnsafeCell<u32>,
    taken: [AtomicU32; 3],
}

// SAFETY: the ring says which thread has the place.
unsafe impl Sync for World {}

impl World {
    fn new() -> Self {
        let taken = [(); 3].map(|()| AtomicU32::new(0));
        Self { ring: Ring::new([1].into_iter()), place: UnsafeCell::new(0), taken }
    }

    fn with_one() -> Self {
        let world = Self::new();
        world.put();
        world
    }

    fn put(&self) {
        // SAFETY: one thread of each test does this.
        if let Ok(number) = unsafe { self.ring.put(0, UnsafeCell::new(7)) }
            && number > 1 + ONE
        {
            // SAFETY: the one before was taken out, so the place is this thread's.
            self.place.with_mut(|uses| unsafe { *uses += 1 });
        }
    }

    fn take(&self, generation: u32) {
        let number = 1 + u64::from(generation) * ONE;
        if let Some(operation) = self.ring.take(number) {
            // SAFETY: it was taken out, so it is this thread's.
            operation.with(|value| assert_eq!(unsafe { *value }, 7));
            if generation == 1 {
                // SAFETY: the place is not free yet.
                self.place.with(|uses| assert_eq!(unsafe { *uses }, 0));
            }
            self.taken[generation as usize].fetch_add(1, Ordering::Relaxed);
            self.ring.free(number);
        }
    }

    fn taken(&self) -> [u32; 3] {
        self.taken.each_ref().map(|taken| taken.load(Ordering::Relaxed))
    }
}

#[test]
fn an_operation_is_there_once_it_can_be_taken_and_its_place_is_free_once_it_was() {
    let sends = |world: &World| (0..2).for_each(|_| world.put());
    let polls = |world: &World| [1, 2, 2].into_iter().for_each(|number| world.take(number));
    let runs = in_every_order(World::new, [sends, polls], |world| {
        assert_eq!(world.taken()[0], 0);
        assert!(world.taken().iter().all(|&taken| taken <= 1));
        [1, 2].into_iter().for_each(|number| world.take(number));
        assert_eq!(world.ring.in_flight(), 0);
        assert_eq!(world.taken()[1], 1, "the first was put in");
    });
    assert!(runs > 5, "{runs}");
}

/// The sender takes one back that the device has refused, and the device reports it all the same.
#[test]
fn an_operation_is_taken_once() {
    let takes = |world: &World| world.take(1);
    in_every_order(World::with_one, [takes, takes], |world| assert_eq!(world.taken(), [0, 1, 0]));
}

#[test]
fn a_number_with_a_mark_is_of_no_place() {
    let takes = |world: &World| {
        [1 << 30, 1 << 31].map(|mark| assert!(world.ring.take(1 | mark).is_none()));
    };
    in_every_order(World::new, [takes, takes], |_| ());
}
