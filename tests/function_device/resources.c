/* Protection domains, device memory, windows, address handles: what queue pairs refer to. */
#include "internal.h"

/* Ends a verb that destroys. */
static int destroy(struct ibv_context *context, enum td_verb verb, struct td_object *obj)
{
	struct td_device *dev = to_device(context);
	int error = td_destroy(dev, verb, obj);

	if (!error)
		td_free(dev, obj);
	td_unlock(context);
	return error;
}

/* ---- Domains ---- */

static struct ibv_pd *alloc_pd(struct ibv_context *context)
{
	struct td_device *dev = to_device(context);
	struct td_pd *pd = NULL;

	td_begin(context, TD_alloc_pd, context);
	int error = td_admit(dev, TD_alloc_pd);
	if (!error) {
		pd = td_new(dev, context, TD_OBJECT_PD, td_pd, dev->opt.max_pd);
		if (pd) {
			pd->real = pd;
			pd->pd.handle = td_next_key(dev);
		} else {
			error = errno;
		}
	}
	return td_done(context, pd, error);
}

static struct ibv_pd *import_pd(struct ibv_context *context, uint32_t handle)
{
	struct td_device *dev = to_device(context);
	struct td_object *obj;
	struct td_pd *pd = NULL, *from = NULL;

	td_begin(context, TD_import_pd, context)->mask = (int)handle;
	int error = td_admit(dev, TD_import_pd);
	list_for_each(&dev->objects, obj, entry)
		if (obj->kind == TD_OBJECT_PD &&
		    container_of(obj, struct td_pd, obj)->pd.handle == handle)
			from = container_of(obj, struct td_pd, obj);
	if (!error && !from)
		error = ENOENT;
	if (!error) {
		pd = td_new(dev, context, TD_OBJECT_PD, td_pd, dev->opt.max_pd);
		if (pd) {
			pd->real = from->real;
			pd->pd.context = context;
			pd->pd.handle = handle;
		} else {
			error = errno;
		}
	}
	return td_done(context, pd, error);
}

static void unimport_pd(struct ibv_pd *pd)
{
	struct ibv_context *context = pd->context;

	td_begin(context, TD_unimport_pd, pd);
	if (td_busy(to_device(context), &to_td_pd(pd)->obj))
		td_violate(to_device(context), "a domain unimported that was in use");
	td_free(to_device(context), &to_td_pd(pd)->obj);
	td_unlock(context);
}

static int dealloc_pd(struct ibv_pd *pd)
{
	td_begin(pd->context, TD_dealloc_pd, pd);
	return destroy(pd->context, TD_dealloc_pd, &to_td_pd(pd)->obj);
}

static struct ibv_td *alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr)
{
	struct td_device *dev = to_device(context);
	struct td_thread_domain *td = NULL;

	td_begin(context, TD_alloc_td, context)->mask = attr->comp_mask;
	int error = td_admit(dev, TD_alloc_td);
	if (!error && attr->comp_mask)
		error = EINVAL;
	if (!error) {
		td = td_new(dev, context, TD_OBJECT_TD, td_thread_domain, 0);
		if (td)
			td->td.context = context;
		else
			error = errno;
	}
	return td_done(context, td, error);
}

static int dealloc_td(struct ibv_td *td)
{
	td_begin(td->context, TD_dealloc_td, td);
	return destroy(td->context, TD_dealloc_td, &to_td_thread_domain(td)->obj);
}

static struct ibv_pd *alloc_parent_domain(struct ibv_context *context,
					  struct ibv_parent_domain_init_attr *attr)
{
	struct td_device *dev = to_device(context);
	struct td_pd *parent = NULL;

	td_begin(context, TD_alloc_parent_domain, context)->parent_domain_attr = *attr;
	int error = td_admit(dev, TD_alloc_parent_domain);
	if (!error && ibv_check_alloc_parent_domain(attr))
		error = errno;
	if (!error) {
		parent = td_new(dev, context, TD_OBJECT_PD, td_pd, dev->opt.max_pd);
		if (parent) {
			ibv_initialize_parent_domain(&parent->pd, attr->pd);
			parent->real = to_td_pd(attr->pd)->real;
			parent->obj.uses[0] = &to_td_pd(attr->pd)->obj;
			if (attr->td)
				parent->obj.uses[1] = &to_td_thread_domain(attr->td)->obj;
		} else {
			error = errno;
		}
	}
	return td_done(context, parent, error);
}

static struct ibv_xrcd *open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *attr)
{
	struct td_device *dev = to_device(context);
	struct td_xrcd *xrcd = NULL;

	td_begin(context, TD_open_xrcd, context)->xrcd_attr = *attr;
	int error = td_admit(dev, TD_open_xrcd);
	if (!error && attr->comp_mask != (IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS))
		error = EINVAL;
	if (!error) {
		xrcd = td_new(dev, context, TD_OBJECT_XRCD, td_xrcd, 0);
		if (xrcd)
			xrcd->vxrcd.xrcd.context = context;
		else
			error = errno;
	}
	return td_done(context, xrcd, error);
}

static int close_xrcd(struct ibv_xrcd *xrcd)
{
	td_begin(xrcd->context, TD_close_xrcd, xrcd);
	return destroy(xrcd->context, TD_close_xrcd, &to_td_xrcd(xrcd)->obj);
}

/* ---- Device memory ---- */

static int memcpy_to_dm(struct ibv_dm *ibdm, uint64_t offset, const void *from, size_t length)
{
	struct td_dm *dm = to_td_dm(ibdm);

	if (offset > dm->length || length > dm->length - offset)
		return EFAULT;
	memcpy(dm->memory + offset, from, length);
	return 0;
}

static int memcpy_from_dm(void *to, struct ibv_dm *ibdm, uint64_t offset, size_t length)
{
	struct td_dm *dm = to_td_dm(ibdm);

	if (offset > dm->length || length > dm->length - offset)
		return EFAULT;
	memcpy(to, dm->memory + offset, length);
	return 0;
}

static struct ibv_dm *alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *attr)
{
	struct td_device *dev = to_device(context);
	struct td_dm *dm = NULL;

	td_begin(context, TD_alloc_dm, context)->dm_attr = *attr;
	int error = td_admit(dev, TD_alloc_dm);
	if (!error && (attr->comp_mask || !attr->length))
		error = EINVAL;
	if (!error && attr->length > 1 << 20)
		error = ENOMEM;
	if (!error) {
		dm = td_new(dev, context, TD_OBJECT_DM, td_dm, 0);
		if (dm) {
			dm->length = attr->length;
			dm->memory = calloc(1, attr->length);
			dm->vdm.dm.context = context;
			dm->vdm.dm.comp_mask = IBV_DM_MASK_HANDLE;
			dm->vdm.dm.handle = td_next_key(dev);
			dm->vdm.dm.memcpy_to_dm = memcpy_to_dm;
			dm->vdm.dm.memcpy_from_dm = memcpy_from_dm;
		} else {
			error = errno;
		}
	}
	return td_done(context, dm, error);
}

static struct ibv_dm *import_dm(struct ibv_context *context, uint32_t handle)
{
	struct td_device *dev = to_device(context);
	struct td_object *obj;
	struct td_dm *dm = NULL, *from = NULL;

	td_begin(context, TD_import_dm, context)->mask = (int)handle;
	int error = td_admit(dev, TD_import_dm);
	list_for_each(&dev->objects, obj, entry)
		if (obj->kind == TD_OBJECT_DM &&
		    container_of(obj, struct td_dm, obj)->vdm.dm.handle == handle)
			from = container_of(obj, struct td_dm, obj);
	if (!error && !from)
		error = ENOENT;
	if (!error) {
		dm = td_new(dev, context, TD_OBJECT_DM, td_dm, 0);
		if (dm) {
			dm->length = from->length;
			dm->memory = from->memory;
			dm->vdm.dm = from->vdm.dm;
			dm->vdm.dm.context = context;
		} else {
			error = errno;
		}
	}
	return td_done(context, dm, error);
}

static void unimport_dm(struct ibv_dm *ibdm)
{
	struct ibv_context *context = ibdm->context;

	td_begin(context, TD_unimport_dm, ibdm);
	td_free(to_device(context), &to_td_dm(ibdm)->obj);
	td_unlock(context);
}

static int free_dm(struct ibv_dm *ibdm)
{
	struct td_dm *dm = to_td_dm(ibdm);
	uint8_t *memory = dm->memory;

	td_begin(ibdm->context, TD_free_dm, ibdm);
	int error = destroy(ibdm->context, TD_free_dm, &dm->obj);
	if (!error)
		free(memory);
	return error;
}

/* ---- Memory windows ---- */

static struct ibv_mw *alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
	struct td_device *dev = to_device(pd->context);
	struct td_mw *mw = NULL;

	td_begin(pd->context, TD_alloc_mw, pd)->mw_type = type;
	int error = td_admit(dev, TD_alloc_mw);
	if (!error && type != IBV_MW_TYPE_1 && type != IBV_MW_TYPE_2)
		error = EINVAL;
	if (!error) {
		mw = td_new(dev, pd->context, TD_OBJECT_MW, td_mw, dev->opt.max_mw);
		if (mw) {
			mw->mw.context = pd->context;
			mw->mw.pd = pd;
			mw->mw.type = type;
			mw->rkey = mw->mw.rkey = mw->mw.handle = td_next_key(dev);
			mw->obj.uses[0] = &to_td_pd(pd)->obj;
		} else {
			error = errno;
		}
	}
	return td_done(pd->context, mw, error);
}

static int dealloc_mw(struct ibv_mw *mw)
{
	td_begin(mw->context, TD_dealloc_mw, mw);
	return destroy(mw->context, TD_dealloc_mw, &to_td_mw(mw)->obj);
}

static int bind_mw(struct ibv_qp *ibqp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	struct td_device *dev = to_device(ibqp->context);

	td_begin(ibqp->context, TD_bind_mw, mw)->mw_bind = *bind;
	int error = td_admit(dev, TD_bind_mw);
	if (!error)
		error = td_post_bind(to_td_qp(ibqp), to_td_mw(mw), bind);
	td_unlock(ibqp->context);
	return error;
}

/* ---- Address handles ---- */

static struct ibv_ah *create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	struct td_device *dev = to_device(pd->context);
	struct td_ah *ah = NULL;

	td_begin(pd->context, TD_create_ah, pd)->ah_attr = *attr;
	int error = td_admit(dev, TD_create_ah);
	if (!error && (attr->port_num < 1 || attr->port_num > dev->opt.ports))
		error = EINVAL;
	/* RoCE has no LIDs: without a global route there is no address. */
	if (!error && dev->opt.link_layer == IBV_LINK_LAYER_ETHERNET && !attr->is_global)
		error = EINVAL;
	if (!error && attr->is_global && attr->grh.sgid_index >= TD_GIDS)
		error = EINVAL;
	if (!error) {
		ah = td_new(dev, pd->context, TD_OBJECT_AH, td_ah, dev->opt.max_ah);
		if (ah) {
			ah->attr = *attr;
			ah->obj.uses[0] = &to_td_pd(pd)->obj;
		} else {
			error = errno;
		}
	}
	return td_done(pd->context, ah, error);
}

static int destroy_ah(struct ibv_ah *ah)
{
	td_begin(ah->context, TD_destroy_ah, ah);
	return destroy(ah->context, TD_destroy_ah, &to_td_ah(ah)->obj);
}

const struct verbs_context_ops td_resource_ops = {
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
