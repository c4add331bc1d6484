/* How the model reaches memory: keys, bounds, access, windows. */
#include "internal.h"

static struct device_mr *find_mr(struct function_device *dev, uint32_t key)
{
	struct device_object *obj;

	if (key)
		list_for_each(&dev->objects, obj, entry)
			if (obj->kind == DEVICE_OBJECT_MR &&
			    container_of(obj, struct device_mr, obj)->key == key)
				return container_of(obj, struct device_mr, obj);
	return NULL;
}

static const struct device_pd *pd_of(const struct device_object *obj)
{
	return container_of(obj->uses[0], struct device_pd, obj)->real;
}

static uint8_t *at(const struct device_mr *mr, uint64_t addr, uint64_t length)
{
	if (addr < mr->iova || addr - mr->iova > mr->length ||
	    length > mr->length - (addr - mr->iova))
		return NULL;
	return mr->memory + (addr - mr->iova);
}

uint8_t *device_local(struct function_device *dev, struct device_pd *pd, uint32_t lkey,
		      uint64_t addr, uint64_t length, unsigned int access, bool *zero)
{
	const struct device_mr *mr = find_mr(dev, lkey);

	*zero = false;
	if (!mr || pd_of(&mr->obj) != pd->real || (mr->access & access) != access)
		return NULL;
	if (mr->vmr.mr_type == IBV_MR_TYPE_NULL_MR) {
		*zero = true;
		return NULL;
	}
	return at(mr, addr, length);
}

struct device_mw *device_find_rkey_window(struct function_device *dev, uint32_t rkey)
{
	struct device_object *obj;

	list_for_each(&dev->objects, obj, entry)
		if (obj->kind == DEVICE_OBJECT_MW &&
		    container_of(obj, struct device_mw, obj)->rkey == rkey)
			return container_of(obj, struct device_mw, obj);
	return NULL;
}

static uint8_t *through_window(const struct device_mw *mw, const struct device_qp *peer,
			       uint64_t addr, uint64_t length, unsigned int access)
{
	if (!mw->mr || pd_of(&mw->obj) != pd_of(&peer->obj) || (mw->access & access) != access)
		return NULL;
	/* Type 2 windows belong to the queue pair that bound them. */
	if (mw->mw.type == IBV_MW_TYPE_2 && mw->qp_num != peer->vqp.qp.qp_num)
		return NULL;
	uint64_t base = mw->access & IBV_ACCESS_ZERO_BASED ? 0 : mw->addr;
	if (addr < base || addr - base > mw->length || length > mw->length - (addr - base))
		return NULL;
	return at(mw->mr, mw->addr + (addr - base), length);
}

uint8_t *device_remote(struct function_device *dev, struct device_qp *peer, uint32_t rkey,
		       uint64_t addr, uint64_t length, unsigned int access,
		       enum ibv_wc_status *status)
{
	const struct device_mr *mr = find_mr(dev, rkey);
	const struct device_mw *mw = mr ? NULL : device_find_rkey_window(dev, rkey);
	uint8_t *memory = NULL;

	if ((peer->attr.qp_access_flags & access) != access) {
		*status = IBV_WC_REM_INV_REQ_ERR;
		return NULL;
	}
	if (mw)
		memory = through_window(mw, peer, addr, length, access);
	else if (mr && pd_of(&mr->obj) == pd_of(&peer->obj) && (mr->access & access) == access)
		memory = at(mr, addr, length);
	if (!memory)
		*status = IBV_WC_REM_ACCESS_ERR;
	return memory;
}

uint64_t device_length(const struct device_wqe *wqe)
{
	uint64_t length = wqe->inline_length;

	for (uint32_t i = 0; i < wqe->num_sge; i++)
		length += wqe->sge[i].length;
	return length;
}

/* One element of a list; false: not allowed. *memory NULL then means zeros. */
static bool element(struct function_device *dev, struct device_pd *pd, const struct device_wqe *wqe,
		    uint32_t i, unsigned int access, uint8_t **memory)
{
	const struct ibv_sge *sge = &wqe->sge[i];
	bool zero;

	*memory = device_local(dev, pd, sge->lkey, sge->addr, sge->length, access, &zero);
	if (!*memory && !zero && dev->stale_translation)
		*memory = wqe->memory[i];
	return *memory || zero;
}

bool device_gather(struct function_device *dev, struct device_pd *pd, const struct device_wqe *wqe,
		   uint8_t *data)
{
	uint8_t *memory;

	memcpy(data, wqe->inline_data, wqe->inline_length);
	for (uint32_t i = 0; i < wqe->num_sge; i++) {
		if (!wqe->sge[i].length)
			continue;
		if (!element(dev, pd, wqe, i, 0, &memory))
			return false;
		if (memory)
			memcpy(data, memory, wqe->sge[i].length);
		else
			memset(data, 0, wqe->sge[i].length);
		data += wqe->sge[i].length;
	}
	return true;
}

bool device_scatter(struct function_device *dev, struct device_pd *pd, const struct device_wqe *wqe,
		const uint8_t *data, uint64_t length)
{
	uint8_t *memory;

	for (uint32_t i = 0; i < wqe->num_sge && length; i++) {
		uint64_t part = wqe->sge[i].length < length ? wqe->sge[i].length : length;

		if (!part)
			continue;
		if (!element(dev, pd, wqe, i, IBV_ACCESS_LOCAL_WRITE, &memory))
			return false;
		if (memory)
			memcpy(memory, data, part);
		data += part;
		length -= part;
	}
	return !length;
}

/* ---- Windows ---- */

void device_unbind(struct device_mw *mw)
{
	mw->mr = NULL;
	mw->obj.uses[1] = NULL;
}

bool device_bind(struct function_device *dev, struct device_qp *qp, const struct ibv_send_wr *wr)
{
	const struct ibv_mw_bind_info *info = &wr->bind_mw.bind_info;
	struct device_object *obj;
	struct device_mw *mw = NULL;
	struct device_mr *mr = NULL;

	list_for_each(&dev->objects, obj, entry) {
		if (obj->kind == DEVICE_OBJECT_MW &&
		    &container_of(obj, struct device_mw, obj)->mw == wr->bind_mw.mw)
			mw = container_of(obj, struct device_mw, obj);
		if (obj->kind == DEVICE_OBJECT_MR &&
		    &container_of(obj, struct device_mr, obj)->vmr.ibv_mr == info->mr)
			mr = container_of(obj, struct device_mr, obj);
	}
	if (!mw || pd_of(&mw->obj) != pd_of(&qp->obj))
		return false;
	if (info->length) {
		unsigned int writes = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

		if (!mr || pd_of(&mr->obj) != pd_of(&mw->obj) ||
		    !(mr->access & IBV_ACCESS_MW_BIND) ||
		    (info->mw_access_flags & writes && !(mr->access & IBV_ACCESS_LOCAL_WRITE)) ||
		    !at(mr, info->addr, info->length))
			return false;
	} else {
		mr = NULL;
	}
	/* A bound type 2 window has to be invalidated first. */
	if (mw->mw.type == IBV_MW_TYPE_2 && (mw->mr || !mr))
		return false;
	device_unbind(mw);
	mw->rkey = (mw->rkey & ~0xffu) | (wr->bind_mw.rkey & 0xff);
	mw->qp_num = qp->vqp.qp.qp_num;
	if (mr) {
		mw->mr = mr;
		mw->addr = info->addr;
		mw->length = info->length;
		mw->access = info->mw_access_flags;
		mw->obj.uses[1] = &mr->obj;
	}
	return true;
}
