// Generated from the headers of rdma-core v65.0 by bindgen (build/generate.rs); do not edit.
// tests/committed_bindings.rs compares this file with what bindgen generates, and writes it again.
//
// rdma-core is under a choice of two licenses, GPL-2.0 or the OpenIB.org BSD license
// (vendor/rdma-core/COPYING.md). This file is used under the latter; the copyright is that of the
// authors of the headers.

#include <infiniband/efadv.h>

// Static wrappers

void efadv_wr_set_processing_hints__bundled(struct efadv_qp *efadv_qp, uint32_t hints) { efadv_wr_set_processing_hints(efadv_qp, hints); }
int efadv_wc_read_sgid__bundled(struct efadv_cq *efadv_cq, union ibv_gid *sgid) { return efadv_wc_read_sgid(efadv_cq, sgid); }
bool efadv_wc_is_unsolicited__bundled(struct efadv_cq *efadv_cq) { return efadv_wc_is_unsolicited(efadv_cq); }
