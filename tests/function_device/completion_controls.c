/* What a test does to a completion queue of the model. */
#include <limits.h>
#include "internal.h"

static struct device_cq *lock_cq(struct function_device *dev, struct ibv_cq *ibcq)
{
	pthread_mutex_lock(&dev->lock);
	struct device_cq *cq = dev->opt.kind == DEVICE_MODEL ? device_find_cq(dev, ibcq) : NULL;
	if (!cq)
		pthread_mutex_unlock(&dev->lock);
	return cq;
}

int device_hold_completions(struct function_device *dev, struct ibv_cq *ibcq, uint32_t qp_num,
			    bool hold)
{
	struct device_cq *cq = lock_cq(dev, ibcq);
	int error = 0;

	if (!cq)
		return EINVAL;
	if (qp_num) {
		struct device_qp *qp = device_find_qp(dev, qp_num);

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

int device_held(struct function_device *dev, struct ibv_cq *ibcq, unsigned int *count)
{
	struct device_cq *cq = lock_cq(dev, ibcq);

	if (!cq)
		return EINVAL;
	*count = cq->held_count;
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

/* A released completion is new as far as notification goes: it passes through device_complete again. */
static void let_out(struct function_device *dev, struct device_cq *cq, struct device_cqe *cqe)
{
	struct device_qp *qp = cqe->qp;
	bool hold_all = cq->hold_all, hold = qp && qp->hold;

	list_del(&cqe->entry);
	cq->held_count--;
	cq->hold_all = false;
	if (qp)
		qp->hold = false;
	device_complete(dev, cq, qp, &cqe->wc, cqe->send_slots, cqe->receive_slots, cqe->solicited);
	cq->hold_all = hold_all;
	if (qp)
		qp->hold = hold;
	free(cqe);
}

int device_release_held(struct function_device *dev, struct ibv_cq *ibcq, unsigned int index)
{
	struct device_cq *cq = lock_cq(dev, ibcq);
	int error = EINVAL;

	if (!cq)
		return EINVAL;
	if (index == UINT_MAX) {
		struct device_cqe *cqe;

		while ((cqe = list_top(&cq->held, struct device_cqe, entry)))
			let_out(dev, cq, cqe);
		error = 0;
	} else {
		struct device_cqe *cqe, *next;

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

int device_inject(struct function_device *dev, struct ibv_cq *ibcq, const struct ibv_wc *wc)
{
	struct device_cq *cq = lock_cq(dev, ibcq);

	if (!cq)
		return EINVAL;
	bool hold_all = cq->hold_all;
	cq->hold_all = false;
	device_complete(dev, cq, NULL, wc, 0, 0, true);
	cq->hold_all = hold_all;
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

static bool same_stream(const struct device_cqe *a, const struct device_cqe *b)
{
	return a->wc.qp_num == b->wc.qp_num && !a->send_slots == !b->send_slots;
}

int device_shuffle(struct function_device *dev, struct ibv_cq *ibcq, uint64_t seed)
{
	struct device_cq *cq = lock_cq(dev, ibcq);
	LIST_HEAD(mixed);

	if (!cq)
		return EINVAL;
	while (!list_empty(&cq->ready)) {
		struct device_cqe *cqe, *earlier, *first;

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
	struct device_cqe *cqe;
	while ((cqe = list_pop(&mixed, struct device_cqe, entry))) {
		list_add_tail(&cq->ready, &cqe->entry);
		cq->ready_count++;
	}
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

int device_raise_cq_event(struct function_device *dev, struct ibv_cq *ibcq)
{
	pthread_mutex_lock(&dev->lock);
	struct device_cq *cq = device_find_cq(dev, ibcq);
	if (cq && ibcq->channel)
		device_cq_event(cq);
	pthread_mutex_unlock(&dev->lock);
	return cq && ibcq->channel ? 0 : EINVAL;
}
