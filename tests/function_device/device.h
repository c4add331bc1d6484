/*
 * An RDMA device made of functions: no kernel driver, no hardware, one process.
 *
 * It is opened through the real libibverbs (ibv_open_device and all that follows), so the code
 * under test takes exactly the paths that it takes on hardware. Two kinds, chosen at creation:
 *
 * TD_LEAN   a post pushes its completion into a ring, a poll pops it. Nothing is locked, nothing is
 *           copied, nothing is checked but the ring's own bounds: for counting instructions.
 *           One thread at a time.
 * TD_MODEL  a model of an RDMA device: RC, UC, UD and XRC queue pairs of one device reach each other
 *           and really move bytes, at a moment that the test controls, with keys, bounds, access
 *           flags, states and retries checked as hardware checks them. Every fault can be injected.
 *           Thread-safe.
 *
 * Functions that return int return 0 or an errno value; td_open and td_create return NULL and set
 * errno. A handle (queue pair, completion queue ..) that the device does not know gives EINVAL.
 */
#ifndef TEST_DEVICE_H
#define TEST_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

struct td_device;

enum td_kind { TD_LEAN, TD_MODEL };

/* When the model executes posted work. */
enum td_progress {
	TD_MANUAL,  /* in td_step() only */
	TD_ON_POLL, /* also in each poll and each request for notification */
	TD_ON_POST, /* also in each post */
};

/* A field left 0 takes the default in brackets. */
struct td_options {
	uint32_t kind;	     /* enum td_kind */
	uint32_t progress;   /* enum td_progress */
	uint32_t link_layer; /* IBV_LINK_LAYER_* [Ethernet] */
	uint32_t ports;	     /* [1] */
	uint32_t max_qp_wr;  /* [16384] */
	uint32_t max_sge;    /* at most TD_MAX_SGE [16] */
	uint32_t max_inline; /* at most TD_MAX_INLINE [256] */
	uint32_t max_cqe;    /* [65536] */
	uint32_t max_qp, max_cq, max_mr, max_pd, max_srq, max_ah, max_mw; /* [65536] each */
	uint32_t max_rd_atomic; /* [16] */
	uint32_t comp_vectors;	/* [4] */
	uint32_t first_qp_num;	/* [0x11] */
	uint64_t max_mr_size;	/* [2^40] */
	uint32_t on_demand;	/* 1: on-demand paging, implicit too [no] */
	uint32_t vendor_id;	/* [0xffffff, and then the model is 55] */
	uint32_t vendor_part_id;
};

enum { TD_MAX_SGE = 16, TD_MAX_INLINE = 1024, TD_GIDS = 8, TD_MAX_PORTS = 4 };

struct td_device *td_create(const struct td_options *options);
/* The device lives on until every context of it is closed too. */
void td_hold(struct td_device *device);
void td_release(struct td_device *device);
/* A new context, to be closed with ibv_close_device. */
struct ibv_context *td_open(struct td_device *device);

/* ---- Progress (model) ---- */

void td_set_progress(struct td_device *device, enum td_progress progress);
/*
 * Executes up to max work requests (0: until nothing moves), one of each queue pair in turn;
 * returns how many. A request that finds no receive, or no peer, spends one retry per call.
 */
unsigned int td_step(struct td_device *device, unsigned int max);
/* While paused, the queue pair's send queue is not executed; posting goes on. */
int td_pause(struct td_device *device, uint32_t qp_num, bool paused);
/* The number of work requests that the device still owns: not executed, or not yet polled. */
int td_outstanding(struct td_device *device, uint32_t qp_num, uint32_t *sends, uint32_t *receives);
/* Every packet is lost while the link is down; the port's state changes, no event is raised. */
void td_set_link(struct td_device *device, bool up);
/* Loses the next count messages that the queue pair sends. */
int td_lose(struct td_device *device, uint32_t qp_num, unsigned int count);
/*
 * With a stale translation, memory is reached through the pointer seen when the request was posted,
 * even if the region was deregistered since: what DMA in flight does. Off by default: then such a
 * request ends in a protection error, and counts as a violation either way.
 */
void td_set_stale_translation(struct td_device *device, bool on);
/* Completions of a queue pair stay in its queue when it is reset or destroyed, as rxe does it. */
void td_set_keep_stale(struct td_device *device, bool on);
/* Threads that read an event of a completion queue stay between the read and the acknowledgement as long as this is on. */
void td_set_hold_readers(struct td_device *device, bool on);
unsigned int td_held_readers(struct td_device *device);
/* Moves a queue pair to ERR as the device itself does it after an error: flushes, no event. */
int td_qp_error(struct td_device *device, uint32_t qp_num);
void td_set_next_qp_num(struct td_device *device, uint32_t qp_num);

/* ---- Completions (model) ---- */

/* Held completions exist, but no poll sees them until they are released. qp_num 0: all. */
int td_hold_completions(struct td_device *device, struct ibv_cq *cq, uint32_t qp_num, bool hold);
int td_held(struct td_device *device, struct ibv_cq *cq, unsigned int *count);
/* Lets out the held completion at index (oldest is 0), or all of them in order: UINT_MAX. */
int td_release_held(struct td_device *device, struct ibv_cq *cq, unsigned int index);
/* Drops all held completions: they never arrive. */
int td_drop_held(struct td_device *device, struct ibv_cq *cq);
/* Puts in a completion as it is, whatever it says. */
int td_inject(struct td_device *device, struct ibv_cq *cq, const struct ibv_wc *wc);
/* Mixes the queue, keeping the order within each queue pair's sends and within its receives. */
int td_shuffle(struct td_device *device, struct ibv_cq *cq, uint64_t seed);
/* Each poll returns at most this many completions (0: no limit). */
int td_limit_poll(struct td_device *device, struct ibv_cq *cq, unsigned int max);
/* What a failing poll_cq returns; -1 by default, mlx5 has -2. */
void td_set_poll_error(struct td_device *device, int value);

/* ---- Faults ---- */

/*
 * After skip calls that go through, the next times calls of the verb (UINT_MAX: all) fail with
 * error. Verbs are named as in struct verbs_context_ops, plus create_comp_channel, query_gid,
 * query_gid_table, start_poll, next_poll, wr_complete, modify_to_err, modify_to_reset, and
 * ring_doorbell: post_send fails though it has queued all requests. For post_send, post_recv and post_srq_recv
 * each work request of a list counts as one call. poll_cq fails with td_set_poll_error's value.
 * EINVAL: no verb has that name.
 */
int td_fail(struct td_device *device, const char *verb, int error, unsigned int skip,
	    unsigned int times);
void td_clear_faults(struct td_device *device);
/*
 * The device died: DEVICE_FATAL is raised, every queue pair flushes, every verb but those that
 * destroy or poll fails with EIO.
 */
void td_device_fatal(struct td_device *device);
/*
 * The device was pulled out: as td_device_fatal, but nothing flushes or completes any more, and the
 * channels of its completion queues come to their end (reading fails), as the kernel has it.
 */
void td_device_removed(struct td_device *device);

/* ---- Events ---- */

/* element: a port number, or the handle that the event is about; 0 for unknown event types. */
int td_raise_async(struct td_device *device, struct ibv_context *context, uint32_t event_type,
		   uint64_t element);
/* Puts an event in the queue's channel, armed or not. */
int td_raise_cq_event(struct td_device *device, struct ibv_cq *cq);

/* ---- Port ---- */

/* An all-zero GID empties the entry. gid_type: enum ibv_gid_type. */
int td_set_gid(struct td_device *device, uint32_t port, uint32_t index, const union ibv_gid *gid,
	       uint32_t gid_type, uint32_t ifindex);
int td_set_port(struct td_device *device, uint32_t port, const struct ibv_port_attr *attr);
int td_get_port(struct td_device *device, uint32_t port, struct ibv_port_attr *attr);

/* ---- What was handed to the device ---- */

enum td_object_kind {
	TD_OBJECT_CONTEXT,
	TD_OBJECT_PD, /* parent domains too */
	TD_OBJECT_MR,
	TD_OBJECT_MW,
	TD_OBJECT_CQ,
	TD_OBJECT_QP,
	TD_OBJECT_SRQ,
	TD_OBJECT_AH,
	TD_OBJECT_DM,
	TD_OBJECT_TD,
	TD_OBJECT_XRCD,
	TD_OBJECT_KINDS,
};

/* The number of live objects. */
unsigned int td_live(struct td_device *device, enum td_object_kind kind);

/* The arguments of a control verb; what a verb does not take is zero. Lists are not followed. */
struct td_call {
	const char *verb;
	const void *object; /* what the verb was called on */
	int mask;	    /* attr_mask, or flags of rereg_mr */
	uint64_t addr, length, iova;
	uint32_t access;
	int fd;
	uint32_t cqe, comp_vector;
	uint32_t solicited_only;
	uint32_t mw_type;
	uint16_t lid;
	union ibv_gid gid;
	struct ibv_qp_attr qp_attr;
	struct ibv_qp_init_attr_ex qp_init_attr;
	struct ibv_cq_init_attr_ex cq_init_attr;
	struct ibv_modify_cq_attr modify_cq_attr;
	struct ibv_srq_init_attr_ex srq_init_attr;
	struct ibv_srq_attr srq_attr;
	struct ibv_ah_attr ah_attr;
	struct ibv_mw_bind mw_bind;
	struct ibv_alloc_dm_attr dm_attr;
	struct ibv_parent_domain_init_attr parent_domain_attr;
	struct ibv_xrcd_init_attr xrcd_attr;
	struct ibv_ece ece;
};

/* A copy of a posted work request, its lists included (model only). */
struct td_posted {
	uint32_t qp_num; /* 0: a shared receive queue */
	bool receive;
	uint64_t wr_id;
	uint32_t num_sge;
	struct ibv_sge sge[TD_MAX_SGE];
	uint32_t inline_length;
	uint8_t inline_data[TD_MAX_INLINE];
	struct ibv_send_wr send; /* without its pointers to lists */
};

/* How many calls of the verb came in since creation, failed ones too; 0 for an unknown name. */
uint64_t td_calls(struct td_device *device, const char *verb);
/* The latest call of the verb but back; false: there is none (the last 64 calls are kept). */
bool td_call_at(struct td_device *device, const char *verb, unsigned int back,
		struct td_call *call);
/* The latest posted request but back; false: there is none (the last 64 are kept). */
bool td_posted_at(struct td_device *device, unsigned int back, struct td_posted *posted);
/*
 * Things that a correct program never does: a region deregistered while a request that names it is
 * outstanding, a post or a poll within a batch, a post to a full queue while the same thread polls,
 * a batch left open .. The text of the latest one, or "".
 */
unsigned int td_violations(struct td_device *device, char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
