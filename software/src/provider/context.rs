//! The open contexts.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::mem::offset_of;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::ffi::{ibv_context, verbs_context};

/// `struct verbs_context`, and the engine's number for it.
#[repr(C)]
pub(super) struct SoftContext {
    pub(super) number: u32,
    pub(super) verbs: verbs_context,
}

/// The context of each file on which libibverbs sends requests to the kernel.
static FILES: Mutex<BTreeMap<c_int, OpenContext>> = Mutex::new(BTreeMap::new());

#[derive(Clone, Copy)]
pub(super) struct OpenContext(pub(super) *mut ibv_context);

// SAFETY: contexts may be used from any thread.
unsafe impl Send for OpenContext {}

pub(super) fn files() -> MutexGuard<'static, BTreeMap<c_int, OpenContext>> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a context is of this provider.
///
/// # Safety
///
/// `context` is live, of whichever provider.
pub(super) unsafe fn is_ours(context: *mut ibv_context) -> bool {
    // SAFETY: the caller vouches for it.
    let fd = unsafe { (*context).cmd_fd };
    files().get(&fd).is_some_and(|open| open.0 == context)
}

pub(super) fn soft(context: *mut ibv_context) -> *mut SoftContext {
    let offset = offset_of!(SoftContext, verbs) + offset_of!(verbs_context, context);
    context.wrapping_byte_sub(offset).cast()
}

/// The engine's number for a context.
///
/// # Safety
///
/// `context` is a live context of this provider.
pub(super) unsafe fn number(context: *mut ibv_context) -> u32 {
    // SAFETY: the caller vouches for it.
    unsafe { (*soft(context)).number }
}
