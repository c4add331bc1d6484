// Generated from the headers of rdma-core v65.0 by bindgen (build/generate.rs); do not edit.
// tests/committed_bindings.rs compares this file with what bindgen generates, and writes it again.
//
// rdma-core is under a choice of two licenses, GPL-2.0 or the OpenIB.org BSD license
// (vendor/rdma-core/COPYING.md). This file is used under the latter; the copyright is that of the
// authors of the headers.

#include <infiniband/mlx4dv.h>

// Static wrappers

uint8_t mlx4dv_get_cqe_owner__bundled(struct mlx4_cqe *cqe) { return mlx4dv_get_cqe_owner(cqe); }
void mlx4dv_set_cqe_owner__bundled(struct mlx4_cqe *cqe, uint8_t val) { mlx4dv_set_cqe_owner(cqe, val); }
uint8_t mlx4dv_get_cqe_opcode__bundled(struct mlx4_cqe *cqe) { return mlx4dv_get_cqe_opcode(cqe); }
void mlx4dv_set_ctrl_seg__bundled(struct mlx4_wqe_ctrl_seg *seg, uint32_t owner_opcode, uint8_t fence_size, uint32_t srcrb_flags, uint32_t imm) { mlx4dv_set_ctrl_seg(seg, owner_opcode, fence_size, srcrb_flags, imm); }
void mlx4dv_set_dgram_seg__bundled(struct mlx4_wqe_datagram_seg *seg, uint32_t port_pd, uint8_t g_slid, uint16_t dlid, uint8_t gid_index, uint8_t stat_rate, uint8_t hop_limit, uint32_t sl_tclass_flowlabel, uint8_t *dgid, uint32_t dqpn, uint32_t qkey, uint16_t vlan, uint8_t *mac) { mlx4dv_set_dgram_seg(seg, port_pd, g_slid, dlid, gid_index, stat_rate, hop_limit, sl_tclass_flowlabel, dgid, dqpn, qkey, vlan, mac); }
void mlx4dv_set_data_seg__bundled(struct mlx4_wqe_data_seg *seg, uint32_t length, uint32_t lkey, uintptr_t address) { mlx4dv_set_data_seg(seg, length, lkey, address); }
