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
#define TD_VERBS(X) \
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
	X(set_ece) X(query_ece) \
	X(modify_to_err) X(modify_to_reset) X(post_send) X(ring_doorbell) X(post_recv) X(post_srq_recv) X(wr_complete) \
	X(poll_cq) X(start_poll) X(next_poll)
/* clang-format on */

enum td_verb {
#define X(name) TD_##name,
	TD_VERBS(X)
#undef X
	TD_VERB_COUNT,
};

/* Every object that a context hands out; base is what free() takes. */
struct td_object {
	struct list_node entry;
	enum td_object_kind kind;
	struct ibv_context *context;
	void *base;
	struct td_object *uses[4]; /* destroying one of these meanwhile is EBUSY */
	bool failed; /* its destroy verb was made to: who uses it after that is at fault */
};

struct td_context {
	struct td_object obj;
	struct verbs_context vctx;
};

struct td_pd {
	struct ibv_pd pd;
	struct td_object obj;
	struct td_pd *real; /* a parent domain is another name of its protection domain */
};

struct td_mr {
	struct verbs_mr vmr;
	struct td_object obj;
	uint32_t key;
	uint64_t iova;
	uint8_t *memory; /* NULL: reads as zero, swallows writes */
	size_t length;
	unsigned int access;
	void *mapped; /* of a dma-buf */
	size_t mapped_length;
};

struct td_mw {
	struct ibv_mw mw;
	struct td_object obj; /* uses[0]: the protection domain, uses[1]: the bound region */
	struct td_mr *mr;
	uint32_t rkey, qp_num;
	uint64_t addr, length;
	unsigned int access;
};

struct td_dm {
	struct verbs_dm vdm;
	struct td_object obj;
	size_t length;
	uint8_t *memory;
};

struct td_ah {
	struct ibv_ah ah;
	struct td_object obj;
	struct ibv_ah_attr attr;
};

struct td_xrcd {
	struct verbs_xrcd vxrcd;
	struct td_object obj;
};

struct td_thread_domain {
	struct ibv_td td;
	struct td_object obj;
};

/* A posted work request. What it points to is copied, as hardware does it when the doorbell rings. */
struct td_wqe {
	struct list_node entry;
	struct ibv_send_wr wr;
	uint32_t num_sge;
	struct ibv_sge sge[TD_MAX_SGE];
	uint8_t *memory[TD_MAX_SGE]; /* of each sge, as translated when posted */
	struct ibv_ah_attr ah;
	uint32_t inline_length;
	uint32_t retries, rnr_retries;
	uint8_t inline_data[];
};

struct td_srq {
	struct verbs_srq vsrq;
	struct td_object obj;
	struct ibv_srq_attr attr;
	struct list_head queue;
	uint32_t count; /* in queue */
	uint32_t events_reported;
	struct td_qp *lean_user;
};

struct td_qp;

/* A completion, and the queue slots that its poll gives back. */
struct td_cqe {
	struct list_node entry;
	struct td_qp *qp; /* NULL once the queue pair is gone */
	struct ibv_wc wc;
	uint64_t time;
	uint32_t send_slots, receive_slots;
	bool solicited;
};

struct td_cq {
	struct verbs_cq vcq;
	/* Lean: a ring of completions, indices running freely. */
	struct ibv_wc *ring;
	uint32_t mask, head, tail;
	uint32_t armed; /* 0, 1: next completion, 2: next solicited or failed one */
	struct td_object obj;
	/* Model. */
	struct list_head ready, held;
	uint32_t ready_count, held_count, capacity;
	bool hold_all, overrun, polling;
	pthread_t poller; /* the thread that polls, while polling */
	uint32_t poll_limit;
	struct td_cqe *current; /* between start_poll and end_poll */
	uint32_t events_reported, async_reported;
};

struct td_qp {
	struct verbs_qp vqp;
	struct td_cq *send_cq, *recv_cq;
	uint32_t sig_all; /* lean: or-ed with the request's flags */
	uint32_t batch_head; /* lean: end of the completions of an open batch */
	uint32_t batch_error;
	struct td_object obj;
	/* Model. */
	struct td_srq *srq;
	struct ibv_qp_attr attr; /* all that was set; qp_state is the device's view */
	struct ibv_qp_init_attr init_attr;
	struct ibv_ece ece;
	struct list_head sends, receives, batch;
	struct td_wqe *building; /* the request of the batch that setters apply to */
	bool batch_open;
	pthread_t builder; /* the thread that builds the batch, while it is open */
	uint32_t send_used, recv_used; /* slots not given back yet */
	uint32_t unreported; /* slots of executed unsignalled sends, given back with the next one */
	uint32_t lose;
	uint32_t send_psn, recv_psn; /* count messages here, packets in hardware */
	bool paused, hold;
	bool executing; /* the first of sends: flushing waits until it is finished */
	uint64_t send_ops;
	uint32_t events_reported;
	union ibv_gid mcast[4];
	uint32_t mcast_count;
};

struct td_fault {
	int error;
	unsigned int skip, times;
};

struct td_gid {
	union ibv_gid gid;
	uint32_t type, ifindex;
};

enum { TD_CALLS_KEPT = 64, TD_POSTED_KEPT = 64 };

struct td_device {
	struct verbs_device vdev;
	struct td_options opt;
	pthread_mutex_t lock;
	struct list_head objects;
	unsigned int live[TD_OBJECT_KINDS];
	struct td_fault faults[TD_VERB_COUNT];
	uint64_t call_count[TD_VERB_COUNT];
	struct td_call calls[TD_CALLS_KEPT];
	uint64_t call_total;
	struct td_posted *posted;
	uint64_t posted_total;
	unsigned int violations;
	char violation[160];
	enum td_progress progress;
	uint32_t next_qp_num, next_key;
	bool hold_readers;
	unsigned int readers; /* that are held between the read of an event and its acknowledgement */
	pthread_cond_t released;
	bool fatal, removed, link_down, stale_translation, keep_stale;
	int poll_error;
	struct ibv_port_attr port[TD_MAX_PORTS];
	struct td_gid gid[TD_MAX_PORTS][TD_GIDS];
};

#define TD_CAST(type, member)                                                                      \
	static inline struct type *to_##type(const void *p)                                        \
	{                                                                                          \
		return container_of((const typeof(((struct type *)0)->member) *)p, struct type,    \
				    member);                                                       \
	}
TD_CAST(td_pd, pd)
TD_CAST(td_mw, mw)
TD_CAST(td_ah, ah)
TD_CAST(td_thread_domain, td)
TD_CAST(td_mr, vmr)
TD_CAST(td_dm, vdm)
TD_CAST(td_xrcd, vxrcd)
TD_CAST(td_srq, vsrq)
TD_CAST(td_cq, vcq)
TD_CAST(td_qp, vqp)
#undef TD_CAST

static inline struct td_device *to_device(struct ibv_context *context)
{
	return container_of(verbs_get_device(context->device), struct td_device, vdev);
}

/* device.c */
/* Locks the device and logs a call, whose arguments the caller fills in before td_admit. */
struct td_call *td_begin(struct ibv_context *context, enum td_verb verb, const void *object);
/* 0, or the errno that the verb shall fail with. */
int td_admit(struct td_device *dev, enum td_verb verb);
int td_fault(struct td_device *dev, enum td_verb verb);
void td_unlock(struct ibv_context *context);
void td_violate(struct td_device *dev, const char *text);
void *td_alloc(struct td_device *dev, struct ibv_context *context, enum td_object_kind kind,
	       size_t size, size_t object_offset, unsigned int limit);
#define td_new(dev, context, kind, type, limit)                                                    \
	((struct type *)td_alloc(dev, context, kind, sizeof(struct type),                          \
				 offsetof(struct type, obj), limit))
/* EBUSY while another object uses it. */
int td_busy(struct td_device *dev, const struct td_object *obj);
/* Begins a verb that destroys: 0, or the errno that it fails with. After a failure that a test has put
 * in nobody may use the object, nor destroy what it was made from. */
int td_destroy(struct td_device *dev, enum td_verb verb, struct td_object *obj);
/* Waits, with the device locked, as long as a test wants it to. */
void td_hold_reader(struct td_device *dev);
/* What every verb on an object begins with that does not destroy it. */
void td_use(struct td_device *dev, const struct td_object *obj);
void td_free(struct td_device *dev, struct td_object *obj);
/* Ends a verb that returns a pointer: unlocks; sets errno and returns NULL on an error. */
void *td_done(struct ibv_context *context, void *object, int error);
extern const struct verbs_context_ops td_resource_ops, td_region_ops, td_srq_ops, td_cq_ops, td_qp_ops;
extern const struct verbs_context_ops td_model_ops, td_lean_ops, td_port_ops;

/* kernel.c */
int td_pipe(void);
void td_pipe_end(int fd);
void td_pipe_write(int fd, const void *record, size_t size);
void td_pipe_remove(int fd, size_t record_size, size_t offset, uint64_t value);
int td_register_fd(int fd, struct td_device *dev);
void td_forget_fd(int fd);
void td_wait_acks(pthread_mutex_t *mutex, pthread_cond_t *cond, const uint32_t *completed,
		  const uint32_t *reported, const char *what);

/* memory_region.c */
uint32_t td_next_key(struct td_device *dev);

/* port.c */
void td_init_ports(struct td_device *dev);

/* completion_queue.c */
struct td_cq *td_find_cq(struct td_device *dev, const void *cq);
void td_complete(struct td_device *dev, struct td_cq *cq, struct td_qp *qp,
		 const struct ibv_wc *wc, uint32_t send_slots, uint32_t receive_slots,
		 bool solicited);
void td_cq_event(struct td_cq *cq);
/* Forgets the queue pair in the queue's completions, which go too unless the device keeps them. */
void td_cq_purge(struct td_device *dev, struct td_cq *cq, struct td_qp *qp);
void td_cq_clear(struct td_cq *cq);

/* queue_pair.c */
struct td_qp *td_find_qp(struct td_device *dev, uint32_t qp_num);
void td_qp_clear(struct td_device *dev, struct td_qp *qp);
/* In ERR flushes both queues, in SQE the send queue; in other states does nothing. */
void td_qp_flush(struct td_device *dev, struct td_qp *qp);
void td_qp_to_error(struct td_device *dev, struct td_qp *qp);
bool td_qp_transition_ok(const struct td_qp *qp, const struct ibv_qp_attr *attr, int mask);
void td_async(struct ibv_context *context, uint32_t type, uint64_t element);

/* post.c */
void td_model_wr_functions(struct td_qp *qp);
int td_post_bind(struct td_qp *qp, struct td_mw *mw, const struct ibv_mw_bind *bind);
/* Checks one send request and appends a copy of it; *out names it for the extended interface. */
int td_enqueue_send(struct td_device *dev, struct td_qp *qp, struct td_wqe *wqe);
struct td_wqe *td_copy_send(const struct ibv_send_wr *wr);
/* What follows a post: flush in an error state, execute if the device does so on posts. */
void td_after_post(struct td_device *dev, struct td_qp *qp);

/* lean.c */
void td_lean_wr_functions(struct td_qp *qp);
void td_lean_cq_functions(struct ibv_cq_ex *cq);

/* memory.c */
/* The memory of a region that covers the range and allows the access, or NULL. */
uint8_t *td_local(struct td_device *dev, struct td_pd *pd, uint32_t lkey, uint64_t addr,
		  uint64_t length, unsigned int access, bool *zero);
/* The same for a peer; NULL with *status. */
uint8_t *td_remote(struct td_device *dev, struct td_qp *peer, uint32_t rkey, uint64_t addr,
		   uint64_t length, unsigned int access, enum ibv_wc_status *status);
/* Copies between a request's lists and data; false: a list names memory it may not use. */
bool td_gather(struct td_device *dev, struct td_pd *pd, const struct td_wqe *wqe, uint8_t *data);
bool td_scatter(struct td_device *dev, struct td_pd *pd, const struct td_wqe *wqe,
		const uint8_t *data, uint64_t length);
uint64_t td_length(const struct td_wqe *wqe);
struct td_mw *td_find_rkey_window(struct td_device *dev, uint32_t rkey);
bool td_bind(struct td_device *dev, struct td_qp *qp, const struct ibv_send_wr *wr);
void td_unbind(struct td_mw *mw);

/* datagram.c */
void td_send_datagram(struct td_device *dev, struct td_qp *qp, const struct td_wqe *wqe,
		      const uint8_t *data, uint32_t length);

/* transfer.c */
unsigned int td_run(struct td_device *dev, unsigned int max);
bool td_reachable(struct td_device *dev, const struct ibv_ah_attr *av);
/* Takes the next receive of the queue pair, or of its shared queue; NULL: none. */
struct td_wqe *td_take_receive(struct td_device *dev, struct td_qp *qp, struct td_srq *srq);
void td_error_wc(struct ibv_wc *wc, const struct td_qp *qp, uint64_t wr_id,
		 enum ibv_wc_status status);

#endif
