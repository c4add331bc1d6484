//! Memory of the device itself: allocation, and the program's copies to and from it.

use std::ffi::c_int;
use std::sync::atomic::AtomicU64;

use super::table::{Table, Tag};
use ibverbs::provider::{load, store};

/// The alignment of all device memory, and the most that a program can ask for.
pub(crate) const ALIGNMENT: usize = 4096;

#[repr(align(4096))]
#[derive(Debug)]
#[expect(dead_code, reason = "reached by its address")]
struct Page([AtomicU64; ALIGNMENT / 8]);

#[derive(Debug)]
struct Memory {
    pages: Box<[Page]>,
    length: u64,
    /// The number of regions of it.
    regions: u32,
}

impl Memory {
    /// The address of `length` bytes from `offset` on.
    fn address(&self, offset: u64, length: u64) -> Result<u64, c_int> {
        // The device memory of mlx5 takes whole words too.
        if !offset.is_multiple_of(4) || !length.is_multiple_of(4) {
            return Err(libc::EINVAL);
        }
        if offset > self.length || length > self.length - offset {
            return Err(libc::EINVAL);
        }
        Ok(self.pages.as_ptr() as u64 + offset)
    }
}

/// All memory that is allocated.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    all: Table<Memory>,
    /// The bytes of it.
    used: u64,
    most: u64,
}

impl DeviceMemory {
    /// `most`: how many bytes there are.
    pub(crate) fn new(most: u64) -> Self {
        Self { all: Table::new(Tag::Low, 1, u32::MAX), used: 0, most }
    }

    /// How many pieces of it are allocated.
    pub(crate) fn count(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn has(&self, number: u32) -> bool {
        self.all.get(number).is_some()
    }

    pub(crate) fn allocate(&mut self, length: u64, align: u64) -> Result<u32, c_int> {
        if length == 0 || align > ALIGNMENT as u64 {
            return Err(libc::EINVAL);
        }
        let used = self.used.saturating_add(length);
        if used > self.most {
            return Err(libc::ENOMEM);
        }
        let count = usize::try_from(length).map_err(|_| libc::ENOMEM)?.div_ceil(ALIGNMENT);
        let mut pages = Vec::new();
        pages.try_reserve_exact(count).map_err(|_| libc::ENOMEM)?;
        pages.extend((0..count).map(|_| Page([const { AtomicU64::new(0) }; ALIGNMENT / 8])));
        let memory = Memory { pages: pages.into_boxed_slice(), length, regions: 0 };
        let number = self.all.insert(|_| memory).ok_or(libc::ENOMEM)?;
        self.used = used;
        Ok(number)
    }

    pub(crate) fn free(&mut self, number: u32) -> Result<(), c_int> {
        if self.all.get(number).ok_or(libc::EINVAL)?.regions > 0 {
            return Err(libc::EBUSY);
        }
        let memory = self.all.remove(number).ok_or(libc::EINVAL)?;
        self.used -= memory.length;
        Ok(())
    }

    /// The address of a part of it, of which a region is made.
    pub(crate) fn part(&self, number: u32, offset: u64, length: u64) -> Result<u64, c_int> {
        self.all.get(number).ok_or(libc::EINVAL)?.address(offset, length)
    }

    /// A region of it was registered.
    pub(crate) fn enter(&mut self, number: u32) {
        if let Some(memory) = self.all.get_mut(number) {
            memory.regions += 1;
        }
    }

    /// A region of it was deregistered.
    pub(crate) fn leave(&mut self, number: u32) {
        if let Some(memory) = self.all.get_mut(number) {
            memory.regions -= 1;
        }
    }

    /// Copies from the program's memory.
    ///
    /// # Safety
    ///
    /// `from` is readable for `length` bytes.
    pub(crate) unsafe fn copy_to(
        &mut self,
        number: u32,
        offset: u64,
        from: *const u8,
        length: usize,
    ) -> Result<(), c_int> {
        let memory = self.all.get(number).ok_or(libc::EINVAL)?;
        let to = memory.address(offset, length as u64)?;
        // SAFETY: the caller vouches for `from`. The range is in the pages, which live as long as their entry in
        // the table; the engine's lock is held, and only racy copies and atomics access them.
        unsafe { store(from, to as *mut u8, length) };
        Ok(())
    }

    /// Copies to the program's memory.
    ///
    /// # Safety
    ///
    /// `to` is writable for `length` bytes.
    pub(crate) unsafe fn copy_from(
        &self,
        number: u32,
        offset: u64,
        to: *mut u8,
        length: usize,
    ) -> Result<(), c_int> {
        let memory = self.all.get(number).ok_or(libc::EINVAL)?;
        let from = memory.address(offset, length as u64)?;
        // SAFETY: as in `copy_to`.
        unsafe { load(from as *const u8, to, length) };
        Ok(())
    }
}
