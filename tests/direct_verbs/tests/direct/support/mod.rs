//! A record of the calls of the replaced functions, and a queue pair of the device made of functions whose
//! posting functions are recorded.
//!
//! Each test has a thread, and the record belongs to it. A thread that has not begun a record calls the
//! provider's own functions.
#![allow(dead_code, reason = "each test program uses a part of it")]

mod posting;

use std::cell::RefCell;
use std::ffi::c_int;

use ibverbs::ffi::*;

pub(crate) use posting::record_posting;

/// A call, with its arguments.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Call {
    /// `ibv_modify_qp`: the mask, and the attributes that matter here.
    Modify { mask: u32, attr: Modified },
    /// A function of `struct ibv_qp_ex` or `struct mlx5dv_qp_ex`, with its arguments, the queue pair apart.
    Post(&'static str, Vec<u64>),
}

/// A part of `struct ibv_qp_attr`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Modified {
    pub(crate) state: u32,
    pub(crate) port: u8,
    pub(crate) qkey: u32,
    pub(crate) access: u32,
    pub(crate) path_mtu: u32,
    pub(crate) rnr_retry: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) sgid_index: Option<u8>,
}

/// The provider that is played.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Played {
    Efa,
    Mlx5,
}

struct Record {
    played: Played,
    calls: Vec<Call>,
    /// The number that a DC target gets in RTR.
    number_in_rtr: Option<u32>,
}

thread_local! {
    static RECORD: RefCell<Option<Record>> = const { RefCell::new(None) };
}

/// Begins the record of this thread.
pub(crate) fn play(played: Played) {
    RECORD.set(Some(Record { played, calls: Vec::new(), number_in_rtr: None }));
}

/// Whether this thread plays the provider.
pub(crate) fn plays(played: Played) -> bool {
    RECORD.with_borrow(|record| record.as_ref().is_some_and(|record| record.played == played))
}

pub(crate) fn number_in_rtr(number: u32) {
    RECORD.with_borrow_mut(|record| record.as_mut().unwrap().number_in_rtr = Some(number));
}

fn push(call: Call) {
    RECORD.with_borrow_mut(|record| {
        if let Some(record) = record {
            record.calls.push(call);
        }
    });
}

pub(crate) fn post(name: &'static str, arguments: &[u64]) {
    push(Call::Post(name, arguments.to_vec()));
}

/// Takes the calls that were recorded.
pub(crate) fn calls() -> Vec<Call> {
    RECORD.with_borrow_mut(|record| std::mem::take(&mut record.as_mut().unwrap().calls))
}

/// The posting calls that were recorded.
pub(crate) fn posts() -> Vec<(&'static str, Vec<u64>)> {
    let post = |call| match call {
        Call::Post(name, arguments) => (name, arguments),
        other => panic!("{other:?}"),
    };
    calls().into_iter().map(post).collect()
}

/// Creates a queue pair as the provider would, on the device made of functions: there it is a UD one, which
/// sends by address as well.
///
/// # Safety
///
/// `context` is live, as is all that `attributes` names.
pub(crate) unsafe fn create_datagram_qp(
    context: *mut ibv_context,
    attributes: &ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    let mut own = *attributes;
    own.qp_type = ibv_qp_type::IBV_QPT_UD;
    own.cap.max_send_wr = own.cap.max_send_wr.min(64);
    own.cap.max_recv_wr = own.cap.max_recv_wr.min(64);
    own.srq = std::ptr::null_mut();
    // SAFETY: the caller vouches for all.
    unsafe { ibv_create_qp_ex(context, &mut own) }
}

unsafe extern "C" {
    fn __real_ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
}

/// # Safety
///
/// As the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_ibv_modify_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    let played = RECORD.with_borrow(|r| r.as_ref().map(|r| (r.played, r.number_in_rtr)));
    // SAFETY: both are the caller's.
    unsafe {
        let Some((played, number)) = played else { return __real_ibv_modify_qp(qp, attr, mask) };
        let a = &mut *attr;
        let has = |bit: ibv_qp_attr_mask| mask as u32 & bit.0 != 0;
        push(Call::Modify {
            mask: mask as u32,
            attr: Modified {
                state: a.qp_state.0,
                port: a.port_num,
                qkey: a.qkey,
                access: a.qp_access_flags,
                path_mtu: a.path_mtu.0,
                rnr_retry: a.rnr_retry,
                max_rd_atomic: a.max_rd_atomic,
                sgid_index: (has(ibv_qp_attr_mask::IBV_QP_AV) && a.ah_attr.is_global == 1)
                    .then_some(a.ah_attr.grh.sgid_index),
            },
        });
        // To the device it is a UD queue pair: it takes those steps with a UD one's attributes.
        let rtr = a.qp_state == ibv_qp_state::IBV_QPS_RTR;
        let mut own = *a;
        own.sq_psn = 0;
        own.qkey = if played == Played::Efa { a.qkey } else { 0 };
        use ibv_qp_attr_mask as m;
        let own_mask = match a.qp_state {
            ibv_qp_state::IBV_QPS_INIT => {
                m::IBV_QP_STATE | m::IBV_QP_PKEY_INDEX | m::IBV_QP_PORT | m::IBV_QP_QKEY
            }
            ibv_qp_state::IBV_QPS_RTS => m::IBV_QP_STATE | m::IBV_QP_SQ_PSN,
            _ => m::IBV_QP_STATE,
        };
        let returned = __real_ibv_modify_qp(qp, &mut own, own_mask.0 as c_int);
        if let Some(number) = number.filter(|_| rtr && returned == 0) {
            (*qp).qp_num = number;
        }
        returned
    }
}
