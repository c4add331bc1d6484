//! rdma-core's provider interface: `infiniband/driver.h`, and the functions of libibverbs that only
//! providers call.

#[allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    missing_debug_implementations,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::missing_safety_doc,
    unsafe_op_in_unsafe_fn
)]
mod driver {
    include!(concat!(env!("OUT_DIR"), "/driver.rs"));
}

mod private {
    use super::*;
    use std::ffi::{c_int, c_void};

    include!(concat!(env!("OUT_DIR"), "/private.rs"));
}

pub(crate) use driver::*;
pub(crate) use ibverbs::ffi::*;
pub(crate) use private::{
    device_hold, device_put, dofork_range, dontfork_range, init_and_alloc_context, verbs_set_ops,
    verbs_uninit_context,
};

pub(crate) fn set_errno(errno: std::ffi::c_int) {
    // SAFETY: the location is valid for the calling thread.
    unsafe { *libc::__errno_location() = errno };
}
