// Preloaded before a program that connects by LID alone, so that it runs on a device of RoCE: its addresses get the device's own GID.

#include <dlfcn.h>
#include <infiniband/verbs.h>

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	int (*real)(struct ibv_qp *, struct ibv_qp_attr *, int) = (int (*)(struct ibv_qp *, struct ibv_qp_attr *, int))dlsym(RTLD_NEXT, "ibv_modify_qp");
	if ((mask & IBV_QP_AV) && !attr->ah_attr.is_global && !ibv_query_gid(qp->context, 1, 1, &attr->ah_attr.grh.dgid)) {
		attr->ah_attr.is_global = 1;
		attr->ah_attr.grh.sgid_index = 1;
		attr->ah_attr.grh.hop_limit = 64;
	}
	return real(qp, attr, mask);
}
