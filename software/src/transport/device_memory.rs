//! Memory of the device itself: allocation, and the program's copies to and from it.

use std::ffi::c_int;
use std::sync::atomic::AtomicU64;

use super::Engine;
use super::memory::Backing;
use ibverbs::provider::{load, store};

/// The alignment of all device memory, and the most that a program can ask for.
pub(crate) const ALIGNMENT: usize = 4096;

#[repr(align(4096))]
#[derive(Debug)]
#[expect(dead_code, reason = "reached by its address")]
struct Page([AtomicU64; ALIGNMENT / 8]);

#[derive(Debug)]
pub(crate) struct DeviceMemory {
    pages: Box<[Page]>,
    length: u64,
    /// The number of regions of it.
    regions: u32,
}

impl DeviceMemory {
    /// The address of `length` bytes from `offset` on.
    fn address(&self, offset: u64, length: u64) -> Result<u64, c_int> {
        // As mlx5, whose device memory takes whole words.
        if !offset.is_multiple_of(4) || !length.is_multiple_of(4) {
            return Err(libc::EINVAL);
        }
        if offset > self.length || length > self.length - offset {
            return Err(libc::EINVAL);
        }
        Ok(self.pages.as_ptr() as u64 + offset)
    }
}

impl Engine {
    pub(crate) fn alloc_device_memory(&mut self, length: u64, align: u64) -> Result<u32, c_int> {
        if length == 0 || align > ALIGNMENT as u64 {
            return Err(libc::EINVAL);
        }
        let used = self.core.device_memory_used.saturating_add(length);
        if used > self.core.settings.max_device_memory {
            return Err(libc::ENOMEM);
        }
        let count = usize::try_from(length).map_err(|_| libc::ENOMEM)?.div_ceil(ALIGNMENT);
        let mut pages = Vec::new();
        pages.try_reserve_exact(count).map_err(|_| libc::ENOMEM)?;
        pages.extend((0..count).map(|_| Page([const { AtomicU64::new(0) }; ALIGNMENT / 8])));
        let memory = DeviceMemory { pages: pages.into_boxed_slice(), length, regions: 0 };
        let number = self.core.device_memory.insert(|_| memory).ok_or(libc::ENOMEM)?;
        self.core.device_memory_used = used;
        Ok(number)
    }

    pub(crate) fn free_device_memory(&mut self, number: u32) -> Result<(), c_int> {
        if self.core.device_memory.get(number).ok_or(libc::EINVAL)?.regions > 0 {
            return Err(libc::EBUSY);
        }
        let memory = self.core.device_memory.remove(number).ok_or(libc::EINVAL)?;
        self.core.device_memory_used -= memory.length;
        Ok(())
    }

    /// Registers a part of it, which requests address from 0 on.
    pub(crate) fn register_device_memory(
        &mut self,
        pd: u32,
        memory: u32,
        (offset, length): (u64, u64),
        access: u32,
    ) -> Result<u32, c_int> {
        let found = self.core.device_memory.get(memory).ok_or(libc::EINVAL)?;
        let address = found.address(offset, length)?;
        let key = self.register(pd, Backing::Device { memory, address }, length, 0, access)?;
        if let Some(memory) = self.core.device_memory.get_mut(memory) {
            memory.regions += 1;
        }
        Ok(key)
    }

    /// A region of it was deregistered.
    pub(crate) fn leave_device_memory(&mut self, number: u32) {
        if let Some(memory) = self.core.device_memory.get_mut(number) {
            memory.regions -= 1;
        }
    }

    /// Copies from the program's memory.
    ///
    /// # Safety
    ///
    /// `from` is readable for `length` bytes.
    pub(crate) unsafe fn copy_to_device(
        &mut self,
        number: u32,
        offset: u64,
        from: *const u8,
        length: usize,
    ) -> Result<(), c_int> {
        let memory = self.core.device_memory.get(number).ok_or(libc::EINVAL)?;
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
    pub(crate) unsafe fn copy_from_device(
        &self,
        number: u32,
        offset: u64,
        to: *mut u8,
        length: usize,
    ) -> Result<(), c_int> {
        let memory = self.core.device_memory.get(number).ok_or(libc::EINVAL)?;
        let from = memory.address(offset, length as u64)?;
        // SAFETY: as in `copy_to_device`.
        unsafe { load(from as *const u8, to, length) };
        Ok(())
    }
}
