/* Ethernet frames: which flows they match, and which queue they go to. */
#include <netinet/in.h>
#include "internal.h"

enum { ETHERNET = 14, IPV4 = 20, ETHERTYPE_IPV4 = 0x0800 };

static bool masked(const uint8_t *data, const void *value, const void *mask, size_t size)
{
	for (size_t i = 0; i < size; i++)
		if ((data[i] ^ ((const uint8_t *)value)[i]) & ((const uint8_t *)mask)[i])
			return false;
	return true;
}

static bool is_ipv4(const uint8_t *frame, uint32_t length)
{
	return length >= ETHERNET + IPV4 && frame[12] << 8 == ETHERTYPE_IPV4 && !frame[13];
}

static bool spec_matches(const struct ibv_flow_spec *spec, const uint8_t *frame, uint32_t length)
{
	uint8_t protocol = is_ipv4(frame, length) ? frame[ETHERNET + 9] : 0;

	switch ((int)spec->hdr.type) {
	case IBV_FLOW_SPEC_ETH:
		/* dst, src and type stand in this order in a frame too; a frame without tag has tag 0. */
		return length >= ETHERNET && masked(frame, &spec->eth.val, &spec->eth.mask, ETHERNET) &&
		       !(spec->eth.val.vlan_tag & spec->eth.mask.vlan_tag);
	case IBV_FLOW_SPEC_IPV4:
		return protocol && masked(frame + ETHERNET + 12, &spec->ipv4.val, &spec->ipv4.mask, 8);
	case IBV_FLOW_SPEC_IPV4_EXT:
		return protocol && masked(frame + ETHERNET + 12, &spec->ipv4_ext.val, &spec->ipv4_ext.mask, 8) &&
		       masked(&protocol, &spec->ipv4_ext.val.proto, &spec->ipv4_ext.mask.proto, 1) &&
		       masked(frame + ETHERNET + 1, &spec->ipv4_ext.val.tos, &spec->ipv4_ext.mask.tos, 1) &&
		       masked(frame + ETHERNET + 8, &spec->ipv4_ext.val.ttl, &spec->ipv4_ext.mask.ttl, 1) &&
		       !(spec->ipv4_ext.val.flags & spec->ipv4_ext.mask.flags);
	case IBV_FLOW_SPEC_TCP:
	case IBV_FLOW_SPEC_UDP:
		if (protocol != (spec->hdr.type == IBV_FLOW_SPEC_TCP ? IPPROTO_TCP : IPPROTO_UDP) ||
		    length < ETHERNET + IPV4 + 4)
			return false;
		/* A header has the source first, a filter the destination. */
		return masked(frame + ETHERNET + IPV4 + 2, &spec->tcp_udp.val.dst_port,
			      &spec->tcp_udp.mask.dst_port, 2) &&
		       masked(frame + ETHERNET + IPV4, &spec->tcp_udp.val.src_port,
			      &spec->tcp_udp.mask.src_port, 2);
	case IBV_FLOW_SPEC_ACTION_TAG:
	case IBV_FLOW_SPEC_ACTION_DROP:
	case IBV_FLOW_SPEC_ACTION_COUNT:
		return true;
	default:
		/* The model knows the other headers by their arguments only. */
		return false;
	}
}

static bool matches(const struct device_flow *flow, uint32_t port, const uint8_t *frame, uint32_t length)
{
	const uint8_t *at = flow->specs;

	if (flow->attr.port != port || flow->attr.flags & IBV_FLOW_ATTR_FLAGS_EGRESS)
		return false;
	if (flow->attr.type == IBV_FLOW_ATTR_MC_DEFAULT)
		return frame[0] & 1;
	for (int i = 0; i < flow->attr.num_of_specs; i++) {
		struct ibv_flow_spec spec = {};

		memcpy(&spec, at, sizeof(spec.hdr));
		memcpy(&spec, at, spec.hdr.size);
		at += spec.hdr.size;
		if (!spec_matches(&spec, frame, length))
			return false;
	}
	return true;
}

/* The Toeplitz hash: for each bit of the input that is set, the 32 bits of the key at its place. */
static uint32_t toeplitz(const uint8_t *key, const uint8_t *input, size_t size)
{
	uint32_t hash = 0;

	for (size_t bit = 0; bit < size * 8; bit++) {
		if (!(input[bit / 8] >> (7 - bit % 8) & 1))
			continue;
		for (size_t i = 0; i < 32; i++) {
			size_t at = bit + i;

			if (at / 8 < DEVICE_MAX_HASH_KEY && key[at / 8] >> (7 - at % 8) & 1)
				hash ^= 1u << (31 - i);
		}
	}
	return hash;
}

static uint32_t hash(const struct device_qp *qp, const uint8_t *frame, uint32_t length)
{
	uint64_t fields = qp->hash.rx_hash_fields_mask;
	uint8_t input[12], protocol;
	size_t size = 0;

	if (!is_ipv4(frame, length))
		return 0;
	protocol = frame[ETHERNET + 9];
#define FIELD(condition, offset, bytes)                                                            \
	if ((condition) && length >= (offset) + (bytes)) {                                         \
		memcpy(input + size, frame + (offset), bytes);                                     \
		size += bytes;                                                                     \
	}
	FIELD(fields & IBV_RX_HASH_SRC_IPV4, ETHERNET + 12, 4)
	FIELD(fields & IBV_RX_HASH_DST_IPV4, ETHERNET + 16, 4)
	FIELD((fields & IBV_RX_HASH_SRC_PORT_TCP && protocol == IPPROTO_TCP) ||
		      (fields & IBV_RX_HASH_SRC_PORT_UDP && protocol == IPPROTO_UDP),
	      ETHERNET + IPV4, 2)
	FIELD((fields & IBV_RX_HASH_DST_PORT_TCP && protocol == IPPROTO_TCP) ||
		      (fields & IBV_RX_HASH_DST_PORT_UDP && protocol == IPPROTO_UDP),
	      ETHERNET + IPV4 + 2, 2)
#undef FIELD
	return toeplitz(qp->hash_key, input, size);
}

static void deliver(struct function_device *dev, struct device_qp *qp, const uint8_t *frame, uint32_t length)
{
	struct device_wq *wq = NULL;
	struct device_wqe *receive = NULL;
	struct ibv_wc wc = {};

	if (qp->table) {
		wq = qp->table->queues[hash(qp, frame, length) & (qp->table->size - 1)];
		if (wq->wq.state == IBV_WQS_RDY && (receive = list_pop(&wq->receives, struct device_wqe, entry)))
			wq->used--;
	} else if (qp->attr.qp_state == IBV_QPS_RTR || qp->attr.qp_state == IBV_QPS_RTS) {
		receive = device_take_receive(dev, qp, qp->srq);
	}
	/* Without a receive the frame is lost, as on any Ethernet. */
	if (!receive)
		return;
	struct device_object *pd = wq ? wq->obj.uses[0] : qp->srq ? qp->srq->obj.uses[0] : qp->obj.uses[0];
	bool fits = device_length(receive) >= length;
	wc.wr_id = receive->wr.wr_id;
	wc.opcode = IBV_WC_RECV;
	wc.byte_len = length;
	wc.qp_num = wq ? wq->wq.wq_num : qp->vqp.qp.qp_num;
	if (!fits)
		wc.status = IBV_WC_LOC_LEN_ERR;
	else if (!device_scatter(dev, container_of(pd, struct device_pd, obj), receive, frame, length))
		wc.status = IBV_WC_LOC_PROT_ERR;
	if (wq)
		device_complete(dev, wq->cq, NULL, &wc, 0, 0, false);
	else
		device_complete(dev, qp->recv_cq, qp, &wc, 0, !qp->srq, false);
	free(receive);
}

static void count(struct device_counters *counters, uint32_t length)
{
	for (uint32_t i = 0; counters && i < counters->point_count; i++)
		counters->values[counters->points[i].index] +=
			counters->points[i].what == IBV_COUNTER_PACKETS ? 1 : length;
}

void device_send_frame(struct function_device *dev, struct device_qp *from, const uint8_t *frame, uint32_t length)
{
	struct device_flow *best = NULL;
	struct device_object *obj;

	if (length < ETHERNET)
		return;
	/* Sniffers see everything; the others in the order of their kinds, then of their priorities. */
	list_for_each(&dev->objects, obj, entry) {
		struct device_flow *flow = container_of(obj, struct device_flow, obj);

		if (obj->kind != DEVICE_OBJECT_FLOW || !obj->context ||
		    !matches(flow, from->attr.port_num, frame, length))
			continue;
		if (flow->attr.type == IBV_FLOW_ATTR_SNIFFER) {
			count(flow->counters, length);
			deliver(dev, container_of(obj->uses[0], struct device_qp, obj), frame, length);
		} else if (!best || flow->attr.type < best->attr.type ||
			   (flow->attr.type == best->attr.type &&
			    flow->attr.priority < best->attr.priority)) {
			best = flow;
		}
	}
	if (!best)
		return;
	count(best->counters, length);
	if (!best->drop)
		deliver(dev, container_of(best->obj.uses[0], struct device_qp, obj), frame, length);
}
