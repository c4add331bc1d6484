/*
 * The extended posting interface of the model. A batch is private to its queue pair until
 * wr_complete, which posts all of it or nothing; an error within makes wr_complete fail.
 */
#include "internal.h"

static void drop(struct device_qp *qp)
{
	struct device_wqe *wqe;

	while ((wqe = list_pop(&qp->batch, struct device_wqe, entry)))
		free(wqe);
	qp->building = NULL;
	qp->batch_open = false;
}

static void wr_start(struct ibv_qp_ex *ex)
{
	struct device_qp *qp = to_device_qp(ex);
	struct function_device *dev = to_device(qp->obj.context);

	pthread_mutex_lock(&dev->lock);
	if (qp->batch_open)
		device_violate(dev, "wr_start within a batch");
	drop(qp);
	qp->batch_open = true;
	qp->builder = pthread_self();
	qp->batch_error = 0;
	pthread_mutex_unlock(&dev->lock);
}

static int wr_complete(struct ibv_qp_ex *ex)
{
	struct device_qp *qp = to_device_qp(ex);
	struct function_device *dev = to_device(qp->obj.context);
	struct device_wqe *wqe;
	uint32_t count = 0, added = 0;

	pthread_mutex_lock(&dev->lock);
	dev->call_count[DEVICE_wr_complete]++;
	if (!qp->batch_open)
		device_violate(dev, "wr_complete without wr_start");
	int error = device_admit(dev, DEVICE_wr_complete);
	if (!error)
		error = qp->batch_error;
	list_for_each(&qp->batch, wqe, entry)
		count++;
	if (!error && qp->send_used + count > qp->attr.cap.max_send_wr)
		error = ENOMEM;
	while (!error && (wqe = list_pop(&qp->batch, struct device_wqe, entry))) {
		error = device_enqueue_send(dev, qp, wqe);
		added += !error;
	}
	/* All or nothing. */
	while (error && added--) {
		wqe = list_tail(&qp->sends, struct device_wqe, entry);
		list_del(&wqe->entry);
		free(wqe);
		qp->send_used--;
	}
	drop(qp);
	if (!error)
		device_after_post(dev, qp);
	pthread_mutex_unlock(&dev->lock);
	return error;
}

static void wr_abort(struct ibv_qp_ex *ex)
{
	struct device_qp *qp = to_device_qp(ex);
	struct function_device *dev = to_device(qp->obj.context);

	pthread_mutex_lock(&dev->lock);
	if (!qp->batch_open)
		device_violate(dev, "wr_abort without wr_start");
	drop(qp);
	pthread_mutex_unlock(&dev->lock);
}

/* Room for inline data from the start, as the request is queued before its data is known. */
static struct ibv_send_wr *add(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint64_t needs)
{
	static _Thread_local struct ibv_send_wr scratch;
	struct device_qp *qp = to_device_qp(ex);
	struct device_wqe *wqe = calloc(1, sizeof(*wqe) + DEVICE_MAX_INLINE);

	/* A function that was not asked for at creation may be absent; it must not be called. */
	if (!(qp->send_ops & needs))
		qp->batch_error = EOPNOTSUPP;
	if (!qp->batch_open || !wqe) {
		qp->batch_error = wqe ? EINVAL : ENOMEM;
		free(wqe);
		return &scratch;
	}
	wqe->wr.opcode = opcode;
	wqe->wr.wr_id = ex->wr_id;
	wqe->wr.send_flags = ex->wr_flags & ~IBV_SEND_INLINE;
	list_add_tail(&qp->batch, &wqe->entry);
	qp->building = wqe;
	return &wqe->wr;
}

static void wr_send(struct ibv_qp_ex *ex)
{
	add(ex, IBV_WR_SEND, IBV_QP_EX_WITH_SEND);
}

static void wr_send_imm(struct ibv_qp_ex *ex, __be32 imm)
{
	add(ex, IBV_WR_SEND_WITH_IMM, IBV_QP_EX_WITH_SEND_WITH_IMM)->imm_data = imm;
}

static void wr_send_inv(struct ibv_qp_ex *ex, uint32_t rkey)
{
	add(ex, IBV_WR_SEND_WITH_INV, IBV_QP_EX_WITH_SEND_WITH_INV)->invalidate_rkey = rkey;
}

static struct ibv_send_wr *rdma(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint64_t needs,
				uint32_t rkey, uint64_t addr)
{
	struct ibv_send_wr *wr = add(ex, opcode, needs);

	wr->wr.rdma.rkey = rkey;
	wr->wr.rdma.remote_addr = addr;
	return wr;
}

static void wr_rdma_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr)
{
	rdma(ex, IBV_WR_RDMA_WRITE, IBV_QP_EX_WITH_RDMA_WRITE, rkey, addr);
}

static void wr_rdma_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, __be32 imm)
{
	rdma(ex, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, rkey, addr)
		->imm_data = imm;
}

static void wr_rdma_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr)
{
	rdma(ex, IBV_WR_RDMA_READ, IBV_QP_EX_WITH_RDMA_READ, rkey, addr);
}

static void atomic(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint64_t needs, uint32_t rkey,
		   uint64_t addr, uint64_t compare_add, uint64_t swap)
{
	struct ibv_send_wr *wr = add(ex, opcode, needs);

	wr->wr.atomic.rkey = rkey;
	wr->wr.atomic.remote_addr = addr;
	wr->wr.atomic.compare_add = compare_add;
	wr->wr.atomic.swap = swap;
}

static void wr_atomic_cmp_swp(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, uint64_t compare,
			      uint64_t swap)
{
	atomic(ex, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, rkey, addr,
	       compare, swap);
}

static void wr_atomic_fetch_add(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, uint64_t value)
{
	atomic(ex, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, rkey, addr,
	       value, 0);
}

static void wr_atomic_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, const void *value)
{
	struct device_qp *qp = to_device_qp(ex);

	rdma(ex, IBV_WR_ATOMIC_WRITE, IBV_QP_EX_WITH_ATOMIC_WRITE, rkey, addr);
	if (qp->building) {
		qp->building->wr.send_flags |= IBV_SEND_INLINE;
		memcpy(qp->building->inline_data, value, 8);
		qp->building->inline_length = 8;
	}
}

static void wr_flush(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, size_t length,
		     uint8_t type, uint8_t level)
{
	rdma(ex, IBV_WR_FLUSH, IBV_QP_EX_WITH_FLUSH, rkey, addr);
}

static void wr_local_inv(struct ibv_qp_ex *ex, uint32_t rkey)
{
	add(ex, IBV_WR_LOCAL_INV, IBV_QP_EX_WITH_LOCAL_INV)->invalidate_rkey = rkey;
}

static void wr_bind_mw(struct ibv_qp_ex *ex, struct ibv_mw *mw, uint32_t rkey,
		       const struct ibv_mw_bind_info *info)
{
	struct ibv_send_wr *wr = add(ex, IBV_WR_BIND_MW, IBV_QP_EX_WITH_BIND_MW);

	wr->bind_mw.mw = mw;
	wr->bind_mw.rkey = rkey;
	wr->bind_mw.bind_info = *info;
}

/* ---- Setters: of the latest request ---- */

static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_sge *list)
{
	struct device_qp *qp = to_device_qp(ex);

	if (!qp->building || count > qp->attr.cap.max_send_sge || count > DEVICE_MAX_SGE) {
		qp->batch_error = EINVAL;
		return;
	}
	qp->building->num_sge = count;
	memcpy(qp->building->sge, list, count * sizeof(*list));
}

static void wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t addr, uint32_t length)
{
	struct ibv_sge sge = { .addr = addr, .length = length, .lkey = lkey };

	wr_set_sge_list(ex, 1, &sge);
}

static void wr_set_inline_data_list(struct ibv_qp_ex *ex, size_t count,
				    const struct ibv_data_buf *list)
{
	struct device_qp *qp = to_device_qp(ex);
	struct device_wqe *wqe = qp->building;

	if (!wqe) {
		qp->batch_error = EINVAL;
		return;
	}
	wqe->wr.send_flags |= IBV_SEND_INLINE;
	wqe->inline_length = 0;
	for (size_t i = 0; i < count; i++) {
		if (list[i].length > qp->attr.cap.max_inline_data - wqe->inline_length) {
			qp->batch_error = ENOMEM;
			return;
		}
		memcpy(wqe->inline_data + wqe->inline_length, list[i].addr, list[i].length);
		wqe->inline_length += list[i].length;
	}
}

static void wr_set_inline_data(struct ibv_qp_ex *ex, void *addr, size_t length)
{
	struct ibv_data_buf buf = { .addr = addr, .length = length };

	wr_set_inline_data_list(ex, 1, &buf);
}

static void wr_set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey)
{
	struct device_qp *qp = to_device_qp(ex);

	if (!qp->building) {
		qp->batch_error = EINVAL;
		return;
	}
	qp->building->wr.wr.ud.ah = ah;
	qp->building->wr.wr.ud.remote_qpn = qpn;
	qp->building->wr.wr.ud.remote_qkey = qkey;
}

static void wr_set_xrc_srqn(struct ibv_qp_ex *ex, uint32_t srqn)
{
	struct device_qp *qp = to_device_qp(ex);

	if (qp->building)
		qp->building->wr.qp_type.xrc.remote_srqn = srqn;
	else
		qp->batch_error = EINVAL;
}

void device_model_wr_functions(struct device_qp *qp)
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
	ex->wr_atomic_write = wr_atomic_write;
	ex->wr_flush = wr_flush;
	ex->wr_local_inv = wr_local_inv;
	ex->wr_bind_mw = wr_bind_mw;
	ex->wr_set_sge = wr_set_sge;
	ex->wr_set_sge_list = wr_set_sge_list;
	ex->wr_set_inline_data = wr_set_inline_data;
	ex->wr_set_inline_data_list = wr_set_inline_data_list;
	ex->wr_set_ud_addr = wr_set_ud_addr;
	ex->wr_set_xrc_srqn = wr_set_xrc_srqn;
}
