//! Raw bindings to rdma-core's `infiniband/verbs.h`.
//!
//! Feature `rdmacm` adds `rdma/rdma_cma.h`, and a provider's feature its direct verbs: `efadv.h` (`efa`),
//! `hnsdv.h` (`hns`), `ionic_dv.h` (`ionic`), `manadv.h` (`mana`), `mlx4dv.h` (`mlx4`) and `mlx5dv.h`
//! (`mlx5`). The man pages are rdma-core's, such as `efadv(7)`.
//!
//! Functions have their C names. The header's `static inline` functions are compiled into this crate, except
//! for the data path ([`ibv_post_send`], [`ibv_post_recv`], [`ibv_post_srq_recv`], [`ibv_poll_cq`],
//! [`ibv_req_notify_cq`]): that is in Rust, so that the compiler can inline it as in C.
//!
//! Call [`___ibv_query_port`] and [`__ibv_reg_mr`], as the header makes C programs do: the exported
//! `ibv_query_port` and `ibv_reg_mr` are frozen legacy entry points.
//!
//! C enumerations are newtypes, because values that this crate does not know are legal. Constants of unnamed
//! enumerations are plain numbers.

use std::ffi::c_int;
use std::sync::OnceLock;

mod convention;

pub(crate) use convention::{count, errno, failed, new_fd, object, set_errno, status};

macro_rules! generated {
    ($(#[$meta:meta])* mod $module:ident { $($content:tt)+ }) => {
        $(#[$meta])*
        #[allow(
            dead_code,
            unused_imports,
            unreachable_pub,
            missing_docs,
            missing_debug_implementations,
            non_camel_case_types,
            non_snake_case,
            non_upper_case_globals,
            rustdoc::all,
            clippy::all,
            clippy::undocumented_unsafe_blocks,
            clippy::missing_safety_doc,
            unsafe_op_in_unsafe_fn
        )]
        mod $module {
            $($content)+
        }
    };
}

generated! {
    mod bindings {
        include!(concat!(env!("OUT_DIR"), "/ffi/bindings.rs"));
        #[cfg(feature = "rdmacm")]
        include!(concat!(env!("OUT_DIR"), "/ffi/bindings_rdmacm.rs"));
    }
}

/// What fails in the place of functions that the library lacks.
mod missing {
    include!(concat!(env!("OUT_DIR"), "/ffi/missing.rs"));
}

#[allow(ambiguous_glob_reexports, reason = "see `direct_verbs`")]
pub use bindings::*;

/// Each in a module of its own: bindgen numbers unnamed types from 1 in each header.
macro_rules! direct_verbs {
    ($($feature:literal: $module:ident, $file:literal;)+) => {$(
        generated! {
            #[cfg(feature = $feature)]
            mod $module {
                use super::bindings::*;

                include!(concat!(env!("OUT_DIR"), "/ffi", $file));
            }
        }

        #[cfg(feature = $feature)]
        #[allow(ambiguous_glob_reexports, reason = "those names of unnamed types")]
        #[allow(unused_imports, unreachable_pub, reason = "an older rdma-core may lack the provider")]
        pub use $module::*;
    )+};
}

direct_verbs! {
    "efa": efadv, "/bindings_efa.rs";
    "hns": hnsdv, "/bindings_hns.rs";
    "ionic": ionic_dv, "/bindings_ionic.rs";
    "mana": manadv, "/bindings_mana.rs";
    "mlx4": mlx4dv, "/bindings_mlx4.rs";
    "mlx5": mlx5dv, "/bindings_mlx5.rs";
}

/// A static libibverbs knows a provider only if its object file, with the registering constructor, is linked.
#[cfg(all(not(feature = "system"), target_os = "linux"))]
mod providers {
    use std::ffi::c_void;

    unsafe extern "C" {
        /// Null-terminated, from `build.rs`.
        static ibverbs_bundled_providers: [*const c_void; 1];
    }

    /// Makes the linker keep them.
    #[used]
    static KEEP: Keep = Keep(&raw const ibverbs_bundled_providers);

    #[allow(dead_code)]
    struct Keep(*const [*const c_void; 1]);

    // SAFETY: nothing reads through the pointer.
    unsafe impl Sync for Keep {}
}

#[cfg(not(rdma_core_65))]
impl ibv_event_type {
    /// Every kernel may report it, whatever rdma-core's release.
    pub const IBV_EVENT_DEVICE_SPEED_CHANGE: Self = Self(20);
}

#[cfg(all(feature = "rdmacm", not(rdma_core_65)))]
#[allow(missing_docs, reason = "as the bindings")]
impl rdma_cm_event_type {
    pub const RDMA_CM_EVENT_ADDRINFO_RESOLVED: Self = Self(16);
    pub const RDMA_CM_EVENT_ADDRINFO_ERROR: Self = Self(17);
    pub const RDMA_CM_EVENT_USER: Self = Self(18);
}

/// `ibv_post_send`: posts a list to a send queue. Returns 0 or an errno value, and the first request not
/// posted in `bad_wr`.
///
/// # Safety
///
/// As in C: `qp` is a live queue pair, `wr` a valid list whose buffers stay valid until each request's
/// completion was polled, `bad_wr` is writable.
#[inline]
pub unsafe fn ibv_post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the caller's `qp` is live, so its context is. libibverbs sets every operation of a context, to a failing
    // default where the provider has none.
    unsafe { (*(*qp).context).ops.post_send.unwrap_unchecked()(qp, wr, bad_wr) }
}

/// `ibv_post_recv`: posts a list to a receive queue. Returns as [`ibv_post_send`].
///
/// # Safety
///
/// As for [`ibv_post_send`].
#[inline]
pub unsafe fn ibv_post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as in `ibv_post_send`.
    unsafe { (*(*qp).context).ops.post_recv.unwrap_unchecked()(qp, wr, bad_wr) }
}

/// `ibv_post_srq_recv`: posts a list to a shared receive queue. Returns as [`ibv_post_send`].
///
/// # Safety
///
/// As in C: `srq` is a live shared receive queue; `wr` and `bad_wr` are as for [`ibv_post_send`].
#[inline]
pub unsafe fn ibv_post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as in `ibv_post_send`.
    unsafe { (*(*srq).context).ops.post_srq_recv.unwrap_unchecked()(srq, wr, bad_wr) }
}

/// `ibv_poll_cq`: takes up to `num_entries` completions. Returns their number, negative on failure.
///
/// # Safety
///
/// As in C: `cq` is a live completion queue and `wc` has room for `num_entries`.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: as in `ibv_post_send`.
    unsafe { (*(*cq).context).ops.poll_cq.unwrap_unchecked()(cq, num_entries, wc) }
}

/// `ibv_req_notify_cq`: asks for an event at the next completion. Returns 0 or an errno value.
///
/// # Safety
///
/// As in C: `cq` is a live completion queue.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: as in `ibv_post_send`.
    unsafe { (*(*cq).context).ops.req_notify_cq.unwrap_unchecked()(cq, solicited_only) }
}

/// Answers `ibv_query_pkey` for a provider without a kernel driver.
pub(crate) type QueryPkey = unsafe fn(*mut ibv_context, u8, c_int) -> Option<Result<u16, c_int>>;

static QUERY_PKEY: OnceLock<QueryPkey> = OnceLock::new();

pub(crate) fn answer_query_pkey(answer: QueryPkey) {
    QUERY_PKEY.get_or_init(|| answer);
}

/// `ibv_query_pkey`: reads a P_Key, in network byte order. Returns 0 or an error.
///
/// libibverbs reads sysfs; for a device without it, this asks the provider.
///
/// # Safety
///
/// As in C: `context` is live and `pkey` is writable.
pub unsafe fn ibv_query_pkey(
    context: *mut ibv_context,
    port_num: u8,
    index: c_int,
    pkey: *mut __be16,
) -> c_int {
    // SAFETY: the caller vouches for the context.
    let asked = QUERY_PKEY.get().and_then(|answer| unsafe { answer(context, port_num, index) });
    match asked {
        // SAFETY: the caller vouches for both.
        None => unsafe { bindings::ibv_query_pkey(context, port_num, index, pkey) },
        Some(Ok(found)) => {
            // SAFETY: the caller vouches for it.
            unsafe { pkey.write(found.to_be()) };
            0
        }
        Some(Err(errno)) => errno,
    }
}

/// `ibv_get_pkey_index`: finds a P_Key (in network byte order) in a port's table; -1 if it is not there.
///
/// # Safety
///
/// As in C: `context` is live.
pub unsafe fn ibv_get_pkey_index(context: *mut ibv_context, port_num: u8, pkey: __be16) -> c_int {
    let mut found = 0;
    for index in 0.. {
        // SAFETY: the caller vouches for the context; `found` is writable.
        if unsafe { ibv_query_pkey(context, port_num, index, &mut found) } != 0 {
            break;
        }
        if found == pkey {
            return index;
        }
    }
    -1
}
