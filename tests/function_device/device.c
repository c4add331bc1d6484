/* The device itself: its life, its contexts, its objects, and the faults and log of its verbs. */
#include <limits.h>
#include <stdio.h>
#include "internal.h"

static const char *const verb_names[DEVICE_VERB_COUNT] = {
#define X(name) #name,
	DEVICE_VERBS(X)
#undef X
};

static int find_verb(const char *name)
{
	for (int i = 0; i < DEVICE_VERB_COUNT; i++)
		if (!strcmp(verb_names[i], name))
			return i;
	return -1;
}

/* ---- Calls ---- */

struct device_call *device_begin(struct ibv_context *context, enum device_verb verb,
				 const void *object)
{
	struct function_device *dev = to_device(context);

	pthread_mutex_lock(&dev->lock);
	if (dev->hold[verb] && !dev->waiting[verb]) {
		dev->waiting[verb] = true;
		while (dev->hold[verb])
			pthread_cond_wait(&dev->released, &dev->lock);
		dev->waiting[verb] = false;
	}
	struct device_call *call = &dev->calls[dev->call_total++ % DEVICE_CALLS_KEPT];
	dev->call_count[verb]++;
	memset(call, 0, sizeof(*call));
	call->verb = verb_names[verb];
	call->object = object;
	return call;
}

int device_fault(struct function_device *dev, enum device_verb verb)
{
	struct device_fault *fault = &dev->faults[verb];

	if (!fault->times)
		return 0;
	if (fault->skip) {
		fault->skip--;
		return 0;
	}
	if (fault->times != UINT_MAX)
		fault->times--;
	return fault->error;
}

int device_admit(struct function_device *dev, enum device_verb verb)
{
	return dev->fatal ? EIO : device_fault(dev, verb);
}

void device_unlock(struct ibv_context *context)
{
	pthread_mutex_unlock(&to_device(context)->lock);
}

void *device_done(struct ibv_context *context, void *object, int error)
{
	device_unlock(context);
	if (!error)
		return object;
	errno = error;
	return NULL;
}

void device_violate(struct function_device *dev, const char *text)
{
	dev->violations++;
	snprintf(dev->violation, sizeof(dev->violation), "%s", text);
}

/* ---- Objects ---- */

void *device_alloc(struct function_device *dev, struct ibv_context *context,
		   enum device_object_kind kind, size_t size, size_t object_offset,
		   unsigned int limit)
{
	if (limit && dev->live[kind] >= limit) {
		errno = ENOMEM;
		return NULL;
	}
	uint8_t *base = calloc(1, size);
	if (!base)
		return NULL;
	struct device_object *obj = (void *)(base + object_offset);
	obj->kind = kind;
	obj->context = context;
	obj->base = base;
	list_add_tail(&dev->objects, &obj->entry);
	dev->live[kind]++;
	return base;
}

int device_busy(struct function_device *dev, const struct device_object *obj)
{
	struct device_object *other;

	if (dev->opt.kind == DEVICE_LEAN) /* which may have thousands, and is measured */
		return 0;
	list_for_each(&dev->objects, other, entry)
		for (size_t i = 0; i < ARRAY_SIZE(other->uses); i++)
			if (other->uses[i] == obj)
				return EBUSY;
	return 0;
}

int device_destroy(struct function_device *dev, enum device_verb verb, struct device_object *obj)
{
	struct device_object *other;
	bool orphans = false;
	int error = device_fault(dev, verb);

	if (dev->opt.kind == DEVICE_LEAN && !error)
		return 0;
	if (obj->failed)
		device_violate(dev, "an object destroyed again after its destroy verb had failed");
	list_for_each(&dev->objects, other, entry)
		for (size_t i = 0; i < ARRAY_SIZE(other->uses); i++)
			orphans |= other->uses[i] == obj && other->failed;
	if (orphans)
		device_violate(dev,
			       "an object destroyed that one is made from whose own destroy verb "
			       "had failed");
	if (error)
		obj->failed = true;
	return error ? error : device_busy(dev, obj);
}

void device_hold_reader(struct function_device *dev)
{
	dev->readers++;
	while (dev->hold_readers)
		pthread_cond_wait(&dev->released, &dev->lock);
	dev->readers--;
}

void device_use(struct function_device *dev, const struct device_object *obj)
{
	if (obj->failed)
		device_violate(dev, "an object used after its destroy verb had failed");
}

void device_free(struct function_device *dev, struct device_object *obj)
{
	list_del(&obj->entry);
	dev->live[obj->kind]--;
	free(obj->base);
}

/* The device forgets what the objects of a context refer to, as the kernel does it on close. */
static void abandon(struct function_device *dev, struct ibv_context *context)
{
	struct device_object *obj;

	list_for_each(&dev->objects, obj, entry) {
		if (obj->context != context)
			continue;
		if (obj->failed)
			device_violate(
				dev,
				"a context closed with an object whose destroy verb had failed");
		if (obj->kind == DEVICE_OBJECT_QP) {
			struct device_qp *qp = container_of(obj, struct device_qp, obj);

			device_qp_clear(dev, qp);
			qp->attr.qp_state = IBV_QPS_RESET;
		}
		if (obj->kind == DEVICE_OBJECT_MR)
			container_of(obj, struct device_mr, obj)->key = 0;
		obj->context = NULL;
	}
}

/* ---- Contexts ---- */

static void free_context(struct ibv_context *context)
{
	struct function_device *dev = to_device(context);
	struct device_context *ctx = container_of(context, struct device_context, vctx.context);

	device_begin(context, DEVICE_free_context, context);
	ctx->obj.context = NULL;
	abandon(dev, context);
	list_del(&ctx->obj.entry);
	dev->live[DEVICE_OBJECT_CONTEXT]--;
	pthread_mutex_unlock(&dev->lock);
	device_forget_fd(context->cmd_fd);
	verbs_uninit_context(&ctx->vctx);
	free(ctx);
}

static const struct verbs_context_ops context_ops = { .free_context = free_context };

static struct verbs_context *alloc_context(struct ibv_device *device, int cmd_fd, void *unused)
{
	struct function_device *dev =
		container_of(verbs_get_device(device), struct function_device, vdev);
	struct device_context *ctx;
	int fd = device_pipe();

	if (fd < 0 || device_register_fd(fd, dev))
		return NULL;
	ctx = verbs_init_and_alloc_context(device, fd, ctx, vctx, RDMA_DRIVER_UNKNOWN);
	if (!ctx) {
		device_forget_fd(fd);
		return NULL;
	}
	verbs_set_ops(&ctx->vctx, &context_ops);
	verbs_set_ops(&ctx->vctx, &device_port_ops);
	verbs_set_ops(&ctx->vctx, &device_resource_ops);
	verbs_set_ops(&ctx->vctx, &device_region_ops);
#ifdef RDMA_CORE_65
	verbs_set_ops(&ctx->vctx, &device_since_65_ops);
#endif
	verbs_set_ops(&ctx->vctx, &device_srq_ops);
	verbs_set_ops(&ctx->vctx, &device_cq_ops);
	verbs_set_ops(&ctx->vctx, &device_qp_ops);
	verbs_set_ops(&ctx->vctx, &device_wq_ops);
	verbs_set_ops(&ctx->vctx, &device_flow_ops);
	verbs_set_ops(&ctx->vctx,
		      dev->opt.kind == DEVICE_LEAN ? &device_lean_ops : &device_model_ops);
	if (dev->held)
		verbs_set_ops(&ctx->vctx, &device_lean_held_ops);
	ctx->vctx.context.num_comp_vectors = dev->opt.comp_vectors;
	ctx->vctx.context.async_fd = device_pipe();
	ctx->obj.kind = DEVICE_OBJECT_CONTEXT;
	ctx->obj.context = &ctx->vctx.context;
	ctx->obj.base = ctx;
	pthread_mutex_lock(&dev->lock);
	list_add_tail(&dev->objects, &ctx->obj.entry);
	dev->live[DEVICE_OBJECT_CONTEXT]++;
	pthread_mutex_unlock(&dev->lock);
	return &ctx->vctx;
}

struct ibv_context *device_open(struct function_device *dev)
{
	pthread_mutex_lock(&dev->lock);
	dev->call_count[DEVICE_open_device]++;
	int error = device_admit(dev, DEVICE_open_device);
	/* With a sysfs directory libibverbs would look for a character device. */
	struct verbs_sysfs_dev *sysfs = dev->vdev.sysfs;
	dev->vdev.sysfs = NULL;
	pthread_mutex_unlock(&dev->lock);

	struct ibv_context *context = error ? NULL : ibv_open_device(&dev->vdev.device);
	dev->vdev.sysfs = sysfs;
	if (error)
		errno = error;
	return context;
}

struct ibv_device *device_listed(struct function_device *dev)
{
	pthread_mutex_lock(&dev->lock);
	free(dev->vdev.sysfs);
	dev->vdev.sysfs = NULL;
	pthread_mutex_unlock(&dev->lock);
	return &dev->vdev.device;
}

/* ---- The device ---- */

static void free_object(struct function_device *dev, struct device_object *obj)
{
	if (obj->kind == DEVICE_OBJECT_CQ)
		device_cq_clear(container_of(obj, struct device_cq, obj));
	if (obj->kind == DEVICE_OBJECT_SRQ) {
		struct device_srq *srq = container_of(obj, struct device_srq, obj);
		struct device_wqe *wqe;

		while ((wqe = list_pop(&srq->queue, struct device_wqe, entry)))
			free(wqe);
		free(srq->tags);
	}
	if (obj->kind == DEVICE_OBJECT_WQ) {
		struct device_wq *wq = container_of(obj, struct device_wq, obj);
		struct device_wqe *wqe;

		while ((wqe = list_pop(&wq->receives, struct device_wqe, entry)))
			free(wqe);
	}
	if (obj->kind == DEVICE_OBJECT_DM)
		free(container_of(obj, struct device_dm, obj)->memory);
	device_free(dev, obj);
}

/* The last handle and the last context are gone: what was leaked goes too. */
static void uninit_device(struct verbs_device *vdev)
{
	struct function_device *dev = container_of(vdev, struct function_device, vdev);
	struct device_object *obj;

	while ((obj = list_top(&dev->objects, struct device_object, entry)))
		free_object(dev, obj);
	pthread_mutex_destroy(&dev->lock);
	free(dev->posted);
	free(dev->held);
	free(dev);
}

static const struct verbs_device_ops device_ops = {
	.name = "testdev",
	.alloc_context = alloc_context,
	.uninit_device = uninit_device,
};

static void defaults(struct device_options *opt)
{
#define DEFAULT(field, value)                                                                      \
	if (!opt->field)                                                                           \
	opt->field = value
	DEFAULT(link_layer, IBV_LINK_LAYER_ETHERNET);
	DEFAULT(ports, 1);
	DEFAULT(max_qp_wr, 16384);
	DEFAULT(max_sge, DEVICE_MAX_SGE);
	DEFAULT(max_inline, 256);
	DEFAULT(max_cqe, 65536);
	if (!opt->vendor_id)
		opt->vendor_part_id = 55;
	DEFAULT(vendor_id, 0xffffff);
	DEFAULT(max_qp, 65536);
	DEFAULT(max_cq, 65536);
	DEFAULT(max_mr, 65536);
	DEFAULT(max_pd, 65536);
	DEFAULT(max_srq, 65536);
	DEFAULT(max_ah, 65536);
	DEFAULT(max_mw, 65536);
	DEFAULT(max_rd_atomic, 16);
	DEFAULT(comp_vectors, 4);
	DEFAULT(first_qp_num, 0x11);
	DEFAULT(max_mr_size, 1ull << 40);
#undef DEFAULT
}

struct function_device *device_create(const struct device_options *options)
{
	static atomic_int serial;
	struct function_device *dev = calloc(1, sizeof(*dev));
	struct verbs_sysfs_dev *sysfs = calloc(1, sizeof(*sysfs));
	int error;

	if (!dev || !sysfs)
		goto nomem;
	dev->opt = *options;
	defaults(&dev->opt);
	if (dev->opt.max_sge > DEVICE_MAX_SGE || dev->opt.max_inline > DEVICE_MAX_INLINE ||
	    dev->opt.ports > DEVICE_MAX_PORTS || dev->opt.kind > DEVICE_MODEL) {
		error = EINVAL;
		goto fail;
	}
	dev->posted = calloc(DEVICE_POSTED_KEPT, sizeof(*dev->posted));
	if (!dev->posted || (dev->opt.held_receives && device_lean_init(dev)))
		goto nomem;
	pthread_mutex_init(&dev->lock, NULL);
	pthread_cond_init(&dev->released, NULL);
	list_head_init(&dev->objects);
	dev->progress = dev->opt.progress;
	dev->next_qp_num = dev->opt.first_qp_num;
	dev->next_key = 1;
	dev->poll_error = -1;
	device_init_ports(dev);

	int number = atomic_fetch_add(&serial, 1);
	struct ibv_device *ibdev = &dev->vdev.device;
	ibdev->node_type = IBV_NODE_CA;
	ibdev->transport_type = IBV_TRANSPORT_IB;
	snprintf(ibdev->name, sizeof(ibdev->name), "testdev%d", number);
	snprintf(ibdev->dev_name, sizeof(ibdev->dev_name), "testverbs%d", number);
	/* libibverbs reads partition keys from files and nowhere else: the build made some. */
	static_assert(sizeof(DEVICE_SYSFS) <= sizeof(ibdev->ibdev_path),
		      "the build path is too long");
	strcpy(ibdev->ibdev_path, DEVICE_SYSFS);
	strcpy(sysfs->ibdev_name, ibdev->name);
	strcpy(sysfs->ibdev_path, ibdev->ibdev_path);
	sysfs->node_guid = 0x0200000000000000ull + number + 1;
	sysfs->flags = VSYSFS_READ_NODE_GUID | VSYSFS_READ_MODALIAS;
	sysfs->node_type = IBV_NODE_CA;
	sysfs->ibdev_idx = number;
	sysfs->num_ports = dev->opt.ports;
	dev->vdev.sysfs = sysfs;
	dev->vdev.ops = &device_ops;
	atomic_init(&dev->vdev.refcount, 1);
	dev->vdev.core_support = IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS;
	return dev;

nomem:
	error = ENOMEM;
fail:
	if (dev) {
		free(dev->posted);
		free(dev->held);
	}
	free(dev);
	free(sysfs);
	errno = error;
	return NULL;
}

void device_hold(struct function_device *dev)
{
	ibverbs_device_hold(&dev->vdev.device);
}

void device_release(struct function_device *dev)
{
	ibverbs_device_put(&dev->vdev.device);
}

/* ---- Controls ---- */

int device_fail(struct function_device *dev, const char *verb, int error, unsigned int skip,
	    unsigned int times)
{
	int index = find_verb(verb);

	if (index < 0)
		return EINVAL;
	pthread_mutex_lock(&dev->lock);
	dev->faults[index] = (struct device_fault){ .error = error, .skip = skip, .times = times };
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

int device_hold_verb(struct function_device *dev, const char *verb, bool on)
{
	int index = find_verb(verb);

	if (index < 0)
		return EINVAL;
	pthread_mutex_lock(&dev->lock);
	dev->hold[index] = on;
	pthread_cond_broadcast(&dev->released);
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

bool device_holds_verb(struct function_device *dev, const char *verb)
{
	int index = find_verb(verb);

	pthread_mutex_lock(&dev->lock);
	bool waits = index >= 0 && dev->waiting[index];
	pthread_mutex_unlock(&dev->lock);
	return waits;
}

void device_clear_faults(struct function_device *dev)
{
	pthread_mutex_lock(&dev->lock);
	memset(dev->faults, 0, sizeof(dev->faults));
	pthread_mutex_unlock(&dev->lock);
}

unsigned int device_live(struct function_device *dev, enum device_object_kind kind)
{
	pthread_mutex_lock(&dev->lock);
	unsigned int live = kind < DEVICE_OBJECT_KINDS ? dev->live[kind] : 0;
	pthread_mutex_unlock(&dev->lock);
	return live;
}

uint64_t device_calls(struct function_device *dev, const char *verb)
{
	int index = find_verb(verb);

	pthread_mutex_lock(&dev->lock);
	uint64_t count = index < 0 ? 0 : dev->call_count[index];
	pthread_mutex_unlock(&dev->lock);
	return count;
}

bool device_call_at(struct function_device *dev, const char *verb, unsigned int back,
		    struct device_call *call)
{
	bool found = false;

	pthread_mutex_lock(&dev->lock);
	for (uint64_t i = 0; i < DEVICE_CALLS_KEPT && i < dev->call_total && !found; i++) {
		const struct device_call *at =
			&dev->calls[(dev->call_total - 1 - i) % DEVICE_CALLS_KEPT];

		if (!strcmp(at->verb, verb) && back-- == 0) {
			*call = *at;
			found = true;
		}
	}
	pthread_mutex_unlock(&dev->lock);
	return found;
}

bool device_posted_at(struct function_device *dev, unsigned int back, struct device_posted *posted)
{
	pthread_mutex_lock(&dev->lock);
	bool found = back < DEVICE_POSTED_KEPT && back < dev->posted_total;
	if (found)
		*posted = dev->posted[(dev->posted_total - 1 - back) % DEVICE_POSTED_KEPT];
	pthread_mutex_unlock(&dev->lock);
	return found;
}

unsigned int device_violations(struct function_device *dev, char *text, size_t size)
{
	pthread_mutex_lock(&dev->lock);
	unsigned int count = dev->violations;
	if (size)
		snprintf(text, size, "%s", dev->violation);
	pthread_mutex_unlock(&dev->lock);
	return count;
}

#define SETTER(name, type, statement)                                                              \
	void name(struct function_device *dev, type value)                                         \
	{                                                                                          \
		pthread_mutex_lock(&dev->lock);                                                    \
		statement;                                                                         \
		pthread_mutex_unlock(&dev->lock);                                                  \
	}
SETTER(device_set_progress, enum device_progress, dev->progress = value)
SETTER(device_set_stale_translation, bool, dev->stale_translation = value)
SETTER(device_set_keep_stale, bool, dev->keep_stale = value)
SETTER(device_set_hold_readers, bool, dev->hold_readers = value;
       pthread_cond_broadcast(&dev->released))

unsigned int device_held_readers(struct function_device *dev)
{
	pthread_mutex_lock(&dev->lock);
	unsigned int count = dev->readers;
	pthread_mutex_unlock(&dev->lock);
	return count;
}
SETTER(device_set_next_qp_num, uint32_t, dev->next_qp_num = value)
SETTER(device_set_grants_less, uint32_t, dev->grants_less = value)
SETTER(device_set_poll_error, int, dev->poll_error = value)
#undef SETTER

unsigned int device_step(struct function_device *dev, unsigned int max)
{
	pthread_mutex_lock(&dev->lock);
	unsigned int count = device_run(dev, max);
	pthread_mutex_unlock(&dev->lock);
	return count;
}

void device_fatal(struct function_device *dev)
{
	struct device_object *obj;

	pthread_mutex_lock(&dev->lock);
	dev->fatal = true;
	list_for_each(&dev->objects, obj, entry) {
		if (obj->kind == DEVICE_OBJECT_QP && obj->context)
			device_qp_to_error(dev, container_of(obj, struct device_qp, obj));
		if (obj->kind == DEVICE_OBJECT_CONTEXT)
			device_async(obj->context, IBV_EVENT_DEVICE_FATAL, 0);
	}
	pthread_mutex_unlock(&dev->lock);
}

void device_removed(struct function_device *dev)
{
	struct device_object *obj;

	pthread_mutex_lock(&dev->lock);
	dev->fatal = dev->removed = true;
	list_for_each(&dev->objects, obj, entry) {
		struct device_cq *cq = container_of(obj, struct device_cq, obj);

		if (obj->kind == DEVICE_OBJECT_CONTEXT)
			device_async(obj->context, IBV_EVENT_DEVICE_FATAL, 0);
		if (obj->kind == DEVICE_OBJECT_CQ && obj->context && cq->vcq.cq.channel)
			device_pipe_end(cq->vcq.cq.channel->fd);
	}
	pthread_mutex_unlock(&dev->lock);
}
