/*
 * The lean data path. Each post pushes its completion, each poll pops. One thread at a time does the one, and one the
 * other. Receives complete when posted, so a receive-and-send loop needs no peer.
 */
#include "internal.h"

static const uint8_t opcodes[16] = {
	[IBV_WR_RDMA_WRITE] = IBV_WC_RDMA_WRITE,
	[IBV_WR_RDMA_WRITE_WITH_IMM] = IBV_WC_RDMA_WRITE,
	[IBV_WR_SEND] = IBV_WC_SEND,
	[IBV_WR_SEND_WITH_IMM] = IBV_WC_SEND,
	[IBV_WR_RDMA_READ] = IBV_WC_RDMA_READ,
	[IBV_WR_ATOMIC_CMP_AND_SWP] = IBV_WC_COMP_SWAP,
	[IBV_WR_ATOMIC_FETCH_AND_ADD] = IBV_WC_FETCH_ADD,
	[IBV_WR_LOCAL_INV] = IBV_WC_LOCAL_INV,
	[IBV_WR_BIND_MW] = IBV_WC_BIND_MW,
	[IBV_WR_SEND_WITH_INV] = IBV_WC_SEND,
	[IBV_WR_TSO] = IBV_WC_TSO,
	[IBV_WR_FLUSH] = IBV_WC_FLUSH,
	[IBV_WR_ATOMIC_WRITE] = IBV_WC_ATOMIC_WRITE,
};

static inline bool full(const struct device_cq *cq, uint32_t head)
{
	return unlikely(head - __atomic_load_n(&cq->tail, __ATOMIC_ACQUIRE) > cq->mask);
}

/* The other fields of an entry are zero from the start and stay so. */
static inline void push(struct device_cq *cq, uint32_t head, uint64_t wr_id, uint32_t opcode,
			uint32_t length, uint32_t qp_num)
{
	struct ibv_wc *wc = &cq->ring[head & cq->mask];

	wc->wr_id = wr_id;
	wc->opcode = opcode;
	wc->byte_len = length;
	wc->qp_num = qp_num;
}

static inline void notify(struct device_cq *cq)
{
	if (unlikely(cq->armed)) {
		cq->armed = 0;
		device_cq_event(cq);
	}
}

static int post_send(struct ibv_qp *ibqp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct device_qp *qp = to_device_qp(ibqp);
	struct device_cq *cq = qp->send_cq;
	uint32_t head = cq->head;
	int error = 0;

	for (; wr; wr = wr->next) {
		if (!((wr->send_flags | qp->sig_all) & IBV_SEND_SIGNALED))
			continue;
		if (full(cq, head)) {
			*bad = wr;
			error = ENOMEM;
			break;
		}
		push(cq, head++, wr->wr_id, opcodes[wr->opcode & 15],
		     wr->num_sge ? wr->sg_list->length : 0, ibqp->qp_num);
	}
	__atomic_store_n(&cq->head, head, __ATOMIC_RELEASE);
	notify(cq);
	return error;
}

static inline int post_receive(struct device_cq *cq, uint32_t qp_num, struct ibv_recv_wr *wr,
			       struct ibv_recv_wr **bad)
{
	uint32_t head = cq->head;
	int error = 0;

	for (; wr; wr = wr->next) {
		if (full(cq, head)) {
			*bad = wr;
			error = ENOMEM;
			break;
		}
		push(cq, head++, wr->wr_id, IBV_WC_RECV, wr->num_sge ? wr->sg_list->length : 0,
		     qp_num);
	}
	cq->head = head;
	notify(cq);
	return error;
}

static int post_recv(struct ibv_qp *ibqp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	return post_receive(to_device_qp(ibqp)->recv_cq, ibqp->qp_num, wr, bad);
}

/* ---- Receives that wait for a message ---- */

static int post_held(struct ibv_qp *ibqp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct device_qp *qp = to_device_qp(ibqp);
	struct function_device *dev = to_device(ibqp->context);

	for (; wr; wr = wr->next) {
		if (unlikely(dev->held_head - dev->held_tail > dev->held_mask)) {
			*bad = wr;
			return ENOMEM;
		}
		dev->held[dev->held_head++ & dev->held_mask] = (struct device_held){
			.cq = qp->recv_cq,
			.wr_id = wr->wr_id,
			.length = wr->num_sge ? wr->sg_list->length : 0,
			.qp_num = ibqp->qp_num,
		};
	}
	return 0;
}

uint32_t device_deliver(struct function_device *dev, uint32_t count)
{
	uint32_t delivered = 0;

	for (; delivered < count && dev->held_tail != dev->held_head; delivered++) {
		const struct device_held *held = &dev->held[dev->held_tail & dev->held_mask];
		struct device_cq *cq = held->cq;

		if (full(cq, cq->head))
			break;
		push(cq, cq->head++, held->wr_id, IBV_WC_RECV, held->length, held->qp_num);
		dev->held_tail++;
		notify(cq);
	}
	return delivered;
}

int device_lean_init(struct function_device *dev)
{
	uint32_t size = 1;

	while (size < dev->opt.held_receives)
		size *= 2;
	dev->held_mask = size - 1;
	dev->held = calloc(size, sizeof(*dev->held));
	return dev->held ? 0 : ENOMEM;
}

/* Completes in the receive queue of the queue pair that was created with it last. */
static int post_srq_recv(struct ibv_srq *ibsrq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct device_qp *qp = to_device_srq(ibsrq)->lean_user;

	if (!qp) {
		*bad = wr;
		return EINVAL;
	}
	return post_receive(qp->recv_cq, qp->vqp.qp.qp_num, wr, bad);
}

static int poll_cq(struct ibv_cq *ibcq, int max, struct ibv_wc *wc)
{
	struct device_cq *cq = to_device_cq(ibcq);
	uint32_t tail = cq->tail;
	int count = 0;

	while (count < max && tail != __atomic_load_n(&cq->head, __ATOMIC_ACQUIRE))
		wc[count++] = cq->ring[tail++ & cq->mask];
	__atomic_store_n(&cq->tail, tail, __ATOMIC_RELEASE);
	return count;
}

/* ---- Extended completion queue ---- */

static inline int expose(struct device_cq *cq)
{
	const struct ibv_wc *wc = &cq->ring[cq->tail & cq->mask];

	if (cq->tail == cq->head)
		return ENOENT;
	cq->vcq.cq_ex.wr_id = wc->wr_id;
	cq->vcq.cq_ex.status = wc->status;
	return 0;
}

static int start_poll(struct ibv_cq_ex *ibcq, struct ibv_poll_cq_attr *attr)
{
	return expose(to_device_cq(ibcq));
}

static int next_poll(struct ibv_cq_ex *ibcq)
{
	struct device_cq *cq = to_device_cq(ibcq);

	if (cq->tail != cq->head)
		cq->tail++;
	return expose(cq);
}

static void end_poll(struct ibv_cq_ex *ibcq)
{
	struct device_cq *cq = to_device_cq(ibcq);

	if (cq->tail != cq->head)
		cq->tail++;
}

#define READ(name, type, field)                                                                    \
	static type read_##name(struct ibv_cq_ex *ibcq)                                            \
	{                                                                                          \
		struct device_cq *cq = to_device_cq(ibcq);                                         \
                                                                                                   \
		return cq->ring[cq->tail & cq->mask].field;                                        \
	}
READ(opcode, enum ibv_wc_opcode, opcode)
READ(vendor_err, uint32_t, vendor_err)
READ(wc_flags, unsigned int, wc_flags)
READ(byte_len, uint32_t, byte_len)
READ(imm_data, __be32, imm_data)
READ(qp_num, uint32_t, qp_num)
READ(src_qp, uint32_t, src_qp)
READ(slid, uint32_t, slid)
READ(sl, uint8_t, sl)
READ(dlid_path_bits, uint8_t, dlid_path_bits)
READ(completion_ts, uint64_t, wr_id)
#undef READ

void device_lean_cq_functions(struct ibv_cq_ex *ex)
{
	ex->start_poll = start_poll;
	ex->next_poll = next_poll;
	ex->end_poll = end_poll;
	ex->read_opcode = read_opcode;
	ex->read_vendor_err = read_vendor_err;
	ex->read_wc_flags = read_wc_flags;
	ex->read_byte_len = read_byte_len;
	ex->read_imm_data = read_imm_data;
	ex->read_qp_num = read_qp_num;
	ex->read_src_qp = read_src_qp;
	ex->read_slid = read_slid;
	ex->read_sl = read_sl;
	ex->read_dlid_path_bits = read_dlid_path_bits;
	ex->read_completion_ts = read_completion_ts;
}

/* ---- Extended posting ---- */

static inline void add(struct ibv_qp_ex *ex, uint32_t opcode)
{
	struct device_qp *qp = to_device_qp(ex);
	struct device_cq *cq = qp->send_cq;

	if (!((ex->wr_flags | qp->sig_all) & IBV_SEND_SIGNALED))
		return;
	if (full(cq, qp->batch_head)) {
		qp->batch_error = ENOMEM;
		return;
	}
	push(cq, qp->batch_head++, ex->wr_id, opcode, 0, ex->qp_base.qp_num);
}

static inline void set_length(struct ibv_qp_ex *ex, uint32_t length)
{
	struct device_qp *qp = to_device_qp(ex);
	struct device_cq *cq = qp->send_cq;

	if ((ex->wr_flags | qp->sig_all) & IBV_SEND_SIGNALED)
		cq->ring[(qp->batch_head - 1) & cq->mask].byte_len = length;
}

static void wr_start(struct ibv_qp_ex *ex)
{
	struct device_qp *qp = to_device_qp(ex);

	qp->batch_head = qp->send_cq->head;
	qp->batch_error = 0;
}

static int wr_complete(struct ibv_qp_ex *ex)
{
	struct device_qp *qp = to_device_qp(ex);

	if (unlikely(qp->batch_error))
		return qp->batch_error;
	qp->send_cq->head = qp->batch_head;
	notify(qp->send_cq);
	return 0;
}

static void wr_abort(struct ibv_qp_ex *ex)
{
}

static void wr_send(struct ibv_qp_ex *ex)
{
	add(ex, IBV_WC_SEND);
}

static void wr_send_imm(struct ibv_qp_ex *ex, __be32 imm)
{
	add(ex, IBV_WC_SEND);
}

static void wr_send_inv(struct ibv_qp_ex *ex, uint32_t rkey)
{
	add(ex, IBV_WC_SEND);
}

static void wr_rdma_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr)
{
	add(ex, IBV_WC_RDMA_WRITE);
}

static void wr_rdma_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, __be32 imm)
{
	add(ex, IBV_WC_RDMA_WRITE);
}

static void wr_rdma_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr)
{
	add(ex, IBV_WC_RDMA_READ);
}

static void wr_atomic_cmp_swp(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, uint64_t compare,
			      uint64_t swap)
{
	add(ex, IBV_WC_COMP_SWAP);
}

static void wr_atomic_fetch_add(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, uint64_t value)
{
	add(ex, IBV_WC_FETCH_ADD);
}

static void wr_local_inv(struct ibv_qp_ex *ex, uint32_t rkey)
{
	add(ex, IBV_WC_LOCAL_INV);
}

static void wr_bind_mw(struct ibv_qp_ex *ex, struct ibv_mw *mw, uint32_t rkey,
		       const struct ibv_mw_bind_info *info)
{
	add(ex, IBV_WC_BIND_MW);
}

static void wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t addr, uint32_t length)
{
	set_length(ex, length);
}

static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_sge *list)
{
	set_length(ex, count ? list->length : 0);
}

static void wr_set_inline_data(struct ibv_qp_ex *ex, void *addr, size_t length)
{
	set_length(ex, length);
}

static void wr_set_inline_data_list(struct ibv_qp_ex *ex, size_t count,
				    const struct ibv_data_buf *list)
{
	set_length(ex, count ? list->length : 0);
}

static void wr_set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey)
{
}

void device_lean_wr_functions(struct device_qp *qp)
{
	struct ibv_qp_ex *ex = &qp->vqp.qp_ex;

	ex->wr_start = wr_start;
	ex->wr_complete = wr_complete;
	ex->wr_abort = wr_abort;
	ex->wr_send = wr_send;
	ex->wr_send_imm = wr_send_imm;
	ex->wr_send_inv = wr_send_inv;
	ex->wr_rdma_write = wr_rdma_write;
	ex->wr_rdma_write_imm = wr_rdma_write_imm;
	ex->wr_rdma_read = wr_rdma_read;
	ex->wr_atomic_cmp_swp = wr_atomic_cmp_swp;
	ex->wr_atomic_fetch_add = wr_atomic_fetch_add;
	ex->wr_local_inv = wr_local_inv;
	ex->wr_bind_mw = wr_bind_mw;
	ex->wr_set_sge = wr_set_sge;
	ex->wr_set_sge_list = wr_set_sge_list;
	ex->wr_set_inline_data = wr_set_inline_data;
	ex->wr_set_inline_data_list = wr_set_inline_data_list;
	ex->wr_set_ud_addr = wr_set_ud_addr;
}

const struct verbs_context_ops device_lean_ops = {
	.poll_cq = poll_cq,
	.post_recv = post_recv,
	.post_send = post_send,
	.post_srq_recv = post_srq_recv,
};

const struct verbs_context_ops device_lean_held_ops = {
	.post_recv = post_held,
};
