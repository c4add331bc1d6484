//! Integers in shared memory that are accessed in place.

use std::sync::atomic;

use super::scatter_gather::{Element, private, resolve};
use super::shared_slice::SharedMemorySlice;
use crate::error::Result;

/// An integer that has an atomic form, by which
/// [`SharedMemorySlice::atomic`](SharedMemorySlice::atomic) accesses it in place.
///
/// The trait is sealed.
pub trait AtomicElement: Element + private::Sealed {
    /// The atomic form, from [`std::sync::atomic`].
    type Atomic: Send + Sync + 'static;
}

macro_rules! atomic_elements {
    ($($has:meta: $($integer:ty => $atomic:ident),+;)+) => {
        $($(
            #[cfg($has)]
            impl private::Sealed for $integer {}

            #[cfg($has)]
            impl AtomicElement for $integer {
                type Atomic = atomic::$atomic;
            }
        )+)+
    };
}

atomic_elements! {
    target_has_atomic = "8": u8 => AtomicU8, i8 => AtomicI8;
    target_has_atomic = "16": u16 => AtomicU16, i16 => AtomicI16;
    target_has_atomic = "32": u32 => AtomicU32, i32 => AtomicI32;
    // On other targets copies are made in halves, and accesses of different sizes must not race.
    target_pointer_width = "64": u64 => AtomicU64, i64 => AtomicI64;
    target_has_atomic = "ptr": usize => AtomicUsize, isize => AtomicIsize;
}

impl<'buf, T: AtomicElement> SharedMemorySlice<'buf, T> {
    /// The element at `index`, for atomic operations of the CPU: loads, stores, and read-modify-write
    /// operations, with the [`Ordering`](std::sync::atomic::Ordering) of the caller's choice.
    ///
    /// They are atomic with respect to the program's threads. With respect to RDMA atomics they are
    /// atomic only on a device whose [`AtomicCapability`](crate::device::AtomicCapability) is `Global`.
    ///
    /// ```no_run
    /// # // not on Soft-RoCE alone: waits for a peer
    /// # use ibverbs::AccessFlags;
    /// use std::sync::atomic::Ordering;
    ///
    /// # let context = ibverbs::open("rxe0")?;
    /// # let domain = context.alloc_pd()?;
    /// let region = domain.allocate_shared::<u64>(8, AccessFlags::REMOTE_WRITE)?;
    /// // The peer writes a message, and then this flag.
    /// while region.atomic(7)?.load(Ordering::Acquire) == 0 {
    ///     std::hint::spin_loop();
    /// }
    /// # Ok::<(), ibverbs::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `index` is out of bounds.
    #[inline]
    pub fn atomic(&self, index: usize) -> Result<&'buf T::Atomic> {
        let range = resolve(index..index.saturating_add(1), self.len())?;
        // SAFETY: the element is within the slice, and `new` vouches that the slice is accessed by
        // atomic operations of this size only; the atomic form has the size of the integer.
        Ok(unsafe { &*self.as_ptr().add(range.start).cast::<T::Atomic>() })
    }

    /// All elements, for atomic operations of the CPU. See [`atomic`](Self::atomic).
    #[inline]
    pub fn atomics(&self) -> &'buf [T::Atomic] {
        // SAFETY: as in `atomic`.
        unsafe { std::slice::from_raw_parts(self.as_ptr().cast::<T::Atomic>(), self.len()) }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::UnsafeCell;
    use std::ptr::NonNull;
    use std::sync::atomic::Ordering;

    use super::*;

    /// A slice over memory that nothing else accesses.
    fn slice<T: Element>(memory: &[UnsafeCell<T>]) -> SharedMemorySlice<'_, T> {
        let data = NonNull::new(memory.as_ptr().cast::<T>().cast_mut()).unwrap();
        // SAFETY: the cells are borrowed for as long, aligned, and accessed through slices only.
        unsafe { SharedMemorySlice::new(data, memory.len(), data.as_ptr() as u64, 7, 8) }
    }

    #[test]
    fn integers_are_atomic_in_place() {
        let memory = [const { UnsafeCell::new(0_u64) }; 4];
        let all = slice(&memory);
        assert_eq!(all.atomic(3).unwrap().fetch_add(5, Ordering::AcqRel), 0);
        assert_eq!(all.read_one(3), Ok(5));
        assert!(all.atomic(4).is_err() && all.atomic(usize::MAX).is_err());
        all.atomics()[1].store(6, Ordering::Release);
        assert_eq!(all.to_vec(), [0, 6, 0, 5]);
        let memory = [const { UnsafeCell::new(0_i32) }; 2];
        slice(&memory).slice(1..).unwrap().atomic(0).unwrap().store(-1, Ordering::Relaxed);
        assert_eq!(slice(&memory).to_vec(), [0, -1]);
    }
}
