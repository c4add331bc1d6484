/*
 * System calls of the devices of software, past librspreload.so: that library defines functions of these names for the whole
 * process, and what it does for a program's sockets ends in a device, which would wait for itself. script/libibverbs gives
 * the devices these names.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define PLAIN(type, name, parameters, ...)               \
	type ibverbs_plain_##name parameters;             \
	type ibverbs_plain_##name parameters              \
	{                                                 \
		return (type)syscall(SYS_##__VA_ARGS__); \
	}

PLAIN(int, accept4, (int fd, struct sockaddr *address, socklen_t *size, int flags), accept4, fd, address, size, flags)
PLAIN(int, bind, (int fd, const struct sockaddr *address, socklen_t size), bind, fd, address, size)
PLAIN(int, close, (int fd), close, fd)
PLAIN(int, connect, (int fd, const struct sockaddr *address, socklen_t size), connect, fd, address, size)
PLAIN(int, epoll_create1, (int flags), epoll_create1, flags)
PLAIN(int, epoll_ctl, (int epoll, int operation, int fd, struct epoll_event *event), epoll_ctl, epoll, operation, fd, event)
PLAIN(int, epoll_wait, (int epoll, struct epoll_event *events, int count, int timeout), epoll_pwait, epoll, events, count,
      timeout, NULL, _NSIG / 8)
PLAIN(int, getsockname, (int fd, struct sockaddr *address, socklen_t *size), getsockname, fd, address, size)
PLAIN(int, getsockopt, (int fd, int level, int name, void *value, socklen_t *size), getsockopt, fd, level, name, value, size)
PLAIN(int, listen, (int fd, int backlog), listen, fd, backlog)
PLAIN(ssize_t, read, (int fd, void *to, size_t size), read, fd, to, size)
PLAIN(ssize_t, recv, (int fd, void *to, size_t size, int flags), recvfrom, fd, to, size, flags, NULL, NULL)
PLAIN(ssize_t, recvmsg, (int fd, struct msghdr *message, int flags), recvmsg, fd, message, flags)
PLAIN(ssize_t, send, (int fd, const void *from, size_t size, int flags), sendto, fd, from, size, flags, NULL, 0)
PLAIN(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), sendmsg, fd, message, flags)
PLAIN(int, setsockopt, (int fd, int level, int name, const void *value, socklen_t size), setsockopt, fd, level, name, value,
      size)
PLAIN(int, shutdown, (int fd, int how), shutdown, fd, how)
PLAIN(int, socket, (int domain, int type, int protocol), socket, domain, type, protocol)
PLAIN(ssize_t, write, (int fd, const void *from, size_t size), write, fd, from, size)

int ibverbs_plain_poll(struct pollfd *files, nfds_t count, int timeout);
int ibverbs_plain_poll(struct pollfd *files, nfds_t count, int timeout)
{
	struct timespec time = { timeout / 1000, timeout % 1000 * 1000000L };

	return ppoll(files, count, timeout < 0 ? NULL : &time, NULL);
}

/* Each command that a device gives has one argument, or none. */
int ibverbs_plain_fcntl(int fd, int command, ...);
int ibverbs_plain_fcntl(int fd, int command, ...)
{
	va_list arguments;
	long argument;

	va_start(arguments, command);
	argument = va_arg(arguments, long);
	va_end(arguments);
	return (int)syscall(SYS_fcntl, fd, command, argument);
}
