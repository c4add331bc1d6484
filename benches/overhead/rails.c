/*
 * A write of many parts over several queue pairs of two devices. Plain and tuned, as one writes it by hand: the queue
 * pairs take parts in turn. And the same job as ibverbs-rails does: each part goes to the device that will have carried
 * it first, what a device has in flight is bounded, and a part is remembered until it has arrived, to be sent again.
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include "contenders.h"

enum { DEPTH = 32, BATCH = 16, QUEUE_PAIRS = RAILS * LANES };

#define unlikely(x) __builtin_expect(!!(x), 0)

struct part {
	uint64_t address;
	uint64_t remote_address;
	uint32_t length;
};

/* A part under way. */
struct piece {
	uint64_t number;
	uint64_t offset;
	uint32_t part;
	uint32_t length;
};

struct lane {
	struct ibv_qp *qp;
	uint32_t in_flight;
	struct ibv_sge piece;
	struct ibv_send_wr write;
	/* Requests end in their order. */
	uint32_t first;
	struct piece pieces[DEPTH];
};

struct rail {
	struct ibv_cq *cq;
	uint64_t in_flight; /* bytes */
	uint64_t carried;
	uint64_t time_of_byte; /* 10^-15 seconds */
	uint64_t most; /* bytes that it may have in flight */
	uint32_t lkey;
	uint32_t rkey;
};

struct rails {
	struct rail rail[RAILS];
	struct lane lane[QUEUE_PAIRS];
	struct part part[PARTS];
};

struct rails *rails_open(const struct handles *h, struct ibv_cq *const cqs[RAILS],
			 struct ibv_qp *const qps[QUEUE_PAIRS], uint32_t length)
{
	struct rails *r = calloc(1, sizeof(*r));

	if (!r)
		return NULL;
	for (int i = 0; i < RAILS; i++) {
		r->rail[i].cq = cqs[i];
		r->rail[i].time_of_byte = 800000;
		r->rail[i].most = 131072; /* as much as there */
		r->rail[i].lkey = h->lkey;
		r->rail[i].rkey = h->rkey;
	}
	for (int i = 0; i < QUEUE_PAIRS; i++) {
		struct lane *lane = &r->lane[i];

		lane->qp = qps[i];
		lane->piece.lkey = h->lkey;
		lane->write.sg_list = &lane->piece;
		lane->write.num_sge = 1;
		lane->write.opcode = IBV_WR_RDMA_WRITE;
		lane->write.send_flags = IBV_SEND_SIGNALED;
		lane->write.wr.rdma.rkey = h->rkey;
	}
	for (int i = 0; i < PARTS; i++)
		r->part[i] = (struct part){ h->address, h->remote_address, length };
	return r;
}

void rails_close(struct rails *rails)
{
	free(rails);
}

/* ---- In turn ---- */

static int post(struct rails *r, uint64_t number)
{
	const struct rail *rail = &r->rail[number % RAILS];
	const struct part *part = &r->part[number % PARTS];
	struct ibv_sge sge = { .addr = part->address, .length = part->length, .lkey = rail->lkey };
	struct ibv_send_wr *bad, wr = {
		.wr_id = number,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { .remote_addr = part->remote_address, .rkey = rail->rkey },
	};

	return ibv_post_send(r->lane[number % QUEUE_PAIRS].qp, &wr, &bad);
}

int64_t c_plain_rails(struct rails *r, uint64_t operations)
{
	uint64_t posted = 0, done = 0;
	struct ibv_wc wc[BATCH];
	int64_t sum = 0;

	while (done < operations) {
		while (posted < operations && r->lane[posted % QUEUE_PAIRS].in_flight < DEPTH) {
			if (post(r, posted))
				return -1;
			r->lane[posted % QUEUE_PAIRS].in_flight++;
			posted++;
		}
		for (int i = 0; i < RAILS; i++) {
			int found = ibv_poll_cq(r->rail[i].cq, BATCH, wc);

			if (found < 0)
				return -1;
			for (int j = 0; j < found; j++) {
				if (wc[j].status != IBV_WC_SUCCESS)
					return -1;
				sum += wc[j].wr_id;
				r->lane[wc[j].wr_id % QUEUE_PAIRS].in_flight--;
			}
			done += found;
		}
	}
	return sum;
}

int64_t c_tuned_rails(struct rails *r, uint64_t operations)
{
	uint64_t posted = 0, done = 0;
	struct ibv_wc wc[BATCH];
	struct ibv_send_wr *bad;
	int64_t sum = 0;

	while (done < operations) {
		for (; posted < operations; posted++) {
			struct lane *lane = &r->lane[posted % QUEUE_PAIRS];
			const struct part *part = &r->part[posted % PARTS];

			if (unlikely(lane->in_flight == DEPTH))
				break;
			lane->write.wr_id = posted;
			lane->write.wr.rdma.remote_addr = part->remote_address;
			lane->piece.addr = part->address;
			lane->piece.length = part->length;
			if (unlikely(ibv_post_send(lane->qp, &lane->write, &bad)))
				return -1;
			lane->in_flight++;
		}
		for (int i = 0; i < RAILS; i++) {
			int found = ibv_poll_cq(r->rail[i].cq, BATCH, wc);

			if (unlikely(found < 0))
				return -1;
			for (int j = 0; j < found; j++) {
				if (unlikely(wc[j].status != IBV_WC_SUCCESS))
					return -1;
				sum += wc[j].wr_id;
				r->lane[wc[j].wr_id % QUEUE_PAIRS].in_flight--;
			}
			done += found;
		}
	}
	return sum;
}

/* ---- The same job ---- */

/* The device that will have carried so much first, if it has room now. */
static struct rail *choose(struct rails *r, uint32_t length)
{
	struct rail *best = NULL;
	uint64_t least = UINT64_MAX;

	for (int i = 0; i < RAILS; i++) {
		struct rail *rail = &r->rail[i];
		uint64_t time = (rail->in_flight + length) * rail->time_of_byte;

		if (time < least) {
			least = time;
			best = rail;
		}
	}
	return best->in_flight + length <= best->most ? best : NULL;
}

static struct lane *least_busy(struct rails *r, const struct rail *rail)
{
	struct lane *lanes = &r->lane[(rail - r->rail) * LANES], *best = &lanes[0];

	for (int i = 1; i < LANES; i++)
		if (lanes[i].in_flight < best->in_flight)
			best = &lanes[i];
	return best->in_flight < DEPTH ? best : NULL;
}

int64_t c_same_rails(struct rails *r, uint64_t operations)
{
	uint64_t posted = 0, done = 0;
	struct ibv_wc wc[BATCH];
	struct ibv_send_wr *bad;
	int64_t sum = 0;

	while (done < operations) {
		for (; posted < operations; posted++) {
			const struct part *part = &r->part[posted % PARTS];
			struct rail *rail = choose(r, part->length);
			struct lane *lane = rail ? least_busy(r, rail) : NULL;

			if (!lane)
				break;
			lane->write.wr_id = lane - r->lane;
			lane->write.wr.rdma.remote_addr = part->remote_address;
			lane->write.wr.rdma.rkey = rail->rkey;
			lane->piece.addr = part->address;
			lane->piece.length = part->length;
			lane->piece.lkey = rail->lkey;
			if (unlikely(ibv_post_send(lane->qp, &lane->write, &bad)))
				return -1;
			lane->pieces[(lane->first + lane->in_flight++) % DEPTH] = (struct piece){
				.number = posted,
				.part = posted % PARTS,
				.length = part->length,
			};
			rail->in_flight += part->length;
		}
		for (int i = 0; i < RAILS; i++) {
			struct rail *rail = &r->rail[i];
			int found = ibv_poll_cq(rail->cq, BATCH, wc);

			if (unlikely(found < 0))
				return -1;
			for (int j = 0; j < found; j++) {
				struct lane *lane = &r->lane[wc[j].wr_id];
				const struct piece *piece = &lane->pieces[lane->first++ % DEPTH];

				if (unlikely(wc[j].status != IBV_WC_SUCCESS))
					return -1; /* here the piece would go again */
				sum += piece->number;
				rail->in_flight -= piece->length;
				rail->carried += piece->length;
				lane->in_flight--;
			}
			done += found;
		}
	}
	return sum;
}
