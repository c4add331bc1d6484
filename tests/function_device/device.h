/*
 * An RDMA device made of functions: no kernel driver, no hardware, one process.
 *
 * It is opened through the real libibverbs (ibv_open_device and all that follows), so the code
 * under test takes exactly the paths that it takes on hardware. Two kinds, chosen at creation:
 *
 * DEVICE_LEAN   a post pushes its completion into a ring, a poll pops it. Nothing is locked, nothing is
 *           copied, nothing is checked but the ring's own bounds: for counting instructions.
 *           One thread at a time.
 * DEVICE_MODEL  a model of an RDMA device, for what the software device (crate ibverbs-software) does not show: RC, UC, UD and XRC queue pairs of one device reach each other
 *           and really move bytes, at a moment that the test controls, with keys, bounds, access
 *           flags, states and retries checked as hardware checks them. Every fault can be injected.
 *           Thread-safe.
 *
 * Functions that return int return 0 or an errno value; device_open and device_create return NULL and set
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

struct function_device;

enum device_kind { DEVICE_LEAN, DEVICE_MODEL };

/* When the model executes posted work. */
enum device_progress {
	DEVICE_MANUAL,  /* in device_step() only */
	DEVICE_ON_POLL, /* also in each poll and each request for notification */
	DEVICE_ON_POST, /* also in each post */
};

/* A field left 0 takes the default in brackets. */
struct device_options {
	uint32_t kind;	     /* enum device_kind */
	uint32_t progress;   /* enum device_progress */
	uint32_t link_layer; /* IBV_LINK_LAYER_* [Ethernet] */
	uint32_t ports;	     /* [1] */
	uint32_t max_qp_wr;  /* [16384] */
	uint32_t max_sge;    /* at most DEVICE_MAX_SGE [16] */
	uint32_t max_inline; /* at most DEVICE_MAX_INLINE [256] */
	uint32_t max_cqe;    /* [65536] */
	uint32_t max_qp, max_cq, max_mr, max_pd, max_srq, max_ah, max_mw; /* [65536] each */
	uint32_t max_rd_atomic; /* [16] */
	uint32_t comp_vectors;	/* [4] */
	uint32_t first_qp_num;	/* [0x11] */
	uint64_t max_mr_size;	/* [2^40] */
	uint32_t on_demand;	/* 1: on-demand paging, implicit too [no] */
	uint32_t vendor_id;	/* [0xffffff, and then the model is 55] */
	uint32_t vendor_part_id;
	uint32_t held_receives; /* lean: how many receives wait for device_deliver [0: none, they complete at once] */
};

enum { DEVICE_MAX_TABLE = 8, DEVICE_MAX_COUNTERS = 8, DEVICE_MAX_FLOW = 512, DEVICE_MAX_HASH_KEY = 64, DEVICE_MAX_TAGS = 64 };
enum { DEVICE_MAX_SGE = 16, DEVICE_MAX_INLINE = 1024, DEVICE_GIDS = 8, DEVICE_MAX_PORTS = 4 };

/* What a queue pair asks the allocator of its parent domain for. */
enum { DEVICE_BUFFER_SIZE = 8192, DEVICE_BUFFER_ALIGNMENT = 4096, DEVICE_BUFFER_TYPE = 0x5501 };

struct function_device *device_create(const struct device_options *options);
/* The device lives on until every context of it is closed too. */
void device_hold(struct function_device *device);
void device_release(struct function_device *device);
/* A new context, to be closed with ibv_close_device. */
struct ibv_context *device_open(struct function_device *device);
/* The device for a program's list. From now on ibv_open_device opens it, as device_open does. Lives as the device. */
struct ibv_device *device_listed(struct function_device *device);

/* Lean, with held_receives: messages arrive in the oldest receives, which complete; returns in how many. */
uint32_t device_deliver(struct function_device *device, uint32_t count);

/* ---- Progress (model) ---- */

void device_set_progress(struct function_device *device, enum device_progress progress);
/*
 * Executes up to max work requests (0: until nothing moves), one of each queue pair in turn;
 * returns how many. A request that finds no receive, or no peer, spends one retry per call.
 */
unsigned int device_step(struct function_device *device, unsigned int max);
/* While paused, the queue pair's send queue is not executed; posting goes on. */
int device_pause(struct function_device *device, uint32_t qp_num, bool paused);
/* The number of work requests that the device still owns: not executed, or not yet polled. */
int device_outstanding(struct function_device *device, uint32_t qp_num, uint32_t *sends,
		       uint32_t *receives);
/*
 * With a stale translation, memory is reached through the pointer seen when the request was posted,
 * even if the region was deregistered since: what DMA in flight does. Off by default: then such a
 * request ends in a protection error, and counts as a violation either way.
 */
void device_set_stale_translation(struct function_device *device, bool on);
/* Completions of a queue pair stay in its queue when it is reset or destroyed, as rxe does it. */
void device_set_keep_stale(struct function_device *device, bool on);
/* Threads that read an event of a completion queue stay between the read and the acknowledgement as long as this is on. */
void device_set_hold_readers(struct function_device *device, bool on);
unsigned int device_held_readers(struct function_device *device);
/* Moves a queue pair to ERR as the device itself does it after an error: flushes, no event. */
int device_qp_error(struct function_device *device, uint32_t qp_num);
void device_set_next_qp_num(struct function_device *device, uint32_t qp_num);
/* Queue pairs are granted one less than was asked of each of these: 1 for the sends, 2 for the receives, 4 and 8 for their
 * elements, 16 for the inline data. */
void device_set_grants_less(struct function_device *device, uint32_t of);

/* ---- Completions (model) ---- */

/* Held completions exist, but no poll sees them until they are released. qp_num 0: all. */
int device_hold_completions(struct function_device *device, struct ibv_cq *cq, uint32_t qp_num,
			    bool hold);
int device_held(struct function_device *device, struct ibv_cq *cq, unsigned int *count);
/* Lets out the held completion at index (oldest is 0), or all of them in order: UINT_MAX. */
int device_release_held(struct function_device *device, struct ibv_cq *cq, unsigned int index);
/* Puts in a completion as it is, whatever it says. */
int device_inject(struct function_device *device, struct ibv_cq *cq, const struct ibv_wc *wc);
/* Mixes the queue, keeping the order within each queue pair's sends and within its receives. */
int device_shuffle(struct function_device *device, struct ibv_cq *cq, uint64_t seed);
/* What a failing poll_cq returns; -1 by default, mlx5 has -2. */
void device_set_poll_error(struct function_device *device, int value);

/* ---- Faults ---- */

/*
 * After skip calls that go through, the next times calls of the verb (UINT_MAX: all) fail with
 * error. Verbs are named as in struct verbs_context_ops, plus create_comp_channel, query_gid,
 * query_gid_table, start_poll, next_poll, wr_complete, modify_to_err, modify_to_reset, and
 * ring_doorbell: post_send fails though it has queued all requests; and lose_error: post_send returns 0 if it has
 * queued a part of a list and refused the rest. For post_send, post_recv and post_srq_recv
 * each work request of a list counts as one call. poll_cq fails with device_set_poll_error's value.
 * EINVAL: no verb has that name.
 */
int device_fail(struct function_device *device, const char *verb, int error, unsigned int skip,
	    unsigned int times);
/*
 * While on, one call of the verb waits at its beginning; others go through. Only verbs that are not on the data path.
 * EINVAL: no verb has that name.
 */
int device_hold_verb(struct function_device *device, const char *verb, bool on);
/* Whether a call of the verb waits. */
bool device_holds_verb(struct function_device *device, const char *verb);
void device_clear_faults(struct function_device *device);
/*
 * The device died: DEVICE_FATAL is raised, every queue pair flushes, every verb but those that
 * destroy or poll fails with EIO.
 */
void device_fatal(struct function_device *device);
/*
 * The device was pulled out: as device_fatal, but nothing flushes or completes any more, and the
 * channels of its completion queues come to their end (reading fails), as the kernel has it.
 */
void device_removed(struct function_device *device);

/* ---- Events ---- */

/* element: a port number, or the handle that the event is about; 0 for unknown event types. */
int device_raise_async(struct function_device *device, struct ibv_context *context,
		       uint32_t event_type, uint64_t element);
/* Puts an event in the queue's channel, armed or not. */
int device_raise_cq_event(struct function_device *device, struct ibv_cq *cq);

/* ---- Port ---- */

/* An all-zero GID empties the entry. gid_type: enum ibv_gid_type. */
int device_set_gid(struct function_device *device, uint32_t port, uint32_t index,
		   const union ibv_gid *gid, uint32_t gid_type, uint32_t ifindex);
int device_set_port(struct function_device *device, uint32_t port,
		    const struct ibv_port_attr *attr);
int device_get_port(struct function_device *device, uint32_t port, struct ibv_port_attr *attr);

/* ---- What was handed to the device ---- */

enum device_object_kind {
	DEVICE_OBJECT_CONTEXT,
	DEVICE_OBJECT_PD, /* parent domains too */
	DEVICE_OBJECT_MR,
	DEVICE_OBJECT_MW,
	DEVICE_OBJECT_CQ,
	DEVICE_OBJECT_QP,
	DEVICE_OBJECT_SRQ,
	DEVICE_OBJECT_AH,
	DEVICE_OBJECT_DM,
	DEVICE_OBJECT_TD,
	DEVICE_OBJECT_XRCD,
	DEVICE_OBJECT_WQ,
	DEVICE_OBJECT_TABLE,
	DEVICE_OBJECT_FLOW,
	DEVICE_OBJECT_ACTION,
	DEVICE_OBJECT_COUNTERS,
	DEVICE_OBJECT_DMAH,
	DEVICE_OBJECT_COMP_CNTR,
	DEVICE_OBJECT_KINDS,
};

/* The number of live objects. */
unsigned int device_live(struct function_device *device, enum device_object_kind kind);

/* The parts of struct ibv_flow_action_esp_attr, as far as they were given. */
struct device_esp {
	bool has_attr, has_keymat, has_replay;
	uint32_t spi, seq, tfc_pad, flags;
	uint64_t hard_limit_pkts;
	uint32_t keymat_proto, keymat_len;
	uint64_t iv;
	uint32_t iv_algo, salt, icv_len, key_len;
	uint32_t aes_key[8];
	uint32_t replay_proto, replay_len, replay_size;
	uint32_t encap_type, encap_len; /* 0: none */
	uint8_t encap[64]; /* its filter */
	bool encap_next;
	uint32_t comp_mask, esn;
};

/* The arguments of a control verb; what a verb does not take is zero. Lists are not followed. */
struct device_call {
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
	struct ibv_qp_open_attr open_attr;
	uint8_t hash_key[DEVICE_MAX_HASH_KEY]; /* of qp_init_attr.rx_hash_conf */
	struct ibv_wq_init_attr wq_init_attr;
	struct ibv_wq_attr wq_attr;
	uint32_t table_log_size;
	struct ibv_wq *table[DEVICE_MAX_TABLE];
	struct ibv_flow_attr flow_attr;
	uint8_t flow_specs[DEVICE_MAX_FLOW]; /* what follows flow_attr */
	struct ibv_counter_attach_attr counter_attr;
	const void *flow;
	uint32_t counters_read, read_flags;
	struct device_esp esp;
	struct ibv_ops_wr ops;
	struct ibv_sge ops_sge;
	/* Of verbs since v65, whose structures older headers lack. */
	const void *dmah;
	uint32_t dmah_mask, dmah_cpu, dmah_hint, dmah_memory;
	uint32_t counter_type, counted_ops;
	uint64_t amount;
};

/* A copy of a posted work request, its lists included (model only). */
struct device_posted {
	uint32_t qp_num; /* 0: a shared receive queue; of a work queue, its number */
	bool receive;
	uint64_t wr_id;
	uint32_t num_sge;
	struct ibv_sge sge[DEVICE_MAX_SGE];
	uint32_t inline_length;
	uint8_t inline_data[DEVICE_MAX_INLINE];
	struct ibv_send_wr send; /* without its pointers to lists */
};

/* How many calls of the verb came in since creation, failed ones too; 0 for an unknown name. */
uint64_t device_calls(struct function_device *device, const char *verb);
/* The latest call of the verb but back; false: there is none (the last 64 calls are kept). */
bool device_call_at(struct function_device *device, const char *verb, unsigned int back,
		struct device_call *call);
/* The latest posted request but back; false: there is none (the last 64 are kept). */
bool device_posted_at(struct function_device *device, unsigned int back,
		      struct device_posted *posted);
/*
 * Things that a correct program never does: a region deregistered while a request that names it is
 * outstanding, a post or a poll within a batch, a post to a full queue while the same thread polls,
 * a batch left open .. The text of the latest one, or "".
 */
unsigned int device_violations(struct function_device *device, char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
