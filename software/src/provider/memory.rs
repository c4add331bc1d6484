//! Memory regions and windows.

use std::ffi::{c_int, c_void};
use std::{io, ptr};

use ibverbs::ffi::ib_uverbs_advise_mr_advice as Advice;

use super::{Shared, object, shared, status, zeroed};
use crate::ffi::*;
use crate::transport::Engine;
use crate::transport::memory::{Backing, check_mapped};

fn writes(access: c_int) -> bool {
    access as u32 & ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0 != 0
}

/// The access flags that a region can have. Hints are accepted and ignored.
fn check_flags(access: c_int) -> Result<(), c_int> {
    type A = ibv_access_flags;
    let known = A::IBV_ACCESS_LOCAL_WRITE
        | A::IBV_ACCESS_REMOTE_WRITE
        | A::IBV_ACCESS_REMOTE_READ
        | A::IBV_ACCESS_REMOTE_ATOMIC
        | A::IBV_ACCESS_MW_BIND
        | A::IBV_ACCESS_ZERO_BASED
        | A::IBV_ACCESS_HUGETLB
        | A::IBV_ACCESS_ON_DEMAND
        | A::IBV_ACCESS_FLUSH_GLOBAL;
    let hints = (IB_UVERBS_ACCESS_OPTIONAL_LAST << 1) - IB_UVERBS_ACCESS_OPTIONAL_FIRST;
    let access = access as u32;
    if access & !(known.0 | hints) == 0 { Ok(()) } else { Err(libc::EINVAL) }
}

/// What a device that is like EFA allows; `EFADV_DEVICE_ATTR_CAPS_*` say which.
fn check_efa(capabilities: u32, access: c_int) -> Result<(), c_int> {
    type A = ibv_access_flags;
    // EFADV_DEVICE_ATTR_CAPS_RDMA_READ and .._WRITE.
    let (reads, writes) = (capabilities & 1 != 0, capabilities & 1 << 3 != 0);
    let lacks = (A::IBV_ACCESS_REMOTE_ATOMIC | A::IBV_ACCESS_MW_BIND | A::IBV_ACCESS_ON_DEMAND).0
        | if reads { 0 } else { A::IBV_ACCESS_REMOTE_READ.0 }
        | if writes { 0 } else { A::IBV_ACCESS_REMOTE_WRITE.0 };
    if access as u32 & lacks == 0 { Ok(()) } else { Err(libc::EOPNOTSUPP) }
}

/// # Safety
///
/// `pd` is live.
unsafe fn register(
    pd: *mut ibv_pd,
    backing: Backing,
    length: u64,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller vouches for it.
    let number = unsafe {
        let shared = shared((*pd).context);
        shared.lock().register((*pd).handle, backing, length, iova, access as u32)
    };
    object(number.map(|key| made(pd, key, length, access)))
}

/// What libibverbs sees of a region comes first.
#[repr(C)]
struct Mr {
    verbs: verbs_mr,
    /// The mapping of a dma-buf. Its length is 0 if there is none.
    mapped: (u64, usize),
}

pub(super) fn made(pd: *mut ibv_pd, key: u32, length: u64, access: c_int) -> *mut ibv_mr {
    let mut mr = zeroed::<Mr>();
    let verbs = &mut mr.verbs;
    // SAFETY: the callers vouch for the domain, which is live.
    (verbs.ibv_mr.context, verbs.ibv_mr.pd) = (unsafe { (*pd).context }, pd);
    (verbs.ibv_mr.handle, verbs.ibv_mr.lkey, verbs.ibv_mr.rkey) = (key, key, key);
    (verbs.ibv_mr.length, verbs.access) = (length as usize, access);
    Box::into_raw(mr).cast()
}

/// A dma-buf, or any other file that this process may map. Its mapping is the device's own.
pub(super) unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: it only asks.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    let in_page = offset % page;
    let Some(mapped) = length.checked_add(in_page as usize) else {
        return object(Err(libc::EINVAL));
    };
    if let Err(errno) = check_flags(access) {
        return object(Err(errno));
    }
    let protection = libc::PROT_READ | if writes(access) { libc::PROT_WRITE } else { 0 };
    let from = (offset - in_page) as libc::off_t;
    // SAFETY: a new mapping, where the system finds room.
    let start =
        unsafe { libc::mmap(ptr::null_mut(), mapped, protection, libc::MAP_SHARED, fd, from) };
    if start == libc::MAP_FAILED {
        return object(Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)));
    }
    // Each access asks the kernel, since the file may become shorter.
    let backing = Backing::OnDemand(start as u64 + in_page);
    // SAFETY: as the module says; what `register` returns is ours, and nobody else has it yet.
    unsafe {
        let mr = register(pd, backing, length as u64, iova, access);
        if mr.is_null() {
            libc::munmap(start, mapped);
        } else {
            (*mr.cast::<Mr>()).mapped = (start as u64, mapped);
            // No page was taken from children.
            (*mr.cast::<verbs_mr>()).access |= ibv_access_flags::IBV_ACCESS_ON_DEMAND.0 as c_int;
        }
        mr
    }
}

/// A region that another context of this device has: that context deregisters it.
pub(super) unsafe extern "C" fn import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr {
    // SAFETY: as the module says.
    let engine = unsafe { shared((*pd).context) }.lock();
    // SAFETY: as above.
    let domain = unsafe { (*pd).handle };
    let region = engine.core.keys.region(handle).filter(|region| region.pd == domain);
    object(match region {
        Some(region) => Ok(made(pd, handle, region.length, region.access as c_int)),
        None => Err(libc::EINVAL),
    })
}

pub(super) unsafe extern "C" fn unimport_mr(mr: *mut ibv_mr) {
    // SAFETY: as the module says; `import_mr` made it, and it is freed once.
    drop(unsafe { Box::from_raw(mr.cast::<Mr>()) });
}

pub(super) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    let (address, size) = (address as u64, length as u64);
    // Requests address a zero-based region by the offset from its first byte.
    let zero_based = access as u32 & ibv_access_flags::IBV_ACCESS_ZERO_BASED.0 != 0;
    let iova = if zero_based { 0 } else { iova };
    let on_demand = access as u32 & ibv_access_flags::IBV_ACCESS_ON_DEMAND.0 != 0;
    let backing = if on_demand { Backing::OnDemand(address) } else { Backing::Memory(address) };
    // SAFETY: as the module says.
    let efa = unsafe { shared((*pd).context) }.lock().core.settings.efa;
    let checked =
        check_flags(access).and_then(|()| efa.map_or(Ok(()), |efa| check_efa(efa, access)));
    let checked = checked.and_then(|()| {
        if on_demand { Ok(()) } else { check_mapped(address, size, writes(access)) }
    });
    if let Err(errno) = checked {
        return object(Err(errno));
    }
    // SAFETY: as the module says; what `register` returns is ours, and nobody else has it yet.
    unsafe {
        let mr = register(pd, backing, size, iova, access);
        if !mr.is_null() && !on_demand {
            give_to_children(address as *mut c_void, length);
            // libibverbs looks here whether it has taken pages from children that deregistering is to give back.
            (*mr.cast::<verbs_mr>()).access |= ibv_access_flags::IBV_ACCESS_ON_DEMAND.0 as c_int;
        }
        mr
    }
}

/// After `ibv_fork_init`, libibverbs takes registered pages from children, since a device would write to those that the parent
/// had before the fork. This device writes to the parent's memory wherever it is, so children get their copies, as on each
/// kernel that copies pinned pages for them.
///
/// # Safety
///
/// libibverbs has just taken this range.
unsafe fn give_to_children(start: *mut c_void, length: usize) {
    // SAFETY: without a call of `ibv_fork_init` it does nothing; else it changes what libibverbs counts for these pages.
    unsafe { dofork_range(start, length) };
}

/// Pages that a region has on demand are there afterwards, unless none is to be made.
pub(super) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: u32,
    _flags: u32,
    list: *mut ibv_sge,
    count: u32,
) -> c_int {
    let write = match Advice(advice) {
        Advice::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH => false,
        Advice::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE => true,
        Advice::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT => return 0,
        _ => return libc::EOPNOTSUPP,
    };
    // SAFETY: as the module says.
    let (engine, list) =
        unsafe { (shared((*pd).context).lock(), super::translate::list(list, count as usize)) };
    // SAFETY: as the module says.
    let pd = unsafe { (*pd).handle };
    match list.iter().all(|sge| engine.core.keys.check(pd, &[*sge], write).is_ok()) {
        true => 0,
        false => libc::EFAULT,
    }
}

pub(super) unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    let access = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0 as c_int;
    // Any address is valid unless the range exceeds the address space.
    // SAFETY: as the module says.
    unsafe { register(pd, Backing::Null, 1 << 40, 0, access) }
}

/// Changes a region while no peer accesses its memory by itself ([`one_sided`](crate::Builder::one_sided)). The engine is not locked
/// while this waits for them.
///
/// # Errors
///
/// `EBUSY`: a peer has stopped in the middle of its access.
fn vacated(
    shared: &Shared,
    key: u32,
    change: impl FnOnce(&mut Engine) -> Result<(), c_int>,
) -> Result<(), c_int> {
    let mut engine = shared.lock();
    if let Some(access) = engine.core.keep_out_of(key) {
        drop(engine);
        if !access.wait_for_region(key) {
            return Err(libc::EBUSY);
        }
        engine = shared.lock();
    }
    let changed = change(&mut engine);
    if changed.is_err() {
        engine.core.let_into(key);
    }
    changed
}

pub(super) unsafe extern "C" fn rereg_mr(
    mr: *mut verbs_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let has = |flag: ibv_rereg_mr_flags| flags as u32 & flag.0 != 0;
    // SAFETY: as the module says; what a flag names is given.
    unsafe {
        let new_pd = has(ibv_rereg_mr_flags::IBV_REREG_MR_CHANGE_PD).then(|| (*pd).handle);
        let new_access = has(ibv_rereg_mr_flags::IBV_REREG_MR_CHANGE_ACCESS).then_some(access);
        let range = has(ibv_rereg_mr_flags::IBV_REREG_MR_CHANGE_TRANSLATION)
            .then_some((address as u64, length as u64));
        let write = writes(new_access.unwrap_or((*mr).access));
        if new_pd.is_some() && (*pd).context != (*mr).ibv_mr.context {
            return status(Err(libc::EINVAL));
        }
        let checked = check_flags(new_access.unwrap_or(0)).and_then(|()| match range {
            Some((start, size)) => check_mapped(start, size, write),
            None => Ok(()),
        });
        let result = checked.and_then(|()| {
            let key = (*mr).ibv_mr.handle;
            vacated(shared((*mr).ibv_mr.context), key, |engine| {
                engine.reregister(key, new_pd, range, new_access.map(|access| access as u32))
            })
        });
        if let (Ok(()), Some(access)) = (result, new_access) {
            (*mr).access = access | ibv_access_flags::IBV_ACCESS_ON_DEMAND.0 as c_int;
        }
        if result.is_ok() && range.is_some() {
            give_to_children(address, length);
            // Gives back the pages that it took before: none.
            dontfork_range((*mr).ibv_mr.addr, (*mr).ibv_mr.length);
        }
        status(result)
    }
}

pub(super) unsafe extern "C" fn dereg_mr(mr: *mut verbs_mr) -> c_int {
    // SAFETY: as the module says; it is ours, and freed once.
    unsafe {
        let key = (*mr).ibv_mr.handle;
        let result = vacated(shared((*mr).ibv_mr.context), key, |engine| engine.deregister(key));
        if result.is_ok() {
            let (start, length) = Box::from_raw(mr.cast::<Mr>()).mapped;
            if length > 0 {
                libc::munmap(start as *mut c_void, length);
            }
        }
        status(result)
    }
}

pub(super) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    let type_2 = match kind {
        ibv_mw_type::IBV_MW_TYPE_1 => false,
        ibv_mw_type::IBV_MW_TYPE_2 => true,
        _ => return object(Err(libc::EINVAL)),
    };
    // SAFETY: as the module says.
    let (context, number) = unsafe {
        let context = (*pd).context;
        (context, shared(context).lock().alloc_window((*pd).handle, type_2))
    };
    object(number.map(|number| {
        let mut mw = zeroed::<ibv_mw>();
        (mw.context, mw.pd, mw.type_) = (context, pd, kind);
        (mw.handle, mw.rkey) = (number, number);
        Box::into_raw(mw)
    }))
}

pub(super) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: as the module says; it is ours, and freed once.
    unsafe {
        let result = shared((*mw).context).lock().dealloc_window((*mw).handle);
        if result.is_ok() {
            drop(Box::from_raw(mw));
        }
        status(result)
    }
}
