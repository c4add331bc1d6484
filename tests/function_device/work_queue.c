/* Work queues, and the tables that spread packets over them. */
#include "internal.h"

static void flush(struct function_device *dev, struct device_wq *wq)
{
	struct device_wqe *wqe;

	while ((wqe = list_pop(&wq->receives, struct device_wqe, entry))) {
		struct ibv_wc wc;

		memset(&wc, 0x5a, sizeof(wc));
		wc.wr_id = wqe->wr.wr_id;
		wc.status = IBV_WC_WR_FLUSH_ERR;
		wc.qp_num = wq->wq.wq_num;
		free(wqe);
		device_complete(dev, wq->cq, NULL, &wc, 0, 0, false);
	}
	wq->used = 0;
}

static void drop(struct device_wq *wq)
{
	struct device_wqe *wqe;

	while ((wqe = list_pop(&wq->receives, struct device_wqe, entry)))
		free(wqe);
	wq->used = 0;
}

static int post_recv(struct ibv_wq *ibwq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct function_device *dev = to_device(ibwq->context);
	struct device_wq *wq = to_device_wq(ibwq);
	int error = 0;

	pthread_mutex_lock(&dev->lock);
	dev->call_count[DEVICE_post_wq_recv]++;
	device_use(dev, &wq->obj);
	for (; wr; wr = wr->next) {
		struct device_wqe *wqe = NULL;

		error = dev->fatal ? EIO : device_fault(dev, DEVICE_post_wq_recv);
		if (!error && wq->used >= wq->max_wr)
			error = ENOMEM;
		if (!error && !(wqe = device_copy_receive(dev, wq->obj.uses[0], wr, wq->max_sge)))
			error = errno;
		if (error) {
			*bad = wr;
			break;
		}
		device_log_posted(dev, ibwq->wq_num, true, wqe);
		list_add_tail(&wq->receives, &wqe->entry);
		wq->used++;
	}
	if (ibwq->state == IBV_WQS_ERR)
		flush(dev, wq);
	device_after_post(dev, NULL);
	pthread_mutex_unlock(&dev->lock);
	return error;
}

static struct ibv_wq *create_wq(struct ibv_context *context, struct ibv_wq_init_attr *attr)
{
	struct function_device *dev = to_device(context);
	struct device_wq *wq = NULL;

	device_begin(context, DEVICE_create_wq, context)->wq_init_attr = *attr;
	int error = device_admit(dev, DEVICE_create_wq);
	if (!error && (attr->wq_type != IBV_WQT_RQ || !attr->pd || !attr->cq || !attr->max_wr ||
		       attr->max_wr > dev->opt.max_qp_wr || attr->max_sge > dev->opt.max_sge))
		error = EINVAL;
	if (!error && (attr->comp_mask & ~(uint32_t)IBV_WQ_INIT_ATTR_FLAGS))
		error = EOPNOTSUPP;
	if (!error) {
		wq = device_new(dev, context, DEVICE_OBJECT_WQ, device_wq, 0);
		if (!wq)
			error = errno;
	}
	if (!error) {
		wq->wq.context = context;
		wq->wq.pd = attr->pd;
		wq->wq.cq = attr->cq;
		wq->wq.wq_type = attr->wq_type;
		wq->wq.wq_num = dev->next_qp_num++ & 0xffffff;
		wq->wq.handle = wq->wq.wq_num;
		wq->wq.state = IBV_WQS_RESET;
		wq->wq.post_recv = post_recv;
		list_head_init(&wq->receives);
		/* As hardware does it, more than was asked for. */
		attr->max_wr = wq->max_wr = attr->max_wr + (attr->max_wr & 1);
		wq->max_sge = attr->max_sge;
		wq->cq = to_device_cq(attr->cq);
		if (attr->comp_mask & IBV_WQ_INIT_ATTR_FLAGS)
			wq->flags = attr->create_flags;
		wq->obj.uses[0] = &to_device_pd(attr->pd)->obj;
		wq->obj.uses[1] = &wq->cq->obj;
	}
	return device_done(context, wq, error);
}

static int modify_wq(struct ibv_wq *ibwq, struct ibv_wq_attr *attr)
{
	struct function_device *dev = to_device(ibwq->context);
	struct device_wq *wq = to_device_wq(ibwq);

	device_begin(ibwq->context, DEVICE_modify_wq, ibwq)->wq_attr = *attr;
	device_use(dev, &wq->obj);
	int error = device_admit(dev, DEVICE_modify_wq);
	if (!error && attr->attr_mask & ~(uint32_t)(IBV_WQ_ATTR_RESERVED - 1))
		error = EINVAL;
	if (!error && attr->attr_mask & IBV_WQ_ATTR_CURR_STATE && attr->curr_wq_state != ibwq->state)
		error = EINVAL;
	/* From RESET to RDY, and from everywhere to RESET and to ERR. */
	if (!error && attr->attr_mask & IBV_WQ_ATTR_STATE &&
	    (attr->wq_state > IBV_WQS_ERR ||
	     (attr->wq_state == IBV_WQS_RDY && ibwq->state == IBV_WQS_ERR) ||
	     (attr->wq_state == IBV_WQS_ERR && ibwq->state == IBV_WQS_RESET)))
		error = EINVAL;
	if (!error && attr->attr_mask & IBV_WQ_ATTR_FLAGS)
		wq->flags = (wq->flags & ~attr->flags_mask) | (attr->flags & attr->flags_mask);
	if (!error && attr->attr_mask & IBV_WQ_ATTR_STATE) {
		ibwq->state = attr->wq_state;
		if (ibwq->state == IBV_WQS_ERR)
			flush(dev, wq);
		if (ibwq->state == IBV_WQS_RESET)
			drop(wq);
	}
	device_unlock(ibwq->context);
	return error;
}

static int destroy_wq(struct ibv_wq *ibwq)
{
	struct ibv_context *context = ibwq->context;
	struct function_device *dev = to_device(context);
	struct device_wq *wq = to_device_wq(ibwq);

	device_begin(context, DEVICE_destroy_wq, ibwq);
	int error = device_destroy(dev, DEVICE_destroy_wq, &wq->obj);
	if (!error)
		device_pipe_remove(context->async_fd, sizeof(struct ib_uverbs_async_event_desc),
			       offsetof(struct ib_uverbs_async_event_desc, element),
			       (uintptr_t)ibwq);
	device_unlock(context);
	if (error)
		return error;
	if (!dev->removed)
		device_wait_acks(&ibwq->mutex, &ibwq->cond, &ibwq->events_completed,
			     &wq->events_reported, "ibv_destroy_wq");
	pthread_mutex_lock(&dev->lock);
	drop(wq);
	device_free(dev, &wq->obj);
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

/* ---- Indirection tables ---- */

static struct ibv_rwq_ind_table *create_table(struct ibv_context *context,
					      struct ibv_rwq_ind_table_init_attr *attr)
{
	struct function_device *dev = to_device(context);
	struct device_table *table = NULL;
	struct device_call *call = device_begin(context, DEVICE_create_rwq_ind_table, context);
	uint32_t size = attr->log_ind_tbl_size < 31 ? 1u << attr->log_ind_tbl_size : UINT32_MAX;
	int error = device_admit(dev, DEVICE_create_rwq_ind_table);

	call->table_log_size = attr->log_ind_tbl_size;
	if (!error && attr->comp_mask)
		error = EOPNOTSUPP;
	if (!error && size > DEVICE_MAX_TABLE)
		error = EINVAL;
	for (uint32_t i = 0; !error && i < size; i++) {
		call->table[i] = attr->ind_tbl[i];
		if (attr->ind_tbl[i]->context != context)
			error = EINVAL;
	}
	if (!error) {
		table = device_new(dev, context, DEVICE_OBJECT_TABLE, device_table, 0);
		if (!table)
			error = errno;
	}
	if (!error) {
		table->table.context = context;
		table->table.ind_tbl_num = table->table.ind_tbl_handle = dev->next_key++;
		table->size = size;
		for (uint32_t i = 0; i < size; i++) {
			table->queues[i] = to_device_wq(attr->ind_tbl[i]);
			table->obj.uses[i] = &table->queues[i]->obj;
		}
	}
	return device_done(context, table, error);
}

static int destroy_table(struct ibv_rwq_ind_table *table)
{
	struct ibv_context *context = table->context;
	struct function_device *dev = to_device(context);

	device_begin(context, DEVICE_destroy_rwq_ind_table, table);
	int error = device_destroy(dev, DEVICE_destroy_rwq_ind_table, &to_device_table(table)->obj);
	if (!error)
		device_free(dev, &to_device_table(table)->obj);
	device_unlock(context);
	return error;
}

const struct verbs_context_ops device_wq_ops = {
	.create_rwq_ind_table = create_table,
	.create_wq = create_wq,
	.destroy_rwq_ind_table = destroy_table,
	.destroy_wq = destroy_wq,
	.modify_wq = modify_wq,
};
