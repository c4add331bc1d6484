//! A provider whose posts of receives fail after they were queued, and name no request. For sends, the function device
//! has the fault "ring_doorbell".

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::OnceLock;

use ibverbs::{Context, ffi};

type Post = unsafe extern "C" fn(
    *mut ffi::ibv_qp,
    *mut ffi::ibv_recv_wr,
    *mut *mut ffi::ibv_recv_wr,
) -> c_int;

static REAL: OnceLock<Post> = OnceLock::new();

thread_local! {
    static FAILS: Cell<bool> = const { Cell::new(false) };
}

/// The next receive that this thread posts is queued, and its post fails with EACCES.
pub(crate) fn fail_next_receive() {
    FAILS.set(true);
}

/// Call this before anything is made on the context.
pub(crate) fn prepare(context: &Context<'_>) {
    // SAFETY: the context is live, and nobody else uses it yet.
    let real = unsafe { (*context.as_raw()).ops.post_recv.replace(post_receive) };
    let real = real.expect("the device has it");
    assert_eq!(*REAL.get_or_init(|| real) as usize, real as usize, "one device at a time");
}

unsafe extern "C" fn post_receive(
    queue_pair: *mut ffi::ibv_qp,
    request: *mut ffi::ibv_recv_wr,
    bad: *mut *mut ffi::ibv_recv_wr,
) -> c_int {
    let real = REAL.get().expect("it was set before this function");
    // SAFETY: it is called as the real one is.
    let returned = unsafe { real(queue_pair, request, bad) };
    if FAILS.take() { libc::EACCES } else { returned }
}
