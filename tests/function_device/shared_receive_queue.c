/* Shared receive queues: their control verbs. */
#include "internal.h"

static struct ibv_srq *make(struct ibv_context *context, enum device_verb verb,
			    struct ibv_srq_init_attr_ex *attr)
{
	struct function_device *dev = to_device(context);
	struct device_srq *srq = NULL;
	enum ibv_srq_type type =
		attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE ? attr->srq_type : IBV_SRQT_BASIC;
	int error = device_admit(dev, verb);

	if (!error && (!(attr->comp_mask & IBV_SRQ_INIT_ATTR_PD) || !attr->pd))
		error = EINVAL;
	if (!error && type == IBV_SRQT_TM &&
	    (!(attr->comp_mask & IBV_SRQ_INIT_ATTR_CQ) || !(attr->comp_mask & IBV_SRQ_INIT_ATTR_TM) ||
	     !attr->cq || !attr->tm_cap.max_num_tags || attr->tm_cap.max_num_tags > DEVICE_MAX_TAGS ||
	     !attr->tm_cap.max_ops))
		error = EINVAL;
	if (!error && type == IBV_SRQT_XRC &&
	    (!(attr->comp_mask & IBV_SRQ_INIT_ATTR_XRCD) ||
	     !(attr->comp_mask & IBV_SRQ_INIT_ATTR_CQ) || !attr->xrcd || !attr->cq))
		error = EINVAL;
	if (!error && (!attr->attr.max_wr || attr->attr.max_wr > dev->opt.max_qp_wr ||
		       attr->attr.max_sge > dev->opt.max_sge))
		error = EINVAL;
	if (!error) {
		srq = device_new(dev, context, DEVICE_OBJECT_SRQ, device_srq, dev->opt.max_srq);
		if (!srq)
			error = errno;
	}
	if (!error) {
		list_head_init(&srq->queue);
		if (!attr->attr.max_sge)
			attr->attr.max_sge = 1;
		srq->attr = attr->attr;
		srq->attr.srq_limit = 0;
		srq->vsrq.srq_type = type;
		srq->vsrq.srq_num = dev->next_key++;
		srq->vsrq.srq.handle = srq->vsrq.srq_num;
		srq->obj.uses[0] = &to_device_pd(attr->pd)->obj;
		if (type == IBV_SRQT_TM) {
			srq->tag_count = attr->tm_cap.max_num_tags;
			srq->tags = calloc(srq->tag_count, sizeof(*srq->tags));
			srq->vsrq.cq = attr->cq;
			srq->cq = to_device_cq(attr->cq);
			srq->obj.uses[1] = &srq->cq->obj;
		}
		if (type == IBV_SRQT_XRC) {
			srq->vsrq.xrcd = &to_device_xrcd(attr->xrcd)->vxrcd;
			srq->vsrq.cq = attr->cq;
			srq->obj.uses[1] = &to_device_xrcd(attr->xrcd)->obj;
			srq->obj.uses[2] = &to_device_cq(attr->cq)->obj;
		}
	}
	device_unlock(context);
	if (!error)
		return &srq->vsrq.srq;
	errno = error;
	return NULL;
}

static struct ibv_srq *create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	struct ibv_srq_init_attr_ex ex = {
		.srq_context = attr->srq_context,
		.attr = attr->attr,
		.comp_mask = IBV_SRQ_INIT_ATTR_PD,
		.pd = pd,
	};

	device_begin(pd->context, DEVICE_create_srq, pd)->srq_init_attr = ex;
	struct ibv_srq *srq = make(pd->context, DEVICE_create_srq, &ex);
	if (srq)
		attr->attr = ex.attr;
	return srq;
}

static struct ibv_srq *create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr)
{
	device_begin(context, DEVICE_create_srq_ex, context)->srq_init_attr = *attr;
	struct ibv_srq *srq = make(context, DEVICE_create_srq_ex, attr);
	if (srq) {
		srq->context = context;
		srq->srq_context = attr->srq_context;
		srq->pd = attr->pd;
		pthread_mutex_init(&srq->mutex, NULL);
		pthread_cond_init(&srq->cond, NULL);
	}
	return srq;
}

static int modify_srq(struct ibv_srq *ibsrq, struct ibv_srq_attr *attr, int mask)
{
	struct function_device *dev = to_device(ibsrq->context);
	struct device_srq *srq = to_device_srq(ibsrq);
	struct device_call *call = device_begin(ibsrq->context, DEVICE_modify_srq, ibsrq);
	device_use(to_device(ibsrq->context), &to_device_srq(ibsrq)->obj);

	call->srq_attr = *attr;
	call->mask = mask;
	int error = device_admit(dev, DEVICE_modify_srq);
	if (!error && mask & ~(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT))
		error = EINVAL;
	if (!error && mask & IBV_SRQ_MAX_WR &&
	    (attr->max_wr < srq->count || attr->max_wr > dev->opt.max_qp_wr))
		error = EINVAL;
	if (!error && mask & IBV_SRQ_LIMIT &&
	    attr->srq_limit > (mask & IBV_SRQ_MAX_WR ? attr->max_wr : srq->attr.max_wr))
		error = EINVAL;
	if (!error) {
		if (mask & IBV_SRQ_MAX_WR)
			srq->attr.max_wr = attr->max_wr;
		if (mask & IBV_SRQ_LIMIT)
			srq->attr.srq_limit = attr->srq_limit;
	}
	device_unlock(ibsrq->context);
	return error;
}

static int query_srq(struct ibv_srq *ibsrq, struct ibv_srq_attr *attr)
{
	device_begin(ibsrq->context, DEVICE_query_srq, ibsrq);
	device_use(to_device(ibsrq->context), &to_device_srq(ibsrq)->obj);
	int error = device_admit(to_device(ibsrq->context), DEVICE_query_srq);
	if (!error)
		*attr = to_device_srq(ibsrq)->attr;
	device_unlock(ibsrq->context);
	return error;
}

static int get_srq_num(struct ibv_srq *ibsrq, uint32_t *number)
{
	device_begin(ibsrq->context, DEVICE_get_srq_num, ibsrq);
	int error = device_admit(to_device(ibsrq->context), DEVICE_get_srq_num);
	/* Only XRC shared receive queues have a number to send to. */
	if (!error && to_device_srq(ibsrq)->vsrq.srq_type != IBV_SRQT_XRC)
		error = EOPNOTSUPP;
	if (!error)
		*number = to_device_srq(ibsrq)->vsrq.srq_num;
	device_unlock(ibsrq->context);
	return error;
}

static int destroy_srq(struct ibv_srq *ibsrq)
{
	struct ibv_context *context = ibsrq->context;
	struct function_device *dev = to_device(context);
	struct device_srq *srq = to_device_srq(ibsrq);
	struct device_wqe *wqe;

	device_begin(context, DEVICE_destroy_srq, ibsrq);
	int error = device_destroy(dev, DEVICE_destroy_srq, &srq->obj);
	if (!error)
		device_pipe_remove(context->async_fd, sizeof(struct ib_uverbs_async_event_desc),
			       offsetof(struct ib_uverbs_async_event_desc, element),
			       (uintptr_t)ibsrq);
	device_unlock(context);
	if (error)
		return error;
	if (!dev->removed)
		device_wait_acks(&ibsrq->mutex, &ibsrq->cond, &ibsrq->events_completed,
				 &srq->events_reported, "ibv_destroy_srq");
	pthread_mutex_lock(&dev->lock);
	while ((wqe = list_pop(&srq->queue, struct device_wqe, entry)))
		free(wqe);
	free(srq->tags);
	device_free(dev, &srq->obj);
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

/* Carries one operation on the list of tags out; *found is the tag that it is about. */
static int change_tags(struct device_srq *srq, struct ibv_ops_wr *op, enum ibv_wc_status *status)
{
	uint32_t i = 0;

	switch (op->opcode) {
	case IBV_WR_TAG_ADD:
		while (i < srq->tag_count && srq->tags[i].used)
			i++;
		if (i == srq->tag_count)
			return ENOMEM;
		if (op->tm.add.num_sge < 0 || op->tm.add.num_sge > 1)
			return EINVAL;
		srq->tags[i] = (struct device_tag){ true, op->tm.add.recv_wr_id, op->tm.add.tag,
						op->tm.add.mask };
		op->tm.handle = i;
		return 0;
	case IBV_WR_TAG_DEL:
		if (op->tm.handle >= srq->tag_count || !srq->tags[op->tm.handle].used)
			*status = IBV_WC_TM_ERR;
		else
			srq->tags[op->tm.handle].used = false;
		return 0;
	case IBV_WR_TAG_SYNC:
		return 0;
	default:
		return EINVAL;
	}
}

static int post_srq_ops(struct ibv_srq *ibsrq, struct ibv_ops_wr *op, struct ibv_ops_wr **bad)
{
	static const enum ibv_wc_opcode done[] = { IBV_WC_TM_ADD, IBV_WC_TM_DEL, IBV_WC_TM_SYNC };
	struct function_device *dev = to_device(ibsrq->context);
	struct device_srq *srq = to_device_srq(ibsrq);
	int error = 0;

	for (; op && !error; op = error ? op : op->next) {
		struct device_call *call = device_begin(ibsrq->context, DEVICE_post_srq_ops, ibsrq);
		struct ibv_wc wc = { .wr_id = op->wr_id };

		device_use(dev, &srq->obj);
		call->ops = *op;
		if (op->opcode == IBV_WR_TAG_ADD && op->tm.add.num_sge == 1)
			call->ops_sge = *op->tm.add.sg_list;
		error = device_admit(dev, DEVICE_post_srq_ops);
		if (!error && !srq->tags)
			error = EINVAL;
		if (!error)
			error = change_tags(srq, op, &wc.status);
		if (error) {
			*bad = op;
		} else if (op->flags & IBV_OPS_SIGNALED) {
			wc.opcode = done[op->opcode];
			device_complete(dev, srq->cq, NULL, &wc, 0, 0, false);
		}
		device_unlock(ibsrq->context);
	}
	return error;
}

const struct verbs_context_ops device_srq_ops = {
	.create_srq = create_srq,
	.create_srq_ex = create_srq_ex,
	.destroy_srq = destroy_srq,
	.get_srq_num = get_srq_num,
	.modify_srq = modify_srq,
	.post_srq_ops = post_srq_ops,
	.query_srq = query_srq,
};
