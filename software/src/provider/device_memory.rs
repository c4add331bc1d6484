//! Device memory.

use std::ffi::{c_int, c_uint, c_void};

use super::memory::made as made_mr;
use super::{object, shared, status, zeroed};
use crate::ffi::*;

pub(super) unsafe extern "C" fn alloc_dm(
    context: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    // SAFETY: as the module says.
    let number = unsafe {
        let ibv_alloc_dm_attr { length, log_align_req, comp_mask } = *attr;
        match 1_u64.checked_shl(log_align_req) {
            Some(align) if comp_mask == 0 => {
                shared(context).lock().core.device_memory.allocate(length as u64, align)
            }
            _ => Err(libc::EINVAL),
        }
    };
    object(number.map(|number| made(context, number)))
}

fn made(context: *mut ibv_context, handle: u32) -> *mut ibv_dm {
    let mut dm = zeroed::<ibv_dm>();
    dm.context = context;
    dm.memcpy_to_dm = Some(memcpy_to_dm);
    dm.memcpy_from_dm = Some(memcpy_from_dm);
    dm.comp_mask = ibv_dm_mask::IBV_DM_MASK_HANDLE.0;
    dm.handle = handle;
    Box::into_raw(dm)
}

/// Memory that another context of this device has: that context frees it.
pub(super) unsafe extern "C" fn import_dm(context: *mut ibv_context, handle: u32) -> *mut ibv_dm {
    // SAFETY: as the module says.
    let found = unsafe { shared(context) }.lock().core.device_memory.has(handle);
    object(if found { Ok(made(context, handle)) } else { Err(libc::EINVAL) })
}

pub(super) unsafe extern "C" fn unimport_dm(dm: *mut ibv_dm) {
    // SAFETY: as the module says; `import_dm` made it, and it is freed once.
    drop(unsafe { Box::from_raw(dm) });
}

pub(super) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    // SAFETY: as the module says; it is ours, and freed once.
    unsafe {
        let result = shared((*dm).context).lock().core.device_memory.free((*dm).handle);
        if result.is_ok() {
            drop(Box::from_raw(dm));
        }
        status(result)
    }
}

unsafe extern "C" fn memcpy_to_dm(
    dm: *mut ibv_dm,
    offset: u64,
    from: *const c_void,
    length: usize,
) -> c_int {
    // SAFETY: as the module says.
    status(unsafe {
        let mut engine = shared((*dm).context).lock();
        engine.core.device_memory.copy_to((*dm).handle, offset, from.cast(), length)
    })
}

unsafe extern "C" fn memcpy_from_dm(
    to: *mut c_void,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
) -> c_int {
    // SAFETY: as the module says.
    status(unsafe {
        let engine = shared((*dm).context).lock();
        engine.core.device_memory.copy_from((*dm).handle, offset, to.cast(), length)
    })
}

pub(super) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    let has = |flag: ibv_access_flags| access & flag.0 != 0;
    if !has(ibv_access_flags::IBV_ACCESS_ZERO_BASED)
        || has(ibv_access_flags::IBV_ACCESS_ON_DEMAND)
        || has(ibv_access_flags::IBV_ACCESS_MW_BIND)
    {
        return object(Err(libc::EINVAL));
    }
    // SAFETY: as the module says.
    let key = unsafe {
        if (*dm).context != (*pd).context {
            return object(Err(libc::EINVAL));
        }
        let range = (offset, length as u64);
        let mut engine = shared((*pd).context).lock();
        engine.register_device_memory((*pd).handle, (*dm).handle, range, access)
    };
    object(key.map(|key| made_mr(pd, key, length as u64, access as c_int)))
}
