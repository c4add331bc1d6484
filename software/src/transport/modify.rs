//! `ibv_modify_qp`: all attributes are checked before any takes effect.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv6Addr};

use super::Engine;
use super::core::{Core, named_by_link_local};
use super::queue_pair::{QueuePair, Transport};
use super::state;
use super::work::{Path, is_way};
use crate::ffi::{
    ibv_ah_attr, ibv_gid, ibv_qp_attr, ibv_qp_attr_mask as Mask, ibv_qp_state as State,
};

/// The largest code of a retry counter, which has three bits.
const MOST_RETRIES: u8 = 7;

impl Core {
    /// Resolves an address vector to a destination.
    pub(crate) fn path(&self, av: &ibv_ah_attr) -> Result<Path, c_int> {
        let port = usize::from(av.port_num).checked_sub(1).and_then(|i| self.ports.get(i));
        let port = port.ok_or(libc::EINVAL)?;
        // RoCE addresses peers only by GID.
        if av.is_global == 0 {
            return Err(libc::EINVAL);
        }
        let (_, from) = *port.gids().get(usize::from(av.grh.sgid_index)).ok_or(libc::EINVAL)?;
        let to = address(&av.grh.dgid);
        if !is_way(from, to) || to.is_unspecified() {
            return Err(libc::EINVAL);
        }
        Ok(Path { from, to })
    }
}

/// The IP address of a RoCE v2 GID.
pub(crate) fn address(gid: &ibv_gid) -> IpAddr {
    // SAFETY: all bytes of the union are initialised, and any value is good.
    let raw = unsafe { gid.raw };
    let v6 = Ipv6Addr::from(raw);
    // A multicast GID of IPv4, as rdma-core's librdmacm and the kernel form them: ff0e::ffff:a.b.c.d.
    if raw[0] == 0xff && raw[1] == 0x0e && raw[2..10] == [0; 8] && raw[10..12] == [0xff, 0xff] {
        return IpAddr::from([raw[12], raw[13], raw[14], raw[15]]);
    }
    let v4 = v6.to_ipv4_mapped().or_else(|| named_by_link_local(v6));
    v4.map_or(IpAddr::V6(v6), IpAddr::V4)
}

fn ensure(condition: bool) -> Result<(), c_int> {
    if condition { Ok(()) } else { Err(libc::EINVAL) }
}

/// Checks the value of each attribute in the mask.
fn check(
    qp: &QueuePair,
    core: &Core,
    attr: &ibv_qp_attr,
    mask: u32,
) -> Result<Option<Path>, c_int> {
    let has = |bit: Mask| mask & bit.0 != 0;
    let settings = &core.settings;
    ensure(!has(Mask::IBV_QP_PKEY_INDEX) || attr.pkey_index == 0)?;
    let port = usize::from(attr.port_num);
    ensure(!has(Mask::IBV_QP_PORT) || (1..=core.ports.len()).contains(&port))?;
    ensure(!has(Mask::IBV_QP_CUR_STATE) || attr.cur_qp_state == qp.state)?;
    ensure(!has(Mask::IBV_QP_PATH_MTU) || (1..=settings.mtu.0).contains(&attr.path_mtu.0))?;
    ensure(!has(Mask::IBV_QP_DEST_QPN) || attr.dest_qp_num <= 0xff_ffff)?;
    ensure(!has(Mask::IBV_QP_TIMEOUT) || attr.timeout <= 31)?;
    ensure(!has(Mask::IBV_QP_RETRY_CNT) || attr.retry_cnt <= MOST_RETRIES)?;
    ensure(!has(Mask::IBV_QP_RNR_RETRY) || attr.rnr_retry <= MOST_RETRIES)?;
    ensure(!has(Mask::IBV_QP_MIN_RNR_TIMER) || attr.min_rnr_timer <= 31)?;
    let fetches = settings.max_rd_atomic;
    ensure(!has(Mask::IBV_QP_MAX_QP_RD_ATOMIC) || attr.max_rd_atomic <= fetches)?;
    ensure(!has(Mask::IBV_QP_MAX_DEST_RD_ATOMIC) || attr.max_dest_rd_atomic <= fetches)?;
    if has(Mask::IBV_QP_AV) { core.path(&attr.ah_attr).map(Some) } else { Ok(None) }
}

impl QueuePair {
    fn apply(&mut self, attr: &ibv_qp_attr, mask: u32, path: Option<Path>) {
        let to = &mut self.attr;
        macro_rules! copy {
            ($($bit:ident $field:ident),* $(,)?) => {
                $(if mask & Mask::$bit.0 != 0 { to.$field = attr.$field; })*
            };
        }
        copy! {
            IBV_QP_ACCESS_FLAGS qp_access_flags,
            IBV_QP_PORT port_num,
            IBV_QP_PKEY_INDEX pkey_index,
            IBV_QP_QKEY qkey,
            IBV_QP_AV ah_attr,
            IBV_QP_PATH_MTU path_mtu,
            IBV_QP_TIMEOUT timeout,
            IBV_QP_RETRY_CNT retry_cnt,
            IBV_QP_RNR_RETRY rnr_retry,
            IBV_QP_RQ_PSN rq_psn,
            IBV_QP_MAX_QP_RD_ATOMIC max_rd_atomic,
            IBV_QP_MIN_RNR_TIMER min_rnr_timer,
            IBV_QP_SQ_PSN sq_psn,
            IBV_QP_MAX_DEST_RD_ATOMIC max_dest_rd_atomic,
            IBV_QP_DEST_QPN dest_qp_num,
            IBV_QP_EN_SQD_ASYNC_NOTIFY en_sqd_async_notify,
        }
        to.rq_psn &= 0xff_ffff;
        to.sq_psn &= 0xff_ffff;
        if mask & Mask::IBV_QP_PATH_MTU.0 != 0 {
            self.mtu = 128 << attr.path_mtu.0;
        }
        if mask & Mask::IBV_QP_RQ_PSN.0 != 0 {
            self.responder.expected = self.attr.rq_psn;
        }
        if mask & Mask::IBV_QP_SQ_PSN.0 != 0 {
            self.sq.start(self.attr.sq_psn);
        }
        if path.is_some() {
            self.path = path;
        }
    }
}

impl Engine {
    pub(crate) fn modify_qp(
        &mut self,
        number: u32,
        attr: &ibv_qp_attr,
        mask: u32,
    ) -> Result<(), c_int> {
        self.release_answers();
        let qp = self.qps.get_mut(number).ok_or(libc::EINVAL)?;
        let from = qp.state;
        // Leaves out, as the kernel does, attributes of the half that such a queue pair does not have are left out.
        let mask = mask & !state::ignored(qp.transport);
        let to = if mask & Mask::IBV_QP_STATE.0 != 0 { attr.qp_state } else { from };
        ensure(state::allows(qp.transport, from, to, mask))?;
        let path = check(qp, &self.core, attr, mask)?;
        // EFADV_DEVICE_ATTR_CAPS_RNR_RETRY
        let limits_retries = self.core.settings.efa.is_none_or(|efa| efa & 1 << 1 != 0);
        if qp.transport == Transport::Srd && mask & Mask::IBV_QP_RNR_RETRY.0 != 0 && !limits_retries
        {
            return Err(libc::EOPNOTSUPP);
        }
        if mask & Mask::IBV_QP_MAX_DEST_RD_ATOMIC.0 != 0 {
            let others = self.core.answers - u32::from(qp.attr.max_dest_rd_atomic);
            let answers = others + u32::from(attr.max_dest_rd_atomic);
            if answers > self.core.settings.max_res_rd_atom {
                return Err(libc::ENOMEM);
            }
            self.core.answers = answers;
        }
        self.core.keep_out(number);
        qp.apply(attr, mask, path);
        if to == State::IBV_QPS_RTS
            && qp.transport == Transport::Srd
            && mask & Mask::IBV_QP_RNR_RETRY.0 == 0
            && from == State::IBV_QPS_RTR
        {
            qp.attr.rnr_retry = MOST_RETRIES;
        }
        if matches!(to, State::IBV_QPS_RESET | State::IBV_QPS_ERR) {
            self.end_flows(number);
        }
        let Some(qp) = self.qps.get_mut(number) else { return Err(libc::EINVAL) };
        match to {
            State::IBV_QPS_RESET => {
                qp.reset(&mut self.core);
                if qp.transport != Transport::XrcReceive {
                    let cqs = [qp.send_cq, qp.receive_cq];
                    self.forget_completions(number, cqs);
                }
                if self.core.windows > 0 {
                    self.core.unbind_all_of(number);
                }
                return Ok(());
            }
            State::IBV_QPS_ERR => {
                qp.enter_error(&mut self.core);
                return Ok(());
            }
            State::IBV_QPS_SQD if from == State::IBV_QPS_RTS => {
                qp.draining = true;
                qp.drained_event =
                    mask & Mask::IBV_QP_EN_SQD_ASYNC_NOTIFY.0 != 0 && attr.en_sqd_async_notify != 0;
            }
            State::IBV_QPS_RTR if matches!(qp.transport, Transport::Ud | Transport::Srd) => {
                qp.mtu = 128 << self.core.settings.mtu.0;
            }
            State::IBV_QPS_RTS => (qp.draining, qp.drained_event) = (false, false),
            _ => {}
        }
        qp.state = to;
        self.core.let_in(qp);
        if qp.is_up() {
            qp.send_requests(&mut self.core);
        }
        Ok(())
    }
}
