/* A user of RDMA on the system's libibverbs, as MPI and UCX are: registers memory, and sends in it from a queue pair
 * to itself. To be linked with -libverbs. Each function says on standard error what fails. */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MESSAGE = 64, PORT = 1, GID_INDEX = 1 };

struct user {
	struct ibv_context *context;
	struct ibv_pd *domain;
	struct ibv_mr *region;
	struct ibv_cq *queue;
	struct ibv_qp *queue_pair;
	char *memory;
};

static int failed(const char *what)
{
	fprintf(stderr, "theirs: %s: %m\n", what);
	return -1;
}

int theirs_fork_init(void)
{
	return ibv_fork_init() ? failed("ibv_fork_init") : 0;
}

static struct ibv_context *open_device(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL), **device;
	struct ibv_context *context = NULL;

	for (device = list; device && *device; device++)
		if (!strcmp(ibv_get_device_name(*device), name))
			context = ibv_open_device(*device);
	if (list)
		ibv_free_device_list(list);
	return context;
}

static int connect_to_itself(struct ibv_context *context, struct ibv_qp *queue_pair)
{
	struct ibv_port_attr port;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = PORT };
	union ibv_gid gid;

	if (ibv_query_port(context, PORT, &port) || ibv_query_gid(context, PORT, GID_INDEX, &gid))
		return failed("ibv_query_port, ibv_query_gid");
	if (ibv_modify_qp(queue_pair, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
		return failed("ibv_modify_qp to INIT");
	attr = (struct ibv_qp_attr) {
		.qp_state = IBV_QPS_RTR, .path_mtu = port.active_mtu, .dest_qp_num = queue_pair->qp_num,
		.max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = PORT, .dlid = port.lid,
			     .grh = { .dgid = gid, .sgid_index = GID_INDEX, .hop_limit = 64 } },
	};
	if (ibv_modify_qp(queue_pair, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			  IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
		return failed("ibv_modify_qp to RTR");
	attr = (struct ibv_qp_attr) {
		.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 6, .rnr_retry = 6, .max_rd_atomic = 1,
	};
	if (ibv_modify_qp(queue_pair, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
		return failed("ibv_modify_qp to RTS");
	return 0;
}

void *theirs_open(const char *device, void *memory, size_t length)
{
	struct user *user = calloc(1, sizeof *user);
	struct ibv_qp_init_attr attr = {
		.qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
	};

	if (!user)
		return NULL;
	user->memory = memory;
	if (!(user->context = open_device(device)))
		return failed("ibv_open_device"), NULL;
	if (!(user->domain = ibv_alloc_pd(user->context)))
		return failed("ibv_alloc_pd"), NULL;
	if (!(user->region = ibv_reg_mr(user->domain, memory, length, IBV_ACCESS_LOCAL_WRITE)))
		return failed("ibv_reg_mr"), NULL;
	if (!(user->queue = ibv_create_cq(user->context, 4, NULL, NULL, 0)))
		return failed("ibv_create_cq"), NULL;
	attr.send_cq = attr.recv_cq = user->queue;
	if (!(user->queue_pair = ibv_create_qp(user->domain, &attr)))
		return failed("ibv_create_qp"), NULL;
	return connect_to_itself(user->context, user->queue_pair) ? NULL : user;
}

int theirs_work(void *opaque, size_t start)
{
	struct user *user = opaque;
	struct ibv_sge to = { (uintptr_t)user->memory + start + MESSAGE, MESSAGE, user->region->lkey };
	struct ibv_sge from = { (uintptr_t)user->memory + start, MESSAGE, user->region->lkey };
	struct ibv_recv_wr receive = { .sg_list = &to, .num_sge = 1 }, *bad_receive;
	struct ibv_send_wr send = { .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_send_wr *bad_send;
	struct ibv_wc completion;
	time_t end = time(NULL) + 60;
	int completed = 0, polled;

	if (ibv_post_recv(user->queue_pair, &receive, &bad_receive) || ibv_post_send(user->queue_pair, &send, &bad_send))
		return failed("ibv_post_recv, ibv_post_send");
	while (completed < 2) {
		polled = ibv_poll_cq(user->queue, 1, &completion);
		if (polled < 0 || time(NULL) > end)
			return failed("ibv_poll_cq");
		if (polled && completion.status != IBV_WC_SUCCESS) {
			fprintf(stderr, "theirs: %s\n", ibv_wc_status_str(completion.status));
			return -1;
		}
		completed += polled;
	}
	return 0;
}

int theirs_close(void *opaque)
{
	struct user *user = opaque;

	if (ibv_destroy_qp(user->queue_pair) || ibv_destroy_cq(user->queue) || ibv_dereg_mr(user->region) ||
	    ibv_dealloc_pd(user->domain) || ibv_close_device(user->context))
		return failed("ibv_destroy_qp, ibv_destroy_cq, ibv_dereg_mr, ibv_dealloc_pd, ibv_close_device");
	free(user);
	return 0;
}
