/* Queue pairs: control verbs of both kinds, states, flushing. */
#include "internal.h"

struct device_qp *device_find_qp(struct function_device *dev, uint32_t qp_num)
{
	struct device_object *obj;

	list_for_each(&dev->objects, obj, entry) {
		struct device_qp *qp = container_of(obj, struct device_qp, obj);

		if (obj->kind == DEVICE_OBJECT_QP && obj->context && qp->vqp.qp.qp_num == qp_num)
			return qp;
	}
	return NULL;
}

/* ---- Errors ---- */

/* The fields that the standard leaves undefined in a failed completion hold what no one expects. */
void device_error_wc(struct ibv_wc *wc, const struct device_qp *qp, uint64_t wr_id,
		 enum ibv_wc_status status)
{
	memset(wc, 0x5a, sizeof(*wc));
	wc->wr_id = wr_id;
	wc->status = status;
	wc->qp_num = qp->vqp.qp.qp_num;
	wc->vendor_err = 0x5a00 | status;
}

void device_qp_flush(struct function_device *dev, struct device_qp *qp)
{
	enum ibv_qp_state state = qp->attr.qp_state;
	struct device_wqe *wqe;
	struct ibv_wc wc;

	if (qp->executing || (state != IBV_QPS_ERR && state != IBV_QPS_SQE))
		return;
	while ((wqe = list_pop(&qp->sends, struct device_wqe, entry))) {
		device_error_wc(&wc, qp, wqe->wr.wr_id, IBV_WC_WR_FLUSH_ERR);
		free(wqe);
		device_complete(dev, qp->send_cq, qp, &wc, 1 + qp->unreported, 0, false);
		qp->unreported = 0;
	}
	while (state == IBV_QPS_ERR && (wqe = list_pop(&qp->receives, struct device_wqe, entry))) {
		device_error_wc(&wc, qp, wqe->wr.wr_id, IBV_WC_WR_FLUSH_ERR);
		free(wqe);
		device_complete(dev, qp->recv_cq, qp, &wc, 0, 1, false);
	}
}

void device_qp_to_error(struct function_device *dev, struct device_qp *qp)
{
	if (qp->attr.qp_state == IBV_QPS_RESET || qp->attr.qp_state == IBV_QPS_ERR)
		return;
	qp->attr.qp_state = IBV_QPS_ERR;
	device_qp_flush(dev, qp);
	if (qp->srq)
		device_async(qp->obj.context, IBV_EVENT_QP_LAST_WQE_REACHED, (uintptr_t)&qp->vqp);
}

static void drop_list(struct list_head *list)
{
	struct device_wqe *wqe;

	while ((wqe = list_pop(list, struct device_wqe, entry)))
		free(wqe);
}

void device_qp_clear(struct function_device *dev, struct device_qp *qp)
{
	drop_list(&qp->sends);
	drop_list(&qp->receives);
	if (qp->send_cq)
		device_cq_purge(dev, qp->send_cq, qp);
	if (qp->recv_cq)
		device_cq_purge(dev, qp->recv_cq, qp);
	qp->send_used = qp->recv_used = qp->unreported = 0;
}

/* ---- Creation ---- */

/* A queue pair that spreads packets has no queues of its own. */
static int check_hash(const struct ibv_qp_init_attr_ex *attr)
{
	const struct ibv_rx_hash_conf *hash = &attr->rx_hash_conf;

	if (attr->qp_type != IBV_QPT_RAW_PACKET && attr->qp_type != IBV_QPT_UD)
		return EOPNOTSUPP;
	if (attr->comp_mask != (IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_IND_TABLE |
				IBV_QP_INIT_ATTR_RX_HASH) ||
	    !attr->pd || !attr->rwq_ind_tbl || attr->send_cq || attr->recv_cq || attr->srq ||
	    attr->cap.max_send_wr || attr->cap.max_recv_wr)
		return EINVAL;
	if (hash->rx_hash_function != IBV_RX_HASH_FUNC_TOEPLITZ || !hash->rx_hash_key ||
	    hash->rx_hash_key_len != 40)
		return EINVAL;
	return 0;
}

static int check_init(struct function_device *dev, const struct ibv_qp_init_attr_ex *attr)
{
	const struct ibv_qp_cap *cap = &attr->cap;

	switch (attr->qp_type) {
	case IBV_QPT_RC:
	case IBV_QPT_UC:
	case IBV_QPT_UD:
	case IBV_QPT_RAW_PACKET:
		if (attr->comp_mask & IBV_QP_INIT_ATTR_IND_TABLE)
			return check_hash(attr);
		if (!attr->send_cq || !attr->recv_cq)
			return EINVAL;
		break;
	case IBV_QPT_XRC_SEND:
		if (!attr->send_cq)
			return EINVAL;
		break;
	case IBV_QPT_XRC_RECV:
		return attr->comp_mask & IBV_QP_INIT_ATTR_XRCD && attr->xrcd ? 0 : EINVAL;
	default:
		return EOPNOTSUPP;
	}
	if (!(attr->comp_mask & IBV_QP_INIT_ATTR_PD) || !attr->pd)
		return EINVAL;
	if (cap->max_send_wr > dev->opt.max_qp_wr || cap->max_recv_wr > dev->opt.max_qp_wr ||
	    cap->max_send_sge > dev->opt.max_sge || cap->max_recv_sge > dev->opt.max_sge ||
	    cap->max_inline_data > dev->opt.max_inline)
		return EINVAL;
	if (attr->comp_mask & ~(uint32_t)(IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_XRCD |
					  IBV_QP_INIT_ATTR_CREATE_FLAGS |
					  IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) ||
	    (attr->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS && attr->create_flags))
		return EOPNOTSUPP;
	return 0;
}

/* Takes the memory of the queues from the allocator of a parent domain, as mlx5 does. */
static int take_buffer(struct function_device *dev, struct device_qp *qp, struct ibv_pd *pd)
{
	const struct ibv_parent_domain_init_attr *attr = pd ? &to_device_pd(pd)->attr : NULL;

	if (!attr || !(attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS))
		return 0;
	void *buffer = attr->alloc(pd, attr->pd_context, DEVICE_BUFFER_SIZE, DEVICE_BUFFER_ALIGNMENT, DEVICE_BUFFER_TYPE);
	if (!buffer)
		return ENOMEM;
	qp->buffer_is_default = buffer == IBV_ALLOCATOR_USE_DEFAULT;
	qp->buffer = qp->buffer_is_default ? calloc(1, DEVICE_BUFFER_SIZE) : buffer;
	if (!qp->buffer)
		return ENOMEM;
	if ((uintptr_t)buffer % DEVICE_BUFFER_ALIGNMENT && !qp->buffer_is_default)
		device_violate(dev, "an allocator's memory is not aligned");
	for (size_t i = 0; i < DEVICE_BUFFER_SIZE; i++)
		if (((uint8_t *)qp->buffer)[i])
			device_violate(dev, "an allocator's memory is not zero");
	memset(qp->buffer, 0xb5, DEVICE_BUFFER_SIZE);
	return 0;
}

static void give_buffer(struct device_qp *qp)
{
	struct ibv_pd *pd = qp->vqp.qp.pd;

	if (qp->buffer_is_default)
		free(qp->buffer);
	else if (qp->buffer)
		to_device_pd(pd)->attr.free(pd, to_device_pd(pd)->attr.pd_context, qp->buffer, DEVICE_BUFFER_TYPE);
}

static struct ibv_qp *make(struct ibv_context *context, enum device_verb verb,
			   const struct ibv_qp_init_attr_ex *attr)
{
	struct function_device *dev = to_device(context);
	struct device_qp *qp = NULL;
	int error = device_admit(dev, verb);

	if (!error)
		error = check_init(dev, attr);
	if (!error) {
		qp = device_new(dev, context, DEVICE_OBJECT_QP, device_qp, dev->opt.max_qp);
		if (!qp)
			error = errno;
	}
	if (!error && (error = take_buffer(dev, qp, attr->pd)))
		device_free(dev, &qp->obj);
	if (!error) {
		struct ibv_qp *base = &qp->vqp.qp;

		base->context = context;
		base->qp_context = attr->qp_context;
		base->pd = attr->pd;
		base->send_cq = attr->send_cq;
		base->recv_cq = attr->recv_cq;
		base->srq = attr->srq;
		base->qp_type = attr->qp_type;
		base->qp_num = dev->next_qp_num++ & 0xffffff;
		base->handle = base->qp_num;
		pthread_mutex_init(&base->mutex, NULL);
		pthread_cond_init(&base->cond, NULL);
		list_head_init(&qp->sends);
		list_head_init(&qp->receives);
		list_head_init(&qp->batch);
		qp->sig_all = attr->sq_sig_all ? IBV_SEND_SIGNALED : 0;
		qp->attr.cap = attr->cap;
		memcpy(&qp->init_attr, attr, sizeof(qp->init_attr));
		qp->send_cq = attr->send_cq ? to_device_cq(attr->send_cq) : NULL;
		qp->recv_cq = attr->recv_cq ? to_device_cq(attr->recv_cq) : NULL;
		qp->srq = attr->srq ? to_device_srq(attr->srq) : NULL;
		if (qp->srq)
			qp->srq->lean_user = qp;
		qp->obj.uses[0] = attr->pd ? &to_device_pd(attr->pd)->obj : NULL;
		qp->obj.uses[1] = qp->send_cq ? &qp->send_cq->obj : NULL;
		qp->obj.uses[2] = qp->recv_cq ? &qp->recv_cq->obj : NULL;
		qp->obj.uses[3] = qp->srq ? &qp->srq->obj : NULL;
		if (attr->comp_mask & IBV_QP_INIT_ATTR_XRCD) {
			qp->vqp.xrcd = &to_device_xrcd(attr->xrcd)->vxrcd;
			qp->obj.uses[0] = &to_device_xrcd(attr->xrcd)->obj;
		}
		if (attr->comp_mask & IBV_QP_INIT_ATTR_IND_TABLE) {
			qp->table = to_device_table(attr->rwq_ind_tbl);
			qp->hash = attr->rx_hash_conf;
			memcpy(qp->hash_key, attr->rx_hash_conf.rx_hash_key,
			       attr->rx_hash_conf.rx_hash_key_len);
			qp->obj.uses[1] = &qp->table->obj;
		}
		if (attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) {
			qp->send_ops = attr->send_ops_flags;
			qp->vqp.comp_mask |= VERBS_QP_EX;
			if (dev->opt.kind == DEVICE_LEAN)
				device_lean_wr_functions(qp);
			else
				device_model_wr_functions(qp);
		}
	}
	device_unlock(context);
	if (!error)
		return &qp->vqp.qp;
	errno = error;
	return NULL;
}

static void grant(struct ibv_context *context, struct ibv_qp_cap *cap)
{
	uint32_t less = to_device(context)->grants_less;

	cap->max_send_wr -= less & 1;
	cap->max_recv_wr -= less >> 1 & 1;
	cap->max_send_sge -= less >> 2 & 1;
	cap->max_recv_sge -= less >> 3 & 1;
	cap->max_inline_data -= less >> 4 & 1;
}

static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp_init_attr_ex ex = {};

	memcpy(&ex, attr, sizeof(*attr));
	ex.comp_mask = IBV_QP_INIT_ATTR_PD;
	ex.pd = pd;
	device_begin(pd->context, DEVICE_create_qp, pd)->qp_init_attr = ex;
	grant(pd->context, &attr->cap);
	return make(pd->context, DEVICE_create_qp, &ex);
}

static struct ibv_qp *create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
	struct device_call *call = device_begin(context, DEVICE_create_qp_ex, context);

	call->qp_init_attr = *attr;
	if (attr->comp_mask & IBV_QP_INIT_ATTR_RX_HASH && attr->rx_hash_conf.rx_hash_key &&
	    attr->rx_hash_conf.rx_hash_key_len <= DEVICE_MAX_HASH_KEY)
		memcpy(call->hash_key, attr->rx_hash_conf.rx_hash_key,
		       attr->rx_hash_conf.rx_hash_key_len);
	struct ibv_qp *qp = make(context, DEVICE_create_qp_ex, attr);

	if (qp)
		grant(context, &attr->cap);
	return qp;
}

/* Another handle of a queue pair, in the domain that it belongs to. */
static struct ibv_qp *open_qp(struct ibv_context *context, struct ibv_qp_open_attr *attr)
{
	struct function_device *dev = to_device(context);
	struct device_qp *qp = NULL, *from;

	device_begin(context, DEVICE_open_qp, context)->open_attr = *attr;
	int error = device_admit(dev, DEVICE_open_qp);
	if (!error && (attr->comp_mask & ~(uint32_t)IBV_QP_OPEN_ATTR_CONTEXT) !=
			      (IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE))
		error = EINVAL;
	from = error ? NULL : device_find_qp(dev, attr->qp_num);
	if (!error && (!from || from->vqp.qp.qp_type != IBV_QPT_XRC_RECV ||
		       from->vqp.xrcd != &to_device_xrcd(attr->xrcd)->vxrcd || attr->qp_type != IBV_QPT_XRC_RECV))
		error = EINVAL;
	if (!error) {
		qp = device_new(dev, context, DEVICE_OBJECT_QP, device_qp, dev->opt.max_qp);
		if (!qp)
			error = errno;
	}
	if (!error) {
		struct ibv_qp *base = &qp->vqp.qp;

		base->context = context;
		base->qp_type = attr->qp_type;
		base->qp_num = base->handle = attr->qp_num;
		base->state = from->attr.qp_state;
		pthread_mutex_init(&base->mutex, NULL);
		pthread_cond_init(&base->cond, NULL);
		list_head_init(&qp->sends);
		list_head_init(&qp->receives);
		list_head_init(&qp->batch);
		qp->attr = from->attr;
		qp->init_attr = from->init_attr;
		qp->vqp.xrcd = from->vqp.xrcd;
		qp->obj.uses[0] = &to_device_xrcd(attr->xrcd)->obj;
	}
	return device_done(context, qp, error);
}

/* ---- States ---- */

static int check_av(struct function_device *dev, const struct ibv_ah_attr *av)
{
	if (av->port_num < 1 || av->port_num > dev->opt.ports)
		return EINVAL;
	if (dev->opt.link_layer == IBV_LINK_LAYER_ETHERNET && !av->is_global)
		return EINVAL;
	if (av->is_global && av->grh.sgid_index >= DEVICE_GIDS)
		return EINVAL;
	return 0;
}

static int check_values(struct function_device *dev, const struct ibv_qp_attr *attr, int mask)
{
	if (mask & IBV_QP_PORT && (attr->port_num < 1 || attr->port_num > dev->opt.ports))
		return EINVAL;
	if (mask & IBV_QP_PKEY_INDEX && attr->pkey_index >= 1)
		return EINVAL;
	if (mask & IBV_QP_PATH_MTU &&
	    (attr->path_mtu < IBV_MTU_256 || attr->path_mtu > dev->port[0].active_mtu))
		return EINVAL;
	if ((mask & IBV_QP_DEST_QPN && attr->dest_qp_num > 0xffffff) ||
	    (mask & IBV_QP_SQ_PSN && attr->sq_psn > 0xffffff) ||
	    (mask & IBV_QP_RQ_PSN && attr->rq_psn > 0xffffff))
		return EINVAL;
	if ((mask & IBV_QP_RETRY_CNT && attr->retry_cnt > 7) ||
	    (mask & IBV_QP_RNR_RETRY && attr->rnr_retry > 7) ||
	    (mask & IBV_QP_TIMEOUT && attr->timeout > 31) ||
	    (mask & IBV_QP_MIN_RNR_TIMER && attr->min_rnr_timer > 31))
		return EINVAL;
	if ((mask & IBV_QP_MAX_QP_RD_ATOMIC && attr->max_rd_atomic > dev->opt.max_rd_atomic) ||
	    (mask & IBV_QP_MAX_DEST_RD_ATOMIC && attr->max_dest_rd_atomic > dev->opt.max_rd_atomic))
		return EINVAL;
	if (mask & IBV_QP_AV && check_av(dev, &attr->ah_attr))
		return EINVAL;
	if (mask & IBV_QP_ALT_PATH && check_av(dev, &attr->alt_ah_attr))
		return EINVAL;
	return 0;
}

static void store(struct device_qp *qp, const struct ibv_qp_attr *from, int mask)
{
	struct ibv_qp_attr *to = &qp->attr;
#define STORE(flag, field)                                                                         \
	if (mask & IBV_QP_##flag)                                                                  \
	to->field = from->field
	STORE(STATE, qp_state);
	STORE(EN_SQD_ASYNC_NOTIFY, en_sqd_async_notify);
	STORE(ACCESS_FLAGS, qp_access_flags);
	STORE(PKEY_INDEX, pkey_index);
	STORE(PORT, port_num);
	STORE(QKEY, qkey);
	STORE(AV, ah_attr);
	STORE(PATH_MTU, path_mtu);
	STORE(TIMEOUT, timeout);
	STORE(RETRY_CNT, retry_cnt);
	STORE(RNR_RETRY, rnr_retry);
	STORE(RQ_PSN, rq_psn);
	STORE(MAX_QP_RD_ATOMIC, max_rd_atomic);
	STORE(MIN_RNR_TIMER, min_rnr_timer);
	STORE(SQ_PSN, sq_psn);
	STORE(MAX_DEST_RD_ATOMIC, max_dest_rd_atomic);
	STORE(PATH_MIG_STATE, path_mig_state);
	STORE(DEST_QPN, dest_qp_num);
	STORE(RATE_LIMIT, rate_limit);
	STORE(ALT_PATH, alt_ah_attr);
	STORE(ALT_PATH, alt_port_num);
	STORE(ALT_PATH, alt_pkey_index);
	STORE(ALT_PATH, alt_timeout);
#undef STORE
}

static int modify_qp(struct ibv_qp *ibqp, struct ibv_qp_attr *attr, int mask)
{
	struct function_device *dev = to_device(ibqp->context);
	struct device_qp *qp = to_device_qp(ibqp);
	struct device_call *call = device_begin(ibqp->context, DEVICE_modify_qp, ibqp);
	device_use(to_device(ibqp->context), &to_device_qp(ibqp)->obj);

	call->qp_attr = *attr;
	call->mask = mask;
	int error = device_admit(dev, DEVICE_modify_qp);
	/* As mlx5: it works from the beginning. */
	if (!error && qp->table)
		error = EOPNOTSUPP;
	if (!error && mask & IBV_QP_STATE && attr->qp_state == IBV_QPS_ERR)
		error = device_fault(dev, DEVICE_modify_to_err);
	if (!error && mask & IBV_QP_STATE && attr->qp_state == IBV_QPS_RESET)
		error = device_fault(dev, DEVICE_modify_to_reset);
	if (!error && (mask & IBV_QP_CAP || !device_qp_transition_ok(qp, attr, mask)))
		error = EINVAL;
	if (!error && mask & IBV_QP_CUR_STATE && attr->cur_qp_state != qp->attr.qp_state)
		error = EINVAL;
	if (!error)
		error = check_values(dev, attr, mask);
	if (!error) {
		if (mask & IBV_QP_STATE && attr->qp_state == IBV_QPS_ERR)
			device_qp_to_error(dev, qp);
		store(qp, attr, mask);
		if (mask & IBV_QP_STATE && attr->qp_state == IBV_QPS_RESET) {
			struct ibv_qp_cap cap = qp->attr.cap;

			device_qp_clear(dev, qp);
			qp->attr = (struct ibv_qp_attr){ .cap = cap };
		}
		if (mask & IBV_QP_SQ_PSN)
			qp->send_psn = attr->sq_psn;
		if (mask & IBV_QP_RQ_PSN)
			qp->recv_psn = attr->rq_psn;
		/* A model's requests are executed in one go: the queue is drained at once. */
		if (mask & IBV_QP_STATE && attr->qp_state == IBV_QPS_SQD &&
		    qp->attr.en_sqd_async_notify)
			device_async(ibqp->context, IBV_EVENT_SQ_DRAINED, (uintptr_t)&qp->vqp);
	}
	device_unlock(ibqp->context);
	return error;
}

static int query_qp(struct ibv_qp *ibqp, struct ibv_qp_attr *attr, int mask,
		    struct ibv_qp_init_attr *init)
{
	struct device_qp *qp = to_device_qp(ibqp);

	device_begin(ibqp->context, DEVICE_query_qp, ibqp)->mask = mask;
	device_use(to_device(ibqp->context), &to_device_qp(ibqp)->obj);
	int error = device_admit(to_device(ibqp->context), DEVICE_query_qp);
	if (!error) {
		*attr = qp->attr;
		attr->cur_qp_state = qp->attr.qp_state;
		*init = qp->init_attr;
		init->cap = qp->attr.cap;
	}
	device_unlock(ibqp->context);
	return error;
}

static int destroy_qp(struct ibv_qp *ibqp)
{
	struct ibv_context *context = ibqp->context;
	struct function_device *dev = to_device(context);
	struct device_qp *qp = to_device_qp(ibqp);

	device_begin(context, DEVICE_destroy_qp, ibqp);
	int error = device_destroy(dev, DEVICE_destroy_qp, &qp->obj);
	/* A multicast attachment holds the queue pair. */
	if (!error && qp->mcast_count)
		error = EBUSY;
	if (!error) {
		if (qp->batch_open)
			device_violate(dev, "destroy_qp with an open batch");
		drop_list(&qp->batch);
		device_qp_clear(dev, qp);
		qp->attr.qp_state = IBV_QPS_RESET;
		if (qp->srq && qp->srq->lean_user == qp)
			qp->srq->lean_user = NULL;
		device_pipe_remove(context->async_fd, sizeof(struct ib_uverbs_async_event_desc),
			       offsetof(struct ib_uverbs_async_event_desc, element),
			       (uintptr_t)ibqp);
	}
	device_unlock(context);
	if (error)
		return error;
	if (!dev->removed)
		device_wait_acks(&ibqp->mutex, &ibqp->cond, &ibqp->events_completed,
				 &qp->events_reported, "ibv_destroy_qp");
	pthread_mutex_lock(&dev->lock);
	give_buffer(qp);
	device_free(dev, &qp->obj);
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

/* ---- Multicast, ECE ---- */

static int attach_mcast(struct ibv_qp *ibqp, const union ibv_gid *gid, uint16_t lid)
{
	struct function_device *dev = to_device(ibqp->context);
	struct device_qp *qp = to_device_qp(ibqp);
	struct device_call *call = device_begin(ibqp->context, DEVICE_attach_mcast, ibqp);
	device_use(to_device(ibqp->context), &to_device_qp(ibqp)->obj);

	call->gid = *gid;
	call->lid = lid;
	int error = device_admit(dev, DEVICE_attach_mcast);
	if (!error && (ibqp->qp_type != IBV_QPT_UD || gid->raw[0] != 0xff))
		error = EINVAL;
	if (!error && qp->mcast_count == ARRAY_SIZE(qp->mcast))
		error = ENOMEM;
	if (!error)
		qp->mcast[qp->mcast_count++] = *gid;
	device_unlock(ibqp->context);
	return error;
}

static int detach_mcast(struct ibv_qp *ibqp, const union ibv_gid *gid, uint16_t lid)
{
	struct function_device *dev = to_device(ibqp->context);
	struct device_qp *qp = to_device_qp(ibqp);
	struct device_call *call = device_begin(ibqp->context, DEVICE_detach_mcast, ibqp);
	device_use(to_device(ibqp->context), &to_device_qp(ibqp)->obj);

	call->gid = *gid;
	call->lid = lid;
	int error = device_admit(dev, DEVICE_detach_mcast);
	if (!error) {
		error = EINVAL;
		for (uint32_t i = 0; error && i < qp->mcast_count; i++) {
			if (!memcmp(&qp->mcast[i], gid, sizeof(*gid))) {
				qp->mcast[i] = qp->mcast[--qp->mcast_count];
				error = 0;
			}
		}
	}
	device_unlock(ibqp->context);
	return error;
}

static int set_ece(struct ibv_qp *ibqp, struct ibv_ece *ece)
{
	device_begin(ibqp->context, DEVICE_set_ece, ibqp)->ece = *ece;
	int error = device_admit(to_device(ibqp->context), DEVICE_set_ece);
	if (!error && ece->comp_mask)
		error = EINVAL;
	if (!error)
		to_device_qp(ibqp)->ece = *ece;
	device_unlock(ibqp->context);
	return error;
}

static int query_ece(struct ibv_qp *ibqp, struct ibv_ece *ece)
{
	device_begin(ibqp->context, DEVICE_query_ece, ibqp);
	int error = device_admit(to_device(ibqp->context), DEVICE_query_ece);
	if (!error)
		*ece = to_device_qp(ibqp)->ece;
	device_unlock(ibqp->context);
	return error;
}

const struct verbs_context_ops device_qp_ops = {
	.attach_mcast = attach_mcast,
	.create_qp = create_qp,
	.create_qp_ex = create_qp_ex,
	.destroy_qp = destroy_qp,
	.detach_mcast = detach_mcast,
	.modify_qp = modify_qp,
	.open_qp = open_qp,
	.query_ece = query_ece,
	.query_qp = query_qp,
	.set_ece = set_ece,
};
