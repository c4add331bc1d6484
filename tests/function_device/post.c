/* Posting to the model: requests are checked, copied with their lists, and queued. */
#include "internal.h"

void device_log_posted(struct function_device *dev, uint32_t qp_num, bool receive, const struct device_wqe *wqe)
{
	struct device_posted *posted = &dev->posted[dev->posted_total++ % DEVICE_POSTED_KEPT];

	memset(posted, 0, sizeof(*posted));
	posted->qp_num = qp_num;
	posted->receive = receive;
	posted->wr_id = wqe->wr.wr_id;
	posted->num_sge = wqe->num_sge;
	memcpy(posted->sge, wqe->sge, sizeof(posted->sge));
	posted->inline_length = wqe->inline_length;
	memcpy(posted->inline_data, wqe->inline_data, wqe->inline_length);
	posted->send = wqe->wr;
}

/* ---- Sends ---- */

struct device_wqe *device_copy_send(const struct ibv_send_wr *wr)
{
	uint64_t length = 0;

	if (wr->num_sge < 0 || wr->num_sge > DEVICE_MAX_SGE) {
		errno = EINVAL;
		return NULL;
	}
	if (wr->send_flags & IBV_SEND_INLINE)
		for (int i = 0; i < wr->num_sge; i++)
			length += wr->sg_list[i].length;
	if (length > DEVICE_MAX_INLINE) {
		errno = EINVAL;
		return NULL;
	}
	struct device_wqe *wqe = calloc(1, sizeof(*wqe) + length);
	if (!wqe)
		return NULL;
	wqe->wr = *wr;
	wqe->wr.next = NULL;
	wqe->wr.sg_list = NULL;
	if (wr->send_flags & IBV_SEND_INLINE) {
		for (int i = 0; i < wr->num_sge; i++) {
			memcpy(wqe->inline_data + wqe->inline_length,
			       (void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
			wqe->inline_length += wr->sg_list[i].length;
		}
	} else if (wr->num_sge) {
		wqe->num_sge = wr->num_sge;
		memcpy(wqe->sge, wr->sg_list, wr->num_sge * sizeof(*wr->sg_list));
	}
	return wqe;
}

static bool opcode_ok(enum ibv_qp_type type, enum ibv_wr_opcode opcode)
{
	switch (opcode) {
	case IBV_WR_SEND:
	case IBV_WR_SEND_WITH_IMM:
		return type != IBV_QPT_XRC_RECV;
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
	case IBV_WR_SEND_WITH_INV:
	case IBV_WR_LOCAL_INV:
	case IBV_WR_BIND_MW:
		return type == IBV_QPT_RC || type == IBV_QPT_UC || type == IBV_QPT_XRC_SEND;
	case IBV_WR_RDMA_READ:
	case IBV_WR_ATOMIC_CMP_AND_SWP:
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
	case IBV_WR_ATOMIC_WRITE:
	case IBV_WR_FLUSH:
		return type == IBV_QPT_RC || type == IBV_QPT_XRC_SEND;
	default:
		return false;
	}
}

/* What a provider refuses at once; the rest is for the device to find out. */
static int check_send(struct device_qp *qp, const struct device_wqe *wqe)
{
	enum ibv_qp_state state = qp->attr.qp_state;

	if (state == IBV_QPS_RESET || state == IBV_QPS_INIT || state == IBV_QPS_RTR)
		return EINVAL;
	if (qp->send_used >= qp->attr.cap.max_send_wr)
		return ENOMEM;
	if (!opcode_ok(qp->vqp.qp.qp_type, wqe->wr.opcode) ||
	    wqe->num_sge > qp->attr.cap.max_send_sge ||
	    wqe->inline_length > qp->attr.cap.max_inline_data)
		return EINVAL;
	if (wqe->wr.send_flags & IBV_SEND_INLINE &&
	    wqe->wr.opcode != IBV_WR_SEND && wqe->wr.opcode != IBV_WR_SEND_WITH_IMM &&
	    wqe->wr.opcode != IBV_WR_SEND_WITH_INV && wqe->wr.opcode != IBV_WR_RDMA_WRITE &&
	    wqe->wr.opcode != IBV_WR_RDMA_WRITE_WITH_IMM && wqe->wr.opcode != IBV_WR_ATOMIC_WRITE)
		return EINVAL;
	if (qp->vqp.qp.qp_type == IBV_QPT_UD && !wqe->wr.wr.ud.ah)
		return EINVAL;
	return 0;
}

static void translate(struct function_device *dev, struct device_object *pd, struct device_wqe *wqe)
{
	bool zero;

	for (uint32_t i = 0; pd && i < wqe->num_sge; i++)
		wqe->memory[i] = device_local(dev, container_of(pd, struct device_pd, obj),
					  wqe->sge[i].lkey, wqe->sge[i].addr, wqe->sge[i].length, 0,
					  &zero);
}

int device_enqueue_send(struct function_device *dev, struct device_qp *qp, struct device_wqe *wqe)
{
	int error = dev->fatal ? EIO : device_fault(dev, DEVICE_post_send);

	device_use(dev, &qp->obj);
	if (!error)
		error = check_send(qp, wqe);
	/* mlx4, mlx5 and hns look for room under the completion queue's lock, which that thread holds. */
	if (error == ENOMEM && qp->send_cq && qp->send_cq->polling &&
	    pthread_equal(qp->send_cq->poller, pthread_self()))
		device_violate(dev, "a post to a full queue between start_poll and end_poll");
	if (error) {
		free(wqe);
		return error;
	}
	if (qp->vqp.qp.qp_type == IBV_QPT_UD)
		wqe->ah = to_device_ah(wqe->wr.wr.ud.ah)->attr;
	translate(dev, qp->obj.uses[0], wqe);
	device_log_posted(dev, qp->vqp.qp.qp_num, false, wqe);
	list_add_tail(&qp->sends, &wqe->entry);
	qp->send_used++;
	return 0;
}

void device_after_post(struct function_device *dev, struct device_qp *qp)
{
	if (qp)
		device_qp_flush(dev, qp);
	if (dev->progress == DEVICE_ON_POST)
		device_run(dev, 0);
}

static int post_send(struct ibv_qp *ibqp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct function_device *dev = to_device(ibqp->context);
	struct device_qp *qp = to_device_qp(ibqp);
	struct ibv_send_wr *first;
	int error = 0;

	pthread_mutex_lock(&dev->lock);
	dev->call_count[DEVICE_post_send]++;
	if (qp->batch_open)
		device_violate(dev, "post_send within a batch");
	for (first = wr; wr; wr = wr->next) {
		struct device_wqe *wqe = device_copy_send(wr);

		error = wqe ? device_enqueue_send(dev, qp, wqe) : errno;
		if (error) {
			*bad = wr;
			/* As siw does, once it has queued a part of the list. */
			if (wr != first && device_fault(dev, DEVICE_lose_error))
				error = 0;
			break;
		}
	}
	/* As with rxe and siw: all requests are where the device looks, and it was not told. */
	if (!error && !wr && (error = device_fault(dev, DEVICE_ring_doorbell)))
		*bad = NULL;
	device_after_post(dev, qp);
	pthread_mutex_unlock(&dev->lock);
	return error;
}

int device_post_bind(struct device_qp *qp, struct device_mw *mw, const struct ibv_mw_bind *bind)
{
	struct function_device *dev = to_device(qp->obj.context);
	struct ibv_send_wr wr = {
		.wr_id = bind->wr_id,
		.opcode = IBV_WR_BIND_MW,
		.send_flags = bind->send_flags,
		.bind_mw = { .mw = &mw->mw,
			     .rkey = ibv_inc_rkey(mw->mw.rkey),
			     .bind_info = bind->bind_info },
	};
	struct device_wqe *wqe = device_copy_send(&wr);
	int error = wqe ? device_enqueue_send(dev, qp, wqe) : errno;

	if (!error) {
		mw->mw.rkey = wr.bind_mw.rkey;
		device_after_post(dev, qp);
	}
	return error;
}

/* ---- Receives ---- */

struct device_wqe *device_copy_receive(struct function_device *dev, struct device_object *pd,
			       const struct ibv_recv_wr *wr, uint32_t max_sge)
{
	if (wr->num_sge < 0 || (uint32_t)wr->num_sge > max_sge) {
		errno = EINVAL;
		return NULL;
	}
	struct device_wqe *wqe = calloc(1, sizeof(*wqe));
	if (!wqe)
		return NULL;
	wqe->wr.wr_id = wr->wr_id;
	wqe->num_sge = wr->num_sge;
	if (wr->num_sge)
		memcpy(wqe->sge, wr->sg_list, wr->num_sge * sizeof(*wr->sg_list));
	translate(dev, pd, wqe);
	return wqe;
}

static int post_recv(struct ibv_qp *ibqp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct function_device *dev = to_device(ibqp->context);
	struct device_qp *qp = to_device_qp(ibqp);
	int error = 0;

	pthread_mutex_lock(&dev->lock);
	dev->call_count[DEVICE_post_recv]++;
	device_use(dev, &qp->obj);
	for (; wr; wr = wr->next) {
		struct device_wqe *wqe = NULL;

		error = dev->fatal ? EIO : device_fault(dev, DEVICE_post_recv);
		if (!error && (qp->attr.qp_state == IBV_QPS_RESET || qp->srq))
			error = EINVAL;
		if (!error && qp->recv_used >= qp->attr.cap.max_recv_wr)
			error = ENOMEM;
		if (!error && !(wqe = device_copy_receive(dev, qp->obj.uses[0], wr,
						   qp->attr.cap.max_recv_sge)))
			error = errno;
		if (error) {
			*bad = wr;
			break;
		}
		device_log_posted(dev, ibqp->qp_num, true, wqe);
		list_add_tail(&qp->receives, &wqe->entry);
		qp->recv_used++;
	}
	device_after_post(dev, qp);
	pthread_mutex_unlock(&dev->lock);
	return error;
}

static int post_srq_recv(struct ibv_srq *ibsrq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct function_device *dev = to_device(ibsrq->context);
	struct device_srq *srq = to_device_srq(ibsrq);
	int error = 0;

	pthread_mutex_lock(&dev->lock);
	dev->call_count[DEVICE_post_srq_recv]++;
	device_use(dev, &srq->obj);
	for (; wr; wr = wr->next) {
		struct device_wqe *wqe = NULL;

		error = dev->fatal ? EIO : device_fault(dev, DEVICE_post_srq_recv);
		if (!error && srq->count >= srq->attr.max_wr)
			error = ENOMEM;
		if (!error &&
		    !(wqe = device_copy_receive(dev, srq->obj.uses[0], wr, srq->attr.max_sge)))
			error = errno;
		if (error) {
			*bad = wr;
			break;
		}
		device_log_posted(dev, 0, true, wqe);
		list_add_tail(&srq->queue, &wqe->entry);
		srq->count++;
	}
	device_after_post(dev, NULL);
	pthread_mutex_unlock(&dev->lock);
	return error;
}

const struct verbs_context_ops device_model_ops = {
	.post_recv = post_recv,
	.post_send = post_send,
	.post_srq_recv = post_srq_recv,
};
