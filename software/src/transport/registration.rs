//! Verbs: protection domains, memory regions and windows. Errors are errno values.

use std::ffi::c_int;

use super::Engine;
use super::memory::{Backing, Key, Region, Window};
use crate::ffi::ibv_access_flags as Access;

impl Engine {
    pub(crate) fn alloc_pd(&mut self) -> Result<u32, c_int> {
        self.core.pds.insert(|_| 0).ok_or(libc::ENOMEM)
    }

    pub(crate) fn dealloc_pd(&mut self, pd: u32) -> Result<(), c_int> {
        match self.core.pds.get(pd) {
            None => Err(libc::EINVAL),
            Some(0) => self.core.pds.remove(pd).map(|_| ()).ok_or(libc::EINVAL),
            Some(_) => Err(libc::EBUSY),
        }
    }

    pub(crate) fn register(
        &mut self,
        pd: u32,
        backing: Backing,
        length: u64,
        iova: u64,
        access: u32,
    ) -> Result<u32, c_int> {
        check_access(access)?;
        self.check_range(backing, length, iova)?;
        let registered = self.core.registered.saturating_add(backing.pinned(length));
        let regions = self.core.keys.0.len() - self.core.windows as usize;
        let settings = &self.core.settings;
        if registered > settings.max_registered || regions >= settings.max_mr as usize {
            return Err(libc::ENOMEM);
        }
        if !self.core.use_pd(pd) {
            return Err(libc::EINVAL);
        }
        let region = Region { pd, backing, iova, length, access, windows: 0 };
        let key = self.core.keys.0.insert(|_| Key::Region(region));
        match key {
            Some(key) => {
                self.core.registered = registered;
                self.core.let_into(key);
            }
            None => self.core.leave_pd(pd),
        }
        key.ok_or(libc::ENOMEM)
    }

    /// Registers a part of the device's memory, which requests address from 0 on.
    pub(crate) fn register_device_memory(
        &mut self,
        pd: u32,
        memory: u32,
        (offset, length): (u64, u64),
        access: u32,
    ) -> Result<u32, c_int> {
        let address = self.core.device_memory.part(memory, offset, length)?;
        let key = self.register(pd, Backing::Device { memory, address }, length, 0, access)?;
        self.core.device_memory.enter(memory);
        Ok(key)
    }

    pub(crate) fn deregister(&mut self, key: u32) -> Result<(), c_int> {
        let region = self.core.keys.region(key).ok_or(libc::EINVAL)?;
        if region.windows > 0 {
            return Err(libc::EBUSY);
        }
        let (pd, pinned, backing) = (region.pd, region.pinned(), region.backing);
        if self.core.is_observed && self.is_named(key) {
            self.core.early_deregistrations += 1;
        }
        self.core.registered -= pinned;
        self.core.keep_out_of(key);
        self.core.keys.0.remove(key);
        self.core.leave_pd(pd);
        if let Backing::Device { memory, .. } = backing {
            self.core.device_memory.leave(memory);
        }
        Ok(())
    }

    /// Refuses a range that is longer than a region may be, or wraps around the end of the address space.
    fn check_range(&self, backing: Backing, length: u64, iova: u64) -> Result<(), c_int> {
        let start = match backing {
            Backing::Memory(start)
            | Backing::OnDemand(start)
            | Backing::Device { address: start, .. } => start,
            Backing::Null => 0,
        };
        // A region of all memory is an implicit one.
        let is_implicit = backing == Backing::OnDemand(0) && length == u64::MAX;
        let is_too_long = length > self.core.settings.max_mr_size && !is_implicit;
        let ends = (start.checked_add(length), iova.checked_add(length));
        if is_too_long || ends.0.is_none() || ends.1.is_none() { Err(libc::EINVAL) } else { Ok(()) }
    }

    /// `ibv_rereg_mr`: changes the parts of a region for which an argument is given. Its key stays the same.
    pub(crate) fn reregister(
        &mut self,
        key: u32,
        pd: Option<u32>,
        range: Option<(u64, u64)>,
        access: Option<u32>,
    ) -> Result<(), c_int> {
        let old = self.core.keys.region(key).ok_or(libc::EINVAL)?;
        if old.windows > 0 {
            return Err(libc::EBUSY);
        }
        if matches!(old.backing, Backing::Device { .. }) {
            return Err(libc::EOPNOTSUPP);
        }
        let access = access.unwrap_or(old.access);
        check_access(access)?;
        let backing = |start| match access & Access::IBV_ACCESS_ON_DEMAND.0 {
            0 => Backing::Memory(start),
            _ => Backing::OnDemand(start),
        };
        if let Some((start, length)) = range {
            self.check_range(backing(start), length, start)?;
        }
        let old_pd = old.pd;
        let mut registered = self.core.registered;
        if let Some((start, length)) = range {
            registered = (registered - old.pinned()).saturating_add(backing(start).pinned(length));
            if registered > self.core.settings.max_registered {
                return Err(libc::ENOMEM);
            }
        }
        if let Some(pd) = pd {
            if !self.core.use_pd(pd) {
                return Err(libc::EINVAL);
            }
            self.core.leave_pd(old_pd);
        }
        self.core.registered = registered;
        self.core.keep_out_of(key);
        let region = self.core.keys.region_mut(key).ok_or(libc::EINVAL)?;
        region.pd = pd.unwrap_or(old_pd);
        region.access = access;
        if let Some((start, length)) = range {
            (region.backing, region.iova, region.length) = (backing(start), start, length);
        }
        self.core.let_into(key);
        Ok(())
    }

    pub(crate) fn alloc_window(&mut self, pd: u32, type_2: bool) -> Result<u32, c_int> {
        if self.core.windows >= self.core.settings.max_mw {
            return Err(libc::ENOMEM);
        }
        if !self.core.use_pd(pd) {
            return Err(libc::EINVAL);
        }
        let window = |rkey| Key::Window(Window { pd, type_2, rkey, bound: None });
        let number = self.core.keys.0.insert(window);
        match number {
            Some(_) => self.core.windows += 1,
            None => self.core.leave_pd(pd),
        }
        number.ok_or(libc::ENOMEM)
    }

    pub(crate) fn dealloc_window(&mut self, number: u32) -> Result<(), c_int> {
        self.core.remove_window(number).ok_or(libc::EINVAL)?;
        self.core.windows -= 1;
        Ok(())
    }
}

/// Remote write and atomic rights require the local write right.
fn check_access(access: u32) -> Result<(), c_int> {
    let has = |right: Access| access & right.0 != 0;
    let changes = has(Access::IBV_ACCESS_REMOTE_WRITE) || has(Access::IBV_ACCESS_REMOTE_ATOMIC);
    if changes && !has(Access::IBV_ACCESS_LOCAL_WRITE) {
        return Err(libc::EINVAL);
    }
    Ok(())
}
