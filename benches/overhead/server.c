/*
 * An event server in C, plain and tuned: it sleeps until messages have come, answers each with what it has received,
 * and posts the receive again when the answer is sent. Each connection has one buffer.
 */
#include <stdlib.h>
#include "contenders.h"

enum { LENGTH = 64, WINDOW = 16 };

#define unlikely(x) __builtin_expect(!!(x), 0)

/* Of the device: tests/function_device/device.h. */
uint32_t device_deliver(struct function_device *device, uint32_t count);

/* Its requests are prepared; the address of the connection, which is even, is their number, and one more that of sends. */
struct connection {
	struct ibv_qp *qp;
	struct ibv_sge piece;
	struct ibv_recv_wr receive;
	struct ibv_send_wr send;
};

struct server {
	struct ibv_cq *cq;
	struct ibv_comp_channel *channel;
	struct function_device *device;
	int epoll;
	uint32_t burst; /* the number of messages that come at a time */
	struct connection connections[];
};

struct server *server_open(const struct handles *h, struct function_device *device, struct ibv_qp *const *qps,
			   uint32_t count)
{
	struct server *s = calloc(1, sizeof(*s) + count * sizeof(*s->connections));
	struct ibv_recv_wr *bad;

	if (!s || ibv_req_notify_cq(h->cq, 0))
		return NULL;
	s->cq = h->cq;
	s->channel = h->channel;
	s->epoll = h->epoll;
	s->device = device;
	s->burst = count < WINDOW ? count : WINDOW;
	for (uint32_t i = 0; i < count; i++) {
		struct connection *c = &s->connections[i];

		c->qp = qps[i];
		c->piece.addr = h->address + (uint64_t)i * LENGTH;
		c->piece.length = LENGTH;
		c->piece.lkey = h->lkey;
		c->receive.wr_id = (uintptr_t)c;
		c->receive.sg_list = &c->piece;
		c->receive.num_sge = 1;
		c->send.wr_id = (uintptr_t)c + 1;
		c->send.sg_list = &c->piece;
		c->send.num_sge = 1;
		c->send.opcode = IBV_WR_SEND;
		c->send.send_flags = IBV_SEND_SIGNALED;
		if (ibv_post_recv(c->qp, &c->receive, &bad))
			return NULL;
	}
	return s;
}

void server_close(struct server *s)
{
	free(s);
}

/* Lets messages come, at most this many, and sleeps until they have. -1: it failed. */
static inline int next_messages(struct server *s, uint64_t left)
{
	uint32_t burst = left < s->burst ? left : s->burst;
	struct ibv_cq *cq;
	void *context;

	if (device_deliver(s->device, burst) != burst || sleep_in(s->epoll) ||
	    ibv_get_cq_event(s->channel, &cq, &context))
		return -1;
	ibv_ack_cq_events(cq, 1);
	return ibv_req_notify_cq(cq, 0);
}

/* ---- Plain ---- */

static int answer(struct connection *c, uint32_t length)
{
	struct ibv_sge sge = { .addr = c->piece.addr, .length = length, .lkey = c->piece.lkey };
	struct ibv_send_wr *bad, wr = {
		.wr_id = (uintptr_t)c + 1,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
	};

	return ibv_post_send(c->qp, &wr, &bad);
}

static int receive(struct connection *c)
{
	struct ibv_sge sge = { .addr = c->piece.addr, .length = LENGTH, .lkey = c->piece.lkey };
	struct ibv_recv_wr *bad, wr = { .wr_id = (uintptr_t)c, .sg_list = &sge, .num_sge = 1 };

	return ibv_post_recv(c->qp, &wr, &bad);
}

int64_t c_plain_server(struct server *s, uint64_t operations)
{
	struct ibv_wc wc[WINDOW];
	uint64_t answered = 0;
	int64_t bytes = 0;

	while (answered < operations) {
		int found;

		if (next_messages(s, operations - answered))
			return -1;
		while ((found = ibv_poll_cq(s->cq, WINDOW, wc)) > 0) {
			for (int i = 0; i < found; i++) {
				struct connection *c = (void *)(uintptr_t)(wc[i].wr_id & ~1ull);

				if (wc[i].status != IBV_WC_SUCCESS)
					return -1;
				if (wc[i].wr_id & 1) {
					answered++;
					if (receive(c))
						return -1;
				} else {
					bytes += wc[i].byte_len;
					if (answer(c, wc[i].byte_len))
						return -1;
				}
			}
		}
		if (found < 0)
			return -1;
	}
	return bytes;
}

/* ---- Tuned ---- */

int64_t c_tuned_server(struct server *s, uint64_t operations)
{
	struct ibv_cq *cq = s->cq;
	struct ibv_wc wc[WINDOW];
	uint64_t answered = 0;
	int64_t bytes = 0;

	while (answered < operations) {
		struct ibv_recv_wr *bad_receive;
		struct ibv_send_wr *bad;
		int found;

		if (unlikely(next_messages(s, operations - answered)))
			return -1;
		while ((found = ibv_poll_cq(cq, WINDOW, wc)) > 0) {
			for (int i = 0; i < found; i++) {
				struct connection *c = (void *)(uintptr_t)(wc[i].wr_id & ~1ull);

				if (unlikely(wc[i].status != IBV_WC_SUCCESS))
					return -1;
				if (wc[i].wr_id & 1) {
					answered++;
					c->piece.length = LENGTH;
					if (unlikely(ibv_post_recv(c->qp, &c->receive, &bad_receive)))
						return -1;
				} else {
					bytes += wc[i].byte_len;
					c->piece.length = wc[i].byte_len;
					if (unlikely(ibv_post_send(c->qp, &c->send, &bad)))
						return -1;
				}
			}
		}
		if (unlikely(found < 0))
			return -1;
	}
	return bytes;
}
