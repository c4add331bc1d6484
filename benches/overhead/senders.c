/*
 * Threads that post on one queue pair, behind a spin lock of the queue pair, while one polls; and sends on many queue pairs, in
 * turn: in C.
 */
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>
#include "contenders.h"

enum { LENGTH = 64, BATCH = 16, MOST = 64 };

#define unlikely(x) __builtin_expect(!!(x), 0)

struct posting {
	struct ibv_qp *qp;
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	int locked;
};

static void prepare(struct posting *p, const struct handles *h)
{
	*p = (struct posting){
		.qp = h->qp,
		.wr = { .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED },
		.sge = { .addr = h->address, .length = LENGTH, .lkey = h->lkey },
	};
	p->wr.sg_list = &p->sge;
}

static inline void relax(void)
{
#ifdef __x86_64__
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

static inline void lock(struct posting *p)
{
	while (unlikely(__atomic_exchange_n(&p->locked, 1, __ATOMIC_ACQUIRE)))
		while (__atomic_load_n(&p->locked, __ATOMIC_RELAXED))
			relax();
}

static inline bool post(struct posting *p, uint64_t wr_id)
{
	struct ibv_send_wr *bad;
	int failed;

	lock(p);
	p->wr.wr_id = wr_id;
	failed = ibv_post_send(p->qp, &p->wr, &bad);
	__atomic_store_n(&p->locked, 0, __ATOMIC_RELEASE);
	return !failed;
}

/* Whether the next send that has ended was carried out. */
static inline bool wait_for_one(struct ibv_cq *cq, struct ibv_wc *wc)
{
	int found;

	do
		found = ibv_poll_cq(cq, 1, wc);
	while (!found);
	return !unlikely(found < 0) && !unlikely(wc->status != IBV_WC_SUCCESS);
}

int64_t c_tuned_w26(struct handles *h, uint64_t operations)
{
	struct posting p;
	int64_t sum = 0;

	prepare(&p, h);
	for (uint64_t i = 0; i < operations; i++) {
		struct ibv_wc wc;

		if (unlikely(!post(&p, i)))
			return -1;
		if (unlikely(!wait_for_one(h->cq, &wc)))
			return -1;
		sum += wc.wr_id;
	}
	return sum;
}

struct many {
	struct ibv_cq *cq;
	uint32_t count;
	/* By queue pair: what a sender needs, with its own lock. */
	struct posting postings[];
};

struct many *many_open(const struct handles *h, struct ibv_qp *const *qps, uint32_t count)
{
	struct many *many = aligned_alloc(64, (sizeof(*many) + count * sizeof(many->postings[0]) + 63) & ~(size_t)63);

	if (!many)
		return NULL;
	many->cq = h->cq;
	many->count = count;
	for (uint32_t i = 0; i < count; i++) {
		prepare(&many->postings[i], h);
		many->postings[i].qp = qps[i];
	}
	for (uint32_t i = 0; i < count; i++)
		many->postings[i].wr.sg_list = &many->postings[i].sge;
	return many;
}

void many_close(struct many *many)
{
	free(many);
}

/* All share one request, of which only the number changes. */
int64_t c_tuned_many(struct many *many, uint64_t operations)
{
	struct posting *p = &many->postings[0];
	struct ibv_send_wr *bad;
	int64_t sum = 0;

	for (uint64_t i = 0, at = 0; i < operations; i++) {
		struct ibv_wc wc;

		p->wr.wr_id = i;
		if (unlikely(ibv_post_send(many->postings[at].qp, &p->wr, &bad)))
			return -1;
		if (unlikely(!wait_for_one(many->cq, &wc)))
			return -1;
		sum += wc.wr_id;
		at = at + 1 == many->count ? 0 : at + 1;
	}
	return sum;
}

int64_t c_locked_many(struct many *many, uint64_t operations)
{
	int64_t sum = 0;

	for (uint64_t i = 0, at = 0; i < operations; i++) {
		struct ibv_wc wc;

		if (unlikely(!post(&many->postings[at], i)))
			return -1;
		if (unlikely(!wait_for_one(many->cq, &wc)))
			return -1;
		sum += wc.wr_id;
		at = at + 1 == many->count ? 0 : at + 1;
	}
	return sum;
}

/* Its calls are what script/bench senders counts. */
__attribute__((noinline)) bool overhead_send_in_c(struct posting *p, uint64_t wr_id)
{
	return post(p, wr_id);
}

struct sender {
	struct posting *posting;
	uint64_t first, end;
	pthread_t thread;
};

static void *send_all(void *argument)
{
	struct sender *s = argument;

	for (uint64_t i = s->first; i < s->end; i++)
		while (unlikely(!overhead_send_in_c(s->posting, i)))
			sched_yield();
	return NULL;
}

int64_t c_senders(struct handles *h, uint32_t threads, uint64_t operations)
{
	struct sender senders[MOST];
	struct ibv_wc wc[BATCH];
	struct posting p;
	int64_t sum = 0;

	if (threads > MOST)
		return -1;
	prepare(&p, h);
	for (uint32_t t = 0; t < threads; t++) {
		senders[t].posting = &p;
		senders[t].first = operations * t / threads;
		senders[t].end = operations * (t + 1) / threads;
		if (pthread_create(&senders[t].thread, NULL, send_all, &senders[t]))
			return -1;
	}
	for (uint64_t ended = 0; ended < operations;) {
		int found = ibv_poll_cq(h->cq, BATCH, wc);

		if (unlikely(found < 0))
			return -1;
		for (int i = 0; i < found; i++) {
			if (unlikely(wc[i].status != IBV_WC_SUCCESS))
				return -1;
			sum += wc[i].wr_id;
		}
		ended += found;
	}
	for (uint32_t t = 0; t < threads; t++)
		pthread_join(senders[t].thread, NULL);
	return sum;
}
