/* Execution: takes posted requests one by one and does what a device and its peer would do. */
#include "internal.h"

enum outcome { FINISHED, WAITING };

bool device_reachable(struct function_device *dev, const struct ibv_ah_attr *av)
{
	for (uint32_t port = 0; port < dev->opt.ports; port++) {
		if (!av->is_global) {
			if (dev->port[port].lid == av->dlid)
				return true;
			continue;
		}
		for (uint32_t i = 0; i < DEVICE_GIDS; i++)
			if (!memcmp(&dev->gid[port][i].gid, &av->grh.dgid, 16))
				return true;
	}
	return false;
}

/* ---- Completion of sends ---- */

static enum ibv_wc_opcode completed_opcode(enum ibv_wr_opcode opcode)
{
	switch (opcode) {
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		return IBV_WC_RDMA_WRITE;
	case IBV_WR_RDMA_READ:
		return IBV_WC_RDMA_READ;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		return IBV_WC_COMP_SWAP;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		return IBV_WC_FETCH_ADD;
	case IBV_WR_LOCAL_INV:
		return IBV_WC_LOCAL_INV;
	case IBV_WR_BIND_MW:
		return IBV_WC_BIND_MW;
	case IBV_WR_FLUSH:
		return IBV_WC_FLUSH;
	case IBV_WR_ATOMIC_WRITE:
		return IBV_WC_ATOMIC_WRITE;
	default:
		return IBV_WC_SEND;
	}
}

/* Takes the request off its queue and reports it; a failed one takes its queue pair along. */
static enum outcome finish(struct function_device *dev, struct device_qp *qp,
			   struct device_wqe *wqe, enum ibv_wc_status status)
{
	struct ibv_wc wc = {};

	list_del(&wqe->entry);
	qp->executing = false;
	if (status != IBV_WC_SUCCESS) {
		device_error_wc(&wc, qp, wqe->wr.wr_id, status);
	} else if ((wqe->wr.send_flags | qp->sig_all) & IBV_SEND_SIGNALED) {
		wc.wr_id = wqe->wr.wr_id;
		wc.opcode = completed_opcode(wqe->wr.opcode);
		wc.byte_len = device_length(wqe);
		wc.qp_num = qp->vqp.qp.qp_num;
	} else {
		qp->unreported++;
		free(wqe);
		device_qp_flush(dev, qp);
		return FINISHED;
	}
	uint32_t slots = qp->unreported + 1;
	qp->unreported = 0;
	free(wqe);
	device_complete(dev, qp->send_cq, qp, &wc, slots, 0, false);
	/* Connected to itself, the queue pair may have failed on the way. */
	device_qp_flush(dev, qp);
	if (status == IBV_WC_SUCCESS)
		return FINISHED;
	if (qp->vqp.qp.qp_type == IBV_QPT_RC || qp->vqp.qp.qp_type == IBV_QPT_XRC_SEND) {
		device_qp_to_error(dev, qp);
	} else if (qp->attr.qp_state == IBV_QPS_RTS) {
		/* An unreliable queue pair goes on receiving. */
		qp->attr.qp_state = IBV_QPS_SQE;
		device_qp_flush(dev, qp);
	}
	return FINISHED;
}

/* ---- The other side ---- */

struct device_wqe *device_take_receive(struct function_device *dev, struct device_qp *qp,
				       struct device_srq *srq)
{
	if (!srq)
		return list_pop(&qp->receives, struct device_wqe, entry);
	struct device_wqe *wqe = list_pop(&srq->queue, struct device_wqe, entry);
	if (wqe) {
		srq->count--;
		if (srq->attr.srq_limit && srq->count < srq->attr.srq_limit) {
			srq->attr.srq_limit = 0;
			device_async(srq->obj.context, IBV_EVENT_SRQ_LIMIT_REACHED,
				 (uintptr_t)&srq->vsrq);
		}
	}
	return wqe;
}

static struct device_qp *find_peer(struct function_device *dev, struct device_qp *qp)
{
	struct device_qp *peer = device_find_qp(dev, qp->attr.dest_qp_num);
	enum ibv_qp_type type = qp->vqp.qp.qp_type;

	if (!peer || !device_reachable(dev, &qp->attr.ah_attr))
		return NULL;
	if (peer->vqp.qp.qp_type != (type == IBV_QPT_XRC_SEND ? IBV_QPT_XRC_RECV : type) ||
	    peer->attr.dest_qp_num != qp->vqp.qp.qp_num)
		return NULL;
	if (peer->attr.qp_state != IBV_QPS_RTR && peer->attr.qp_state != IBV_QPS_RTS &&
	    peer->attr.qp_state != IBV_QPS_SQD && peer->attr.qp_state != IBV_QPS_SQE)
		return NULL;
	/* A reliable responder drops what is out of sequence; an unreliable one starts anew. */
	if (type != IBV_QPT_UC && peer->recv_psn != qp->send_psn)
		return NULL;
	return peer;
}

static struct device_srq *find_xrc_srq(struct function_device *dev, struct device_qp *peer,
				       uint32_t number)
{
	struct device_object *obj;

	list_for_each(&dev->objects, obj, entry) {
		struct device_srq *srq = container_of(obj, struct device_srq, obj);

		if (obj->kind == DEVICE_OBJECT_SRQ && srq->vsrq.srq_num == number &&
		    srq->vsrq.xrcd == peer->vqp.xrcd)
			return srq;
	}
	return NULL;
}

/* The peer refuses: it goes to ERR itself, and says so with an event. An unreliable one drops. */
static enum ibv_wc_status refuse(struct function_device *dev, struct device_qp *peer,
				 uint32_t event, enum ibv_wc_status status)
{
	if (peer->vqp.qp.qp_type == IBV_QPT_UC)
		return status;
	device_async(peer->obj.context, event, (uintptr_t)&peer->vqp);
	device_qp_to_error(dev, peer);
	return status;
}

static bool needs_receive(enum ibv_wr_opcode opcode)
{
	return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM ||
	       opcode == IBV_WR_SEND_WITH_INV || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

/* Fills and completes a receive; the status is the sender's. */
static enum ibv_wc_status receive(struct function_device *dev, struct device_qp *qp,
				  const struct device_wqe *wqe, struct device_qp *peer,
				  struct device_srq *srq, struct device_wqe *into,
				  const uint8_t *data, uint64_t length)
{
	struct device_object *pd = srq ? srq->obj.uses[0] : peer->obj.uses[0];
	struct device_cq *cq = srq && srq->vsrq.cq ? to_device_cq(srq->vsrq.cq) : peer->recv_cq;
	bool write = wqe->wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	enum ibv_wc_status here = IBV_WC_SUCCESS, there = IBV_WC_SUCCESS;
	struct ibv_wc wc = {
		.wr_id = into->wr.wr_id,
		.opcode = write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV,
		.byte_len = length,
		.qp_num = peer->vqp.qp.qp_num,
		.src_qp = qp->vqp.qp.qp_num,
	};

	if (!write && device_length(into) < length) {
		here = IBV_WC_LOC_LEN_ERR;
		there = IBV_WC_REM_INV_REQ_ERR;
	} else if (!write && !device_scatter(dev, container_of(pd, struct device_pd, obj), into,
					     data, length)) {
		here = IBV_WC_LOC_PROT_ERR;
		there = IBV_WC_REM_OP_ERR;
	}
	if (wqe->wr.opcode == IBV_WR_SEND_WITH_IMM || write) {
		wc.wc_flags = IBV_WC_WITH_IMM;
		wc.imm_data = wqe->wr.imm_data;
	} else if (wqe->wr.opcode == IBV_WR_SEND_WITH_INV && here == IBV_WC_SUCCESS) {
		struct device_mw *mw = device_find_rkey_window(dev, wqe->wr.invalidate_rkey);

		if (mw && mw->mw.type == IBV_MW_TYPE_2 && mw->mr) {
			device_unbind(mw);
			wc.wc_flags = IBV_WC_WITH_INV;
			wc.invalidated_rkey = wqe->wr.invalidate_rkey;
		} else {
			here = IBV_WC_LOC_QP_OP_ERR;
			there = IBV_WC_REM_OP_ERR;
		}
	}
	if (here != IBV_WC_SUCCESS)
		device_error_wc(&wc, peer, into->wr.wr_id, here);
	device_complete(dev, cq, peer, &wc, 0, !srq, wqe->wr.send_flags & IBV_SEND_SOLICITED);
	free(into);
	if (here != IBV_WC_SUCCESS)
		device_qp_to_error(dev, peer);
	return there;
}

static enum ibv_wc_status atomic(struct function_device *dev, const struct device_wqe *wqe,
				 struct device_qp *peer, uint8_t *result)
{
	enum ibv_wc_status status;
	uint64_t *at, old;

	if (wqe->wr.wr.atomic.remote_addr % 8)
		return refuse(dev, peer, IBV_EVENT_QP_REQ_ERR, IBV_WC_REM_INV_REQ_ERR);
	at = (void *)device_remote(dev, peer, wqe->wr.wr.atomic.rkey, wqe->wr.wr.atomic.remote_addr,
				   8, IBV_ACCESS_REMOTE_ATOMIC, &status);
	if (!at)
		return refuse(dev, peer, IBV_EVENT_QP_ACCESS_ERR, status);
	if (wqe->wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		old = __atomic_fetch_add(at, wqe->wr.wr.atomic.compare_add, __ATOMIC_SEQ_CST);
	} else {
		old = wqe->wr.wr.atomic.compare_add;
		__atomic_compare_exchange_n(at, &old, wqe->wr.wr.atomic.swap, false,
					    __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	}
	memcpy(result, &old, 8);
	return IBV_WC_SUCCESS;
}

/* One-sided operations; data is what goes out, or what comes back. */
static enum ibv_wc_status one_sided(struct function_device *dev, const struct device_wqe *wqe,
				    struct device_qp *peer, uint8_t *data, uint64_t length)
{
	enum ibv_wc_status status = IBV_WC_SUCCESS;
	unsigned int access = IBV_ACCESS_REMOTE_WRITE;
	uint8_t *memory;

	if (wqe->wr.opcode == IBV_WR_RDMA_READ || wqe->wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
	    wqe->wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		access = IBV_ACCESS_REMOTE_READ;
		if (!peer->attr.max_dest_rd_atomic)
			return refuse(dev, peer, IBV_EVENT_QP_REQ_ERR, IBV_WC_REM_INV_REQ_ERR);
		if (wqe->wr.opcode != IBV_WR_RDMA_READ)
			return atomic(dev, wqe, peer, data);
	}
	if (wqe->wr.opcode == IBV_WR_FLUSH || !length)
		return IBV_WC_SUCCESS; /* the memory is coherent; nothing is checked for no bytes */
	memory = device_remote(dev, peer, wqe->wr.wr.rdma.rkey, wqe->wr.wr.rdma.remote_addr, length,
			   access, &status);
	if (!memory)
		return refuse(dev, peer, IBV_EVENT_QP_ACCESS_ERR, status);
	if (access == IBV_ACCESS_REMOTE_READ)
		memcpy(data, memory, length);
	else
		memcpy(memory, data, length);
	return IBV_WC_SUCCESS;
}

/* ---- One request ---- */

static enum outcome lost(struct function_device *dev, struct device_qp *qp, struct device_wqe *wqe,
			 bool attempt)
{
	if (qp->vqp.qp.qp_type == IBV_QPT_UC)
		return finish(dev, qp, wqe, IBV_WC_SUCCESS);
	if (attempt && wqe->retries++ >= qp->attr.retry_cnt)
		return finish(dev, qp, wqe, IBV_WC_RETRY_EXC_ERR);
	return WAITING;
}

static enum outcome not_ready(struct function_device *dev, struct device_qp *qp,
			      struct device_wqe *wqe, bool attempt)
{
	if (qp->vqp.qp.qp_type == IBV_QPT_UC)
		return finish(dev, qp, wqe, IBV_WC_SUCCESS);
	/* 7 is for ever. */
	if (attempt && qp->attr.rnr_retry != 7 && wqe->rnr_retries++ >= qp->attr.rnr_retry)
		return finish(dev, qp, wqe, IBV_WC_RNR_RETRY_EXC_ERR);
	return WAITING;
}

static enum outcome transfer(struct function_device *dev, struct device_qp *qp,
			     struct device_wqe *wqe, uint8_t *data, uint64_t length, bool attempt)
{
	struct device_pd *pd = container_of(qp->obj.uses[0], struct device_pd, obj);
	enum ibv_wr_opcode opcode = wqe->wr.opcode;
	bool fetches = opcode == IBV_WR_RDMA_READ || opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
		       opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
	enum ibv_wc_status status = IBV_WC_SUCCESS;
	struct device_srq *srq = NULL;

	if (!fetches && !device_gather(dev, pd, wqe, data))
		return finish(dev, qp, wqe, IBV_WC_LOC_PROT_ERR);
	if (qp->vqp.qp.qp_type == IBV_QPT_RAW_PACKET) {
		device_send_frame(dev, qp, data, length);
		return finish(dev, qp, wqe, IBV_WC_SUCCESS);
	}
	if (qp->vqp.qp.qp_type == IBV_QPT_UD) {
		device_send_datagram(dev, qp, wqe, data, length);
		return finish(dev, qp, wqe, IBV_WC_SUCCESS);
	}
	if (fetches && !qp->attr.max_rd_atomic)
		return finish(dev, qp, wqe, IBV_WC_LOC_QP_OP_ERR);

	struct device_qp *peer = find_peer(dev, qp);
	if (!peer)
		return lost(dev, qp, wqe, attempt);
	if (needs_receive(opcode)) {
		srq = peer->srq;
		if (qp->vqp.qp.qp_type == IBV_QPT_XRC_SEND) {
			srq = find_xrc_srq(dev, peer, wqe->wr.qp_type.xrc.remote_srqn);
			if (!srq)
				return finish(dev, qp, wqe,
					      refuse(dev, peer, IBV_EVENT_QP_REQ_ERR,
						     IBV_WC_REM_INV_REQ_ERR));
		}
		if (list_empty(srq ? &srq->queue : &peer->receives))
			return not_ready(dev, qp, wqe, attempt);
	}
	qp->send_psn = (qp->send_psn + 1) & 0xffffff;
	peer->recv_psn = qp->send_psn;
	/* A write that is refused consumes no receive. */
	if (!needs_receive(opcode) || opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
		status = one_sided(dev, wqe, peer, data, length);
	if (needs_receive(opcode) && status == IBV_WC_SUCCESS)
		status = receive(dev, qp, wqe, peer, srq, device_take_receive(dev, peer, srq), data,
				 length);
	if (status == IBV_WC_SUCCESS && fetches && !device_scatter(dev, pd, wqe, data, length))
		status = IBV_WC_LOC_PROT_ERR;
	/* An unreliable sender never learns what happened. */
	if (qp->vqp.qp.qp_type == IBV_QPT_UC)
		status = IBV_WC_SUCCESS;
	return finish(dev, qp, wqe, status);
}

static enum outcome execute(struct function_device *dev, struct device_qp *qp,
			    struct device_wqe *wqe, bool attempt)
{
	uint64_t length = device_length(wqe), limit = dev->port[0].max_msg_sz;
	bool atomic = wqe->wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
		      wqe->wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ||
		      wqe->wr.opcode == IBV_WR_ATOMIC_WRITE;

	switch (wqe->wr.opcode) {
	case IBV_WR_BIND_MW:
		return finish(dev, qp, wqe,
			      device_bind(dev, qp, &wqe->wr) ? IBV_WC_SUCCESS : IBV_WC_MW_BIND_ERR);
	case IBV_WR_LOCAL_INV: {
		struct device_mw *mw = device_find_rkey_window(dev, wqe->wr.invalidate_rkey);

		if (!mw || mw->mw.type != IBV_MW_TYPE_2)
			return finish(dev, qp, wqe, IBV_WC_LOC_QP_OP_ERR);
		device_unbind(mw);
		return finish(dev, qp, wqe, IBV_WC_SUCCESS);
	}
	default:
		break;
	}
	if (qp->vqp.qp.qp_type == IBV_QPT_UD)
		limit = 128u << dev->port[0].active_mtu;
	if (length > limit || (atomic && length != 8))
		return finish(dev, qp, wqe, IBV_WC_LOC_LEN_ERR);
	uint8_t *data = malloc(length + 8);
	if (!data)
		return finish(dev, qp, wqe, IBV_WC_FATAL_ERR);
	enum outcome outcome = transfer(dev, qp, wqe, data, length, attempt);
	free(data);
	return outcome;
}

unsigned int device_run(struct function_device *dev, unsigned int max)
{
	unsigned int count = 0;
	bool moved, first = true;
	struct device_object *obj;

	if (dev->removed)
		return 0;
	do {
		moved = false;
		list_for_each(&dev->objects, obj, entry) {
			struct device_qp *qp = container_of(obj, struct device_qp, obj);

			if (obj->kind != DEVICE_OBJECT_QP || !obj->context || qp->paused ||
			    qp->attr.qp_state != IBV_QPS_RTS || list_empty(&qp->sends))
				continue;
			struct device_wqe *wqe = list_top(&qp->sends, struct device_wqe, entry);
			qp->executing = true;
			if (execute(dev, qp, wqe, first) == WAITING) {
				qp->executing = false;
				continue;
			}
			moved = true;
			if (++count == max)
				return count;
		}
		first = false;
	} while (moved);
	return count;
}

/* ---- Controls ---- */

int device_pause(struct function_device *dev, uint32_t qp_num, bool paused)
{
	pthread_mutex_lock(&dev->lock);
	struct device_qp *qp = device_find_qp(dev, qp_num);
	if (qp)
		qp->paused = paused;
	pthread_mutex_unlock(&dev->lock);
	return qp ? 0 : EINVAL;
}

int device_outstanding(struct function_device *dev, uint32_t qp_num, uint32_t *sends,
		       uint32_t *receives)
{
	pthread_mutex_lock(&dev->lock);
	struct device_qp *qp = device_find_qp(dev, qp_num);
	if (qp) {
		*sends = qp->send_used;
		*receives = qp->recv_used;
	}
	pthread_mutex_unlock(&dev->lock);
	return qp ? 0 : EINVAL;
}

int device_qp_error(struct function_device *dev, uint32_t qp_num)
{
	pthread_mutex_lock(&dev->lock);
	struct device_qp *qp = device_find_qp(dev, qp_num);
	if (qp)
		device_qp_to_error(dev, qp);
	pthread_mutex_unlock(&dev->lock);
	return qp ? 0 : EINVAL;
}
