//! Registered memory: keys, bounds and rights, and the copies to and from it.
//!
//! Every packet looks its memory up by key, so no memory is accessed after its region is
//! deregistered, and a revoked right has no effect any more.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use ibverbs::provider::{load, store};

use super::table::Table;
use super::work::{Data, SendRequest, Sge};
use crate::ffi::ibv_access_flags as Access;

/// The memory behind a region's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    /// Memory of the process, from this address on.
    Memory(u64),
    /// Mapped memory of which pages may be missing: each access asks the kernel.
    OnDemand(u64),
    /// Memory of the device, with its number, from this address on.
    Device { memory: u32, address: u64 },
    /// No memory (a null region): reads give zeros, writes are dropped.
    Null,
}

impl Backing {
    /// How much of the program's memory a region of this length holds.
    pub(crate) fn pinned(self, length: u64) -> u64 {
        if matches!(self, Self::Memory(_)) { length } else { 0 }
    }
}

#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) pd: u32,
    pub(crate) backing: Backing,
    /// The address of its first byte in requests.
    pub(crate) iova: u64,
    pub(crate) length: u64,
    pub(crate) access: u32,
    /// The number of memory windows that are bound to it.
    pub(crate) windows: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bound {
    /// The region's key.
    pub(crate) region: u32,
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) access: u32,
    /// The queue pair that it is bound through; a window of type 2 works only with that one.
    pub(crate) qpn: u32,
}

#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) pd: u32,
    pub(crate) type_2: bool,
    /// Its current key.
    pub(crate) rkey: u32,
    pub(crate) bound: Option<Bound>,
}

#[derive(Debug)]
pub(crate) enum Key {
    Region(Region),
    Window(Window),
}

/// A piece of memory that was checked for an access.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    backing: Backing,
}

/// An access that is not allowed: wrong key, bounds, rights or protection domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Denied;

impl Region {
    /// How much of the program's memory it holds.
    pub(crate) fn pinned(&self) -> u64 {
        self.backing.pinned(self.length)
    }

    /// Whether it is memory of the program's that no peer may change.
    fn is_private(&self) -> bool {
        let changes = Access::IBV_ACCESS_REMOTE_WRITE.0 | Access::IBV_ACCESS_REMOTE_ATOMIC.0;
        matches!(self.backing, Backing::Memory(_))
            && self.access & changes == 0
            && self.windows == 0
    }

    fn target(&self, address: u64, length: u64, write: bool) -> Result<Target, Denied> {
        let offset = address.checked_sub(self.iova).ok_or(Denied)?;
        if offset > self.length || length > self.length - offset {
            return Err(Denied);
        }
        let backing = match self.backing {
            Backing::Memory(start) | Backing::Device { address: start, .. } => {
                Backing::Memory(start + offset)
            }
            Backing::OnDemand(start) => {
                let start = start.checked_add(offset).ok_or(Denied)?;
                check_mapped(start, length, write).map_err(|_| Denied)?;
                Backing::Memory(start)
            }
            Backing::Null => Backing::Null,
        };
        Ok(Target { backing })
    }
}

/// The keys of a device.
#[derive(Debug)]
pub(crate) struct Keys(pub(crate) Table<Key>);

impl Keys {
    pub(crate) fn region(&self, key: u32) -> Option<&Region> {
        match self.0.get(key)? {
            Key::Region(region) => Some(region),
            Key::Window(_) => None,
        }
    }

    pub(crate) fn region_mut(&mut self, key: u32) -> Option<&mut Region> {
        match self.0.get_mut(key)? {
            Key::Region(region) => Some(region),
            Key::Window(_) => None,
        }
    }

    /// Finds a window by its current key. The program chooses the lowest eight bits of a type 2 window's key.
    pub(crate) fn window(&self, rkey: u32) -> Option<&Window> {
        match self.0.get_untagged(rkey)? {
            Key::Window(window) if window.rkey == rkey => Some(window),
            _ => None,
        }
    }

    pub(crate) fn window_mut(&mut self, rkey: u32) -> Option<&mut Window> {
        match self.0.get_untagged_mut(rkey)? {
            Key::Window(window) if window.rkey == rkey => Some(window),
            _ => None,
        }
    }

    /// Checks an access by a work request of this program.
    fn local(
        &self,
        pd: u32,
        sge: Sge,
        offset: u64,
        length: u64,
        write: bool,
    ) -> Result<Target, Denied> {
        let region = self.region(sge.lkey).ok_or(Denied)?;
        if region.pd != pd || (write && region.access & Access::IBV_ACCESS_LOCAL_WRITE.0 == 0) {
            return Err(Denied);
        }
        region.target(sge.address.checked_add(offset).ok_or(Denied)?, length, write)
    }

    /// Checks an access with the rights in `access` by the peer that is connected to this queue pair.
    pub(crate) fn remote(
        &self,
        (pd, qpn): (u32, u32),
        rkey: u32,
        address: u64,
        length: u64,
        access: Access,
    ) -> Result<Target, Denied> {
        let write = access != Access::IBV_ACCESS_REMOTE_READ;
        if let Some(window) = self.window(rkey) {
            let bound = window.bound.ok_or(Denied)?;
            let qp_may = if window.type_2 { bound.qpn == qpn } else { window.pd == pd };
            let end = address.checked_add(length).ok_or(Denied)?;
            if !qp_may
                || window.pd != pd
                || bound.access & access.0 == 0
                || address < bound.address
                || end > bound.address + bound.length
            {
                return Err(Denied);
            }
            return self.region(bound.region).ok_or(Denied)?.target(address, length, write);
        }
        let region = self.region(rkey).ok_or(Denied)?;
        if region.pd != pd || region.access & access.0 == 0 {
            return Err(Denied);
        }
        region.target(address, length, write)
    }

    /// Calls `each` with the parts of a list that hold `length` bytes from `offset` on. All of them are
    /// checked before the first call.
    fn walk(
        &self,
        (pd, write): (u32, bool),
        list: &[Sge],
        offset: u64,
        length: usize,
        mut each: impl FnMut(Target, usize),
    ) -> Result<(), Denied> {
        for check in [true, false] {
            let (mut offset, mut left) = (offset, length as u64);
            for sge in list {
                let size = u64::from(sge.length);
                if offset >= size {
                    offset -= size;
                    continue;
                }
                let part = left.min(size - offset);
                if part == 0 {
                    break;
                }
                let target = self.local(pd, *sge, offset, part, write)?;
                if !check {
                    each(target, part as usize);
                }
                offset = 0;
                left -= part;
            }
            if left > 0 {
                return Err(Denied);
            }
        }
        Ok(())
    }

    /// Appends `length` bytes of a list, from `offset` on.
    pub(crate) fn gather(
        &self,
        pd: u32,
        list: &[Sge],
        offset: u64,
        length: usize,
        to: &mut Vec<u8>,
    ) -> Result<(), Denied> {
        self.walk((pd, false), list, offset, length, |target, part| target.read(part, to))
    }

    /// Writes `bytes` to a list, from `offset` on.
    pub(crate) fn scatter(
        &self,
        pd: u32,
        list: &[Sge],
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), Denied> {
        let mut from = bytes;
        self.walk((pd, true), list, offset, bytes.len(), |target, part| {
            let (now, later) = from.split_at(part);
            target.write(now);
            from = later;
        })
    }

    /// A checksum of the data of a request, or of 256 pieces of it if it is longer than a MiB. `None`: the data is not in
    /// memory of the program's, or others may write it.
    pub(crate) fn seal(&self, pd: u32, request: &SendRequest) -> Option<u32> {
        const PIECE: u32 = 4096;
        let Data::List(list) = &request.data else { return None };
        let is_private =
            |sge: &Sge| sge.length == 0 || self.region(sge.lkey).is_some_and(Region::is_private);
        if request.length == 0 || !list.iter().all(is_private) {
            return None;
        }
        let (mut hasher, mut bytes) = (crc32fast::Hasher::new(), Vec::new());
        let step = request.length.div_ceil(PIECE).div_ceil(256) * PIECE;
        for from in (0..request.length).step_by(step as usize) {
            bytes.clear();
            let length = PIECE.min(request.length - from);
            self.gather(pd, list, from.into(), length as usize, &mut bytes).ok()?;
            hasher.update(&bytes);
        }
        Some(hasher.finalize())
    }

    /// The parts of a list that hold `length` bytes, as many as there are. `None`: they are not memory of the program's, or more
    /// parts than `to` has room for.
    pub(crate) fn parts(
        &self,
        (pd, write): (u32, bool),
        list: &[Sge],
        length: usize,
        to: &mut [libc::iovec],
    ) -> Option<usize> {
        let (mut count, mut fits) = (0, true);
        let walked = self.walk((pd, write), list, 0, length, |target, part| {
            match (target.backing, to.get_mut(count)) {
                (Backing::Memory(start), Some(to)) => {
                    *to = libc::iovec { iov_base: start as *mut c_void, iov_len: part };
                    count += 1;
                }
                _ => fits = false,
            }
        });
        (walked.is_ok() && fits).then_some(count)
    }

    /// Whether the whole list may be written, or read.
    pub(crate) fn check(&self, pd: u32, list: &[Sge], write: bool) -> Result<(), Denied> {
        let length = list.iter().map(|sge| sge.length as usize).sum();
        self.walk((pd, write), list, 0, length, |_, _| {})
    }
}

impl Target {
    /// Appends the contents of the range.
    pub(crate) fn read(self, length: usize, to: &mut Vec<u8>) {
        let Backing::Memory(address) = self.backing else {
            to.resize(to.len() + length, 0);
            return;
        };
        to.reserve(length);
        // SAFETY: the range is in a registered region, whose owner keeps it mapped until it is
        // deregistered, as `ibv_reg_mr` demands; the engine's lock is held since it was looked up, and
        // deregistration takes that lock. The memory is accessed by these racy copies only. The vector has
        // room.
        unsafe {
            let end = to.as_mut_ptr().add(to.len());
            load(address as *const u8, end, length);
            to.set_len(to.len() + length);
        }
    }

    pub(crate) fn write(self, bytes: &[u8]) {
        if let Backing::Memory(address) = self.backing {
            // SAFETY: as in `read`; that the region may be written was checked.
            unsafe { store(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        }
    }

    /// Carries out an atomic operation; returns what was there. The address is a multiple of 8.
    pub(crate) fn atomic(self, operation: Atomic) -> Result<u64, Denied> {
        let Backing::Memory(address) = self.backing else { return Ok(0) };
        if address % 8 != 0 {
            return Err(Denied);
        }
        // SAFETY: as in `read`; the address is aligned, and the program accesses such memory by atomic
        // operations, or not at all while a peer may.
        let target = unsafe { AtomicU64::from_ptr(address as *mut u64) };
        Ok(match operation {
            Atomic::FetchAdd(add) => target.fetch_add(add, Ordering::SeqCst),
            Atomic::CompareSwap { compare, swap } => target
                .compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst)
                .unwrap_or_else(|found| found),
            Atomic::Write(value) => target.swap(value, Ordering::SeqCst),
        })
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Atomic {
    FetchAdd(u64),
    CompareSwap { compare: u64, swap: u64 },
    Write(u64),
}

/// Missing in some C libraries' headers.
const MADV_POPULATE_READ: c_int = 22;
const MADV_POPULATE_WRITE: c_int = 23;

/// Whether the memory is mapped and allows this access, as hardware checks when it pins the pages; otherwise an errno
/// value. Kernels before Linux 5.14 cannot check it: there the answer is always yes.
pub(crate) fn check_mapped(address: u64, length: u64, write: bool) -> Result<(), c_int> {
    const PAGE: u64 = 4096;
    if length == 0 {
        return Ok(());
    }
    let start = address & !(PAGE - 1);
    let end = address.checked_add(length).and_then(|end| end.checked_next_multiple_of(PAGE));
    let size = end.and_then(|end| usize::try_from(end - start).ok()).ok_or(libc::EINVAL)?;
    let advice = if write { MADV_POPULATE_WRITE } else { MADV_POPULATE_READ };
    // SAFETY: it changes nothing that can be seen but the memory in use; the kernel checks the range.
    if unsafe { libc::madvise(start as *mut c_void, size, advice) } == 0 {
        return Ok(());
    }
    // SAFETY: the location is valid for the calling thread.
    match unsafe { *libc::__errno_location() } {
        libc::ENOMEM | libc::EFAULT | libc::EHWPOISON => Err(libc::EFAULT),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::table::Tag;
    use super::*;

    fn keys(memory: &mut [u64], access: Access) -> (Keys, u32) {
        let mut keys = Keys(Table::new(Tag::Low, 1, 100));
        let region = Region {
            pd: 1,
            backing: Backing::Memory(memory.as_mut_ptr() as u64),
            iova: 0x1000,
            length: memory.len() as u64 * 8,
            access: access.0,
            windows: 0,
        };
        let key = keys.0.insert(|_| Key::Region(region)).unwrap();
        (keys, key)
    }

    #[test]
    fn bounds_are_exact() {
        let mut memory = [0_u64; 4];
        let write = Access::IBV_ACCESS_REMOTE_WRITE;
        let (keys, key) = keys(&mut memory, write);
        let allowed = |address, length| keys.remote((1, 5), key, address, length, write).is_ok();
        assert!(allowed(0x1000, 32) && allowed(0x101f, 1) && allowed(0x1020, 0));
        assert!(!allowed(0x1000, 33) && !allowed(0x0fff, 1) && !allowed(0x1020, 1));
        assert!(!allowed(u64::MAX, 2) && !allowed(0x1001, u64::MAX));
        assert!(keys.remote((2, 5), key, 0x1000, 1, write).is_err(), "another domain");
        assert!(keys.remote((1, 5), key ^ 1, 0x1000, 1, write).is_err(), "another tag");
        let read = Access::IBV_ACCESS_REMOTE_READ;
        assert!(keys.remote((1, 5), key, 0x1000, 1, read).is_err(), "no right");
    }

    #[test]
    fn lists_are_checked_before_anything_is_written() {
        let mut memory = [0_u64; 4];
        let (keys, lkey) = keys(&mut memory, Access::IBV_ACCESS_LOCAL_WRITE);
        let sge = |address, length| Sge { address, length, lkey };
        let list = [sge(0x1004, 4), sge(0x1010, 3), sge(0x1000, 2)];
        assert_eq!(keys.scatter(1, &list, 3, b"abcdef"), Ok(()));
        assert_eq!(keys.scatter(1, &list, 3, b"abcdefg"), Err(Denied));
        let bad = [sge(0x1004, 4), sge(0x101f, 2)];
        assert_eq!(keys.scatter(1, &bad, 0, b"123456"), Err(Denied));
        let mut back = Vec::new();
        assert_eq!(keys.gather(1, &list, 2, 7, &mut back), Ok(()));
        assert_eq!(back, b"\0abcdef");
        assert_eq!(keys.gather(2, &list, 2, 7, &mut back), Err(Denied));
    }
}
