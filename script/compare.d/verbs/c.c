// Sends 64 bytes from a queue pair to itself: the same program in C.

#include <infiniband/verbs.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct ibv_context *context;
static struct ibv_cq *queue;
static struct ibv_pd *domain;

static void check(int right, const char *what)
{
	if (right)
		return;
	perror(what);
	exit(1);
}

static struct ibv_qp *make_pair(void)
{
	struct ibv_qp_init_attr init = {
		.send_cq = queue, .recv_cq = queue, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp *qp = ibv_create_qp(domain, &init);
	union ibv_gid gid;
	check(qp != NULL, "ibv_create_qp");
	check(!ibv_query_gid(context, 1, 1, &gid), "ibv_query_gid");
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_LOCAL_WRITE };
	check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num, .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .sgid_index = 1, .hop_limit = 64 } },
	};
	check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), "RTR");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 6, .rnr_retry = 6, .max_rd_atomic = 1 };
	check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
			     IBV_QP_MAX_QP_RD_ATOMIC), "RTS");
	return qp;
}

static void send(struct ibv_qp *qp, long count)
{
	static char sent[64], received[64];
	struct ibv_mr *source = ibv_reg_mr(domain, sent, sizeof(sent), IBV_ACCESS_LOCAL_WRITE);
	struct ibv_mr *target = ibv_reg_mr(domain, received, sizeof(received), IBV_ACCESS_LOCAL_WRITE);
	struct ibv_wc completions[16];
	check(source && target, "ibv_reg_mr");
	for (long i = 0; i < count; i++) {
		struct ibv_sge to = { .addr = (uintptr_t)received, .length = sizeof(received), .lkey = target->lkey };
		struct ibv_recv_wr receive = { .wr_id = 2, .sg_list = &to, .num_sge = 1 }, *bad_receive;
		struct ibv_sge from = { .addr = (uintptr_t)sent, .length = sizeof(sent), .lkey = source->lkey };
		struct ibv_send_wr request = {
			.wr_id = 1, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
		}, *bad;
		check(!ibv_post_recv(qp, &receive, &bad_receive), "ibv_post_recv");
		check(!ibv_post_send(qp, &request, &bad), "ibv_post_send");
		for (int left = 2; left > 0;) {
			int found = ibv_poll_cq(queue, 16, completions);
			check(found >= 0, "ibv_poll_cq");
			for (int n = 0; n < found; n++)
				check(completions[n].status == IBV_WC_SUCCESS, "a completion");
			left -= found;
		}
	}
}

int main(int count_of_arguments, char **arguments)
{
	check(count_of_arguments == 3, "send|pair|keep COUNT");
	long count = atol(arguments[2]);
	struct ibv_device **devices = ibv_get_device_list(NULL);
	check(devices && devices[0], "no RDMA device");
	context = ibv_open_device(devices[0]);
	check(context != NULL, "ibv_open_device");
	queue = ibv_create_cq(context, 16, NULL, NULL, 0);
	domain = ibv_alloc_pd(context);
	check(queue && domain, "ibv_create_cq, ibv_alloc_pd");
	if (!strcmp(arguments[1], "send")) {
		send(make_pair(), count);
	} else if (!strcmp(arguments[1], "pair")) {
		for (long i = 0; i < count; i++)
			ibv_destroy_qp(make_pair());
	} else {
		struct ibv_qp **kept = calloc(count, sizeof(*kept));
		for (long i = 0; i < count; i++)
			kept[i] = make_pair();
		struct mallinfo2 info = mallinfo2();
		printf("heap %zu\n", info.uordblks + info.hblkhd);
		free(kept);
	}
	return 0;
}
