//! In debug builds: which memory is registered where, so that a post can refuse memory of another protection domain or
//! device. The device would end the connection, or write to other memory if the other device has the same key.

use std::ffi::c_int;

use crate::base::ffi;

/// A verb has registered this region.
#[inline(always)]
pub(crate) fn is_free(_region: *mut ffi::ibv_mr) {
    #[cfg(debug_assertions)]
    known::add(_region);
}

#[inline(always)]
pub(crate) fn destroy(
    _: &'static str,
    region: *mut ffi::ibv_mr,
    _: *mut ffi::ibv_context,
    verb: impl FnOnce(*mut ffi::ibv_mr) -> c_int,
) -> c_int {
    #[cfg(debug_assertions)]
    known::remove(region);
    verb(region)
}

#[cfg(debug_assertions)]
pub(crate) use known::{DomainId, add, is_foreign, remove};

#[cfg(debug_assertions)]
mod known {
    use std::ops::Range;
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use crate::base::ffi;

    /// Identifies a domain and all parent domains made from it.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) struct DomainId {
        context: usize,
        handle: u32,
    }

    impl DomainId {
        /// # Safety
        ///
        /// The domain is live.
        pub(crate) unsafe fn of(domain: *mut ffi::ibv_pd) -> Self {
            // SAFETY: the caller promises a live domain.
            let ffi::ibv_pd { context, handle } = unsafe { *domain };
            Self { context: context.addr(), handle }
        }
    }

    struct Known {
        region: usize,
        key: u32,
        addresses: Range<u64>,
        domain: DomainId,
    }

    /// Sorted by key, so that a post looks at few.
    static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());

    fn known() -> MutexGuard<'static, Vec<Known>> {
        KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Without memory for the entry, posts do not refuse the region's memory.
    pub(crate) fn add(region: *mut ffi::ibv_mr) {
        // SAFETY: the callers have a live region, and with it its domain.
        let known_region = unsafe {
            let ffi::ibv_mr { pd, addr, length, lkey, .. } = *region;
            if pd.is_null() {
                return;
            }
            let start = addr.addr() as u64;
            let addresses = start..start.saturating_add(length as u64);
            Known { region: region.addr(), key: lkey, addresses, domain: DomainId::of(pd) }
        };
        let mut known = known();
        if known.try_reserve(1).is_ok() {
            let at = known.partition_point(|other| other.key < known_region.key);
            known.insert(at, known_region);
        }
    }

    pub(crate) fn remove(region: *mut ffi::ibv_mr) {
        // SAFETY: the callers have a live region.
        let key = unsafe { (*region).lkey };
        let mut known = known();
        let first = known.partition_point(|other| other.key < key);
        let mut of_key = known[first..].iter().take_while(|other| other.key == key);
        if let Some(at) = of_key.position(|other| other.region == region.addr()) {
            known.remove(first + at);
        }
    }

    /// Whether a piece is registered in another domain, and not in this one.
    #[inline(never)]
    pub(crate) fn is_foreign(domain: DomainId, list: &[ffi::ibv_sge]) -> bool {
        let known = known();
        list.iter().any(|piece| {
            let first = known.partition_point(|other| other.key < piece.lkey);
            let of_key = known[first..].iter().take_while(|other| other.key == piece.lkey);
            let end = piece.addr.saturating_add(piece.length.into());
            let holding = of_key
                .filter(|other| other.addresses.start <= piece.addr && end <= other.addresses.end);
            let mut any = false;
            for other in holding {
                if other.domain == domain {
                    return false;
                }
                any = true;
            }
            any
        })
    }
}
