//! Protection domains, thread domains and parent domains.

use std::ffi::c_int;

use super::{object, shared, status, zeroed};
use crate::ffi::*;

/// `struct ibv_pd`, whose `handle` is the engine's number.
#[repr(C)]
struct SoftPd {
    pd: ibv_pd,
    /// Whether it is a parent domain, which refers to another one.
    is_parent: bool,
}

pub(super) unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: as the module says.
    let number = unsafe { shared(context) }.lock().alloc_pd();
    object(number.map(|number| made(context, number, false)))
}

fn made(context: *mut ibv_context, handle: u32, is_parent: bool) -> *mut ibv_pd {
    let mut pd = zeroed::<SoftPd>();
    (pd.pd.context, pd.pd.handle, pd.is_parent) = (context, handle, is_parent);
    Box::into_raw(pd).cast()
}

/// A domain that another context of this device has: that context frees it.
pub(super) unsafe extern "C" fn import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd {
    // SAFETY: as the module says.
    let found = unsafe { shared(context) }.lock().core.pds.get(handle).is_some();
    object(if found { Ok(made(context, handle, false)) } else { Err(libc::EINVAL) })
}

pub(super) unsafe extern "C" fn unimport_pd(pd: *mut ibv_pd) {
    // SAFETY: as the module says; `import_pd` made it, and it is freed once.
    drop(unsafe { Box::from_raw(pd.cast::<SoftPd>()) });
}

pub(super) unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: as the module says; it is ours, and freed once.
    unsafe {
        let mut engine = shared((*pd).context).lock();
        let result = if (*pd.cast::<SoftPd>()).is_parent {
            engine.core.leave_pd((*pd).handle);
            engine.core.parent_domains -= 1;
            Ok(())
        } else {
            engine.dealloc_pd((*pd).handle)
        };
        drop(engine);
        if result.is_ok() {
            drop(Box::from_raw(pd.cast::<SoftPd>()));
        }
        status(result)
    }
}

pub(super) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: as the module says.
    let domain = unsafe {
        let (parent, mask) = ((*attr).pd, (*attr).comp_mask);
        type Given = ibv_parent_domain_init_attr_mask;
        // The caller's allocators are for provider memory, which this device does not need.
        let known = Given::IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
            | Given::IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
        let foreign = parent.is_null() || (*parent).context != context;
        if foreign {
            Err(libc::EINVAL)
        } else if mask & !known.0 != 0 {
            Err(libc::EOPNOTSUPP)
        } else if shared(context).lock().core.add_parent_domain((*parent).handle) {
            Ok(made(context, (*parent).handle, true))
        } else {
            Err(libc::EINVAL)
        }
    };
    object(domain)
}

/// A thread domain has no effect, since everything here is thread-safe.
pub(super) unsafe extern "C" fn alloc_td(
    context: *mut ibv_context,
    _attr: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    // SAFETY: as the module says.
    unsafe { shared(context) }.lock().core.thread_domains += 1;
    let mut td = zeroed::<ibv_td>();
    td.context = context;
    Box::into_raw(td)
}

pub(super) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    // SAFETY: as the module says; `alloc_td` made it, and it is freed once.
    unsafe {
        shared((*td).context).lock().core.thread_domains -= 1;
        drop(Box::from_raw(td));
    }
    0
}
