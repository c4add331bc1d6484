/* Which attributes each state transition of each queue pair type needs and allows: the kernel's
 * table (ib_modify_qp_is_ok), which all drivers share. */
#include "internal.h"

#define PKEY IBV_QP_PKEY_INDEX
#define PORT IBV_QP_PORT
#define QKEY IBV_QP_QKEY
#define ACC IBV_QP_ACCESS_FLAGS
#define AV IBV_QP_AV
#define MTU IBV_QP_PATH_MTU
#define DQPN IBV_QP_DEST_QPN
#define RPSN IBV_QP_RQ_PSN
#define SPSN IBV_QP_SQ_PSN
#define DRD IBV_QP_MAX_DEST_RD_ATOMIC
#define RD IBV_QP_MAX_QP_RD_ATOMIC
#define RNRT IBV_QP_MIN_RNR_TIMER
#define TIME IBV_QP_TIMEOUT
#define RETRY IBV_QP_RETRY_CNT
#define RNR IBV_QP_RNR_RETRY
#define CUR IBV_QP_CUR_STATE
#define ALT IBV_QP_ALT_PATH
#define MIG IBV_QP_PATH_MIG_STATE
#define RATE IBV_QP_RATE_LIMIT

enum { UD, UC, RC, INI, TGT, RAW, TYPES };

struct rule {
	uint8_t from, to;
	int required[TYPES], optional[TYPES];
};

static const struct rule rules[] = {
	{ IBV_QPS_RESET, IBV_QPS_INIT,
	  { [UD] = PKEY | PORT | QKEY, [UC] = PKEY | PORT | ACC, [RC] = PKEY | PORT | ACC,
	    [INI] = PKEY | PORT | ACC, [TGT] = PKEY | PORT | ACC, [RAW] = PORT },
	  { 0 } },
	{ IBV_QPS_INIT, IBV_QPS_INIT,
	  { 0 },
	  { [UD] = PKEY | PORT | QKEY, [UC] = PKEY | PORT | ACC, [RC] = PKEY | PORT | ACC,
	    [INI] = PKEY | PORT | ACC, [TGT] = PKEY | PORT | ACC } },
	{ IBV_QPS_INIT, IBV_QPS_RTR,
	  { [UC] = AV | MTU | DQPN | RPSN, [RC] = AV | MTU | DQPN | RPSN | DRD | RNRT,
	    [INI] = AV | MTU | DQPN | RPSN, [TGT] = AV | MTU | DQPN | RPSN | DRD | RNRT },
	  { [UD] = PKEY | QKEY, [UC] = ALT | ACC | PKEY, [RC] = ALT | ACC | PKEY,
	    [INI] = ALT | ACC | PKEY, [TGT] = ALT | ACC | PKEY } },
	{ IBV_QPS_RTR, IBV_QPS_RTS,
	  { [UD] = SPSN, [UC] = SPSN, [RC] = TIME | RETRY | RNR | SPSN | RD,
	    [INI] = TIME | RETRY | RNR | SPSN | RD, [TGT] = TIME | SPSN },
	  { [UD] = CUR | QKEY, [UC] = CUR | ALT | ACC | MIG, [RC] = CUR | ALT | ACC | RNRT | MIG,
	    [INI] = CUR | ALT | ACC | MIG, [TGT] = CUR | ALT | ACC | RNRT | MIG, [RAW] = RATE } },
	{ IBV_QPS_RTS, IBV_QPS_RTS,
	  { 0 },
	  { [UD] = CUR | QKEY, [UC] = CUR | ACC | ALT | MIG, [RC] = CUR | ACC | ALT | MIG | RNRT,
	    [INI] = CUR | ACC | ALT | MIG, [TGT] = CUR | ACC | ALT | MIG | RNRT, [RAW] = RATE } },
	{ IBV_QPS_RTS, IBV_QPS_SQD,
	  { 0 },
	  { [UD] = IBV_QP_EN_SQD_ASYNC_NOTIFY, [UC] = IBV_QP_EN_SQD_ASYNC_NOTIFY,
	    [RC] = IBV_QP_EN_SQD_ASYNC_NOTIFY, [INI] = IBV_QP_EN_SQD_ASYNC_NOTIFY,
	    [TGT] = IBV_QP_EN_SQD_ASYNC_NOTIFY } },
	{ IBV_QPS_SQD, IBV_QPS_RTS,
	  { 0 },
	  { [UD] = CUR | QKEY, [UC] = CUR | ALT | ACC | MIG, [RC] = CUR | ALT | ACC | RNRT | MIG,
	    [INI] = CUR | ALT | ACC | MIG, [TGT] = CUR | ALT | ACC | RNRT | MIG } },
	{ IBV_QPS_SQD, IBV_QPS_SQD,
	  { 0 },
	  { [UD] = PKEY | QKEY, [UC] = AV | ALT | ACC | PKEY | MIG,
	    [RC] = PORT | AV | TIME | RETRY | RNR | RD | DRD | ALT | ACC | PKEY | RNRT | MIG,
	    [INI] = PORT | AV | TIME | RETRY | RNR | RD | ALT | ACC | PKEY | MIG,
	    [TGT] = PORT | AV | TIME | DRD | ALT | ACC | PKEY | RNRT | MIG } },
	{ IBV_QPS_SQE, IBV_QPS_RTS, { 0 }, { [UD] = CUR | QKEY, [UC] = CUR | ACC } },
};

static int type_index(enum ibv_qp_type type)
{
	switch (type) {
	case IBV_QPT_UD:
		return UD;
	case IBV_QPT_UC:
		return UC;
	case IBV_QPT_XRC_SEND:
		return INI;
	case IBV_QPT_XRC_RECV:
		return TGT;
	case IBV_QPT_RAW_PACKET:
		return RAW;
	default:
		return RC;
	}
}

bool device_qp_transition_ok(const struct device_qp *qp, const struct ibv_qp_attr *attr, int mask)
{
	enum ibv_qp_state from = mask & IBV_QP_CUR_STATE ? attr->cur_qp_state : qp->attr.qp_state;
	enum ibv_qp_state to = mask & IBV_QP_STATE ? attr->qp_state : from;
	int type = type_index(qp->vqp.qp.qp_type);

	if (mask & IBV_QP_CUR_STATE && from != IBV_QPS_RTR && from != IBV_QPS_RTS &&
	    from != IBV_QPS_SQD && from != IBV_QPS_SQE)
		return false;
	if (to == IBV_QPS_RESET || (to == IBV_QPS_ERR && from != IBV_QPS_RESET))
		return mask == IBV_QP_STATE || mask == (IBV_QP_STATE | IBV_QP_CUR_STATE);
	for (size_t i = 0; i < ARRAY_SIZE(rules); i++) {
		const struct rule *rule = &rules[i];

		if (rule->from == from && rule->to == to)
			return !(rule->required[type] & ~mask) &&
			       !(mask &
				 ~(rule->required[type] | rule->optional[type] | IBV_QP_STATE));
	}
	return false;
}
