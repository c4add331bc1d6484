/* What the files of the device share; not for its users. */
#ifndef TEST_DEVICE_INTERNAL_H
#define TEST_DEVICE_INTERNAL_H

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <ccan/array_size.h>
#include <infiniband/driver.h>
#include "device.h"

/* In libibverbs/ibverbs.h, which is not installed in the build tree. */
void ibverbs_device_hold(struct ibv_device *dev);
void ibverbs_device_put(struct ibv_device *dev);

/* clang-format off */
#define DEVICE_VERBS(X) \
	X(open_device) X(free_context) X(query_device_ex) X(query_port) X(query_gid) \
	X(query_gid_table) X(query_rt_values) X(create_comp_channel) \
	X(alloc_pd) X(dealloc_pd) X(alloc_parent_domain) X(alloc_td) X(dealloc_td) \
	X(open_xrcd) X(close_xrcd) \
	X(reg_mr) X(reg_dmabuf_mr) X(reg_dm_mr) X(alloc_null_mr) X(rereg_mr) X(dereg_mr) \
	X(advise_mr) X(alloc_mw) X(dealloc_mw) X(bind_mw) X(alloc_dm) X(free_dm) \
	X(import_pd) X(unimport_pd) X(import_mr) X(unimport_mr) X(import_dm) X(unimport_dm) \
	X(create_ah) X(destroy_ah) X(attach_mcast) X(detach_mcast) \
	X(create_srq) X(create_srq_ex) X(modify_srq) X(query_srq) X(get_srq_num) X(destroy_srq) \
	X(create_cq) X(create_cq_ex) X(modify_cq) X(resize_cq) X(req_notify_cq) X(destroy_cq) \
	X(create_qp) X(create_qp_ex) X(modify_qp) X(query_qp) X(destroy_qp) \
	X(set_ece) X(query_ece) X(open_qp) \
	X(create_wq) X(modify_wq) X(destroy_wq) X(post_wq_recv) \
	X(create_rwq_ind_table) X(destroy_rwq_ind_table) \
	X(create_flow) X(destroy_flow) \
	X(create_flow_action_esp) X(modify_flow_action_esp) X(destroy_flow_action) \
	X(create_counters) X(destroy_counters) X(attach_counters_point_flow) X(read_counters) \
	X(post_srq_ops) \
	X(modify_to_err) X(modify_to_reset) X(post_send) X(ring_doorbell) X(lose_error) X(post_recv) X(post_srq_recv) X(wr_complete) \
	X(poll_cq) X(start_poll) X(next_poll) \
	X(query_port_speed) X(alloc_dmah) X(dealloc_dmah) X(reg_mr_ex) X(alloc_buf) X(free_buf) X(dm_export_dmabuf_fd) \
	X(query_comp_cntr_caps) X(create_comp_cntr) X(destroy_comp_cntr) X(set_comp_cntr) X(set_err_comp_cntr) \
	X(inc_comp_cntr) X(inc_err_comp_cntr) X(read_comp_cntr) X(read_err_comp_cntr) X(qp_attach_comp_cntr)
/* clang-format on */

enum device_verb {
#define X(name) DEVICE_##name,
	DEVICE_VERBS(X)
#undef X
	DEVICE_VERB_COUNT,
};

/* Every object that a context hands out; base is what free() takes. */
struct device_object {
	struct list_node entry;
	enum device_object_kind kind;
	struct ibv_context *context;
	void *base;
	struct device_object *uses[DEVICE_MAX_TABLE]; /* destroying one of these meanwhile is EBUSY */
	bool failed; /* its destroy verb was made to: who uses it after that is at fault */
};

struct device_context {
	struct device_object obj;
	struct verbs_context vctx;
};

struct device_pd {
	struct ibv_pd pd;
	struct device_object obj;
	struct device_pd *real; /* a parent domain is another name of its protection domain */
	struct ibv_parent_domain_init_attr attr; /* of a parent domain: its allocator */
};

struct device_mr {
	struct verbs_mr vmr;
	struct device_object obj;
	uint32_t key;
	uint64_t iova;
	uint8_t *memory; /* NULL: reads as zero, swallows writes */
	size_t length;
	unsigned int access;
	void *mapped; /* of a dma-buf */
	size_t mapped_length;
};

struct device_mw {
	struct ibv_mw mw;
	struct device_object obj; /* uses[0]: the protection domain, uses[1]: the bound region */
	struct device_mr *mr;
	uint32_t rkey, qp_num;
	uint64_t addr, length;
	unsigned int access;
};

struct device_dm {
	struct verbs_dm vdm;
	struct device_object obj;
	size_t length;
	uint8_t *memory;
};

struct device_ah {
	struct ibv_ah ah;
	struct device_object obj;
	struct ibv_ah_attr attr;
};

struct device_xrcd {
	struct verbs_xrcd vxrcd;
	struct device_object obj;
};

struct device_thread_domain {
	struct ibv_td td;
	struct device_object obj;
};

/* A posted work request. What it points to is copied, as hardware does it when the doorbell rings. */
struct device_wqe {
	struct list_node entry;
	struct ibv_send_wr wr;
	uint32_t num_sge;
	struct ibv_sge sge[DEVICE_MAX_SGE];
	uint8_t *memory[DEVICE_MAX_SGE]; /* of each sge, as translated when posted */
	struct ibv_ah_attr ah;
	uint32_t inline_length;
	uint32_t retries, rnr_retries;
	uint8_t inline_data[];
};

struct device_srq {
	struct verbs_srq vsrq;
	struct device_object obj;
	struct ibv_srq_attr attr;
	struct list_head queue;
	uint32_t count; /* in queue */
	uint32_t events_reported;
	struct device_qp *lean_user;
	/* Tag matching. */
	struct device_cq *cq;
	struct device_tag {
		bool used;
		uint64_t recv_wr_id, tag, mask;
	} *tags;
	uint32_t tag_count;
};

struct device_wq {
	struct ibv_wq wq;
	struct device_object obj; /* uses[0]: the protection domain */
	struct device_cq *cq;
	struct list_head receives;
	uint32_t used, max_wr, max_sge, flags, events_reported;
};

/* Its uses are its work queues. */
struct device_table {
	struct ibv_rwq_ind_table table;
	struct device_object obj;
	uint32_t size;
	struct device_wq *queues[DEVICE_MAX_TABLE];
};

struct device_counters {
	struct ibv_counters counters;
	struct device_object obj;
	struct device_point {
		enum ibv_counter_description what;
		uint32_t index;
	} points[DEVICE_MAX_COUNTERS];
	uint32_t point_count;
	uint64_t values[DEVICE_MAX_COUNTERS];
};

struct device_action {
	struct ibv_flow_action action;
	struct device_object obj;
};

struct device_flow {
	struct ibv_flow flow;
	struct device_object obj; /* uses[0]: the queue pair, then counters and actions */
	struct ibv_flow_attr attr;
	uint8_t specs[DEVICE_MAX_FLOW];
	struct device_counters *counters;
	bool drop;
};

struct device_qp;

/* A completion, and the queue slots that its poll gives back. */
struct device_cqe {
	struct list_node entry;
	struct device_qp *qp; /* NULL once the queue pair is gone */
	struct ibv_wc wc;
	uint64_t time;
	uint32_t send_slots, receive_slots;
	bool solicited;
};

struct device_cq {
	struct verbs_cq vcq;
	/* Lean: a ring of completions, indices running freely. */
	struct ibv_wc *ring;
	uint32_t mask, head, tail;
	uint32_t armed; /* 0, 1: next completion, 2: next solicited or failed one */
	struct device_object obj;
	/* Model. */
	struct list_head ready, held;
	uint32_t ready_count, held_count, capacity;
	bool hold_all, overrun, polling;
	pthread_t poller; /* the thread that polls, while polling */
	struct device_cqe *current; /* between start_poll and end_poll */
	uint32_t events_reported, async_reported;
};

struct device_qp {
	struct verbs_qp vqp;
	struct device_cq *send_cq, *recv_cq;
	uint32_t sig_all; /* lean: or-ed with the request's flags */
	uint32_t batch_head; /* lean: end of the completions of an open batch */
	uint32_t batch_error;
	struct device_object obj;
	/* Model. */
	struct device_srq *srq;
	struct ibv_qp_attr attr; /* all that was set; qp_state is the device's view */
	struct ibv_qp_init_attr init_attr;
	struct ibv_ece ece;
	struct list_head sends, receives, batch;
	struct device_wqe *building; /* the request of the batch that setters apply to */
	bool batch_open;
	pthread_t builder; /* the thread that builds the batch, while it is open */
	uint32_t send_used, recv_used; /* slots not given back yet */
	uint32_t unreported; /* slots of executed unsignalled sends, given back with the next one */
	uint32_t send_psn, recv_psn; /* count messages here, packets in hardware */
	bool paused, hold;
	bool executing; /* the first of sends: flushing waits until it is finished */
	uint64_t send_ops;
	uint32_t events_reported;
	struct device_table *table; /* it spreads what arrives by a hash */
	struct ibv_rx_hash_conf hash;
	uint8_t hash_key[DEVICE_MAX_HASH_KEY];
	void *buffer; /* from the allocator of its parent domain */
	bool buffer_is_default;
	union ibv_gid mcast[4];
	uint32_t mcast_count;
};

struct device_fault {
	int error;
	unsigned int skip, times;
};

struct device_gid {
	union ibv_gid gid;
	uint32_t type, ifindex;
};

/* Lean: a receive that waits for device_deliver. */
struct device_held {
	struct device_cq *cq;
	uint64_t wr_id;
	uint32_t length, qp_num;
};

enum { DEVICE_CALLS_KEPT = 64, DEVICE_POSTED_KEPT = 64 };

struct function_device {
	struct verbs_device vdev;
	struct device_options opt;
	pthread_mutex_t lock;
	struct list_head objects;
	unsigned int live[DEVICE_OBJECT_KINDS];
	struct device_fault faults[DEVICE_VERB_COUNT];
	uint64_t call_count[DEVICE_VERB_COUNT];
	struct device_call calls[DEVICE_CALLS_KEPT];
	uint64_t call_total;
	struct device_posted *posted;
	uint64_t posted_total;
	unsigned int violations;
	char violation[160];
	enum device_progress progress;
	uint32_t next_qp_num, next_key, grants_less;
	bool hold_readers;
	bool hold[DEVICE_VERB_COUNT];
	bool waiting[DEVICE_VERB_COUNT];
	unsigned int readers; /* that are held between the read of an event and its acknowledgement */
	pthread_cond_t released;
	bool fatal, removed, stale_translation, keep_stale;
	int poll_error;
	struct ibv_port_attr port[DEVICE_MAX_PORTS];
	struct device_gid gid[DEVICE_MAX_PORTS][DEVICE_GIDS];
	struct device_held *held; /* a ring, indices running freely; NULL: receives complete at once */
	uint32_t held_mask, held_head, held_tail;
};

#define DEVICE_CAST(type, member)                                                                  \
	static inline struct type *to_##type(const void *p)                                        \
	{                                                                                          \
		return container_of((const typeof(((struct type *)0)->member) *)p, struct type,    \
				    member);                                                       \
	}
DEVICE_CAST(device_pd, pd)
DEVICE_CAST(device_mw, mw)
DEVICE_CAST(device_ah, ah)
DEVICE_CAST(device_thread_domain, td)
DEVICE_CAST(device_mr, vmr)
DEVICE_CAST(device_dm, vdm)
DEVICE_CAST(device_xrcd, vxrcd)
DEVICE_CAST(device_srq, vsrq)
DEVICE_CAST(device_wq, wq)
DEVICE_CAST(device_table, table)
DEVICE_CAST(device_counters, counters)
DEVICE_CAST(device_action, action)
DEVICE_CAST(device_flow, flow)
DEVICE_CAST(device_cq, vcq)
DEVICE_CAST(device_qp, vqp)
#undef DEVICE_CAST

static inline struct function_device *to_device(struct ibv_context *context)
{
	return container_of(verbs_get_device(context->device), struct function_device, vdev);
}

/* device.c */
/* Locks the device and logs a call, whose arguments the caller fills in before device_admit. */
struct device_call *device_begin(struct ibv_context *context, enum device_verb verb,
				 const void *object);
/* 0, or the errno that the verb shall fail with. */
int device_admit(struct function_device *dev, enum device_verb verb);
int device_fault(struct function_device *dev, enum device_verb verb);
void device_unlock(struct ibv_context *context);
void device_violate(struct function_device *dev, const char *text);
void *device_alloc(struct function_device *dev, struct ibv_context *context,
		   enum device_object_kind kind, size_t size, size_t object_offset,
		   unsigned int limit);
#define device_new(dev, context, kind, type, limit)                                                \
	((struct type *)device_alloc(dev, context, kind, sizeof(struct type),                      \
				     offsetof(struct type, obj), limit))
/* EBUSY while another object uses it. */
int device_busy(struct function_device *dev, const struct device_object *obj);
/* Begins a verb that destroys: 0, or the errno that it fails with. After a failure that a test has put
 * in nobody may use the object, nor destroy what it was made from. */
int device_destroy(struct function_device *dev, enum device_verb verb, struct device_object *obj);
/* Waits, with the device locked, as long as a test wants it to. */
void device_hold_reader(struct function_device *dev);
/* What every verb on an object begins with that does not destroy it. */
void device_use(struct function_device *dev, const struct device_object *obj);
void device_free(struct function_device *dev, struct device_object *obj);
/* Ends a verb that returns a pointer: unlocks; sets errno and returns NULL on an error. */
void *device_done(struct ibv_context *context, void *object, int error);
extern const struct verbs_context_ops device_resource_ops, device_region_ops, device_srq_ops,
	device_cq_ops, device_qp_ops;
extern const struct verbs_context_ops device_model_ops, device_lean_ops, device_lean_held_ops, device_port_ops,
	device_wq_ops, device_flow_ops, device_since_65_ops;

/* kernel.c */
int device_pipe(void);
void device_pipe_end(int fd);
void device_pipe_write(int fd, const void *record, size_t size);
void device_pipe_remove(int fd, size_t record_size, size_t offset, uint64_t value);
int device_register_fd(int fd, struct function_device *dev);
void device_forget_fd(int fd);
void device_wait_acks(pthread_mutex_t *mutex, pthread_cond_t *cond, const uint32_t *completed,
		  const uint32_t *reported, const char *what);

/* memory_region.c */
uint32_t device_next_key(struct function_device *dev);

/* port.c */
void device_init_ports(struct function_device *dev);

/* completion_queue.c */
struct device_cq *device_find_cq(struct function_device *dev, const void *cq);
void device_complete(struct function_device *dev, struct device_cq *cq, struct device_qp *qp,
		 const struct ibv_wc *wc, uint32_t send_slots, uint32_t receive_slots,
		 bool solicited);
void device_cq_event(struct device_cq *cq);
/* Forgets the queue pair in the queue's completions, which go too unless the device keeps them. */
void device_cq_purge(struct function_device *dev, struct device_cq *cq, struct device_qp *qp);
void device_cq_clear(struct device_cq *cq);

/* queue_pair.c */
struct device_qp *device_find_qp(struct function_device *dev, uint32_t qp_num);
void device_qp_clear(struct function_device *dev, struct device_qp *qp);
/* In ERR flushes both queues, in SQE the send queue; in other states does nothing. */
void device_qp_flush(struct function_device *dev, struct device_qp *qp);
void device_qp_to_error(struct function_device *dev, struct device_qp *qp);
bool device_qp_transition_ok(const struct device_qp *qp, const struct ibv_qp_attr *attr, int mask);
void device_async(struct ibv_context *context, uint32_t type, uint64_t element);

/* post.c */
void device_model_wr_functions(struct device_qp *qp);
int device_post_bind(struct device_qp *qp, struct device_mw *mw, const struct ibv_mw_bind *bind);
/* Checks one send request and appends a copy of it; *out names it for the extended interface. */
int device_enqueue_send(struct function_device *dev, struct device_qp *qp, struct device_wqe *wqe);
struct device_wqe *device_copy_send(const struct ibv_send_wr *wr);
/* What follows a post: flush in an error state, execute if the device does so on posts. */
void device_after_post(struct function_device *dev, struct device_qp *qp);

struct device_wqe *device_copy_receive(struct function_device *dev, struct device_object *pd,
			       const struct ibv_recv_wr *wr, uint32_t max_sge);
void device_log_posted(struct function_device *dev, uint32_t qp_num, bool receive, const struct device_wqe *wqe);

/* raw_packet.c */
/* Gives a frame to the queue pairs whose flows match it. */
void device_send_frame(struct function_device *dev, struct device_qp *qp, const uint8_t *frame, uint32_t length);

/* lean.c */
void device_lean_wr_functions(struct device_qp *qp);
void device_lean_cq_functions(struct ibv_cq_ex *cq);
int device_lean_init(struct function_device *dev);

/* memory.c */
/* The memory of a region that covers the range and allows the access, or NULL. */
uint8_t *device_local(struct function_device *dev, struct device_pd *pd, uint32_t lkey,
		      uint64_t addr, uint64_t length, unsigned int access, bool *zero);
/* The same for a peer; NULL with *status. */
uint8_t *device_remote(struct function_device *dev, struct device_qp *peer, uint32_t rkey,
		       uint64_t addr, uint64_t length, unsigned int access,
		       enum ibv_wc_status *status);
/* Copies between a request's lists and data; false: a list names memory it may not use. */
bool device_gather(struct function_device *dev, struct device_pd *pd, const struct device_wqe *wqe,
		   uint8_t *data);
bool device_scatter(struct function_device *dev, struct device_pd *pd, const struct device_wqe *wqe,
		const uint8_t *data, uint64_t length);
uint64_t device_length(const struct device_wqe *wqe);
struct device_mw *device_find_rkey_window(struct function_device *dev, uint32_t rkey);
bool device_bind(struct function_device *dev, struct device_qp *qp, const struct ibv_send_wr *wr);
void device_unbind(struct device_mw *mw);

/* datagram.c */
void device_send_datagram(struct function_device *dev, struct device_qp *qp,
			  const struct device_wqe *wqe, const uint8_t *data, uint32_t length);

/* transfer.c */
unsigned int device_run(struct function_device *dev, unsigned int max);
bool device_reachable(struct function_device *dev, const struct ibv_ah_attr *av);
/* Takes the next receive of the queue pair, or of its shared queue; NULL: none. */
struct device_wqe *device_take_receive(struct function_device *dev, struct device_qp *qp,
				       struct device_srq *srq);
void device_error_wc(struct ibv_wc *wc, const struct device_qp *qp, uint64_t wr_id,
		 enum ibv_wc_status status);

#endif
