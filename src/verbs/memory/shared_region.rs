use std::ops::{Index, RangeBounds};
use std::ptr::NonNull;
use std::sync::{Arc, atomic};

use super::options::{AccessFlags, RegionOptions};
use super::owned_region::Allocated;
use super::region::{Addressed, Backing, InMemory, Peers, Region, Writable};
use super::region_buffer::RegionBuffer;
use super::scatter_gather::{Element, LocalMemory, ScatterElement, private, resolve};
use super::shared_slice::{Indexes, SharedMemorySlice};
use crate::base::Result;
use crate::verbs::domain::{DomainRef, ProtectionDomain};

/// `struct ibv_mr`: registered memory for `len` elements, owned, which peers read or write by RDMA as its
/// [`AccessFlags`] allow.
///
/// A peer may write at any time, so there is never a reference into it: [`read`](Self::read) and
/// [`write`](Self::write) copy. [`SharedMemorySlice`] explains what they see of a concurrent write.
///
/// ```
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// use ibverbs::AccessFlags;
///
/// # let context = ibverbs::open("rxe0")?;
/// let domain = context.alloc_pd()?;
/// let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
/// let region = domain.allocate_shared::<u64>(1024, access)?;
/// region.write(0, &[1, 2, 3])?;
/// let for_the_peer = region.remote_range(..3)?;
/// # Ok::<(), ibverbs::Error>(())
/// ```
pub type SharedMemoryRegion<'pd, T> = Region<'pd, Shared<T>>;

/// Memory that the region owns and peers access: there is no reference into it while it is registered.
#[derive(Debug)]
pub struct Shared<T>(pub(super) Arc<RegionBuffer<T>>);

impl<T: Element> Backing for Shared<T> {
    type Item = T;

    const NAME: &'static str = "SharedMemoryRegion";
}

impl<T: Element> Addressed for Shared<T> {
    const HAS_IOVA: bool = true;
}

impl<T: Element> InMemory for Shared<T> {}
impl<T: Element> Writable for Shared<T> {}
#[doc(hidden)]
impl<T: Element, I: Indexes> Index<I> for SharedMemoryRegion<'_, T> {
    type Output = T;

    fn index(&self, index: I) -> &T {
        index.never()
    }
}

impl<T: Element> Peers for Shared<T> {}

impl<T: Element> Allocated for Shared<T> {
    const PEERS: bool = true;

    fn into_buffer(self) -> Option<RegionBuffer<T>> {
        Arc::into_inner(self.0).filter(RegionBuffer::is_exclusive)
    }
}

impl<T> From<RegionBuffer<T>> for Shared<T> {
    fn from(memory: RegionBuffer<T>) -> Self {
        Self(Arc::new(memory))
    }
}

impl<'pd, T: Element> SharedMemoryRegion<'pd, T> {
    /// `ibv_reg_mr`: allocates `len` zeroed elements and registers them as `options`, or [`AccessFlags`], say.
    ///
    /// Local write access is always included. The buffer is aligned to 64 bytes, or more if `T` is. It may
    /// exceed 4 GiB, which a single scatter/gather element may not.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the region would be empty, or longer than memory or the device allow, or the options
    ///    contradict each other.
    ///  - `EOPNOTSUPP`: the device does not have that access, or the machine does not have such huge pages.
    ///  - `ENOMEM`: no memory, not enough huge pages set aside, no region left on the device, or
    ///    `RLIMIT_MEMLOCK` is too low.
    #[doc(alias = "ibv_reg_mr")]
    #[doc(alias = "ibv_reg_mr_iova")]
    #[doc(alias = "ibv_reg_mr_iova2")]
    pub fn new(
        domain: impl Into<DomainRef<'pd>>,
        len: usize,
        options: impl Into<RegionOptions>,
    ) -> Result<Self> {
        Self::allocate(domain.into(), len, options.into())
    }

    /// `ibv_reg_mr`: registers memory that was allocated, and perhaps [populated](RegionBuffer::populate),
    /// before.
    ///
    /// Of the options, only the access and the iova count.
    ///
    /// ```
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// use ibverbs::memory::RegionBuffer;
    /// use ibverbs::{AccessFlags, SharedMemoryRegion};
    ///
    /// # let context = ibverbs::open("rxe0")?;
    /// let domain = context.alloc_pd()?;
    /// let mut buffer = RegionBuffer::<u8>::new(64 << 20, AccessFlags::REMOTE_READ)?;
    /// let threads = std::thread::available_parallelism().unwrap();
    /// buffer.populate(threads, |bytes| println!("{bytes} bytes are in memory"))?;
    /// buffer[0] = 17;
    /// let region = SharedMemoryRegion::from_buffer(&domain, buffer, AccessFlags::REMOTE_READ)?;
    /// # Ok::<(), ibverbs::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// On an error the memory is freed.
    ///
    ///  - `EINVAL`: the memory is longer than the device allows, or the options contradict each other or the
    ///    memory's address.
    ///  - `EOPNOTSUPP`: the device does not have that access.
    ///  - `ENOMEM`: no region left on the device, or `RLIMIT_MEMLOCK` is too low.
    pub fn from_buffer(
        domain: impl Into<DomainRef<'pd>>,
        buffer: RegionBuffer<T>,
        options: impl Into<RegionOptions>,
    ) -> Result<Self> {
        Self::register_buffer(domain.into(), buffer, options.into())
    }

    /// `ibv_reg_mr`: registers the same memory in another protection domain, such as that of another device.
    ///
    /// The memory is freed when the last of its regions is deregistered. With
    /// [`ZERO_BASED`](AccessFlags::ZERO_BASED), it must begin on a [page](RegionOptions::page_aligned).
    ///
    /// ```
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # let rxe1 = ibverbs_software::Device::builder().name("rxe1").build().unwrap();
    /// # (rxe0.register(), rxe1.register());
    /// use ibverbs::AccessFlags;
    ///
    /// # let contexts = [ibverbs::open("rxe0")?, ibverbs::open("rxe1")?];
    /// let domains = [contexts[0].alloc_pd()?, contexts[1].alloc_pd()?];
    /// let region = domains[0].allocate_shared::<u8>(4096, AccessFlags::REMOTE_WRITE)?;
    /// let same = region.register_in(&domains[1], AccessFlags::REMOTE_WRITE)?;
    /// region.write(0, b"one memory")?;
    /// assert_eq!(&same.to_vec()[..10], b"one memory");
    /// # Ok::<(), ibverbs::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`from_buffer`](Self::from_buffer), but this region keeps the memory.
    pub fn register_in<'other>(
        &self,
        domain: impl Into<DomainRef<'other>>,
        access: AccessFlags,
    ) -> Result<SharedMemoryRegion<'other, T>> {
        let (memory, part) = (Shared(self.memory().0.clone()), (self.address(), self.len()));
        // SAFETY: it is the part that this region has.
        unsafe { Region::register_part(domain.into(), memory, part, access.into()) }
    }

    /// The whole region as a slice.
    #[inline]
    pub fn as_slice(&self) -> SharedMemorySlice<'_, T> {
        let (address, base) = (self.address().cast(), self.base());
        // SAFETY: while the region is borrowed, the memory holds that many initialised elements, aligned for them and
        // their atomic forms: to 64 bytes, or they are bytes. Any bytes are valid for an `Element`, and only such slices access them.
        unsafe {
            let data = NonNull::new_unchecked(address);
            SharedMemorySlice::new(data, self.len(), base, self.lkey(), self.rkey())
        }
    }

    /// A part of the region, as a slice.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    #[inline]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<SharedMemorySlice<'_, T>> {
        self.as_slice().slice(range)
    }

    /// [`SharedMemorySlice::read`]: copies the elements from `index` on to `to`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the region ends before that many elements.
    #[inline]
    pub fn read(&self, index: usize, to: &mut [T]) -> Result<()> {
        self.as_slice().read(index, to)
    }

    /// Copies the element at `index`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `index` is out of bounds.
    #[inline]
    pub fn read_one(&self, index: usize) -> Result<T> {
        self.as_slice().read_one(index)
    }

    /// Copies all elements.
    pub fn to_vec(&self) -> Vec<T> {
        self.as_slice().to_vec()
    }

    /// [`SharedMemorySlice::write`]: copies `from` to the elements from `index` on.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the region ends before that many elements.
    #[inline]
    pub fn write(&self, index: usize, from: &[T]) -> Result<()> {
        self.as_slice().write(index, from)
    }

    /// Writes the element at `index`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `index` is out of bounds.
    #[inline]
    pub fn write_one(&self, index: usize, value: T) -> Result<()> {
        self.as_slice().write_one(index, value)
    }

    /// Writes `value` to all elements.
    pub fn fill(&self, value: T) {
        self.as_slice().fill(value);
    }

    /// Sets all bytes to zero.
    pub fn zero(&self) {
        self.as_slice().zero();
    }

    /// The elements in `range`, for a work request that writes them.
    ///
    /// # Errors
    ///
    /// Those of [`gather_element`](Self::gather_element).
    #[inline]
    pub fn scatter_element(&self, range: impl RangeBounds<usize>) -> Result<ScatterElement<'_>> {
        self.sge(range).map(ScatterElement::new)
    }
}

impl<T: AtomicElement> SharedMemoryRegion<'_, T> {
    /// [`SharedMemorySlice::atomic`]: the element at `index`, for atomic operations of the CPU.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `index` is out of bounds.
    #[inline]
    pub fn atomic(&self, index: usize) -> Result<&T::Atomic> {
        self.as_slice().atomic(index)
    }

    /// All elements, for atomic operations of the CPU.
    #[inline]
    pub fn atomics(&self) -> &[T::Atomic] {
        self.as_slice().atomics()
    }
}

impl ProtectionDomain<'_> {
    /// `ibv_reg_mr`: [`SharedMemoryRegion::new`], borrowing this domain.
    ///
    /// To return the region from a function, call that with the domain by value or in an `Arc`.
    ///
    /// # Errors
    ///
    /// Those of [`SharedMemoryRegion::new`].
    pub fn allocate_shared<T: Element>(
        &self,
        len: usize,
        options: impl Into<RegionOptions>,
    ) -> Result<SharedMemoryRegion<'_, T>> {
        SharedMemoryRegion::new(self, len, options)
    }
}

/// An integer that has an atomic form, by which [`SharedMemorySlice::atomic`] accesses it in place.
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
    // Other targets copy in halves, and accesses of different sizes must not race.
    target_pointer_width = "64": u64 => AtomicU64, i64 => AtomicI64;
    target_has_atomic = "ptr": usize => AtomicUsize, isize => AtomicIsize;
}

impl<'buf, T: AtomicElement> SharedMemorySlice<'buf, T> {
    /// The element at `index`, for atomic operations of the CPU in place.
    ///
    /// They are atomic for the program's threads, and for RDMA atomics only on a device whose
    /// [`AtomicCapability`](crate::device::AtomicCapability) is `Global`.
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
        // SAFETY: the element is within the slice. The caller of `new` vouches for atomic accesses of this size
        // only, and the atomic form has the size of the integer.
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
