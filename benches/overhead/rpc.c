/*
 * A server of requests in C, tuned: it sleeps until requests have come, answers each from another buffer, which it takes
 * from a list of free ones, with a length of its own, and posts the receive again at once. And what takes its buffers from
 * there is given back when the answer is sent.
 */
#include <stdlib.h>
#include "contenders.h"

enum { LENGTH = 64, ANSWER = 32, WINDOW = 16 };

#define unlikely(x) __builtin_expect(!!(x), 0)

/* Of the device: tests/function_device/device.h. */
uint32_t device_deliver(struct function_device *device, uint32_t count);

/* Both requests are prepared; the address, which is even, is the number of a receive, and one more that of a send. */
struct buffer {
	struct ibv_qp *qp; /* of a receive */
	struct buffer *next; /* in the list of free ones */
	struct ibv_sge piece;
	struct ibv_recv_wr receive;
	struct ibv_send_wr send;
};

struct rpc {
	struct ibv_cq *cq;
	struct ibv_comp_channel *channel;
	struct function_device *device;
	int epoll;
	uint32_t burst;
	struct buffer *free;
	struct buffer buffers[];
};

struct rpc *rpc_open(const struct handles *h, struct function_device *device, struct ibv_qp *const *qps, uint32_t count,
		     uint32_t receives)
{
	uint32_t all = count * receives;
	struct rpc *s = calloc(1, sizeof(*s) + (all + WINDOW) * sizeof(*s->buffers));
	struct ibv_recv_wr *bad;

	if (!s || ibv_req_notify_cq(h->cq, 0))
		return NULL;
	s->cq = h->cq;
	s->channel = h->channel;
	s->epoll = h->epoll;
	s->device = device;
	s->burst = all < WINDOW ? all : WINDOW;
	for (uint32_t i = 0; i < all + WINDOW; i++) {
		struct buffer *b = &s->buffers[i];

		b->piece.addr = h->address + (uint64_t)i * LENGTH;
		b->piece.length = LENGTH;
		b->piece.lkey = h->lkey;
		b->receive.wr_id = (uintptr_t)b;
		b->receive.sg_list = &b->piece;
		b->receive.num_sge = 1;
		b->send.wr_id = (uintptr_t)b + 1;
		b->send.sg_list = &b->piece;
		b->send.num_sge = 1;
		b->send.opcode = IBV_WR_SEND;
		b->send.send_flags = IBV_SEND_SIGNALED;
		if (i < all) {
			b->qp = qps[i % count];
			if (ibv_post_recv(b->qp, &b->receive, &bad))
				return NULL;
		} else {
			b->next = s->free;
			s->free = b;
		}
	}
	return s;
}

void rpc_close(struct rpc *s)
{
	free(s);
}

int64_t c_tuned_rpc(struct rpc *s, uint64_t operations)
{
	struct ibv_cq *cq = s->cq;
	struct ibv_wc wc[WINDOW];
	uint64_t answered = 0;
	int64_t bytes = 0;

	while (answered < operations) {
		uint64_t left = operations - answered;
		uint32_t burst = left < s->burst ? left : s->burst;
		struct ibv_recv_wr *bad_receive;
		struct ibv_send_wr *bad;
		struct ibv_cq *event;
		void *context;
		int found;

		if (unlikely(device_deliver(s->device, burst) != burst || sleep_in(s->epoll) ||
			     ibv_get_cq_event(s->channel, &event, &context)))
			return -1;
		ibv_ack_cq_events(event, 1);
		if (unlikely(ibv_req_notify_cq(cq, 0)))
			return -1;
		while ((found = ibv_poll_cq(cq, WINDOW, wc)) > 0) {
			for (int i = 0; i < found; i++) {
				struct buffer *b = (void *)(uintptr_t)(wc[i].wr_id & ~1ull);

				if (unlikely(wc[i].status != IBV_WC_SUCCESS))
					return -1;
				if (wc[i].wr_id & 1) {
					answered++;
					b->next = s->free;
					s->free = b;
				} else {
					struct buffer *answer = s->free;

					bytes += wc[i].byte_len;
					if (unlikely(!answer))
						return -1;
					s->free = answer->next;
					answer->piece.length = ANSWER;
					if (unlikely(ibv_post_send(b->qp, &answer->send, &bad)) ||
					    unlikely(ibv_post_recv(b->qp, &b->receive, &bad_receive)))
						return -1;
				}
			}
		}
		if (unlikely(found < 0))
			return -1;
	}
	return bytes;
}
