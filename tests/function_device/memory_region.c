/* Memory regions of all kinds. */
#include <sys/mman.h>
#include <unistd.h>
#include "internal.h"

/* Keys look like hardware's: a number that is never used again, and a tag in the low byte. */
uint32_t device_next_key(struct function_device *dev)
{
	return dev->next_key++ << 8 | 0x01;
}

static struct device_mr *new_mr(struct function_device *dev, struct ibv_pd *pd,
				enum ibv_mr_type type, unsigned int access)
{
	struct device_mr *mr =
		device_new(dev, pd->context, DEVICE_OBJECT_MR, device_mr, dev->opt.max_mr);

	if (!mr)
		return NULL;
	mr->vmr.mr_type = type;
	mr->vmr.access = access;
	mr->vmr.ibv_mr.context = pd->context;
	mr->vmr.ibv_mr.pd = pd;
	mr->key = device_next_key(dev);
	mr->vmr.ibv_mr.lkey = mr->vmr.ibv_mr.rkey = mr->vmr.ibv_mr.handle = mr->key;
	mr->access = access;
	mr->obj.uses[0] = &to_device_pd(pd)->obj;
	return mr;
}

/* As the kernel checks it: what a peer may write, the owner must be able to. */
static int check_access(const struct function_device *dev, unsigned int access)
{
	unsigned int known = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
			     IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |
			     IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_HUGETLB |
			     IBV_ACCESS_FLUSH_GLOBAL | IBV_ACCESS_FLUSH_PERSISTENT |
			     IBV_ACCESS_OPTIONAL_RANGE;

	if (access & IBV_ACCESS_ON_DEMAND && !dev->opt.on_demand)
		return EOPNOTSUPP;
	if (access & ~(known | IBV_ACCESS_ON_DEMAND))
		return EINVAL;
	if (access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) &&
	    !(access & IBV_ACCESS_LOCAL_WRITE))
		return EINVAL;
	return 0;
}

static struct ibv_mr *reg_mr(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
			     int access)
{
	struct function_device *dev = to_device(pd->context);
	struct device_mr *mr = NULL;
	struct device_call *call = device_begin(pd->context, DEVICE_reg_mr, pd);

	call->addr = (uintptr_t)addr;
	call->length = length;
	call->iova = iova;
	call->access = access;
	int error = device_admit(dev, DEVICE_reg_mr);
	if (!error)
		error = check_access(dev, access);
	/* The whole address space, paged on demand, is longer than any other region can be. */
	bool implicit = !addr && length == SIZE_MAX && access & IBV_ACCESS_ON_DEMAND;

	if (!error && !implicit &&
	    (length > dev->opt.max_mr_size || (uintptr_t)addr + length < (uintptr_t)addr))
		error = EINVAL;
	if (!error) {
		mr = new_mr(dev, pd, IBV_MR_TYPE_MR, access);
		if (mr) {
			mr->iova = access & IBV_ACCESS_ZERO_BASED ? 0 : iova;
			mr->memory = addr;
			mr->length = length;
		} else {
			error = errno;
		}
	}
	return device_done(pd->context, mr, error);
}

static struct ibv_mr *reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length,
				    uint64_t iova, int fd, int access)
{
	struct function_device *dev = to_device(pd->context);
	struct device_mr *mr = NULL;
	struct device_call *call = device_begin(pd->context, DEVICE_reg_dmabuf_mr, pd);

	call->addr = offset;
	call->length = length;
	call->iova = iova;
	call->access = access;
	call->fd = fd;
	int error = device_admit(dev, DEVICE_reg_dmabuf_mr);
	if (!error)
		error = check_access(dev, access);
	if (!error) {
		size_t page = sysconf(_SC_PAGESIZE), lead = offset % page;
		void *mapped = mmap(NULL, length + lead, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
				    offset - lead);

		/* A file that is open for reading stands for memory that the program cannot map. */
		if (mapped == MAP_FAILED && errno == EACCES)
			mapped = mmap(NULL, length + lead, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd,
				      offset - lead);
		mr = mapped == MAP_FAILED ? NULL : new_mr(dev, pd, IBV_MR_TYPE_DMABUF_MR, access);
		if (mr) {
			mr->iova = iova;
			mr->memory = (uint8_t *)mapped + lead;
			mr->length = length;
			mr->mapped = mapped;
			mr->mapped_length = length + lead;
		} else {
			error = errno;
			if (mapped != MAP_FAILED)
				munmap(mapped, length + lead);
		}
	}
	return device_done(pd->context, mr, error);
}

static struct ibv_mr *reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *ibdm, uint64_t offset,
				size_t length, unsigned int access)
{
	struct function_device *dev = to_device(pd->context);
	struct device_dm *dm = to_device_dm(ibdm);
	struct device_mr *mr = NULL;
	struct device_call *call = device_begin(pd->context, DEVICE_reg_dm_mr, pd);

	call->addr = offset;
	call->length = length;
	call->access = access;
	int error = device_admit(dev, DEVICE_reg_dm_mr);
	if (!error)
		error = check_access(dev, access);
	/* The kernel has zero-based regions of device memory only. */
	if (!error && (!(access & IBV_ACCESS_ZERO_BASED) || offset > dm->length ||
		       length > dm->length - offset))
		error = EINVAL;
	if (!error) {
		mr = new_mr(dev, pd, IBV_MR_TYPE_MR, access);
		if (mr) {
			mr->memory = dm->memory + offset;
			mr->length = length;
			mr->vmr.ibv_mr.length = length;
			mr->obj.uses[1] = &dm->obj;
		} else {
			error = errno;
		}
	}
	return device_done(pd->context, mr, error);
}

static struct ibv_mr *alloc_null_mr(struct ibv_pd *pd)
{
	struct function_device *dev = to_device(pd->context);
	struct device_mr *mr = NULL;

	device_begin(pd->context, DEVICE_alloc_null_mr, pd);
	int error = device_admit(dev, DEVICE_alloc_null_mr);
	if (!error) {
		mr = new_mr(dev, pd, IBV_MR_TYPE_NULL_MR, IBV_ACCESS_LOCAL_WRITE);
		if (mr)
			mr->length = SIZE_MAX;
		else
			error = errno;
	}
	return device_done(pd->context, mr, error);
}

/* Whether a queue holds a request that names the key, in its own lists or in a remote address. */
static bool names(const struct list_head *queue, uint32_t key)
{
	const struct device_wqe *wqe;

	list_for_each(queue, wqe, entry)
		for (uint32_t i = 0; i < wqe->num_sge; i++)
			if (wqe->sge[i].lkey == key)
				return true;
	return false;
}

static void check_outstanding(struct function_device *dev, uint32_t key, const char *text)
{
	struct device_object *obj;

	list_for_each(&dev->objects, obj, entry) {
		if (obj->kind == DEVICE_OBJECT_QP) {
			struct device_qp *qp = container_of(obj, struct device_qp, obj);

			if (names(&qp->sends, key) || names(&qp->receives, key))
				device_violate(dev, text);
		} else if (obj->kind == DEVICE_OBJECT_SRQ) {
			if (names(&container_of(obj, struct device_srq, obj)->queue, key))
				device_violate(dev, text);
		}
	}
}

static int rereg_mr(struct verbs_mr *vmr, int flags, struct ibv_pd *pd, void *addr, size_t length,
		    int access)
{
	struct ibv_context *context = vmr->ibv_mr.context;
	struct function_device *dev = to_device(context);
	struct device_mr *mr = to_device_mr(vmr);
	struct device_call *call = device_begin(context, DEVICE_rereg_mr, vmr);

	call->mask = flags;
	call->addr = (uintptr_t)addr;
	call->length = length;
	call->access = access;
	int error = device_admit(dev, DEVICE_rereg_mr);
	if (!error && flags & IBV_REREG_MR_CHANGE_ACCESS)
		error = check_access(dev, access);
	if (!error && flags & IBV_REREG_MR_CHANGE_TRANSLATION && length > dev->opt.max_mr_size)
		error = EINVAL;
	if (!error) {
		check_outstanding(dev, mr->key,
				  "a region changed under an outstanding work request");
		if (flags & IBV_REREG_MR_CHANGE_TRANSLATION) {
			mr->iova = (uintptr_t)addr;
			mr->memory = addr;
			mr->length = length;
		}
		if (flags & IBV_REREG_MR_CHANGE_ACCESS)
			mr->access = vmr->access = access;
		if (flags & IBV_REREG_MR_CHANGE_PD)
			mr->obj.uses[0] = &to_device_pd(pd)->obj;
	}
	device_unlock(context);
	if (error)
		errno = error;
	return error;
}

static int dereg_mr(struct verbs_mr *vmr)
{
	struct ibv_context *context = vmr->ibv_mr.context;
	struct function_device *dev = to_device(context);
	struct device_mr *mr = to_device_mr(vmr);

	device_begin(context, DEVICE_dereg_mr, vmr);
	int error = device_destroy(dev, DEVICE_dereg_mr, &mr->obj);
	if (!error) {
		check_outstanding(dev, mr->key,
				  "a region deregistered under an outstanding work request");
		if (mr->mapped)
			munmap(mr->mapped, mr->mapped_length);
		device_free(dev, &mr->obj);
	}
	device_unlock(context);
	return error;
}

/* The region goes on being the other's: same key, same memory. */
static struct ibv_mr *import_mr(struct ibv_pd *pd, uint32_t handle)
{
	struct function_device *dev = to_device(pd->context);
	struct device_object *obj;
	struct device_mr *mr = NULL, *from = NULL;

	device_begin(pd->context, DEVICE_import_mr, pd)->mask = (int)handle;
	int error = device_admit(dev, DEVICE_import_mr);
	list_for_each(&dev->objects, obj, entry)
		if (obj->kind == DEVICE_OBJECT_MR &&
		    container_of(obj, struct device_mr, obj)->vmr.ibv_mr.handle == handle)
			from = container_of(obj, struct device_mr, obj);
	if (!error && !from)
		error = ENOENT;
	if (!error) {
		mr = new_mr(dev, pd, IBV_MR_TYPE_IMPORTED_MR, from->access);
		if (mr) {
			mr->key = from->key;
			mr->iova = from->iova;
			mr->memory = from->memory;
			mr->length = from->length;
			mr->vmr.ibv_mr.lkey = mr->vmr.ibv_mr.rkey = mr->vmr.ibv_mr.handle =
				from->key;
			mr->vmr.ibv_mr.length = from->length;
		} else {
			error = errno;
		}
	}
	return device_done(pd->context, mr, error);
}

static void unimport_mr(struct ibv_mr *ibmr)
{
	struct ibv_context *context = ibmr->context;
	struct device_mr *mr = to_device_mr(verbs_get_mr(ibmr));

	device_begin(context, DEVICE_unimport_mr, ibmr);
	if (mr->vmr.mr_type != IBV_MR_TYPE_IMPORTED_MR)
		device_violate(to_device(context), "a region unimported that was not imported");
	device_free(to_device(context), &mr->obj);
	device_unlock(context);
}

static int advise_mr(struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags,
		     struct ibv_sge *list, uint32_t count)
{
	struct device_call *call = device_begin(pd->context, DEVICE_advise_mr, pd);

	call->access = advice;
	call->mask = flags;
	int error = device_admit(to_device(pd->context), DEVICE_advise_mr);
	for (uint32_t i = 0; !error && i < count; i++) {
		bool zero;

		if (!device_local(to_device(pd->context), to_device_pd(pd), list[i].lkey,
				  list[i].addr, list[i].length, IBV_ACCESS_ON_DEMAND, &zero) &&
		    !zero)
			error = ENOENT;
	}
	device_unlock(pd->context);
	return error;
}

const struct verbs_context_ops device_region_ops = {
	.advise_mr = advise_mr,
	.alloc_null_mr = alloc_null_mr,
	.dereg_mr = dereg_mr,
	.import_mr = import_mr,
	.reg_dm_mr = reg_dm_mr,
	.reg_dmabuf_mr = reg_dmabuf_mr,
	.reg_mr = reg_mr,
	.rereg_mr = rereg_mr,
	.unimport_mr = unimport_mr,
};
