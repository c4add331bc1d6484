/* What the device says of itself: attributes, ports, GIDs, clock; and the events it raises. */
#include <stdio.h>
#include <time.h>
#include "internal.h"

void device_init_ports(struct function_device *dev)
{
	bool ethernet = dev->opt.link_layer == IBV_LINK_LAYER_ETHERNET;

	for (uint32_t i = 0; i < dev->opt.ports; i++) {
		const uint8_t local[16] = {
			0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, i + 1
		};
		const uint8_t mapped[16] = { 0, 0, 0,	 0,    0,  0, 0, 0,
					     0, 0, 0xff, 0xff, 10, 0, 0, i + 1 };
		struct device_gid *gid = dev->gid[i];

		dev->port[i] = (struct ibv_port_attr){
			.state = IBV_PORT_ACTIVE,
			.max_mtu = IBV_MTU_4096,
			.active_mtu = ethernet ? IBV_MTU_1024 : IBV_MTU_4096,
			.gid_tbl_len = DEVICE_GIDS,
			.port_cap_flags = ethernet ? IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS :
						     IBV_PORT_CM_SUP | IBV_PORT_SYS_IMAGE_GUID_SUP,
			.max_msg_sz = 1u << 30,
			.pkey_tbl_len = 1,
			.lid = ethernet ? 0 : i + 1,
			.sm_lid = ethernet ? 0 : 0x7f,
			.max_vl_num = 1,
			.active_width = 2,
			.active_speed = 32,
			.active_speed_ex = 32,
			.phys_state = 5,
			.link_layer = dev->opt.link_layer,
		};
		memcpy(gid[0].gid.raw, local, 16);
		if (!ethernet) {
			gid[0].type = IBV_GID_TYPE_IB;
			continue;
		}
		/* As mlx5 fills its table: each address as RoCE v1 first, then as RoCE v2. */
		memcpy(gid[1].gid.raw, local, 16);
		memcpy(gid[2].gid.raw, mapped, 16);
		memcpy(gid[3].gid.raw, mapped, 16);
		for (uint32_t j = 0; j < 4; j++) {
			gid[j].type = j % 2 ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1;
			gid[j].ifindex = 1;
		}
	}
}

static int query_device_ex(struct ibv_context *context,
			   const struct ibv_query_device_ex_input *input,
			   struct ibv_device_attr_ex *attr, size_t attr_size)
{
	struct function_device *dev = to_device(context);
	const struct device_options *opt = &dev->opt;
	struct ibv_device_attr_ex full = {
		.orig_attr = {
			.fw_ver = "1.2.3",
			.node_guid = htobe64(dev->vdev.sysfs ? dev->vdev.sysfs->node_guid : 0),
			.sys_image_guid = htobe64(0x0200000000000000ull),
			.max_mr_size = opt->max_mr_size,
			.page_size_cap = 0xfffff000,
			.vendor_id = opt->vendor_id,
			.vendor_part_id = opt->vendor_part_id,
			.hw_ver = 1,
			.max_qp = opt->max_qp,
			.max_qp_wr = opt->max_qp_wr,
			.device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_SRQ_RESIZE |
					    IBV_DEVICE_PORT_ACTIVE_EVENT | IBV_DEVICE_XRC |
					    IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B |
					    IBV_DEVICE_MEM_MGT_EXTENSIONS |
					    IBV_DEVICE_SYS_IMAGE_GUID,
			.max_sge = opt->max_sge,
			.max_sge_rd = opt->max_sge,
			.max_cq = opt->max_cq,
			.max_cqe = opt->max_cqe,
			.max_mr = opt->max_mr,
			.max_pd = opt->max_pd,
			.max_qp_rd_atom = opt->max_rd_atomic,
			.max_res_rd_atom = opt->max_rd_atomic * opt->max_qp,
			.max_qp_init_rd_atom = opt->max_rd_atomic,
			.atomic_cap = IBV_ATOMIC_HCA,
			.max_mw = opt->max_mw,
			.max_mcast_grp = 1024,
			.max_mcast_qp_attach = 64,
			.max_total_mcast_qp_attach = 4096,
			.max_ah = opt->max_ah,
			.max_srq = opt->max_srq,
			.max_srq_wr = opt->max_qp_wr,
			.max_srq_sge = opt->max_sge,
			.max_pkeys = 1,
			.local_ca_ack_delay = 15,
			.phys_port_cnt = opt->ports,
		},
		.completion_timestamp_mask = UINT64_MAX,
		.hca_core_clock = 1000000, /* kHz: the clock counts nanoseconds */
		.rss_caps = {
			.supported_qpts = 1 << IBV_QPT_RAW_PACKET | 1 << IBV_QPT_UD,
			.max_rwq_indirection_tables = 64,
			.max_rwq_indirection_table_size = DEVICE_MAX_TABLE,
			.rx_hash_fields_mask = IBV_RX_HASH_SRC_IPV4 | IBV_RX_HASH_DST_IPV4 |
					       IBV_RX_HASH_SRC_PORT_TCP | IBV_RX_HASH_DST_PORT_TCP |
					       IBV_RX_HASH_SRC_PORT_UDP | IBV_RX_HASH_DST_PORT_UDP,
			.rx_hash_function = IBV_RX_HASH_FUNC_TOEPLITZ,
		},
		.max_wq_type_rq = 1024,
		.raw_packet_caps = IBV_RAW_PACKET_CAP_SCATTER_FCS | IBV_RAW_PACKET_CAP_CVLAN_STRIPPING,
		.tm_caps = {
			.max_rndv_hdr_size = 64,
			.max_num_tags = DEVICE_MAX_TAGS,
			.flags = IBV_TM_CAP_RC,
			.max_ops = 32,
			.max_sge = 1,
		},
		.cq_mod_caps = { .max_cq_count = 1024, .max_cq_period = 4096 },
		.max_dm_size = 1 << 20,
		.odp_caps.general_caps =
			opt->on_demand ? IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT : 0,
		.phys_port_cnt_ex = opt->ports,
	};

	device_begin(context, DEVICE_query_device_ex, context);
	int error = device_admit(dev, DEVICE_query_device_ex);
	device_unlock(context);
	if (!error && ((input && input->comp_mask) || attr_size < sizeof(attr->orig_attr)))
		error = EINVAL;
	if (!error) {
		memset(attr, 0, attr_size);
		memcpy(attr, &full, attr_size < sizeof(full) ? attr_size : sizeof(full));
	}
	return error;
}

static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr)
{
	struct function_device *dev = to_device(context);

	device_begin(context, DEVICE_query_port, context);
	int error = device_admit(dev, DEVICE_query_port);
	if (!error && (port < 1 || port > dev->opt.ports))
		error = EINVAL;
	if (!error)
		*attr = dev->port[port - 1];
	device_unlock(context);
	return error;
}

static int query_rt_values(struct ibv_context *context, struct ibv_values_ex *values)
{
	uint32_t wanted = values->comp_mask;

	device_begin(context, DEVICE_query_rt_values, context)->mask = wanted;
	int error = device_admit(to_device(context), DEVICE_query_rt_values);
	device_unlock(context);
	if (error)
		return error;
	values->comp_mask = 0;
	if (wanted & IBV_VALUES_MASK_RAW_CLOCK) {
		clock_gettime(CLOCK_MONOTONIC, &values->raw_clock);
		values->comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
	}
	return 0;
}

/* ---- Events ---- */

/* Called by libibverbs for each event that the program takes: what destroying waits for. */
static void async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	struct function_device *dev = to_device(context);

	pthread_mutex_lock(&dev->lock);
	switch (event->event_type) {
	case IBV_EVENT_CQ_ERR:
		to_device_cq(event->element.cq)->async_reported++;
		break;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		to_device_qp(event->element.qp)->events_reported++;
		break;
	case IBV_EVENT_WQ_FATAL:
		to_device_wq(event->element.wq)->events_reported++;
		break;
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		to_device_srq(event->element.srq)->events_reported++;
		break;
	default:
		break;
	}
	pthread_mutex_unlock(&dev->lock);
}

void device_async(struct ibv_context *context, uint32_t type, uint64_t element)
{
	struct ib_uverbs_async_event_desc record = { .element = element, .event_type = type };

	device_pipe_write(context->async_fd, &record, sizeof(record));
}

int device_raise_async(struct function_device *dev, struct ibv_context *context, uint32_t type,
		   uint64_t element)
{
	struct device_object *obj;
	int error = EINVAL;

	pthread_mutex_lock(&dev->lock);
	list_for_each(&dev->objects, obj, entry) {
		if (obj->kind == DEVICE_OBJECT_CONTEXT && obj->context == context) {
			device_async(context, type, element);
			error = 0;
		}
	}
	pthread_mutex_unlock(&dev->lock);
	return error;
}

/* ---- Controls ---- */

int device_set_gid(struct function_device *dev, uint32_t port, uint32_t index,
		   const union ibv_gid *gid, uint32_t type, uint32_t ifindex)
{
	if (port < 1 || port > dev->opt.ports || index >= DEVICE_GIDS)
		return EINVAL;
	pthread_mutex_lock(&dev->lock);
	dev->gid[port - 1][index] = (struct device_gid){ *gid, type, ifindex };
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

int device_set_port(struct function_device *dev, uint32_t port, const struct ibv_port_attr *attr)
{
	if (port < 1 || port > dev->opt.ports)
		return EINVAL;
	pthread_mutex_lock(&dev->lock);
	dev->port[port - 1] = *attr;
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

int device_get_port(struct function_device *dev, uint32_t port, struct ibv_port_attr *attr)
{
	if (port < 1 || port > dev->opt.ports)
		return EINVAL;
	pthread_mutex_lock(&dev->lock);
	*attr = dev->port[port - 1];
	pthread_mutex_unlock(&dev->lock);
	return 0;
}

const struct verbs_context_ops device_port_ops = {
	.async_event = async_event,
	.query_device_ex = query_device_ex,
	.query_port = query_port,
	.query_rt_values = query_rt_values,
};
