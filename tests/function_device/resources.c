/* Protection domains, device memory, windows, address handles: what queue pairs refer to. */
#include "internal.h"

/* Ends a verb that destroys. */
static int destroy(struct ibv_context *context, enum device_verb verb, struct device_object *obj)
{
	struct function_device *dev = to_device(context);
	int error = device_destroy(dev, verb, obj);

	if (!error)
		device_free(dev, obj);
	device_unlock(context);
	return error;
}

/* ---- Domains ---- */

static struct ibv_pd *alloc_pd(struct ibv_context *context)
{
	struct function_device *dev = to_device(context);
	struct device_pd *pd = NULL;

	device_begin(context, DEVICE_alloc_pd, context);
	int error = device_admit(dev, DEVICE_alloc_pd);
	if (!error) {
		pd = device_new(dev, context, DEVICE_OBJECT_PD, device_pd, dev->opt.max_pd);
		if (pd) {
			pd->real = pd;
			pd->pd.handle = device_next_key(dev);
		} else {
			error = errno;
		}
	}
	return device_done(context, pd, error);
}

static struct ibv_pd *import_pd(struct ibv_context *context, uint32_t handle)
{
	struct function_device *dev = to_device(context);
	struct device_object *obj;
	struct device_pd *pd = NULL, *from = NULL;

	device_begin(context, DEVICE_import_pd, context)->mask = (int)handle;
	int error = device_admit(dev, DEVICE_import_pd);
	list_for_each(&dev->objects, obj, entry)
		if (obj->kind == DEVICE_OBJECT_PD &&
		    container_of(obj, struct device_pd, obj)->pd.handle == handle)
			from = container_of(obj, struct device_pd, obj);
	if (!error && !from)
		error = ENOENT;
	if (!error) {
		pd = device_new(dev, context, DEVICE_OBJECT_PD, device_pd, dev->opt.max_pd);
		if (pd) {
			pd->real = from->real;
			pd->pd.context = context;
			pd->pd.handle = handle;
		} else {
			error = errno;
		}
	}
	return device_done(context, pd, error);
}

static void unimport_pd(struct ibv_pd *pd)
{
	struct ibv_context *context = pd->context;

	device_begin(context, DEVICE_unimport_pd, pd);
	if (device_busy(to_device(context), &to_device_pd(pd)->obj))
		device_violate(to_device(context), "a domain unimported that was in use");
	device_free(to_device(context), &to_device_pd(pd)->obj);
	device_unlock(context);
}

static int dealloc_pd(struct ibv_pd *pd)
{
	device_begin(pd->context, DEVICE_dealloc_pd, pd);
	return destroy(pd->context, DEVICE_dealloc_pd, &to_device_pd(pd)->obj);
}

static struct ibv_td *alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr)
{
	struct function_device *dev = to_device(context);
	struct device_thread_domain *td = NULL;

	device_begin(context, DEVICE_alloc_td, context)->mask = attr->comp_mask;
	int error = device_admit(dev, DEVICE_alloc_td);
	if (!error && attr->comp_mask)
		error = EINVAL;
	if (!error) {
		td = device_new(dev, context, DEVICE_OBJECT_TD, device_thread_domain, 0);
		if (td)
			td->td.context = context;
		else
			error = errno;
	}
	return device_done(context, td, error);
}

static int dealloc_td(struct ibv_td *td)
{
	device_begin(td->context, DEVICE_dealloc_td, td);
	return destroy(td->context, DEVICE_dealloc_td, &to_device_thread_domain(td)->obj);
}

static struct ibv_pd *alloc_parent_domain(struct ibv_context *context,
					  struct ibv_parent_domain_init_attr *attr)
{
	struct function_device *dev = to_device(context);
	struct device_pd *parent = NULL;

	device_begin(context, DEVICE_alloc_parent_domain, context)->parent_domain_attr = *attr;
	int error = device_admit(dev, DEVICE_alloc_parent_domain);
	if (!error && ibv_check_alloc_parent_domain(attr))
		error = errno;
	if (!error) {
		parent = device_new(dev, context, DEVICE_OBJECT_PD, device_pd, dev->opt.max_pd);
		if (parent) {
			ibv_initialize_parent_domain(&parent->pd, attr->pd);
			parent->attr = *attr;
			parent->real = to_device_pd(attr->pd)->real;
			parent->obj.uses[0] = &to_device_pd(attr->pd)->obj;
			if (attr->td)
				parent->obj.uses[1] = &to_device_thread_domain(attr->td)->obj;
		} else {
			error = errno;
		}
	}
	return device_done(context, parent, error);
}

static struct ibv_xrcd *open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *attr)
{
	struct function_device *dev = to_device(context);
	struct device_xrcd *xrcd = NULL;

	device_begin(context, DEVICE_open_xrcd, context)->xrcd_attr = *attr;
	int error = device_admit(dev, DEVICE_open_xrcd);
	if (!error && attr->comp_mask != (IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS))
		error = EINVAL;
	if (!error) {
		xrcd = device_new(dev, context, DEVICE_OBJECT_XRCD, device_xrcd, 0);
		if (xrcd)
			xrcd->vxrcd.xrcd.context = context;
		else
			error = errno;
	}
	return device_done(context, xrcd, error);
}

static int close_xrcd(struct ibv_xrcd *xrcd)
{
	device_begin(xrcd->context, DEVICE_close_xrcd, xrcd);
	return destroy(xrcd->context, DEVICE_close_xrcd, &to_device_xrcd(xrcd)->obj);
}

/* ---- Device memory ---- */

static int memcpy_to_dm(struct ibv_dm *ibdm, uint64_t offset, const void *from, size_t length)
{
	struct device_dm *dm = to_device_dm(ibdm);

	if (offset > dm->length || length > dm->length - offset)
		return EFAULT;
	memcpy(dm->memory + offset, from, length);
	return 0;
}

static int memcpy_from_dm(void *to, struct ibv_dm *ibdm, uint64_t offset, size_t length)
{
	struct device_dm *dm = to_device_dm(ibdm);

	if (offset > dm->length || length > dm->length - offset)
		return EFAULT;
	memcpy(to, dm->memory + offset, length);
	return 0;
}

static struct ibv_dm *alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *attr)
{
	struct function_device *dev = to_device(context);
	struct device_dm *dm = NULL;

	device_begin(context, DEVICE_alloc_dm, context)->dm_attr = *attr;
	int error = device_admit(dev, DEVICE_alloc_dm);
	if (!error && (attr->comp_mask || !attr->length))
		error = EINVAL;
	if (!error && attr->length > 1 << 20)
		error = ENOMEM;
	if (!error) {
		dm = device_new(dev, context, DEVICE_OBJECT_DM, device_dm, 0);
		if (dm) {
			dm->length = attr->length;
			dm->memory = calloc(1, attr->length);
			dm->vdm.dm.context = context;
			dm->vdm.dm.comp_mask = IBV_DM_MASK_HANDLE;
			dm->vdm.dm.handle = device_next_key(dev);
			dm->vdm.dm.memcpy_to_dm = memcpy_to_dm;
			dm->vdm.dm.memcpy_from_dm = memcpy_from_dm;
		} else {
			error = errno;
		}
	}
	return device_done(context, dm, error);
}

static struct ibv_dm *import_dm(struct ibv_context *context, uint32_t handle)
{
	struct function_device *dev = to_device(context);
	struct device_object *obj;
	struct device_dm *dm = NULL, *from = NULL;

	device_begin(context, DEVICE_import_dm, context)->mask = (int)handle;
	int error = device_admit(dev, DEVICE_import_dm);
	list_for_each(&dev->objects, obj, entry)
		if (obj->kind == DEVICE_OBJECT_DM &&
		    container_of(obj, struct device_dm, obj)->vdm.dm.handle == handle)
			from = container_of(obj, struct device_dm, obj);
	if (!error && !from)
		error = ENOENT;
	if (!error) {
		dm = device_new(dev, context, DEVICE_OBJECT_DM, device_dm, 0);
		if (dm) {
			dm->length = from->length;
			dm->memory = from->memory;
			dm->vdm.dm = from->vdm.dm;
			dm->vdm.dm.context = context;
		} else {
			error = errno;
		}
	}
	return device_done(context, dm, error);
}

static void unimport_dm(struct ibv_dm *ibdm)
{
	struct ibv_context *context = ibdm->context;

	device_begin(context, DEVICE_unimport_dm, ibdm);
	device_free(to_device(context), &to_device_dm(ibdm)->obj);
	device_unlock(context);
}

static int free_dm(struct ibv_dm *ibdm)
{
	struct device_dm *dm = to_device_dm(ibdm);
	uint8_t *memory = dm->memory;

	device_begin(ibdm->context, DEVICE_free_dm, ibdm);
	int error = destroy(ibdm->context, DEVICE_free_dm, &dm->obj);
	if (!error)
		free(memory);
	return error;
}

/* ---- Memory windows ---- */

static struct ibv_mw *alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
	struct function_device *dev = to_device(pd->context);
	struct device_mw *mw = NULL;

	device_begin(pd->context, DEVICE_alloc_mw, pd)->mw_type = type;
	int error = device_admit(dev, DEVICE_alloc_mw);
	if (!error && type != IBV_MW_TYPE_1 && type != IBV_MW_TYPE_2)
		error = EINVAL;
	if (!error) {
		mw = device_new(dev, pd->context, DEVICE_OBJECT_MW, device_mw, dev->opt.max_mw);
		if (mw) {
			mw->mw.context = pd->context;
			mw->mw.pd = pd;
			mw->mw.type = type;
			mw->rkey = mw->mw.rkey = mw->mw.handle = device_next_key(dev);
			mw->obj.uses[0] = &to_device_pd(pd)->obj;
		} else {
			error = errno;
		}
	}
	return device_done(pd->context, mw, error);
}

static int dealloc_mw(struct ibv_mw *mw)
{
	device_begin(mw->context, DEVICE_dealloc_mw, mw);
	return destroy(mw->context, DEVICE_dealloc_mw, &to_device_mw(mw)->obj);
}

static int bind_mw(struct ibv_qp *ibqp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	struct function_device *dev = to_device(ibqp->context);

	device_begin(ibqp->context, DEVICE_bind_mw, mw)->mw_bind = *bind;
	int error = device_admit(dev, DEVICE_bind_mw);
	if (!error)
		error = device_post_bind(to_device_qp(ibqp), to_device_mw(mw), bind);
	device_unlock(ibqp->context);
	return error;
}

/* ---- Address handles ---- */

static struct ibv_ah *create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	struct function_device *dev = to_device(pd->context);
	struct device_ah *ah = NULL;

	device_begin(pd->context, DEVICE_create_ah, pd)->ah_attr = *attr;
	int error = device_admit(dev, DEVICE_create_ah);
	if (!error && (attr->port_num < 1 || attr->port_num > dev->opt.ports))
		error = EINVAL;
	/* RoCE has no LIDs: without a global route there is no address. */
	if (!error && dev->opt.link_layer == IBV_LINK_LAYER_ETHERNET && !attr->is_global)
		error = EINVAL;
	if (!error && attr->is_global && attr->grh.sgid_index >= DEVICE_GIDS)
		error = EINVAL;
	if (!error) {
		ah = device_new(dev, pd->context, DEVICE_OBJECT_AH, device_ah, dev->opt.max_ah);
		if (ah) {
			ah->attr = *attr;
			ah->obj.uses[0] = &to_device_pd(pd)->obj;
		} else {
			error = errno;
		}
	}
	return device_done(pd->context, ah, error);
}

static int destroy_ah(struct ibv_ah *ah)
{
	struct function_device *dev = to_device(ah->context);
	struct device_object *obj;
	struct device_wqe *wqe;

	device_begin(ah->context, DEVICE_destroy_ah, ah);
	list_for_each(&dev->objects, obj, entry) {
		struct device_qp *qp = container_of(obj, struct device_qp, obj);

		if (obj->kind != DEVICE_OBJECT_QP || !obj->context ||
		    qp->vqp.qp.qp_type != IBV_QPT_UD)
			continue;
		list_for_each(&qp->sends, wqe, entry)
			if (wqe->wr.wr.ud.ah == ah)
				device_violate(dev, "a send in flight has an address handle that is destroyed");
	}
	return destroy(ah->context, DEVICE_destroy_ah, &to_device_ah(ah)->obj);
}

const struct verbs_context_ops device_resource_ops = {
	.alloc_dm = alloc_dm,
	.alloc_mw = alloc_mw,
	.alloc_parent_domain = alloc_parent_domain,
	.alloc_pd = alloc_pd,
	.alloc_td = alloc_td,
	.bind_mw = bind_mw,
	.close_xrcd = close_xrcd,
	.create_ah = create_ah,
	.dealloc_mw = dealloc_mw,
	.dealloc_pd = dealloc_pd,
	.dealloc_td = dealloc_td,
	.destroy_ah = destroy_ah,
	.free_dm = free_dm,
	.import_dm = import_dm,
	.import_pd = import_pd,
	.open_xrcd = open_xrcd,
	.unimport_dm = unimport_dm,
	.unimport_pd = unimport_pd,
};
