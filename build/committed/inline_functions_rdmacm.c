// Generated from the headers of rdma-core v65.0 by bindgen (build/generate.rs); do not edit.
// tests/committed_bindings.rs compares this file with what bindgen generates, and writes it again.
//
// rdma-core is under a choice of two licenses, GPL-2.0 or the OpenIB.org BSD license
// (vendor/rdma-core/COPYING.md). This file is used under the latter; the copyright is that of the
// authors of the headers.

#include <rdma/rdma_cma.h>

// Static wrappers

struct sockaddr * rdma_get_local_addr__bundled(struct rdma_cm_id *id) { return rdma_get_local_addr(id); }
struct sockaddr * rdma_get_peer_addr__bundled(struct rdma_cm_id *id) { return rdma_get_peer_addr(id); }
