/*
 * The part of libnl's interface that libibverbs asks the kernel's RDMA subsystem with, over a plain
 * socket, so that the default build needs no libnl.
 *
 * Without libnl, rdma-core replaces <netlink/attr.h> by stubs that always fail. libibverbs then
 * finds devices in sysfs alone, where nothing tells which driver a device has: siw and mana, which
 * are matched by nothing else, would never be found, nor an rxe device of any other name than
 * "rxe..". This header stands before the stubs in the include path: it takes them for what resolves
 * routes and neighbours (feature `neigh`, which needs libnl itself) and puts real functions in the
 * place of the rest.
 */
#ifndef IBVERBS_BUNDLED_NETLINK_ATTR_H
#define IBVERBS_BUNDLED_NETLINK_ATTR_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <linux/netlink.h>

#define nl_socket_alloc stub_nl_socket_alloc
#define nl_connect stub_nl_connect
#define nl_socket_free stub_nl_socket_free
#define nl_send_simple stub_nl_send_simple
#define nl_send_auto stub_nl_send_auto
#define nl_recvmsgs_default stub_nl_recvmsgs_default
#define nl_socket_modify_err_cb stub_nl_socket_modify_err_cb
#define nl_socket_modify_cb stub_nl_socket_modify_cb
#define nlmsg_alloc_simple stub_nlmsg_alloc_simple
#define nlmsg_free stub_nlmsg_free
#define nlmsg_hdr stub_nlmsg_hdr
#define nlmsg_parse stub_nlmsg_parse
#define nla_get_string stub_nla_get_string
#define nla_get_u8 stub_nla_get_u8
#define nla_get_u32 stub_nla_get_u32
#define nla_get_u64 stub_nla_get_u64
#include_next <netlink/attr.h>
#undef nl_socket_alloc
#undef nl_connect
#undef nl_socket_free
#undef nl_send_simple
#undef nl_send_auto
#undef nl_recvmsgs_default
#undef nl_socket_modify_err_cb
#undef nl_socket_modify_cb
#undef nlmsg_alloc_simple
#undef nlmsg_free
#undef nlmsg_hdr
#undef nlmsg_parse
#undef nla_get_string
#undef nla_get_u8
#undef nla_get_u32
#undef nla_get_u64
#undef NLA_PUT_U32
#undef NLA_PUT_STRING

/* A type that the stubs lack; users test for the macro. */
#define NLA_NUL_STRING 100

struct nl_sock {
	int fd;
	uint32_t sequence; /* of the last request: answers to earlier ones are dropped */
	nl_recvmsg_msg_cb_t valid;
	void *valid_argument;
	nl_recvmsg_err_cb_t error;
	void *error_argument;
};

struct nl_msg {
	struct nlmsghdr *header;
	/* A request under construction; unused in a received message. */
	union {
		struct nlmsghdr aligned;
		char bytes[256];
	} request;
};

static inline struct nl_sock *nl_socket_alloc(void)
{
	struct nl_sock *sock = calloc(1, sizeof(*sock));

	if (sock)
		sock->fd = -1;
	return sock;
}

static inline void nl_socket_free(struct nl_sock *sock)
{
	if (!sock)
		return;
	if (sock->fd >= 0)
		close(sock->fd);
	free(sock);
}

/*
 * The socket stays unbound and unconnected: the kernel binds it when the first request is sent, and
 * the kernel is where an unaddressed request goes.
 */
static inline int nl_connect(struct nl_sock *sock, int protocol)
{
	/* Everything else takes the stubs' side, which cannot work. */
	if (protocol != NETLINK_RDMA)
		return -1;
	sock->fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, protocol);
	return sock->fd < 0 ? -1 : 0;
}

static inline int nl_socket_modify_cb(struct nl_sock *sock, int type, int kind,
				      nl_recvmsg_msg_cb_t function, void *argument)
{
	sock->valid = function;
	sock->valid_argument = argument;
	return 0;
}

static inline int nl_socket_modify_err_cb(struct nl_sock *sock, int kind,
					  nl_recvmsg_err_cb_t function, void *argument)
{
	sock->error = function;
	sock->error_argument = argument;
	return 0;
}

static inline struct nl_msg *nlmsg_alloc_simple(int type, int flags)
{
	struct nl_msg *msg = calloc(1, sizeof(*msg));

	if (!msg)
		return NULL;
	msg->header = &msg->request.aligned;
	msg->header->nlmsg_len = NLMSG_HDRLEN;
	msg->header->nlmsg_type = type;
	msg->header->nlmsg_flags = flags;
	return msg;
}

static inline void nlmsg_free(struct nl_msg *msg)
{
	free(msg);
}

static inline struct nlmsghdr *nlmsg_hdr(struct nl_msg *msg)
{
	return msg->header;
}

/* False if the request has no room for the attribute. */
static inline bool nl_request_put(struct nl_msg *msg, int type, const void *value, size_t size)
{
	size_t at = NLMSG_ALIGN(msg->header->nlmsg_len);
	struct nlattr attribute = { .nla_len = NLA_HDRLEN + size, .nla_type = type };

	if (size > sizeof(msg->request.bytes) ||
	    at + NLA_HDRLEN + size > sizeof(msg->request.bytes))
		return false;
	memcpy(msg->request.bytes + at, &attribute, sizeof(attribute));
	memcpy(msg->request.bytes + at + NLA_HDRLEN, value, size);
	msg->header->nlmsg_len = at + NLA_HDRLEN + size;
	return true;
}

#define NLA_PUT_U32(msg, type, value)                                                              \
	do {                                                                                       \
		uint32_t put_value = (value);                                                      \
		if (!nl_request_put(msg, type, &put_value, sizeof(put_value)))                     \
			goto nla_put_failure;                                                      \
	} while (0)

#define NLA_PUT_STRING(msg, type, value)                                                           \
	do {                                                                                       \
		const char *put_value = (value);                                                   \
		if (!nl_request_put(msg, type, put_value, strlen(put_value) + 1))                  \
			goto nla_put_failure;                                                      \
	} while (0)

static inline int nl_send_auto(struct nl_sock *sock, struct nl_msg *msg)
{
	ssize_t sent;

	msg->header->nlmsg_seq = ++sock->sequence;
	msg->header->nlmsg_flags |= NLM_F_REQUEST;
	do {
		sent = send(sock->fd, msg->header, msg->header->nlmsg_len, 0);
	} while (sent < 0 && errno == EINTR);
	return sent == msg->header->nlmsg_len ? (int)sent : -1;
}

static inline int nl_send_simple(struct nl_sock *sock, int type, int flags, void *data,
				 size_t size)
{
	struct nl_msg *msg;
	int ret;

	if (size) /* no user of these functions sends any */
		return -1;
	msg = nlmsg_alloc_simple(type, flags);
	if (!msg)
		return -1;
	ret = nl_send_auto(sock, msg);
	nlmsg_free(msg);
	return ret;
}

/*
 * Handles one received message of the current request. Returns 1 if more are to come, 0 if it was
 * the last, -1 on failure.
 */
static inline int nl_receive_one(struct nl_sock *sock, struct nlmsghdr *header)
{
	struct nl_msg msg = { .header = header };
	struct nlmsgerr *error;
	int ret;

	switch (header->nlmsg_type) {
	case NLMSG_DONE: /* of a dump, with its result */
		if (header->nlmsg_len < NLMSG_LENGTH(sizeof(int)))
			return 0;
		return *(int *)NLMSG_DATA(header) < 0 ? -1 : 0;
	case NLMSG_ERROR:
		if (header->nlmsg_len < NLMSG_LENGTH(sizeof(*error)))
			return -1;
		error = NLMSG_DATA(header);
		if (error->error &&
		    (!sock->error || sock->error(NULL, error, sock->error_argument) < 0))
			return -1;
		return 0;
	default:
		if (header->nlmsg_type < NLMSG_MIN_TYPE || !sock->valid)
			return -1;
		ret = sock->valid(&msg, sock->valid_argument);
		if (ret != 0 && ret != NL_OK)
			return -1;
		return header->nlmsg_flags & NLM_F_MULTI ? 1 : 0;
	}
}

/* Handles all that answers the last request. Returns 0, or -1 on failure. */
static inline int nl_recvmsgs_default(struct nl_sock *sock)
{
	/* What the kernel sends at most at once to a reader that gives no larger buffer. */
	enum { size = 32768 };
	struct nlmsghdr *header, *buffer = malloc(size);
	ssize_t left;
	int more = 1;

	if (!buffer)
		return -1;
	while (more == 1) {
		left = recv(sock->fd, buffer, size, MSG_TRUNC);
		if (left < 0 && errno == EINTR)
			continue;
		if (left <= 0 || left > size) {
			more = -1;
			break;
		}
		for (header = buffer; more == 1 && NLMSG_OK(header, left);
		     header = NLMSG_NEXT(header, left))
			if (header->nlmsg_seq == sock->sequence)
				more = nl_receive_one(sock, header);
	}
	free(buffer);
	return more;
}

static inline int nla_payload(const struct nlattr *attribute)
{
	return attribute->nla_len - NLA_HDRLEN;
}

static inline bool nla_valid(struct nlattr *attribute, int type)
{
	int size = nla_payload(attribute);

	switch (type) {
	case NLA_U32:
		return size >= (int)sizeof(uint32_t);
	case NLA_U64:
		return size >= (int)sizeof(uint64_t);
	case NLA_NUL_STRING:
		return size >= 1 && ((char *)attribute)[attribute->nla_len - 1] == '\0';
	default: /* NLA_U8 is 0, hence also what the policy does not mention */
		return true;
	}
}

/* Sets table[t] to the attribute of type t, or to null, for all t up to `last`. */
static inline int nlmsg_parse(struct nlmsghdr *header, int header_size, struct nlattr *table[],
			      int last, struct nla_policy *policy)
{
	char *at = (char *)header + NLMSG_HDRLEN + NLMSG_ALIGN(header_size);
	char *end = (char *)header + header->nlmsg_len;
	struct nlattr *attribute;
	int type;

	memset(table, 0, (last + 1) * sizeof(*table));
	for (; end - at >= NLA_HDRLEN; at += NLA_ALIGN(attribute->nla_len)) {
		attribute = (struct nlattr *)at;
		if (attribute->nla_len < NLA_HDRLEN || attribute->nla_len > end - at)
			return -1;
		type = attribute->nla_type & NLA_TYPE_MASK;
		if (type > last)
			continue; /* a kernel newer than these sources */
		if (policy && !nla_valid(attribute, policy[type].type))
			return -1;
		table[type] = attribute;
	}
	return 0;
}

static inline const char *nla_get_string(struct nlattr *attribute)
{
	return (const char *)attribute + NLA_HDRLEN;
}

static inline uint8_t nla_get_u8(struct nlattr *attribute)
{
	return nla_payload(attribute) < 1 ? 0 : *((uint8_t *)attribute + NLA_HDRLEN);
}

static inline uint32_t nla_get_u32(struct nlattr *attribute)
{
	uint32_t value;

	memcpy(&value, (char *)attribute + NLA_HDRLEN, sizeof(value));
	return value;
}

static inline uint64_t nla_get_u64(struct nlattr *attribute)
{
	uint64_t value;

	memcpy(&value, (char *)attribute + NLA_HDRLEN, sizeof(value));
	return value;
}

#endif
