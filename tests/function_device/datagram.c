/* Unreliable datagrams: address handles, Q keys, global routing headers, multicast. */
#include <arpa/inet.h>
#include <netinet/ip.h>
#include "internal.h"

enum { GRH_LENGTH = 40 };

static uint16_t header_checksum(const uint8_t *header)
{
	uint32_t sum = 0;

	for (int i = 0; i < 20; i += 2)
		sum += header[i] << 8 | header[i + 1];
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* The 40 bytes before the payload: an IPv6-like header, or an IPv4 one in the last 20 of them. */
static void make_grh(struct function_device *dev, const struct ibv_ah_attr *ah, uint32_t length,
		     uint8_t *to)
{
	const struct device_gid *source = &dev->gid[ah->port_num - 1][ah->grh.sgid_index];
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };

	memset(to, 0, GRH_LENGTH);
	if (source->type == IBV_GID_TYPE_ROCE_V2 && !memcmp(source->gid.raw, mapped, 12)) {
		struct iphdr ip = {
			.version = 4,
			.ihl = 5,
			.tos = ah->grh.traffic_class,
			.tot_len = htons(20 + 8 + 20 + length + 4),
			.ttl = ah->grh.hop_limit,
			.protocol = 17,
		};

		memcpy(&ip.saddr, source->gid.raw + 12, 4);
		memcpy(&ip.daddr, ah->grh.dgid.raw + 12, 4);
		memcpy(to + 20, &ip, 20);
		uint16_t sum = htons(header_checksum(to + 20));
		memcpy(to + 20 + offsetof(struct iphdr, check), &sum, 2);
		return;
	}
	struct ibv_grh grh = {
		.version_tclass_flow = htonl(6u << 28 | (uint32_t)ah->grh.traffic_class << 20 |
					     (ah->grh.flow_label & 0xfffff)),
		.paylen = htons(length + 20 + 4),
		.next_hdr = source->type == IBV_GID_TYPE_ROCE_V2 ? 17 : 0x1b,
		.hop_limit = ah->grh.hop_limit,
		.sgid = source->gid,
		.dgid = ah->grh.dgid,
	};
	memcpy(to, &grh, GRH_LENGTH);
}

static void deliver(struct function_device *dev, struct device_qp *from,
		    const struct device_wqe *wqe, struct device_qp *to, uint8_t *packet,
		    uint32_t length)
{
	enum ibv_qp_state state = to->attr.qp_state;
	/* With the top bit set, the sender's own Q key goes out instead. */
	uint32_t qkey = wqe->wr.wr.ud.remote_qkey & 0x80000000 ? from->attr.qkey :
								wqe->wr.wr.ud.remote_qkey;
	struct ibv_wc wc = {};

	if (to->vqp.qp.qp_type != IBV_QPT_UD ||
	    (state != IBV_QPS_RTR && state != IBV_QPS_RTS && state != IBV_QPS_SQD &&
	     state != IBV_QPS_SQE))
		return;
	if (qkey != to->attr.qkey) {
		dev->port[0].qkey_viol_cntr++;
		return;
	}
	struct device_wqe *receive = device_take_receive(dev, to, to->srq);
	if (!receive)
		return;
	struct device_object *pd = to->srq ? to->srq->obj.uses[0] : to->obj.uses[0];
	bool fits = device_length(receive) >= length + GRH_LENGTH;
	if (fits && device_scatter(dev, container_of(pd, struct device_pd, obj), receive, packet,
			       length + GRH_LENGTH)) {
		wc.wr_id = receive->wr.wr_id;
		wc.opcode = IBV_WC_RECV;
		wc.byte_len = length + GRH_LENGTH;
		wc.qp_num = to->vqp.qp.qp_num;
		wc.src_qp = from->vqp.qp.qp_num;
		wc.slid = dev->port[wqe->ah.port_num - 1].lid;
		wc.sl = wqe->ah.sl;
		wc.dlid_path_bits = wqe->ah.src_path_bits;
		wc.wc_flags = wqe->ah.is_global ? IBV_WC_GRH : 0;
		if (wqe->wr.opcode == IBV_WR_SEND_WITH_IMM) {
			wc.wc_flags |= IBV_WC_WITH_IMM;
			wc.imm_data = wqe->wr.imm_data;
		}
		device_complete(dev, to->recv_cq, to, &wc, 0, !to->srq,
			    wqe->wr.send_flags & IBV_SEND_SOLICITED);
	} else {
		device_error_wc(&wc, to, receive->wr.wr_id,
			    fits ? IBV_WC_LOC_PROT_ERR : IBV_WC_LOC_LEN_ERR);
		device_complete(dev, to->recv_cq, to, &wc, 0, !to->srq, false);
		device_qp_to_error(dev, to);
	}
	free(receive);
}

void device_send_datagram(struct function_device *dev, struct device_qp *qp,
			  const struct device_wqe *wqe, const uint8_t *data, uint32_t length)
{
	struct device_object *obj;

	uint8_t *packet = malloc(GRH_LENGTH + length);
	if (!packet)
		return;
	memcpy(packet + GRH_LENGTH, data, length);
	if (wqe->ah.is_global)
		make_grh(dev, &wqe->ah, length, packet);
	else
		memset(packet, 0xa5, GRH_LENGTH); /* undefined without a global route */

	if (wqe->ah.is_global && wqe->ah.grh.dgid.raw[0] == 0xff) {
		list_for_each(&dev->objects, obj, entry) {
			struct device_qp *to = container_of(obj, struct device_qp, obj);

			for (uint32_t i = 0; obj->kind == DEVICE_OBJECT_QP && obj->context &&
					     i < to->mcast_count; i++)
				if (!memcmp(&to->mcast[i], &wqe->ah.grh.dgid, 16))
					deliver(dev, qp, wqe, to, packet, length);
		}
	} else if (device_reachable(dev, &wqe->ah)) {
		struct device_qp *to = device_find_qp(dev, wqe->wr.wr.ud.remote_qpn);

		if (to)
			deliver(dev, qp, wqe, to, packet, length);
	}
	free(packet);
}
