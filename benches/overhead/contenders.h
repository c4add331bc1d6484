/* The objects that a contender in C uses; laid out as `Handles` in src/c.rs. */
#ifndef CONTENDERS_H
#define CONTENDERS_H

#include <infiniband/verbs.h>

struct handles {
	struct ibv_qp *qp;
	struct ibv_qp_ex *qp_ex; /* NULL unless made for the extended interface */
	struct ibv_cq *cq;
	struct ibv_comp_channel *channel; /* NULL unless made for events */
	uint64_t address; /* of registered memory, 16 times 64 bytes; for W17, 64 times 4096 */
	uint64_t remote_address; /* the same of the peer's */
	uint32_t lkey;
	uint32_t rkey;
	int epoll; /* -1 unless made for events: with the channel's file */
};

/* An epoll instance with one file; -1: it failed. */
int epoll_of(int file);

/* Sleeps until the file is readable; -1: it failed. */
int sleep_in(int epoll);

/* Does this many operations. Returns the sum of all wr_id that completed, or -1. */
typedef int64_t contender(struct handles *h, uint64_t operations);

/* W6 is W1, in safe Rust. */
contender c_plain_w1, c_plain_w2, c_plain_w3, c_plain_w4, c_plain_w5, c_plain_w5_ex;
contender c_plain_w7, c_plain_w8;
contender c_tuned_w1, c_tuned_w2, c_tuned_w3, c_tuned_w4, c_tuned_w5, c_tuned_w5_ex;
contender c_tuned_w7, c_tuned_w8, c_tuned_w13, c_tuned_w17, c_tuned_w18, c_tuned_w19, c_tuned_w22;
contender c_plain_w21, c_tuned_w21, c_tuned_w24, c_tuned_w26;
/* The same, of two threads. */
int64_t c_tuned_w23(struct handles *one, struct handles *two, uint64_t operations);

/* This many threads post, and this one polls. The queue pair's sends are not more than there is room for at a time. */
int64_t c_senders(struct handles *h, uint32_t threads, uint64_t operations);

/* Sends on many queue pairs in turn, W27. It keeps none of the arguments but the objects. NULL: it failed. */
struct many;
struct many *many_open(const struct handles *h, struct ibv_qp *const *qps, uint32_t count);
void many_close(struct many *many);
/* Does this many sends, one after the other. Returns the sum of their numbers, or -1. */
int64_t c_tuned_many(struct many *many, uint64_t operations);
int64_t c_locked_many(struct many *many, uint64_t operations);

/* The event server, W14. It keeps none of the arguments but the objects. NULL: it failed. */
struct server;
struct function_device;
struct server *server_open(const struct handles *h, struct function_device *device, struct ibv_qp *const *qps,
			   uint32_t count);
void server_close(struct server *server);
/* Answers this many messages. Returns the bytes that came, or -1. */
int64_t c_plain_server(struct server *server, uint64_t operations);
int64_t c_tuned_server(struct server *server, uint64_t operations);

/* The server of requests, W20, with this many receives for each queue pair. As above. */
struct rpc;
struct rpc *rpc_open(const struct handles *h, struct function_device *device, struct ibv_qp *const *qps, uint32_t count,
		     uint32_t receives);
void rpc_close(struct rpc *rpc);
int64_t c_tuned_rpc(struct rpc *rpc, uint64_t operations);

/* A write of many parts over several queue pairs, W16. Each device has a completion queue. NULL: it failed. */
enum { RAILS = 2, LANES = 2, PARTS = 512 };
struct rails;
struct rails *rails_open(const struct handles *h, struct ibv_cq *const cqs[RAILS],
			 struct ibv_qp *const qps[RAILS * LANES], uint32_t length);
void rails_close(struct rails *rails);
/* Writes this many parts. Returns the sum of their numbers, or -1. */
int64_t c_plain_rails(struct rails *rails, uint64_t operations);
int64_t c_tuned_rails(struct rails *rails, uint64_t operations);
int64_t c_same_rails(struct rails *rails, uint64_t operations);

#endif
