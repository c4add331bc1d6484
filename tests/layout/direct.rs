//! The direct verbs of EFA and mlx5 that this crate calls: layouts and constants of their headers.

use super::*;

/// Sizes, and every field's place.
macro_rules! layouts {
    ($($name:ident { $($field:ident),+ })*) => {{
        let mut values = Values::new();
        $(
            let c = concat!("struct ", stringify!($name));
            values.push((format!("sizeof({c})"), value(size_of::<$name>())));
            values.push((format!("_Alignof({c})"), value(align_of::<$name>())));
            $(
                let offset = value(std::mem::offset_of!($name, $field));
                values.push((format!("offsetof({c}, {})", stringify!($field)), offset));
            )+
        )*
        values
    }};
}

#[cfg(feature = "efa")]
#[test]
fn those_of_efa() {
    let mut values = layouts! {
        efadv_device_attr {
            comp_mask, max_sq_wr, max_rq_wr, max_sq_sge, max_rq_sge, inline_buf_size, device_caps,
            max_rdma_size
        }
        efadv_qp_init_attr { comp_mask, driver_qp_type, flags, sl }
        efadv_ah_attr { comp_mask, ahn }
        efadv_cq { comp_mask, wc_read_sgid, wc_is_unsolicited }
        efadv_cq_init_attr { comp_mask, wc_flags }
        efadv_mr_attr { comp_mask, ic_id_validity, recv_ic_id, rdma_read_ic_id, rdma_recv_ic_id }
    };
    macro_rules! constants {
        ($($name:ident),+) => { [$((stringify!($name).to_owned(), $name.into())),+] };
    }
    values.extend(constants!(
        EFADV_QP_DRIVER_TYPE_SRD,
        EFADV_QP_FLAGS_UNSOLICITED_WRITE_RECV,
        EFADV_DEVICE_ATTR_CAPS_RDMA_READ,
        EFADV_DEVICE_ATTR_CAPS_RNR_RETRY,
        EFADV_DEVICE_ATTR_CAPS_CQ_WITH_SGID,
        EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE,
        EFADV_DEVICE_ATTR_CAPS_UNSOLICITED_WRITE_RECV
    ));
    assert_agrees_with("efadv.h", "efa", values);
}

#[cfg(feature = "mlx5")]
#[test]
fn those_of_mlx5() {
    let mut values = layouts! {
        mlx5dv_context {
            version, flags, comp_mask, cqe_comp_caps, sw_parsing_caps, striding_rq_caps,
            tunnel_offloads_caps, max_dynamic_bfregs, max_clock_info_update_nsec, flow_action_flags,
            dc_odp_caps, hca_core_clock, num_lag_ports, sig_caps, dci_streams_caps,
            max_wr_memcpy_length, crypto_caps, max_dc_rd_atom, max_dc_init_rd_atom, reg_c0,
            ooo_recv_wrs_caps
        }
        mlx5dv_dci_streams { log_num_concurent, log_num_errored }
        mlx5dv_dc_init_attr { dc_type }
        mlx5dv_qp_init_attr { comp_mask, create_flags, dc_init_attr, send_ops_flags }
        mlx5dv_qp_ex {
            comp_mask, wr_set_dc_addr, wr_mr_interleaved, wr_raw_wqe, wr_set_dc_addr_stream, wr_memcpy,
            wr_set_mkey_crypto
        }
        mlx5_wqe_ctrl_seg {
            opmod_idx_opcode, qpn_ds, signature, dci_stream_channel_id, fm_ce_se, imm
        }
        mlx5_wqe_av { dqp_dct, stat_rate_sl, fl_mlid, rlid, tclass, hop_limit, grh_gid_fl, rgid }
    };
    use mlx5dv_qp_init_attr_mask as mask;
    values.extend([
        ("MLX5DV_DCTYPE_DCT".to_owned(), mlx5dv_dc_type::MLX5DV_DCTYPE_DCT.0.into()),
        ("MLX5DV_DCTYPE_DCI".to_owned(), mlx5dv_dc_type::MLX5DV_DCTYPE_DCI.0.into()),
        ("MLX5DV_QP_INIT_ATTR_MASK_DC".to_owned(), mask::MLX5DV_QP_INIT_ATTR_MASK_DC.0.into()),
        (
            "MLX5DV_QP_INIT_ATTR_MASK_DCI_STREAMS".to_owned(),
            mask::MLX5DV_QP_INIT_ATTR_MASK_DCI_STREAMS.0.into(),
        ),
        (
            "offsetof(struct mlx5dv_dc_init_attr, dct_access_key)".to_owned(),
            value(std::mem::offset_of!(mlx5dv_dc_init_attr, __bindgen_anon_1)),
        ),
    ]);
    assert_agrees_with("mlx5dv.h", "mlx5", values);
}
