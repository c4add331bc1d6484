/*
 * The kernel's part of verbs. A few verbs have no function in the context but go to the kernel
 * with ioctl(): completion channels and GIDs. This file defines ioctl() for the whole program and
 * answers what is asked of the device's own descriptors; anything else goes on to the kernel.
 */
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include "internal.h"

/* ---- Descriptors with records in them ---- */

/* A pipe that is read and written through one descriptor, so that closing it leaves nothing. */
int device_pipe(void)
{
	char path[32];
	int ends[2], fd;

	if (pipe2(ends, O_CLOEXEC))
		return -1;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", ends[0]);
	fd = open(path, O_RDWR | O_CLOEXEC);
	close(ends[0]);
	close(ends[1]);
	return fd;
}

/*
 * Nothing comes through the descriptor any more, and never will: who sleeps on it wakes, and to read
 * it fails. Another pipe takes its number, one without a writer; the old one gets a byte that is no
 * record, for those that already sleep on it.
 */
void device_pipe_end(int fd)
{
	int old = fcntl(fd, F_DUPFD_CLOEXEC, 0), flags = fcntl(fd, F_GETFL), ends[2];

	if (old < 0 || pipe2(ends, O_CLOEXEC)) {
		perror("function device: a channel lives on");
		abort();
	}
	fcntl(ends[0], F_SETFL, flags);
	dup3(ends[0], fd, O_CLOEXEC);
	close(ends[0]);
	close(ends[1]);
	/* It stays open: an epoll instance watches the file behind a descriptor, not the descriptor. */
	device_pipe_write(old, "", 1);
}

void device_pipe_write(int fd, const void *record, size_t size)
{
	struct pollfd room = { .fd = fd, .events = POLLOUT };

	/* A full pipe (thousands of unread events) loses the event, as a kernel would run out. */
	if (poll(&room, 1, 0) == 1 && (room.revents & POLLOUT) &&
	    write(fd, record, size) != (ssize_t)size)
		perror("function device: event lost");
}

/* Takes out the records whose u64 at offset is value: their object is going away. */
void device_pipe_remove(int fd, size_t record_size, size_t offset, uint64_t value)
{
	int available = 0;
	uint8_t record[64];

	if (syscall(SYS_ioctl, fd, FIONREAD, &available))
		return;
	for (size_t left = available / record_size; left; left--) {
		struct pollfd ready = { .fd = fd, .events = POLLIN };
		uint64_t found;

		if (poll(&ready, 1, 0) != 1 ||
		    read(fd, record, record_size) != (ssize_t)record_size)
			return;
		memcpy(&found, record + offset, sizeof(found));
		if (found != value)
			device_pipe_write(fd, record, record_size);
	}
}

/*
 * libibverbs waits here without end for events to be acknowledged; a test that forgot one should
 * say so instead.
 */
void device_wait_acks(pthread_mutex_t *mutex, pthread_cond_t *cond, const uint32_t *completed,
		  const uint32_t *reported, const char *what)
{
	struct timespec until;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += 20;
	pthread_mutex_lock(mutex);
	while (*completed != *reported) {
		if (pthread_cond_timedwait(cond, mutex, &until) == ETIMEDOUT) {
			fprintf(stderr,
				"function device: %s would wait for ever: %u events got, %u acknowledged\n",
				what, *reported, *completed);
			abort();
		}
	}
	pthread_mutex_unlock(mutex);
}

/* ---- The command descriptors of all open contexts ---- */

struct command_fd {
	struct list_node entry;
	int fd;
	struct function_device *dev;
};

static pthread_mutex_t fds_lock = PTHREAD_MUTEX_INITIALIZER;
static LIST_HEAD(fds);

int device_register_fd(int fd, struct function_device *dev)
{
	struct command_fd *entry = calloc(1, sizeof(*entry));

	if (!entry)
		return ENOMEM;
	entry->fd = fd;
	entry->dev = dev;
	pthread_mutex_lock(&fds_lock);
	list_add_tail(&fds, &entry->entry);
	pthread_mutex_unlock(&fds_lock);
	return 0;
}

static struct command_fd *find_fd(int fd)
{
	struct command_fd *entry;

	list_for_each(&fds, entry, entry)
		if (entry->fd == fd)
			return entry;
	return NULL;
}

void device_forget_fd(int fd)
{
	pthread_mutex_lock(&fds_lock);
	struct command_fd *entry = find_fd(fd);
	if (entry)
		list_del(&entry->entry);
	pthread_mutex_unlock(&fds_lock);
	free(entry);
}

/* ---- Commands ---- */

static const struct ib_uverbs_attr *attribute(const struct ib_uverbs_ioctl_hdr *hdr, uint16_t id)
{
	static const struct ib_uverbs_attr none;

	for (unsigned int i = 0; i < hdr->num_attrs; i++)
		if (hdr->attrs[i].attr_id == id)
			return &hdr->attrs[i];
	return &none;
}

static int create_channel(struct function_device *dev, const struct ib_uverbs_ioctl_hdr *hdr)
{
	struct ib_uverbs_create_comp_channel_resp resp = {};
	const struct ib_uverbs_attr *out = attribute(hdr, UVERBS_ATTR_CORE_OUT);

	pthread_mutex_lock(&dev->lock);
	dev->call_count[DEVICE_create_comp_channel]++;
	int error = device_admit(dev, DEVICE_create_comp_channel);
	pthread_mutex_unlock(&dev->lock);
	if (error)
		return error;
	int fd = device_pipe();
	if (fd < 0)
		return errno;
	resp.fd = fd;
	memcpy((void *)(uintptr_t)out->data, &resp, sizeof(resp));
	return 0;
}

static bool empty(const struct device_gid *entry)
{
	static const union ibv_gid zero;

	return !memcmp(&entry->gid, &zero, sizeof(zero));
}

static void copy_gid(struct function_device *dev, uint32_t port, uint32_t index, void *to,
		     size_t size)
{
	const struct device_gid *from = &dev->gid[port - 1][index];
	struct ibv_gid_entry entry = {
		.gid = from->gid,
		.gid_index = index,
		.port_num = port,
		.gid_type = from->type,
		.ndev_ifindex = from->ifindex,
	};

	memcpy(to, &entry, size < sizeof(entry) ? size : sizeof(entry));
}

static int query_gid(struct function_device *dev, const struct ib_uverbs_ioctl_hdr *hdr)
{
	uint32_t port = attribute(hdr, UVERBS_ATTR_QUERY_GID_ENTRY_PORT)->data;
	uint32_t index = attribute(hdr, UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX)->data;
	const struct ib_uverbs_attr *out = attribute(hdr, UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY);

	pthread_mutex_lock(&dev->lock);
	dev->call_count[DEVICE_query_gid]++;
	int error = device_admit(dev, DEVICE_query_gid);
	if (!error && (port < 1 || port > dev->opt.ports || index >= DEVICE_GIDS))
		error = EINVAL;
	if (!error && empty(&dev->gid[port - 1][index]))
		error = ENODATA;
	if (!error)
		copy_gid(dev, port, index, (void *)(uintptr_t)out->data, out->len);
	pthread_mutex_unlock(&dev->lock);
	return error;
}

static int query_gid_table(struct function_device *dev, const struct ib_uverbs_ioctl_hdr *hdr)
{
	uint64_t size = attribute(hdr, UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE)->data;
	const struct ib_uverbs_attr *out = attribute(hdr, UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES);
	const struct ib_uverbs_attr *number =
		attribute(hdr, UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES);
	uint8_t *to = (void *)(uintptr_t)out->data;
	uint64_t count = 0;

	pthread_mutex_lock(&dev->lock);
	dev->call_count[DEVICE_query_gid_table]++;
	int error = device_admit(dev, DEVICE_query_gid_table);
	if (!error && !size)
		error = EINVAL;
	for (uint32_t port = 1; !error && port <= dev->opt.ports; port++) {
		for (uint32_t index = 0; !error && index < DEVICE_GIDS; index++) {
			if (empty(&dev->gid[port - 1][index]))
				continue;
			if ((count + 1) * size > out->len)
				error = EINVAL;
			else
				copy_gid(dev, port, index, to + count++ * size, size);
		}
	}
	pthread_mutex_unlock(&dev->lock);
	if (!error)
		memcpy((void *)(uintptr_t)number->data, &count, sizeof(count));
	return error;
}

static int command(struct function_device *dev, const struct ib_uverbs_ioctl_hdr *hdr)
{
	if (hdr->object_id != UVERBS_OBJECT_DEVICE)
		return EOPNOTSUPP;
	switch (hdr->method_id) {
	case UVERBS_METHOD_QUERY_GID_ENTRY:
		return query_gid(dev, hdr);
	case UVERBS_METHOD_QUERY_GID_TABLE:
		return query_gid_table(dev, hdr);
	case UVERBS_METHOD_INVOKE_WRITE:
		switch (attribute(hdr, UVERBS_ATTR_WRITE_CMD)->data) {
		case IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL:
			return create_channel(dev, hdr);
		case IB_USER_VERBS_CMD_QUERY_DEVICE:
			/* Asked with too short a request, to learn whether ioctl works. */
			return ENOSPC;
		}
	}
	return EOPNOTSUPP;
}

/* The C libraries disagree about the type of the request's number. */
#ifdef __GLIBC__
typedef unsigned long request_number;
#else
typedef int request_number;
#endif

int ioctl(int fd, request_number request, ...)
{
	struct function_device *dev = NULL;
	va_list args;

	va_start(args, request);
	void *arg = va_arg(args, void *);
	va_end(args);
	if ((uint32_t)request == (uint32_t)RDMA_VERBS_IOCTL) {
		pthread_mutex_lock(&fds_lock);
		struct command_fd *entry = find_fd(fd);
		if (entry)
			dev = entry->dev;
		pthread_mutex_unlock(&fds_lock);
	}
	if (!dev)
		return syscall(SYS_ioctl, fd, request, arg);
	errno = command(dev, arg);
	return errno ? -1 : 0;
}
