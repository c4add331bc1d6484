//! `poll_cq` for channels that share a completion queue.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::Arc;

use super::BATCH;
use crate::channel::router::{Inbox, Router};
use crate::ffi;

/// What [`poll_routed`] is called with.
pub(super) struct Route {
    /// Not the `Arc`, in front of whose content its counts are: the compiler would need a register more.
    router: NonNull<Router>,
    inbox: Inbox,
}

impl Route {
    /// The route of a channel, which holds the router for as long as it uses this value.
    pub(super) fn new((router, inbox): &(Arc<Router>, Inbox)) -> Self {
        Self { router: NonNull::from(&**router), inbox: inbox.clone() }
    }
}

/// A `poll_cq` for channels that share a completion queue. It may find `BATCH` completions, however few are asked for.
///
/// # Safety
///
/// `route` points to the [`Route`] of a live channel. `completions` points to `BATCH` initialised completions, which
/// nobody else accesses meanwhile.
pub(super) unsafe extern "C" fn poll_routed(
    route: *mut ffi::ibv_cq,
    _most: c_int,
    completions: *mut ffi::ibv_wc,
) -> c_int {
    // SAFETY: the caller vouches for all three.
    let (router, inbox, out) = unsafe {
        let Route { router, inbox } = &*route.cast::<Route>();
        (router.as_ref(), inbox, &mut *completions.cast::<[ffi::ibv_wc; BATCH]>())
    };
    router.poll(inbox, out)
}

/// As [`poll_routed`], for channels that a shared receive queue feeds.
///
/// # Safety
///
/// As for [`poll_routed`].
pub(super) unsafe extern "C" fn poll_routed_receives(
    route: *mut ffi::ibv_cq,
    _most: c_int,
    completions: *mut ffi::ibv_wc,
) -> c_int {
    // SAFETY: the caller vouches for all three.
    let (router, inbox, out) = unsafe {
        let Route { router, inbox } = &*route.cast::<Route>();
        (router.as_ref(), inbox, &mut *completions.cast::<[ffi::ibv_wc; BATCH]>())
    };
    router.poll_fed(inbox, out)
}
