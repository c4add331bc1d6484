/* What a test does to a completion queue of the model. */
#include <limits.h>
#include "internal.h"

static struct td_cq *lock_cq(struct td_device *dev, struct ibv_cq *ibcq)
{
	pthread_mutex_lock(&dev->lock);
	struct td_cq *cq = dev->opt.kind == TD_MODEL ? td_find_cq(dev, ibcq) : NULL;
	if (!cq)
		pthread_mutex_unlock(&dev->lock);
	return cq;
}

int td_hold_completions(struct td_device *dev, struct ibv_cq *ibcq, uint32_t qp_num, bool hold)
{
	struct td_cq *cq = lock_cq(dev, ibcq);
	int error = 0;

	if (!cq)
		return EINVAL;
	if (qp_num) {
		struct td_qp *qp = td_find_qp(dev, qp_num);

		if (qp)
			qp->hold = hold;
		else
			error = EINVAL;
	} else {
		cq->hold_all = hold;
	}
	pthread_mutex_unlock(&dev->lock);
	return error;
}

int td_held(struct td_device *dev, struct ibv_cq *ibcq, unsigned int *count)
{
	struct td_cq *cq = lock_cq(dev, ibcq);

	if (!cq)
		return EINVAL;
	*count = cq->held_count;
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

/* A released completion is new as far as notification goes: it passes through td_complete again. */
static void let_out(struct td_device *dev, struct td_cq *cq, struct td_cqe *cqe)
{
	struct td_qp *qp = cqe->qp;
	bool hold_all = cq->hold_all, hold = qp && qp->hold;

	list_del(&cqe->entry);
	cq->held_count--;
	cq->hold_all = false;
	if (qp)
		qp->hold = false;
	td_complete(dev, cq, qp, &cqe->wc, cqe->send_slots, cqe->receive_slots, cqe->solicited);
	cq->hold_all = hold_all;
	if (qp)
		qp->hold = hold;
	free(cqe);
}

int td_release_held(struct td_device *dev, struct ibv_cq *ibcq, unsigned int index)
{
	struct td_cq *cq = lock_cq(dev, ibcq);
	int error = EINVAL;

	if (!cq)
		return EINVAL;
	if (index == UINT_MAX) {
		struct td_cqe *cqe;

		while ((cqe = list_top(&cq->held, struct td_cqe, entry)))
			let_out(dev, cq, cqe);
		error = 0;
	} else {
		struct td_cqe *cqe, *next;

		list_for_each_safe(&cq->held, cqe, next, entry) {
			if (index-- == 0) {
				let_out(dev, cq, cqe);
				error = 0;
				break;
			}
		}
	}
	pthread_mutex_unlock(&dev->lock);
	return error;
}

int td_drop_held(struct td_device *dev, struct ibv_cq *ibcq)
{
	struct td_cq *cq = lock_cq(dev, ibcq);
	struct td_cqe *cqe;

	if (!cq)
		return EINVAL;
	while ((cqe = list_pop(&cq->held, struct td_cqe, entry)))
		free(cqe);
	cq->held_count = 0;
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

int td_inject(struct td_device *dev, struct ibv_cq *ibcq, const struct ibv_wc *wc)
{
	struct td_cq *cq = lock_cq(dev, ibcq);

	if (!cq)
		return EINVAL;
	bool hold_all = cq->hold_all;
	cq->hold_all = false;
	td_complete(dev, cq, NULL, wc, 0, 0, true);
	cq->hold_all = hold_all;
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

static bool same_stream(const struct td_cqe *a, const struct td_cqe *b)
{
	return a->wc.qp_num == b->wc.qp_num && !a->send_slots == !b->send_slots;
}

int td_shuffle(struct td_device *dev, struct ibv_cq *ibcq, uint64_t seed)
{
	struct td_cq *cq = lock_cq(dev, ibcq);
	LIST_HEAD(mixed);

	if (!cq)
		return EINVAL;
	while (!list_empty(&cq->ready)) {
		struct td_cqe *cqe, *earlier, *first;

		/* xorshift64*: any sequence does, as long as the seed decides it. */
		seed = seed ? seed : 1;
		seed ^= seed >> 12;
		seed ^= seed << 25;
		seed ^= seed >> 27;
		uint32_t pick = (seed * 2685821657736338717ull >> 33) % cq->ready_count;
		list_for_each(&cq->ready, cqe, entry)
			if (!pick--)
				break;
		first = cqe;
		list_for_each(&cq->ready, earlier, entry) {
			if (same_stream(earlier, cqe)) {
				first = earlier;
				break;
			}
		}
		list_del(&first->entry);
		list_add_tail(&mixed, &first->entry);
		cq->ready_count--;
	}
	struct td_cqe *cqe;
	while ((cqe = list_pop(&mixed, struct td_cqe, entry))) {
		list_add_tail(&cq->ready, &cqe->entry);
		cq->ready_count++;
	}
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

int td_limit_poll(struct td_device *dev, struct ibv_cq *ibcq, unsigned int max)
{
	struct td_cq *cq = lock_cq(dev, ibcq);

	if (!cq)
		return EINVAL;
	cq->poll_limit = max;
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

int td_raise_cq_event(struct td_device *dev, struct ibv_cq *ibcq)
{
	pthread_mutex_lock(&dev->lock);
	struct td_cq *cq = td_find_cq(dev, ibcq);
	if (cq && ibcq->channel)
		td_cq_event(cq);
	pthread_mutex_unlock(&dev->lock);
	return cq && ibcq->channel ? 0 : EINVAL;
}
