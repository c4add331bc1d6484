//! Address handles and multicast groups.

use std::ffi::c_int;

use super::{object, shared, status, zeroed};
use crate::ffi::*;
use crate::transport::modify;
use crate::transport::work::{Destination, Path};

/// `struct ibv_ah`, and the destination that it describes.
#[repr(C)]
struct SoftAh {
    ah: ibv_ah,
    path: Path,
    /// The number of its protection domain.
    pd: u32,
    /// On EFA devices.
    number: u16,
}

/// Where a datagram with this address handle goes: to this queue pair with this key.
///
/// # Safety
///
/// `ah` is null or a live address handle of this provider.
pub(super) unsafe fn destination(ah: *mut ibv_ah, qpn: u32, key: u64) -> Option<Destination> {
    // SAFETY: the caller vouches for it.
    let &SoftAh { path, pd, .. } = unsafe { ah.cast::<SoftAh>().as_ref() }?;
    Some(Destination { path, pd, qpn: qpn & 0xff_ffff, key })
}

/// The number of an address handle of an EFA device.
///
/// # Safety
///
/// `ah` is a live address handle of this provider.
#[cfg(feature = "efa")]
pub(super) unsafe fn number(ah: *mut ibv_ah) -> u16 {
    // SAFETY: the caller vouches for it.
    unsafe { (*ah.cast::<SoftAh>()).number }
}

pub(super) unsafe extern "C" fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: as the module says.
    let path = unsafe {
        let mut engine = shared((*pd).context).lock();
        engine.core.path(&*attr).and_then(|path| {
            if engine.core.address_handles >= engine.core.settings.max_ah {
                return Err(libc::ENOMEM);
            }
            if !engine.core.use_pd((*pd).handle) {
                return Err(libc::EINVAL);
            }
            engine.core.address_handles += 1;
            let pd = (*pd).handle;
            Ok((path, pd, engine.core.name_address(pd, path.to)))
        })
    };
    object(path.map(|(path, pd, number)| {
        let ah = SoftAh { ah: *zeroed::<ibv_ah>(), path, pd, number };
        Box::into_raw(Box::new(ah)).cast()
    }))
}

pub(super) unsafe extern "C" fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: as the module says; it is ours, and freed once.
    unsafe {
        let mut engine = shared((*ah).context).lock();
        engine.core.address_handles -= 1;
        let &SoftAh { path, pd, .. } = &*ah.cast::<SoftAh>();
        engine.core.forget_address(pd, path.to);
        engine.core.leave_pd(pd);
        drop(engine);
        drop(Box::from_raw(ah.cast::<SoftAh>()));
    }
    0
}

pub(super) unsafe extern "C" fn attach_mcast(
    qp: *mut ibv_qp,
    gid: *const ibv_gid,
    _lid: u16,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let group = modify::address(&*gid);
        status(shared((*qp).context).lock().attach((*qp).handle, group))
    }
}

pub(super) unsafe extern "C" fn detach_mcast(
    qp: *mut ibv_qp,
    gid: *const ibv_gid,
    _lid: u16,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let group = modify::address(&*gid);
        status(shared((*qp).context).lock().detach((*qp).handle, group))
    }
}
