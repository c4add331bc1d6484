/* Shared receive queues: their control verbs. */
#include "internal.h"

static struct ibv_srq *make(struct ibv_context *context, enum td_verb verb,
			    struct ibv_srq_init_attr_ex *attr)
{
	struct td_device *dev = to_device(context);
	struct td_srq *srq = NULL;
	enum ibv_srq_type type =
		attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE ? attr->srq_type : IBV_SRQT_BASIC;
	int error = td_admit(dev, verb);

	if (!error && (!(attr->comp_mask & IBV_SRQ_INIT_ATTR_PD) || !attr->pd))
		error = EINVAL;
	if (!error && type == IBV_SRQT_TM)
		error = EOPNOTSUPP;
	if (!error && type == IBV_SRQT_XRC &&
	    (!(attr->comp_mask & IBV_SRQ_INIT_ATTR_XRCD) ||
	     !(attr->comp_mask & IBV_SRQ_INIT_ATTR_CQ) || !attr->xrcd || !attr->cq))
		error = EINVAL;
	if (!error && (!attr->attr.max_wr || attr->attr.max_wr > dev->opt.max_qp_wr ||
		       attr->attr.max_sge > dev->opt.max_sge))
		error = EINVAL;
	if (!error) {
		srq = td_new(dev, context, TD_OBJECT_SRQ, td_srq, dev->opt.max_srq);
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
		srq->obj.uses[0] = &to_td_pd(attr->pd)->obj;
		if (type == IBV_SRQT_XRC) {
			srq->vsrq.xrcd = &to_td_xrcd(attr->xrcd)->vxrcd;
			srq->vsrq.cq = attr->cq;
			srq->obj.uses[1] = &to_td_xrcd(attr->xrcd)->obj;
			srq->obj.uses[2] = &to_td_cq(attr->cq)->obj;
		}
	}
	td_unlock(context);
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

	td_begin(pd->context, TD_create_srq, pd)->srq_init_attr = ex;
	struct ibv_srq *srq = make(pd->context, TD_create_srq, &ex);
	if (srq)
		attr->attr = ex.attr;
	return srq;
}

static struct ibv_srq *create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr)
{
	td_begin(context, TD_create_srq_ex, context)->srq_init_attr = *attr;
	struct ibv_srq *srq = make(context, TD_create_srq_ex, attr);
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
	struct td_device *dev = to_device(ibsrq->context);
	struct td_srq *srq = to_td_srq(ibsrq);
	struct td_call *call = td_begin(ibsrq->context, TD_modify_srq, ibsrq);
	td_use(to_device(ibsrq->context), &to_td_srq(ibsrq)->obj);

	call->srq_attr = *attr;
	call->mask = mask;
	int error = td_admit(dev, TD_modify_srq);
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
	td_unlock(ibsrq->context);
	return error;
}

static int query_srq(struct ibv_srq *ibsrq, struct ibv_srq_attr *attr)
{
	td_begin(ibsrq->context, TD_query_srq, ibsrq);
	td_use(to_device(ibsrq->context), &to_td_srq(ibsrq)->obj);
	int error = td_admit(to_device(ibsrq->context), TD_query_srq);
	if (!error)
		*attr = to_td_srq(ibsrq)->attr;
	td_unlock(ibsrq->context);
	return error;
}

static int get_srq_num(struct ibv_srq *ibsrq, uint32_t *number)
{
	td_begin(ibsrq->context, TD_get_srq_num, ibsrq);
	int error = td_admit(to_device(ibsrq->context), TD_get_srq_num);
	/* Only XRC shared receive queues have a number to send to. */
	if (!error && to_td_srq(ibsrq)->vsrq.srq_type != IBV_SRQT_XRC)
		error = EOPNOTSUPP;
	if (!error)
		*number = to_td_srq(ibsrq)->vsrq.srq_num;
	td_unlock(ibsrq->context);
	return error;
}

static int destroy_srq(struct ibv_srq *ibsrq)
{
	struct ibv_context *context = ibsrq->context;
	struct td_device *dev = to_device(context);
	struct td_srq *srq = to_td_srq(ibsrq);
	struct td_wqe *wqe;

	td_begin(context, TD_destroy_srq, ibsrq);
	int error = td_destroy(dev, TD_destroy_srq, &srq->obj);
	if (!error)
		td_pipe_remove(context->async_fd, sizeof(struct ib_uverbs_async_event_desc),
			       offsetof(struct ib_uverbs_async_event_desc, element),
			       (uintptr_t)ibsrq);
	td_unlock(context);
	if (error)
		return error;
	if (!dev->removed)
		td_wait_acks(&ibsrq->mutex, &ibsrq->cond, &ibsrq->events_completed, &srq->events_reported,
		     "ibv_destroy_srq");
	pthread_mutex_lock(&dev->lock);
	while ((wqe = list_pop(&srq->queue, struct td_wqe, entry)))
		free(wqe);
	td_free(dev, &srq->obj);
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

const struct verbs_context_ops td_srq_ops = {
	.create_srq = create_srq,
	.create_srq_ex = create_srq_ex,
	.destroy_srq = destroy_srq,
	.get_srq_num = get_srq_num,
	.modify_srq = modify_srq,
	.query_srq = query_srq,
};
