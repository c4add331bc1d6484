//! Two queue pairs on one device, with one region and one completion queue each.

use ibverbs::ffi::{self, *};
use ibverbs_function_device::{Builder, FunctionDevice, Progress};
use std::ptr::null_mut;

pub(crate) const EVERYTHING: u32 = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0
    | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0
    | ibv_access_flags::IBV_ACCESS_REMOTE_READ.0
    | ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0
    | ibv_access_flags::IBV_ACCESS_MW_BIND.0;

pub(crate) const SIGNALED: u32 = ibv_send_flags::IBV_SEND_SIGNALED.0;

pub(crate) struct Side {
    pub(crate) cq: *mut ibv_cq,
    pub(crate) qp: *mut ibv_qp,
    pub(crate) mr: *mut ibv_mr,
    pub(crate) memory: Box<[u8]>,
}

impl Side {
    pub(crate) fn number(&self) -> u32 {
        unsafe { (*self.qp).qp_num }
    }

    pub(crate) fn address(&self) -> u64 {
        unsafe { (*self.mr).addr as u64 }
    }

    pub(crate) fn rkey(&self) -> u32 {
        unsafe { (*self.mr).rkey }
    }

    pub(crate) fn sge(&self, offset: usize, length: u32) -> ibv_sge {
        ibv_sge { addr: self.address() + offset as u64, length, lkey: unsafe { (*self.mr).lkey } }
    }

    /// The bytes as the device left them.
    pub(crate) fn bytes(&self, offset: usize, length: usize) -> Vec<u8> {
        let from = unsafe { ((*self.mr).addr as *const u8).add(offset) };
        (0..length).map(|i| unsafe { from.add(i).read_volatile() }).collect()
    }

    pub(crate) fn fill(&self, offset: usize, bytes: &[u8]) {
        let to = unsafe { ((*self.mr).addr as *mut u8).add(offset) };
        for (i, byte) in bytes.iter().enumerate() {
            unsafe { to.add(i).write_volatile(*byte) }
        }
    }

    pub(crate) fn receive(&self, wr_id: u64, offset: usize, length: u32) -> i32 {
        let mut sge = self.sge(offset, length);
        let mut wr = ibv_recv_wr { wr_id, next: null_mut(), sg_list: &mut sge, num_sge: 1 };
        let mut bad = null_mut();
        unsafe { ffi::ibv_post_recv(self.qp, &mut wr, &mut bad) }
    }

    pub(crate) fn post(
        &self,
        opcode: ibv_wr_opcode,
        wr_id: u64,
        (offset, length): (usize, u32),
        set: impl FnOnce(&mut ibv_send_wr),
    ) -> i32 {
        let mut sge = self.sge(offset, length);
        let mut wr = ibv_send_wr {
            wr_id,
            sg_list: &mut sge,
            num_sge: 1,
            opcode,
            send_flags: SIGNALED,
            ..Default::default()
        };
        set(&mut wr);
        let mut bad = null_mut();
        unsafe { ffi::ibv_post_send(self.qp, &mut wr, &mut bad) }
    }

    pub(crate) fn send(&self, wr_id: u64, offset: usize, length: u32) -> i32 {
        self.post(ibv_wr_opcode::IBV_WR_SEND, wr_id, (offset, length), |_| ())
    }

    pub(crate) fn poll(&self) -> Vec<ibv_wc> {
        let mut wc = vec![ibv_wc::default(); 64];
        let count = unsafe { ffi::ibv_poll_cq(self.cq, 64, wc.as_mut_ptr()) };
        wc.truncate(usize::try_from(count).expect("the poll succeeds"));
        wc
    }

    /// The one completion that is there.
    #[track_caller]
    pub(crate) fn one(&self) -> ibv_wc {
        let wc = self.poll();
        assert_eq!(wc.len(), 1);
        wc[0]
    }

    pub(crate) fn modify(&self, mask: u32, set: impl FnOnce(&mut ibv_qp_attr)) -> i32 {
        let mut attr = ibv_qp_attr::default();
        set(&mut attr);
        unsafe { ibv_modify_qp(self.qp, &mut attr, mask as i32) }
    }

    pub(crate) fn to_state(&self, state: ibv_qp_state) -> i32 {
        self.modify(ibv_qp_attr_mask::IBV_QP_STATE.0, |attr| attr.qp_state = state)
    }

    pub(crate) fn connect(&self, peer: u32, psn: (u32, u32), rnr_retry: u8) {
        use ibv_qp_attr_mask as M;
        let kind = unsafe { (*self.qp).qp_type };
        let ud = kind == ibv_qp_type::IBV_QPT_UD;
        let reliable = !ud && kind != ibv_qp_type::IBV_QPT_UC;
        let responds = reliable && kind != ibv_qp_type::IBV_QPT_XRC_SEND;
        let requests = reliable && kind != ibv_qp_type::IBV_QPT_XRC_RECV;
        let mut mask = M::IBV_QP_STATE.0 | M::IBV_QP_PKEY_INDEX.0 | M::IBV_QP_PORT.0;
        mask |= if ud { M::IBV_QP_QKEY.0 } else { M::IBV_QP_ACCESS_FLAGS.0 };
        let error = self.modify(mask, |attr| {
            attr.qp_state = ibv_qp_state::IBV_QPS_INIT;
            attr.port_num = 1;
            attr.qkey = 0x1234;
            attr.qp_access_flags = EVERYTHING & !ibv_access_flags::IBV_ACCESS_MW_BIND.0;
        });
        assert_eq!(error, 0);
        mask = M::IBV_QP_STATE.0;
        if !ud {
            mask |=
                M::IBV_QP_AV.0 | M::IBV_QP_PATH_MTU.0 | M::IBV_QP_DEST_QPN.0 | M::IBV_QP_RQ_PSN.0;
        }
        if responds {
            mask |= M::IBV_QP_MAX_DEST_RD_ATOMIC.0 | M::IBV_QP_MIN_RNR_TIMER.0;
        }
        let error = self.modify(mask, |attr| {
            attr.qp_state = ibv_qp_state::IBV_QPS_RTR;
            attr.path_mtu = ibv_mtu::IBV_MTU_1024;
            attr.dest_qp_num = peer;
            attr.rq_psn = psn.1;
            attr.max_dest_rd_atomic = 4;
            attr.min_rnr_timer = 12;
            attr.ah_attr = route();
        });
        assert_eq!(error, 0);
        mask = M::IBV_QP_STATE.0 | M::IBV_QP_SQ_PSN.0;
        if reliable {
            mask |= M::IBV_QP_TIMEOUT.0;
        }
        if requests {
            mask |= M::IBV_QP_RETRY_CNT.0 | M::IBV_QP_RNR_RETRY.0 | M::IBV_QP_MAX_QP_RD_ATOMIC.0;
        }
        let error = self.modify(mask, |attr| {
            attr.qp_state = ibv_qp_state::IBV_QPS_RTS;
            attr.sq_psn = psn.0;
            attr.timeout = 14;
            attr.retry_cnt = 3;
            attr.rnr_retry = rnr_retry;
            attr.max_rd_atomic = 4;
        });
        assert_eq!(error, 0);
    }
}

/// The route to port 1 of the device itself, as RoCE v2 over IPv4.
pub(crate) fn route() -> ibv_ah_attr {
    let mut attr = ibv_ah_attr { is_global: 1, port_num: 1, ..Default::default() };
    attr.grh.sgid_index = 3;
    attr.grh.hop_limit = 64;
    attr.grh.dgid = ibv_gid { raw: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1] };
    attr
}

pub(crate) struct Rig {
    pub(crate) device: FunctionDevice,
    pub(crate) context: *mut ibv_context,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) a: Side,
    pub(crate) b: Side,
}

impl Rig {
    pub(crate) fn new(device: FunctionDevice, kind: ibv_qp_type, srq: *mut ibv_srq) -> Self {
        let context = device.open().unwrap();
        let pd = unsafe { ibv_alloc_pd(context) };
        Self::on(device, context, pd, kind, srq)
    }

    pub(crate) fn on(
        device: FunctionDevice,
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        kind: ibv_qp_type,
        srq: *mut ibv_srq,
    ) -> Self {
        let side = |srq| {
            let cq = unsafe { ibv_create_cq(context, 64, null_mut(), null_mut(), 0) };
            let mut init = ibv_qp_init_attr {
                send_cq: cq,
                recv_cq: cq,
                srq,
                qp_type: kind,
                cap: ibv_qp_cap {
                    max_send_wr: 8,
                    max_recv_wr: 8,
                    max_send_sge: 2,
                    max_recv_sge: 2,
                    max_inline_data: 64,
                },
                ..Default::default()
            };
            let qp = unsafe { ibv_create_qp(pd, &mut init) };
            assert!(!qp.is_null());
            let mut memory = vec![0; 4096].into_boxed_slice();
            let mr = unsafe {
                ibv_reg_mr_iova2(
                    pd,
                    memory.as_mut_ptr().cast(),
                    memory.len(),
                    memory.as_ptr() as u64,
                    EVERYTHING,
                )
            };
            assert!(!mr.is_null());
            Side { cq, qp, mr, memory }
        };
        let (a, b) = (side(null_mut()), side(srq));
        Self { device, context, pd, a, b }
    }

    /// A connected pair; nothing moves until the device is told to.
    pub(crate) fn connected(kind: ibv_qp_type) -> Self {
        let device = Builder::model().progress(Progress::Manual).build();
        let rig = Self::new(device, kind, null_mut());
        rig.connect(7);
        rig
    }

    pub(crate) fn rc() -> Self {
        Self::connected(ibv_qp_type::IBV_QPT_RC)
    }

    pub(crate) fn connect(&self, rnr_retry: u8) {
        self.a.connect(self.b.number(), (100, 200), rnr_retry);
        self.b.connect(self.a.number(), (200, 100), rnr_retry);
    }

    pub(crate) fn drop_sides(&mut self) {
        for side in [&self.a, &self.b] {
            unsafe {
                assert_eq!(ibv_destroy_qp(side.qp), 0);
                assert_eq!(ibv_dereg_mr(side.mr), 0);
                assert_eq!(ibv_destroy_cq(side.cq), 0);
            }
        }
    }

    /// Destroys everything, and checks that nothing is left.
    pub(crate) fn finish(mut self) {
        self.drop_sides();
        unsafe {
            assert_eq!(ibv_dealloc_pd(self.pd), 0);
            assert_eq!(ibv_close_device(self.context), 0);
        }
        self.device.assert_clean();
    }
}
