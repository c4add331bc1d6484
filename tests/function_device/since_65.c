/* Verbs that rdma-core has since v65: DMA handles, completion counters, and what is registered with them. */
#include <sys/mman.h>
#include <unistd.h>
#include "internal.h"

#ifdef RDMA_CORE_65

struct device_dmah {
	struct verbs_dmah vdmah;
	struct device_object obj;
};

struct device_comp_cntr {
	struct ibv_comp_cntr counter;
	struct device_object obj;
	uint64_t value, errors;
};

static struct device_comp_cntr *to_counter(struct ibv_comp_cntr *counter)
{
	return container_of(counter, struct device_comp_cntr, counter);
}

static int query_port_speed(struct ibv_context *context, uint32_t port, uint64_t *speed)
{
	struct function_device *dev = to_device(context);

	device_begin(context, DEVICE_query_port_speed, context);
	int error = device_admit(dev, DEVICE_query_port_speed);
	if (!error && (port < 1 || port > dev->opt.ports))
		error = EINVAL;
	if (!error)
		*speed = 4000 + port;
	device_unlock(context);
	return error;
}

static struct ibv_dmah *alloc_dmah(struct ibv_context *context, struct ibv_dmah_init_attr *attr)
{
	struct function_device *dev = to_device(context);
	struct device_dmah *dmah = NULL;
	struct device_call *call = device_begin(context, DEVICE_alloc_dmah, context);

	call->dmah_mask = attr->comp_mask;
	call->dmah_cpu = attr->cpu_id;
	call->dmah_hint = attr->ph;
	call->dmah_memory = attr->tph_mem_type;
	int error = device_admit(dev, DEVICE_alloc_dmah);
	if (!error) {
		dmah = device_new(dev, context, DEVICE_OBJECT_DMAH, device_dmah, 0);
		if (dmah)
			dmah->vdmah.dmah.context = context;
		else
			error = errno;
	}
	return device_done(context, dmah, error);
}

static int destroy(struct ibv_context *context, enum device_verb verb, struct device_object *obj)
{
	struct function_device *dev = to_device(context);

	device_begin(context, verb, obj->base);
	int error = device_destroy(dev, verb, obj);
	if (!error)
		device_free(dev, obj);
	device_unlock(context);
	return error;
}

static int dealloc_dmah(struct ibv_dmah *dmah)
{
	return destroy(dmah->context, DEVICE_dealloc_dmah,
		       &container_of(dmah, struct device_dmah, vdmah.dmah)->obj);
}

/* A buffer that is a dma-buf to libibverbs, as in a confidential virtual machine. */
static void *alloc_buf(struct ibv_pd *pd, size_t size, struct ibv_buf **buf)
{
	struct function_device *dev = to_device(pd->context);
	void *addr = MAP_FAILED;
	int fd = -1;

	device_begin(pd->context, DEVICE_alloc_buf, pd);
	int error = device_admit(dev, DEVICE_alloc_buf);
	device_unlock(pd->context);
	if (!error) {
		*buf = calloc(1, sizeof(**buf));
		fd = memfd_create("buf", MFD_CLOEXEC);
		if (*buf && fd >= 0 && ftruncate(fd, size) == 0)
			addr = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		error = errno;
	}
	if (addr == MAP_FAILED) {
		errno = error;
		return NULL;
	}
	ibv_buf_init_dmabuf(*buf, pd, addr, size, fd);
	return addr;
}

static void free_buf(struct ibv_buf *buf)
{
	device_begin(buf->pd->context, DEVICE_free_buf, buf->pd);
	device_unlock(buf->pd->context);
	munmap(buf->addr, buf->size);
	close(buf->dmabuf_fd);
	free(buf);
}

static struct ibv_mr *reg_mr_ex(struct ibv_pd *pd, struct ibv_mr_init_attr *attr)
{
	struct function_device *dev = to_device(pd->context);
	struct device_call *call = device_begin(pd->context, DEVICE_reg_mr_ex, pd);

	call->mask = (int)attr->comp_mask;
	call->dmah = attr->dmah;
	int error = device_admit(dev, DEVICE_reg_mr_ex);
	if (!error && !(attr->comp_mask & (IBV_REG_MR_MASK_ADDR | IBV_REG_MR_MASK_FD)))
		error = EINVAL;
	device_unlock(pd->context);
	if (error) {
		errno = error;
		return NULL;
	}
	if (attr->comp_mask & IBV_REG_MR_MASK_FD)
		return device_region_ops.reg_dmabuf_mr(pd, attr->fd_offset, attr->length, attr->iova,
						       attr->fd, attr->access);
	struct ibv_mr *mr = device_region_ops.reg_mr(pd, attr->addr, attr->length, attr->iova,
						     attr->access);
	if (mr && attr->comp_mask & IBV_REG_MR_MASK_DMAH) {
		struct device_mr *region = container_of(mr, struct device_mr, vmr.ibv_mr);

		pthread_mutex_lock(&dev->lock);
		region->obj.uses[1] =
			&container_of(attr->dmah, struct device_dmah, vdmah.dmah)->obj;
		pthread_mutex_unlock(&dev->lock);
	}
	return mr;
}

static int dm_export_dmabuf_fd(struct ibv_dm *ibdm)
{
	struct function_device *dev = to_device(ibdm->context);
	struct device_dm *dm = container_of(ibdm, struct device_dm, vdm.dm);

	device_begin(ibdm->context, DEVICE_dm_export_dmabuf_fd, ibdm);
	int error = device_admit(dev, DEVICE_dm_export_dmabuf_fd);
	int fd = -1;

	if (!error) {
		/* A copy is enough to tell that it is this memory. */
		fd = memfd_create("device memory", MFD_CLOEXEC);
		if (fd < 0 || write(fd, dm->memory, dm->length) != (ssize_t)dm->length)
			error = errno;
	}
	device_unlock(ibdm->context);
	errno = error;
	return error ? -1 : fd;
}

static int query_comp_cntr_caps(struct ibv_context *context, struct ibv_comp_cntr_caps *caps,
				size_t size)
{
	device_begin(context, DEVICE_query_comp_cntr_caps, context);
	int error = device_admit(to_device(context), DEVICE_query_comp_cntr_caps);
	if (!error && size != sizeof(*caps))
		error = EINVAL;
	if (!error)
		*caps = (struct ibv_comp_cntr_caps){
			.max_value = (1ULL << 40) - 1,
			.max_counters = 16,
			.supported_qp_attach_ops = IBV_QP_ATTACH_COMP_CNTR_OP_SEND |
						   IBV_QP_ATTACH_COMP_CNTR_OP_REMOTE_RDMA_WRITE,
		};
	device_unlock(context);
	return error;
}

static struct ibv_comp_cntr *create_comp_cntr(struct ibv_context *context,
					      struct ibv_comp_cntr_init_attr *attr)
{
	struct function_device *dev = to_device(context);
	struct device_comp_cntr *counter = NULL;

	device_begin(context, DEVICE_create_comp_cntr, context)->counter_type = attr->type;
	int error = device_admit(dev, DEVICE_create_comp_cntr);
	if (!error && (attr->comp_mask || attr->flags))
		error = EINVAL;
	if (!error) {
		counter = device_new(dev, context, DEVICE_OBJECT_COMP_CNTR, device_comp_cntr, 16);
		if (counter)
			counter->counter.context = context;
		else
			error = errno;
	}
	return device_done(context, counter, error);
}

static int destroy_comp_cntr(struct ibv_comp_cntr *counter)
{
	return destroy(counter->context, DEVICE_destroy_comp_cntr, &to_counter(counter)->obj);
}

/* Admits a verb on one of the two values, and leaves the device locked. */
static int begin_value(struct ibv_comp_cntr *counter, enum device_verb verb, uint64_t amount)
{
	struct function_device *dev = to_device(counter->context);

	device_begin(counter->context, verb, counter)->amount = amount;
	device_use(dev, &to_counter(counter)->obj);
	return device_admit(dev, verb);
}

#define VALUE_VERBS(name, field)                                                                   \
	static int set_##name(struct ibv_comp_cntr *counter, uint64_t value)                       \
	{                                                                                          \
		int error = begin_value(counter, DEVICE_set_##name, value);                        \
		if (!error && value >> 40)                                                         \
			error = EINVAL;                                                            \
		if (!error)                                                                        \
			to_counter(counter)->field = value;                                        \
		device_unlock(counter->context);                                                   \
		return error;                                                                      \
	}                                                                                          \
	static int inc_##name(struct ibv_comp_cntr *counter, uint64_t amount)                      \
	{                                                                                          \
		int error = begin_value(counter, DEVICE_inc_##name, amount);                       \
		if (!error)                                                                        \
			to_counter(counter)->field += amount;                                      \
		device_unlock(counter->context);                                                   \
		return error;                                                                      \
	}                                                                                          \
	static int read_##name(struct ibv_comp_cntr *counter, uint64_t *value)                     \
	{                                                                                          \
		int error = begin_value(counter, DEVICE_read_##name, 0);                           \
		if (!error)                                                                        \
			*value = to_counter(counter)->field;                                       \
		device_unlock(counter->context);                                                   \
		return error;                                                                      \
	}
VALUE_VERBS(comp_cntr, value)
VALUE_VERBS(err_comp_cntr, errors)

static int qp_attach_comp_cntr(struct ibv_qp *ibqp, struct ibv_comp_cntr *counter,
			       struct ibv_qp_attach_comp_cntr_attr *attr)
{
	struct function_device *dev = to_device(ibqp->context);
	struct device_qp *qp = to_device_qp(ibqp);
	struct device_call *call = device_begin(ibqp->context, DEVICE_qp_attach_comp_cntr, ibqp);

	call->counted_ops = attr->op_mask;
	int error = device_admit(dev, DEVICE_qp_attach_comp_cntr);
	if (!error && qp->attr.qp_state != IBV_QPS_RESET && qp->attr.qp_state != IBV_QPS_INIT)
		error = EINVAL;
	if (!error && attr->op_mask & ~(IBV_QP_ATTACH_COMP_CNTR_OP_SEND |
					IBV_QP_ATTACH_COMP_CNTR_OP_REMOTE_RDMA_WRITE))
		error = ENOTSUP;
	if (!error)
		qp->obj.uses[DEVICE_MAX_TABLE - 1] = &to_counter(counter)->obj;
	device_unlock(ibqp->context);
	return error;
}

const struct verbs_context_ops device_since_65_ops = {
	.alloc_buf = alloc_buf,
	.alloc_dmah = alloc_dmah,
	.create_comp_cntr = create_comp_cntr,
	.dealloc_dmah = dealloc_dmah,
	.destroy_comp_cntr = destroy_comp_cntr,
	.dm_export_dmabuf_fd = dm_export_dmabuf_fd,
	.free_buf = free_buf,
	.inc_comp_cntr = inc_comp_cntr,
	.inc_err_comp_cntr = inc_err_comp_cntr,
	.qp_attach_comp_cntr = qp_attach_comp_cntr,
	.query_comp_cntr_caps = query_comp_cntr_caps,
	.query_port_speed = query_port_speed,
	.read_comp_cntr = read_comp_cntr,
	.read_err_comp_cntr = read_err_comp_cntr,
	.reg_mr_ex = reg_mr_ex,
	.set_comp_cntr = set_comp_cntr,
	.set_err_comp_cntr = set_err_comp_cntr,
};

#endif
