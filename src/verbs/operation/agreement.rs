//! Checks that `fill` and `emit` of each operation pass the same values to both interfaces.

use std::cell::Cell;

use super::sealed::Kind;
use super::{Immediate, Invalidate};
use crate::base::ffi::{self, ibv_wr_opcode as Opcode};
use crate::verbs::memory::RemoteMemoryRegion;
use crate::verbs::queue_pair::FlushPlacement;

/// Different fields get different values.
pub(super) trait Sample {
    fn sample(at: u64) -> Self;
}

macro_rules! sample {
    ($($type:ty = |$at:ident| $value:expr;)+) => {$(
        impl Sample for $type {
            fn sample($at: u64) -> Self {
                $value
            }
        }
    )+};
}

sample! {
    u32 = |at| 0x1122_3300 + at as u32;
    u64 = |at| 0x0102_0304_0506_0700 + at;
    bool = |at| at.is_multiple_of(2);
    RemoteMemoryRegion = |at| RemoteMemoryRegion::new(0x8000_0000_0000 + 64 * at, 64, 0x55aa_0001).expect("it fits");
    FlushPlacement = |_at| FlushPlacement::PERSISTENT;
    () = |_at| ();
    Immediate = |_at| Immediate(0x1234_5678);
    Invalidate = |_at| Invalidate(0x0bad_cafe);
}

/// Opcode, peer's memory with an atomic's numbers, immediate or key.
type Said = (Opcode, [u64; 4], u32);

thread_local! {
    static SAID: Cell<Option<Said>> = const { Cell::new(None) };
}

fn say(opcode: Opcode, numbers: [u64; 4], word: u32) {
    assert!(SAID.replace(Some((opcode, numbers, word))).is_none(), "one call for each operation");
}

macro_rules! functions {
    ($queue_pair:ident: $($field:ident($($argument:ident: $type:ty),*) = $opcode:ident $numbers:expr, $word:expr;)+) => {$(
        {
            unsafe extern "C" fn $field(_: *mut ffi::ibv_qp_ex $(, $argument: $type)*) {
                say(Opcode::$opcode, $numbers, $word);
            }
            $queue_pair.$field = Some($field);
        }
    )+};
}

fn noting() -> ffi::ibv_qp_ex {
    let mut queue_pair = ffi::ibv_qp_ex::default();
    functions! { queue_pair:
        wr_send() = IBV_WR_SEND [0; 4], 0;
        wr_send_imm(word: u32) = IBV_WR_SEND_WITH_IMM [0; 4], word;
        wr_send_inv(word: u32) = IBV_WR_SEND_WITH_INV [0; 4], word;
        wr_local_inv(word: u32) = IBV_WR_LOCAL_INV [0; 4], word;
        wr_rdma_write(rkey: u32, to: u64) = IBV_WR_RDMA_WRITE [rkey.into(), to, 0, 0], 0;
        wr_rdma_write_imm(rkey: u32, to: u64, word: u32) =
            IBV_WR_RDMA_WRITE_WITH_IMM [rkey.into(), to, 0, 0], word;
        wr_rdma_read(rkey: u32, to: u64) = IBV_WR_RDMA_READ [rkey.into(), to, 0, 0], 0;
        wr_atomic_cmp_swp(rkey: u32, to: u64, compare: u64, swap: u64) =
            IBV_WR_ATOMIC_CMP_AND_SWP [rkey.into(), to, compare, swap], 0;
        wr_atomic_fetch_add(rkey: u32, to: u64, add: u64) =
            IBV_WR_ATOMIC_FETCH_AND_ADD [rkey.into(), to, add, 0], 0;
        // `ibv_send_wr` has no value.
        wr_atomic_write(rkey: u32, to: u64, value: *const std::ffi::c_void) =
            IBV_WR_ATOMIC_WRITE [rkey.into(), to, 0, 0], u32::from(value.is_null());
        // `ibv_send_wr` has no length, placement and kind.
        wr_flush(rkey: u32, to: u64, length: usize, placement: u8, whole: u8) =
            IBV_WR_FLUSH [rkey.into(), to, 0, 0],
            u32::from((length, placement, whole) != (64, FlushPlacement::PERSISTENT.bits(), 1));
    }
    queue_pair
}

fn said_by(request: &ffi::ibv_send_wr) -> Said {
    // SAFETY: the request was zeroed before it was filled, so each form of the union is initialised.
    let numbers = unsafe {
        match request.opcode {
            Opcode::IBV_WR_ATOMIC_CMP_AND_SWP | Opcode::IBV_WR_ATOMIC_FETCH_AND_ADD => {
                let atomic = request.wr.atomic;
                [atomic.rkey.into(), atomic.remote_addr, atomic.compare_add, atomic.swap]
            }
            _ => {
                let rdma = request.wr.rdma;
                [rdma.rkey.into(), rdma.remote_addr, 0, 0]
            }
        }
    };
    // SAFETY: as above.
    (request.opcode, numbers, unsafe { request.__bindgen_anon_1.imm_data })
}

#[derive(Default)]
pub(super) struct Compared(pub(super) Vec<Opcode>);

impl Compared {
    pub(super) fn check<K: Kind>(&mut self, kind: K) {
        let mut request = ffi::ibv_send_wr { opcode: K::OPCODE, ..Default::default() };
        // SAFETY: it is a request.
        unsafe { kind.fill(&raw mut request) };
        let mut queue_pair = noting();
        // SAFETY: it has all functions, which only note their arguments.
        unsafe { kind.emit(&raw mut queue_pair) };
        let said = SAID.take().expect("it was told");
        assert_eq!(said, said_by(&request), "by ibv_wr_*, and in the request");
        assert_eq!(K::EXTENDED.bits().count_ones(), 1);
        self.0.push(K::OPCODE);
    }
}
