//! Operations that senders put in, under a lock of theirs, and the loop takes out without a lock.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;

use super::slots::ONE;
use crate::base::sync::{AtomicU64, Ordering};

/// Beside the place's latest number: no operation is there. No index has these bits.
const FREE: u64 = 1 << 31;
/// The loop has taken the operation out, and the place is not free yet.
const TAKEN: u64 = 1 << 30;

pub(super) struct Ring<T> {
    first: u32,
    places: Box<[Place<T>]>,
}

struct Place<T> {
    number: AtomicU64,
    /// Initialised while an operation is there.
    operation: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: `number` says which one thread may access the operation, which is `Send`: one that puts it in, alone by the
// contract of `put`, and then the one that changes the number from "is there" to `TAKEN`.
unsafe impl<T: Send> Sync for Ring<T> {}

impl<T> Ring<T> {
    /// The numbers are the latest ones of slots that follow each other.
    pub(super) fn new(numbers: impl Iterator<Item = u64>) -> Self {
        let place = |number| {
            let operation = UnsafeCell::new(MaybeUninit::uninit());
            Place { number: AtomicU64::new(number | FREE), operation }
        };
        let places: Box<[_]> = numbers.map(place).collect();
        let first = places.first().map_or(0, |place| place.latest() as u32);
        Self { first, places }
    }

    fn place(&self, number: u64) -> Option<&Place<T>> {
        // All of its low bits, so that a number with a mark is of no place.
        self.places.get((number as u32).wrapping_sub(self.first) as usize)
    }

    /// Puts an operation into this place, counted from 0, and returns its number.
    ///
    /// # Errors
    ///
    /// The place is not free. The operation comes back.
    ///
    /// # Safety
    ///
    /// Nothing else puts one in meanwhile.
    pub(super) unsafe fn put(&self, at: usize, operation: T) -> Result<u64, T> {
        let Some(place) = self.places.get(at) else { return Err(operation) };
        let latest = place.number.load(Ordering::Acquire);
        if latest & FREE == 0 {
            return Err(operation);
        }
        let number = (latest & !FREE).wrapping_add(ONE);
        // SAFETY: the place is free, and only this thread puts something in.
        unsafe { (*place.operation.get()).write(operation) };
        place.number.store(number, Ordering::Release);
        Ok(number)
    }

    /// Takes out the operation of this number, once. Its place is free only after [`free`](Self::free).
    #[inline]
    pub(super) fn take(&self, number: u64) -> Option<T> {
        let place = self.place(number)?;
        let is_there = place.number.compare_exchange(
            number,
            number | TAKEN,
            Ordering::Acquire,
            Ordering::Relaxed,
        );
        // SAFETY: the operation was there, and nobody else has taken it.
        is_there.ok().map(|_| unsafe { (*place.operation.get()).assume_init_read() })
    }

    /// The number of an operation that was taken out.
    #[inline]
    pub(super) fn free(&self, number: u64) {
        if let Some(place) = self.place(number)
            && place.number.load(Ordering::Relaxed) == number | TAKEN
        {
            place.number.store(number | FREE, Ordering::Release);
        }
    }

    /// The slot of the first place.
    pub(super) fn first(&self) -> u32 {
        self.first
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// The latest number of each place, by its slot.
    pub(super) fn latest(&self) -> impl Iterator<Item = (usize, u64)> {
        (self.first as usize..).zip(self.places.iter().map(Place::latest))
    }

    pub(super) fn in_flight(&self) -> usize {
        let is_there =
            |place: &&Place<T>| place.number.load(Ordering::Relaxed) & (FREE | TAKEN) == 0;
        self.places.iter().filter(is_there).count()
    }
}

impl<T> Place<T> {
    fn latest(&self) -> u64 {
        self.number.load(Ordering::Relaxed) & !(FREE | TAKEN)
    }
}
