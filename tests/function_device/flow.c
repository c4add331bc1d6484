/* Flows, what they count with, and the actions that they take. */
#include "internal.h"

/* Ends a verb that destroys. */
static int destroy(struct ibv_context *context, enum device_verb verb, struct device_object *obj)
{
	struct function_device *dev = to_device(context);

	device_begin(context, verb, (uint8_t *)obj->base);
	int error = device_destroy(dev, verb, obj);
	if (!error)
		device_free(dev, obj);
	device_unlock(context);
	return error;
}

/* ---- Flows ---- */

/* Goes through the specifications as libibverbs does, and finds what the flow refers to. */
static int take_specs(struct device_flow *flow, const struct ibv_flow_attr *attr)
{
	const uint8_t *at = (const uint8_t *)(attr + 1), *end = (const uint8_t *)attr + attr->size;
	size_t used = 1;

	if (attr->size < sizeof(*attr) || attr->size - sizeof(*attr) > DEVICE_MAX_FLOW)
		return EINVAL;
	memcpy(flow->specs, at, end - at);
	for (int i = 0; i < attr->num_of_specs; i++) {
		struct ibv_flow_spec spec = {};

		if (end - at < (ptrdiff_t)sizeof(spec.hdr))
			return EINVAL;
		memcpy(&spec, at, sizeof(spec.hdr));
		if (spec.hdr.size < sizeof(spec.hdr) || spec.hdr.size > sizeof(spec) ||
		    spec.hdr.size > end - at)
			return EINVAL;
		memcpy(&spec, at, spec.hdr.size);
		at += spec.hdr.size;
		switch ((int)spec.hdr.type) {
		case IBV_FLOW_SPEC_ACTION_COUNT:
			if (flow->counters || !to_device_counters(spec.flow_count.counters)->point_count)
				return EINVAL;
			flow->counters = to_device_counters(spec.flow_count.counters);
			flow->obj.uses[used++] = &flow->counters->obj;
			break;
		case IBV_FLOW_SPEC_ACTION_HANDLE:
			if (used == DEVICE_MAX_TABLE)
				return EINVAL;
			flow->obj.uses[used++] = &to_device_action(spec.handle.action)->obj;
			break;
		case IBV_FLOW_SPEC_ACTION_DROP:
			flow->drop = true;
			break;
		default:
			break;
		}
	}
	return at == end ? 0 : EINVAL;
}

static struct ibv_flow *create_flow(struct ibv_qp *qp, struct ibv_flow_attr *attr)
{
	struct ibv_context *context = qp->context;
	struct function_device *dev = to_device(context);
	struct device_flow *flow = NULL;
	struct device_call *call = device_begin(context, DEVICE_create_flow, qp);

	device_use(dev, &to_device_qp(qp)->obj);
	call->flow_attr = *attr;
	if (attr->size >= sizeof(*attr) && attr->size - sizeof(*attr) <= DEVICE_MAX_FLOW)
		memcpy(call->flow_specs, attr + 1, attr->size - sizeof(*attr));
	int error = device_admit(dev, DEVICE_create_flow);
	if (!error && (attr->comp_mask || attr->port < 1 || attr->port > dev->opt.ports))
		error = EINVAL;
	if (!error && qp->qp_type != IBV_QPT_RAW_PACKET && qp->qp_type != IBV_QPT_UD)
		error = EINVAL;
	if (!error) {
		flow = device_new(dev, context, DEVICE_OBJECT_FLOW, device_flow, 0);
		if (!flow)
			error = errno;
	}
	if (!error) {
		flow->flow.context = context;
		flow->flow.handle = dev->next_key++;
		flow->attr = *attr;
		flow->obj.uses[0] = &to_device_qp(qp)->obj;
		error = take_specs(flow, attr);
		if (error)
			device_free(dev, &flow->obj);
	}
	return device_done(context, flow, error);
}

static int destroy_flow(struct ibv_flow *flow)
{
	return destroy(flow->context, DEVICE_destroy_flow, &to_device_flow(flow)->obj);
}

/* ---- Actions ---- */

static void copy_esp(struct device_esp *to, const struct ibv_flow_action_esp_attr *from)
{
	if (from->esp_attr) {
		to->has_attr = true;
		to->spi = from->esp_attr->spi;
		to->seq = from->esp_attr->seq;
		to->tfc_pad = from->esp_attr->tfc_pad;
		to->flags = from->esp_attr->flags;
		to->hard_limit_pkts = from->esp_attr->hard_limit_pkts;
	}
	if (from->keymat_ptr && from->keymat_proto == IB_UVERBS_FLOW_ACTION_ESP_KEYMAT_AES_GCM &&
	    from->keymat_len == sizeof(struct ib_uverbs_flow_action_esp_keymat_aes_gcm)) {
		const struct ib_uverbs_flow_action_esp_keymat_aes_gcm *keymat = from->keymat_ptr;

		to->has_keymat = true;
		to->iv = keymat->iv;
		to->iv_algo = keymat->iv_algo;
		to->salt = keymat->salt;
		to->icv_len = keymat->icv_len;
		to->key_len = keymat->key_len;
		memcpy(to->aes_key, keymat->aes_key, sizeof(to->aes_key));
	}
	to->keymat_proto = from->keymat_proto;
	to->keymat_len = from->keymat_len;
	if (from->replay_ptr && from->replay_proto == IB_UVERBS_FLOW_ACTION_ESP_REPLAY_BMP &&
	    from->replay_len == sizeof(struct ib_uverbs_flow_action_esp_replay_bmp)) {
		const struct ib_uverbs_flow_action_esp_replay_bmp *replay = from->replay_ptr;

		to->has_replay = true;
		to->replay_size = replay->size;
	}
	to->replay_proto = from->replay_proto;
	to->replay_len = from->replay_len;
	if (from->esp_encap) {
		to->encap_type = from->esp_encap->type;
		to->encap_len = from->esp_encap->len;
		to->encap_next = from->esp_encap->next_ptr;
		if (to->encap_len <= sizeof(to->encap))
			memcpy(to->encap, from->esp_encap->val_ptr, to->encap_len);
	}
	to->comp_mask = from->comp_mask;
	to->esn = from->esn;
}

static struct ibv_flow_action *create_esp(struct ibv_context *context,
					  struct ibv_flow_action_esp_attr *attr)
{
	struct function_device *dev = to_device(context);
	struct device_action *action = NULL;
	struct device_call *call = device_begin(context, DEVICE_create_flow_action_esp, context);

	copy_esp(&call->esp, attr);
	int error = device_admit(dev, DEVICE_create_flow_action_esp);
	/* mlx5 needs the keys; it knows no other protocol. */
	if (!error && !call->esp.has_keymat)
		error = EINVAL;
	if (!error) {
		action = device_new(dev, context, DEVICE_OBJECT_ACTION, device_action, 0);
		if (action)
			action->action.context = context;
		else
			error = errno;
	}
	return device_done(context, action, error);
}

static int modify_esp(struct ibv_flow_action *action, struct ibv_flow_action_esp_attr *attr)
{
	struct device_call *call = device_begin(action->context, DEVICE_modify_flow_action_esp, action);

	copy_esp(&call->esp, attr);
	device_use(to_device(action->context), &to_device_action(action)->obj);
	int error = device_admit(to_device(action->context), DEVICE_modify_flow_action_esp);
	device_unlock(action->context);
	return error;
}

static int destroy_action(struct ibv_flow_action *action)
{
	return destroy(action->context, DEVICE_destroy_flow_action, &to_device_action(action)->obj);
}

/* ---- Counters ---- */

static struct ibv_counters *create_counters(struct ibv_context *context,
					    struct ibv_counters_init_attr *attr)
{
	struct function_device *dev = to_device(context);
	struct device_counters *counters = NULL;

	device_begin(context, DEVICE_create_counters, context)->mask = attr->comp_mask;
	int error = device_admit(dev, DEVICE_create_counters);
	if (!error && attr->comp_mask)
		error = EOPNOTSUPP;
	if (!error) {
		counters = device_new(dev, context, DEVICE_OBJECT_COUNTERS, device_counters, 0);
		if (counters)
			counters->counters.context = context;
		else
			error = errno;
	}
	return device_done(context, counters, error);
}

static int attach(struct ibv_counters *ibcounters, struct ibv_counter_attach_attr *attr,
		  struct ibv_flow *flow)
{
	struct function_device *dev = to_device(ibcounters->context);
	struct device_counters *counters = to_device_counters(ibcounters);
	struct device_call *call = device_begin(ibcounters->context, DEVICE_attach_counters_point_flow, ibcounters);

	call->counter_attr = *attr;
	call->flow = flow;
	device_use(dev, &counters->obj);
	int error = device_admit(dev, DEVICE_attach_counters_point_flow);
	/* As mlx5: before the flow is made, and only then. */
	if (!error && flow)
		error = ENOTSUP;
	if (!error && (attr->comp_mask || attr->counter_desc > IBV_COUNTER_BYTES))
		error = EOPNOTSUPP;
	if (!error)
		error = device_busy(dev, &counters->obj);
	if (!error && (attr->index >= DEVICE_MAX_COUNTERS || counters->point_count == DEVICE_MAX_COUNTERS))
		error = EINVAL;
	if (!error)
		counters->points[counters->point_count++] =
			(struct device_point){ attr->counter_desc, attr->index };
	device_unlock(ibcounters->context);
	return error;
}

static int destroy_counters(struct ibv_counters *counters)
{
	return destroy(counters->context, DEVICE_destroy_counters, &to_device_counters(counters)->obj);
}

static int read_counters(struct ibv_counters *counters, uint64_t *values, uint32_t count,
			 uint32_t flags)
{
	struct device_call *call = device_begin(counters->context, DEVICE_read_counters, counters);

	call->counters_read = count;
	call->read_flags = flags;
	device_use(to_device(counters->context), &to_device_counters(counters)->obj);
	int error = device_admit(to_device(counters->context), DEVICE_read_counters);
	if (!error && (!count || count > DEVICE_MAX_COUNTERS))
		error = EINVAL;
	if (!error)
		memcpy(values, to_device_counters(counters)->values, count * sizeof(*values));
	device_unlock(counters->context);
	return error;
}

const struct verbs_context_ops device_flow_ops = {
	.attach_counters_point_flow = attach,
	.create_counters = create_counters,
	.create_flow = create_flow,
	.create_flow_action_esp = create_esp,
	.destroy_counters = destroy_counters,
	.destroy_flow = destroy_flow,
	.destroy_flow_action = destroy_action,
	.modify_flow_action_esp = modify_esp,
	.read_counters = read_counters,
};
