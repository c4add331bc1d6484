/* Completion queues: control verbs of both kinds, polling of the model, and its controls. */
#include <limits.h>
#include <time.h>
#include "internal.h"

struct device_cq *device_find_cq(struct function_device *dev, const void *ibcq)
{
	struct device_object *obj;

	list_for_each(&dev->objects, obj, entry) {
		struct device_cq *cq = container_of(obj, struct device_cq, obj);

		if (obj->kind == DEVICE_OBJECT_CQ && obj->context && (const void *)&cq->vcq == ibcq)
			return cq;
	}
	return NULL;
}

/* ---- Arrival ---- */

void device_cq_event(struct device_cq *cq)
{
	struct ib_uverbs_comp_event_desc record = { .cq_handle = (uintptr_t)&cq->vcq };

	if (cq->vcq.cq.channel)
		device_pipe_write(cq->vcq.cq.channel->fd, &record, sizeof(record));
}

/* A full queue is lost for good, and every queue pair that completes in it with it. */
static void overrun(struct function_device *dev, struct device_cq *cq)
{
	struct device_object *obj;

	cq->overrun = true;
	device_async(cq->obj.context, IBV_EVENT_CQ_ERR, (uintptr_t)&cq->vcq);
	list_for_each(&dev->objects, obj, entry) {
		struct device_qp *qp = container_of(obj, struct device_qp, obj);

		if (obj->kind != DEVICE_OBJECT_QP || !obj->context ||
		    (qp->send_cq != cq && qp->recv_cq != cq) || qp->attr.qp_state == IBV_QPS_ERR ||
		    qp->attr.qp_state == IBV_QPS_RESET)
			continue;
		device_qp_to_error(dev, qp);
		device_async(obj->context, IBV_EVENT_QP_FATAL, (uintptr_t)&qp->vqp);
	}
}

static void arrive(struct function_device *dev, struct device_cq *cq, struct device_cqe *cqe)
{
	bool notable = cqe->solicited || cqe->wc.status != IBV_WC_SUCCESS;

	if (cq->ready_count >= cq->capacity) {
		free(cqe);
		if (!cq->overrun)
			overrun(dev, cq);
		return;
	}
	list_add_tail(&cq->ready, &cqe->entry);
	cq->ready_count++;
	if (cq->armed == 1 || (cq->armed == 2 && notable)) {
		cq->armed = 0;
		device_cq_event(cq);
	}
}

void device_complete(struct function_device *dev, struct device_cq *cq, struct device_qp *qp,
		     const struct ibv_wc *wc, uint32_t send_slots, uint32_t receive_slots,
		     bool solicited)
{
	struct timespec now;
	struct device_cqe *cqe;

	if (cq->overrun || !(cqe = calloc(1, sizeof(*cqe))))
		return;
	clock_gettime(CLOCK_MONOTONIC, &now);
	cqe->qp = qp;
	cqe->wc = *wc;
	cqe->time = now.tv_sec * 1000000000ull + now.tv_nsec;
	cqe->send_slots = send_slots;
	cqe->receive_slots = receive_slots;
	cqe->solicited = solicited;
	if (cq->hold_all || (qp && qp->hold)) {
		list_add_tail(&cq->held, &cqe->entry);
		cq->held_count++;
	} else {
		arrive(dev, cq, cqe);
	}
}

static void purge_list(struct function_device *dev, struct list_head *list, uint32_t *count,
		       struct device_qp *qp)
{
	struct device_cqe *cqe, *next;

	list_for_each_safe(list, cqe, next, entry) {
		if (cqe->qp != qp)
			continue;
		cqe->qp = NULL;
		if (dev->keep_stale)
			continue;
		list_del(&cqe->entry);
		free(cqe);
		--*count;
	}
}

void device_cq_purge(struct function_device *dev, struct device_cq *cq, struct device_qp *qp)
{
	if (cq->current && cq->current->qp == qp)
		cq->current->qp = NULL;
	purge_list(dev, &cq->ready, &cq->ready_count, qp);
	purge_list(dev, &cq->held, &cq->held_count, qp);
}

void device_cq_clear(struct device_cq *cq)
{
	struct device_cqe *cqe;

	while ((cqe = list_pop(&cq->ready, struct device_cqe, entry)))
		free(cqe);
	while ((cqe = list_pop(&cq->held, struct device_cqe, entry)))
		free(cqe);
	free(cq->current);
	free(cq->ring);
	cq->current = NULL;
	cq->ring = NULL;
	cq->ready_count = cq->held_count = 0;
}

/* ---- Polling ---- */

static struct device_cqe *take(struct device_cq *cq)
{
	struct device_cqe *cqe = list_pop(&cq->ready, struct device_cqe, entry);

	if (cqe) {
		cq->ready_count--;
		if (cqe->qp) {
			cqe->qp->send_used -= cqe->send_slots;
			cqe->qp->recv_used -= cqe->receive_slots;
		}
	}
	return cqe;
}

/* EFA holds the lock of the completion queues too while a batch is open: the thread would wait for itself. */
static void check_batches(struct function_device *dev, struct device_cq *cq)
{
	struct device_object *obj;

	list_for_each(&dev->objects, obj, entry) {
		struct device_qp *qp = container_of(obj, struct device_qp, obj);

		if (obj->kind == DEVICE_OBJECT_QP && obj->context && qp->batch_open &&
		    (qp->send_cq == cq || qp->recv_cq == cq) &&
		    pthread_equal(qp->builder, pthread_self()))
			device_violate(dev, "a poll within a batch");
	}
}

static int poll_cq(struct ibv_cq *ibcq, int max, struct ibv_wc *wc)
{
	struct function_device *dev = to_device(ibcq->context);
	struct device_cq *cq = to_device_cq(ibcq);
	int count = 0;

	pthread_mutex_lock(&dev->lock);
	dev->call_count[DEVICE_poll_cq]++;
	device_use(dev, &cq->obj);
	if (dev->progress != DEVICE_MANUAL)
		device_run(dev, 0);
	if (cq->polling)
		device_violate(dev, "poll_cq between start_poll and end_poll");
	check_batches(dev, cq);
	int error = device_fault(dev, DEVICE_poll_cq);
	if (error) {
		errno = error;
		count = dev->poll_error;
	} else {
		struct device_cqe *cqe;

		while (count < max && (cqe = take(cq))) {
			wc[count++] = cqe->wc;
			free(cqe);
		}
	}
	pthread_mutex_unlock(&dev->lock);
	return count;
}

static int advance(struct device_cq *cq)
{
	free(cq->current);
	cq->current = take(cq);
	if (!cq->current)
		return ENOENT;
	cq->vcq.cq_ex.status = cq->current->wc.status;
	cq->vcq.cq_ex.wr_id = cq->current->wc.wr_id;
	return 0;
}

static int start_poll(struct ibv_cq_ex *ibcq, struct ibv_poll_cq_attr *attr)
{
	struct function_device *dev = to_device(ibcq->context);
	struct device_cq *cq = to_device_cq(ibcq);

	pthread_mutex_lock(&dev->lock);
	dev->call_count[DEVICE_start_poll]++;
	device_use(dev, &cq->obj);
	if (dev->progress != DEVICE_MANUAL)
		device_run(dev, 0);
	if (cq->polling)
		device_violate(dev, "start_poll before end_poll");
	check_batches(dev, cq);
	int error = attr->comp_mask ? EINVAL : device_fault(dev, DEVICE_start_poll);
	if (!error)
		error = advance(cq);
	cq->polling = !error;
	cq->poller = pthread_self();
	pthread_mutex_unlock(&dev->lock);
	return error;
}

static int next_poll(struct ibv_cq_ex *ibcq)
{
	struct function_device *dev = to_device(ibcq->context);
	struct device_cq *cq = to_device_cq(ibcq);

	pthread_mutex_lock(&dev->lock);
	dev->call_count[DEVICE_next_poll]++;
	if (!cq->polling)
		device_violate(dev, "next_poll without start_poll");
	int error = device_fault(dev, DEVICE_next_poll);
	if (!error)
		error = advance(cq);
	pthread_mutex_unlock(&dev->lock);
	return error;
}

static void end_poll(struct ibv_cq_ex *ibcq)
{
	struct function_device *dev = to_device(ibcq->context);
	struct device_cq *cq = to_device_cq(ibcq);

	pthread_mutex_lock(&dev->lock);
	if (!cq->polling)
		device_violate(dev, "end_poll without start_poll");
	cq->polling = false;
	free(cq->current);
	cq->current = NULL;
	pthread_mutex_unlock(&dev->lock);
}

#define READ(name, type, value)                                                                    \
	static type read_##name(struct ibv_cq_ex *ibcq)                                            \
	{                                                                                          \
		const struct device_cqe *cqe = to_device_cq(ibcq)->current;                        \
                                                                                                   \
		return value;                                                                      \
	}
READ(opcode, enum ibv_wc_opcode, cqe->wc.opcode)
READ(vendor_err, uint32_t, cqe->wc.vendor_err)
READ(wc_flags, unsigned int, cqe->wc.wc_flags)
READ(byte_len, uint32_t, cqe->wc.byte_len)
READ(imm_data, __be32, cqe->wc.imm_data)
READ(qp_num, uint32_t, cqe->wc.qp_num)
READ(src_qp, uint32_t, cqe->wc.src_qp)
READ(slid, uint32_t, cqe->wc.slid)
READ(sl, uint8_t, cqe->wc.sl)
READ(dlid_path_bits, uint8_t, cqe->wc.dlid_path_bits)
READ(completion_ts, uint64_t, cqe->time)
#undef READ

/* ---- Control verbs ---- */

static struct device_cq *make(struct ibv_context *context, enum device_verb verb, uint32_t cqe,
			  uint32_t vector)
{
	struct function_device *dev = to_device(context);
	struct device_cq *cq = NULL;
	int error = device_admit(dev, verb);

	if (!error && (!cqe || cqe > dev->opt.max_cqe || vector >= dev->opt.comp_vectors))
		error = EINVAL;
	if (!error) {
		cq = device_new(dev, context, DEVICE_OBJECT_CQ, device_cq, dev->opt.max_cq);
		if (!cq)
			error = errno;
	}
	if (!error) {
		list_head_init(&cq->ready);
		list_head_init(&cq->held);
		cq->capacity = cqe;
		cq->vcq.cq.cqe = cqe;
		cq->vcq.cq.handle = dev->next_key++;
		for (cq->mask = 1; cq->mask < cqe; cq->mask <<= 1)
			;
		if (dev->opt.kind == DEVICE_LEAN) {
			cq->ring = calloc(cq->mask, sizeof(*cq->ring));
			if (!cq->ring) {
				device_free(dev, &cq->obj);
				error = ENOMEM;
			}
		}
		cq->mask--;
	}
	device_unlock(context);
	if (!error)
		return cq;
	errno = error;
	return NULL;
}

static struct ibv_cq *create_cq(struct ibv_context *context, int cqe,
				struct ibv_comp_channel *channel, int vector)
{
	struct device_call *call = device_begin(context, DEVICE_create_cq, context);

	call->cqe = cqe;
	call->comp_vector = vector;
	call->cq_init_attr.channel = channel;
	struct device_cq *cq = make(context, DEVICE_create_cq, cqe, vector);
	return cq ? &cq->vcq.cq : NULL;
}

static struct ibv_cq_ex *create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
	struct device_call *call = device_begin(context, DEVICE_create_cq_ex, context);
	struct function_device *dev = to_device(context);
	uint64_t flags = attr->wc_flags;

	call->cq_init_attr = *attr;
	call->cqe = attr->cqe;
	call->comp_vector = attr->comp_vector;
	/* What the device cannot report: VLANs, flow tags, tag matching, wall clock. */
	uint64_t known = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
	if (flags & ~known ||
	    attr->comp_mask & ~(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD)) {
		device_unlock(context);
		errno = EOPNOTSUPP;
		return NULL;
	}
	struct device_cq *cq = make(context, DEVICE_create_cq_ex, attr->cqe, attr->comp_vector);
	if (!cq)
		return NULL;
	struct ibv_cq_ex *ex = &cq->vcq.cq_ex;
	if (dev->opt.kind == DEVICE_LEAN) {
		device_lean_cq_functions(ex);
		return ex;
	}
	ex->start_poll = start_poll;
	ex->next_poll = next_poll;
	ex->end_poll = end_poll;
	ex->read_opcode = read_opcode;
	ex->read_vendor_err = read_vendor_err;
	ex->read_wc_flags = read_wc_flags;
	/* As providers do it: what was not asked for has no function. */
#define OPTIONAL(name, flag)                                                                       \
	if (flags & IBV_WC_EX_WITH_##flag)                                                         \
	ex->read_##name = read_##name
	OPTIONAL(byte_len, BYTE_LEN);
	OPTIONAL(imm_data, IMM);
	OPTIONAL(qp_num, QP_NUM);
	OPTIONAL(src_qp, SRC_QP);
	OPTIONAL(slid, SLID);
	OPTIONAL(sl, SL);
	OPTIONAL(dlid_path_bits, DLID_PATH_BITS);
	OPTIONAL(completion_ts, COMPLETION_TIMESTAMP);
#undef OPTIONAL
	return ex;
}

static int destroy_cq(struct ibv_cq *ibcq)
{
	struct ibv_context *context = ibcq->context;
	struct function_device *dev = to_device(context);
	struct device_cq *cq = to_device_cq(ibcq);

	device_begin(context, DEVICE_destroy_cq, ibcq);
	int error = device_destroy(dev, DEVICE_destroy_cq, &cq->obj);
	if (!error) {
		if (cq->polling)
			device_violate(dev, "destroy_cq before end_poll");
		if (ibcq->channel)
			device_pipe_remove(ibcq->channel->fd,
					   sizeof(struct ib_uverbs_comp_event_desc), 0,
					   (uintptr_t)ibcq);
		device_pipe_remove(context->async_fd, sizeof(struct ib_uverbs_async_event_desc),
			       offsetof(struct ib_uverbs_async_event_desc, element),
			       (uintptr_t)ibcq);
	}
	device_unlock(context);
	if (error)
		return error;
	if (!dev->removed)
		device_wait_acks(&ibcq->mutex, &ibcq->cond, &ibcq->comp_events_completed,
				 &cq->events_reported, "ibv_destroy_cq (completion events)");
	if (!dev->removed)
		device_wait_acks(&ibcq->mutex, &ibcq->cond, &ibcq->async_events_completed,
				 &cq->async_reported, "ibv_destroy_cq (asynchronous events)");
	pthread_mutex_lock(&dev->lock);
	device_cq_clear(cq);
	device_free(dev, &cq->obj);
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

/* Called by libibverbs for each event that the program takes. */
static void cq_event(struct ibv_cq *ibcq)
{
	struct function_device *dev = to_device(ibcq->context);

	pthread_mutex_lock(&dev->lock);
	to_device_cq(ibcq)->events_reported++;
	device_hold_reader(dev);
	pthread_mutex_unlock(&dev->lock);
}

static int req_notify_cq(struct ibv_cq *ibcq, int solicited_only)
{
	struct function_device *dev = to_device(ibcq->context);
	struct device_cq *cq = to_device_cq(ibcq);

	device_begin(ibcq->context, DEVICE_req_notify_cq, ibcq)->solicited_only = solicited_only;
	device_use(to_device(ibcq->context), &to_device_cq(ibcq)->obj);
	int error = device_admit(dev, DEVICE_req_notify_cq);
	if (!error) {
		/* A request for any completion is not narrowed by a later one. */
		if (cq->armed != 1)
			cq->armed = solicited_only ? 2 : 1;
		if (dev->opt.kind == DEVICE_MODEL && dev->progress != DEVICE_MANUAL)
			device_run(dev, 0);
	}
	device_unlock(ibcq->context);
	return error;
}

static int modify_cq(struct ibv_cq *ibcq, struct ibv_modify_cq_attr *attr)
{
	device_begin(ibcq->context, DEVICE_modify_cq, ibcq)->modify_cq_attr = *attr;
	device_use(to_device(ibcq->context), &to_device_cq(ibcq)->obj);
	int error = device_admit(to_device(ibcq->context), DEVICE_modify_cq);
	if (!error && attr->attr_mask & ~(uint32_t)IBV_CQ_ATTR_MODERATE)
		error = EOPNOTSUPP;
	device_unlock(ibcq->context);
	return error;
}

static int resize_cq(struct ibv_cq *ibcq, int cqe)
{
	struct function_device *dev = to_device(ibcq->context);
	struct device_cq *cq = to_device_cq(ibcq);

	device_begin(ibcq->context, DEVICE_resize_cq, ibcq)->cqe = cqe;
	device_use(to_device(ibcq->context), &to_device_cq(ibcq)->obj);
	int error = device_admit(dev, DEVICE_resize_cq);
	if (!error && dev->opt.kind == DEVICE_LEAN)
		error = EOPNOTSUPP;
	if (!error &&
	    (cqe < 1 || (uint32_t)cqe > dev->opt.max_cqe || (uint32_t)cqe < cq->ready_count))
		error = EINVAL;
	if (!error)
		cq->capacity = ibcq->cqe = cqe;
	device_unlock(ibcq->context);
	return error;
}

const struct verbs_context_ops device_cq_ops = {
	.cq_event = cq_event,
	.create_cq = create_cq,
	.create_cq_ex = create_cq_ex,
	.destroy_cq = destroy_cq,
	.modify_cq = modify_cq,
	.poll_cq = poll_cq,
	.req_notify_cq = req_notify_cq,
	.resize_cq = resize_cq,
};
