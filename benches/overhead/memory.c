/*
 * Memory, in C: a list of free buffers, for one thread (tuned) and for any (plain, behind a lock); the same under sends of two
 * threads; and copies of a page.
 */
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include "contenders.h"

enum { LENGTH = 64, WINDOW = 16, PAGE = 4096 };

#define unlikely(x) __builtin_expect(!!(x), 0)

struct node {
	struct node *next;
	uint64_t address;
	uint32_t lkey;
	uint32_t length;
};

struct list {
	struct node *free;
	pthread_mutex_t lock;
	struct node nodes[WINDOW];
};

static void fill(struct list *list, const struct handles *h)
{
	list->free = NULL;
	for (int i = 0; i < WINDOW; i++) {
		list->nodes[i] = (struct node){ list->free, h->address + i * LENGTH, h->lkey, 0 };
		list->free = &list->nodes[i];
	}
}

/* What is taken is empty. */
static inline struct node *take(struct list *list)
{
	struct node *taken = list->free;

	if (unlikely(!taken))
		return NULL;
	list->free = taken->next;
	taken->length = 0;
	return taken;
}

static inline void give_back(struct list *list, struct node *node)
{
	node->next = list->free;
	list->free = node;
}

/* So that the compiler does not see that what is taken is given back. */
static inline struct node *used(struct node *node)
{
	__asm__ volatile("" : "+r"(node) : : "memory");
	return node;
}

int64_t c_plain_w21(struct handles *h, uint64_t operations)
{
	struct list list = { .lock = PTHREAD_MUTEX_INITIALIZER };
	int64_t sum = 0;

	fill(&list, h);
	for (uint64_t i = 0; i < operations; i++) {
		struct node *node;

		pthread_mutex_lock(&list.lock);
		node = take(&list);
		pthread_mutex_unlock(&list.lock);
		if (unlikely(!node))
			return -1;
		node = used(node);
		pthread_mutex_lock(&list.lock);
		give_back(&list, node);
		pthread_mutex_unlock(&list.lock);
		sum += i;
	}
	return sum;
}

int64_t c_tuned_w21(struct handles *h, uint64_t operations)
{
	struct list list;
	int64_t sum = 0;

	fill(&list, h);
	for (uint64_t i = 0; i < operations; i++) {
		struct node *node = take(&list);

		if (unlikely(!node))
			return -1;
		give_back(&list, used(node));
		sum += i;
	}
	return sum;
}

struct sender {
	struct handles *h;
	uint64_t first, end;
	int64_t sum;
};

static void *send_all(void *argument)
{
	struct sender *s = argument;
	struct ibv_qp *qp = s->h->qp;
	struct ibv_cq *cq = s->h->cq;
	struct ibv_sge sge = { .lkey = s->h->lkey };
	struct ibv_send_wr *bad, wr = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
	};
	struct list list;
	int64_t sum = 0;

	fill(&list, s->h);
	for (uint64_t i = s->first; i < s->end; i++) {
		struct node *node = take(&list);
		struct ibv_wc wc;
		int found;

		s->sum = -1;
		if (unlikely(!node))
			return NULL;
		node->length = LENGTH;
		wr.wr_id = i;
		sge.addr = node->address;
		sge.length = node->length;
		if (unlikely(ibv_post_send(qp, &wr, &bad)))
			return NULL;
		do
			found = ibv_poll_cq(cq, 1, &wc);
		while (!found);
		if (unlikely(found < 0) || unlikely(wc.status != IBV_WC_SUCCESS))
			return NULL;
		give_back(&list, used(node));
		sum += wc.wr_id;
	}
	s->sum = sum;
	return NULL;
}

int64_t c_tuned_w23(struct handles *one, struct handles *two, uint64_t operations)
{
	struct sender senders[] = { { one, 0, operations / 2, 0 }, { two, operations / 2, operations, 0 } };
	pthread_t other;

	if (pthread_create(&other, NULL, send_all, &senders[1]))
		return -1;
	send_all(&senders[0]);
	if (pthread_join(other, NULL) || senders[0].sum < 0 || senders[1].sum < 0)
		return -1;
	return senders[0].sum + senders[1].sum;
}

int64_t c_tuned_w24(struct handles *h, uint64_t operations)
{
	static char to[PAGE + 8];
	const char *from = (const char *)(uintptr_t)h->address;
	int64_t sum = 0;

	for (uint64_t i = 0; i < operations; i++) {
		memcpy(to + i % 8, from + i * 3 % 8, PAGE);
		__asm__ volatile("" : : "r"(to) : "memory");
		sum += i;
	}
	return sum;
}
