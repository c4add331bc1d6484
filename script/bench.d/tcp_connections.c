/*
 * tcp_connections COUNT: prints how many milliseconds it takes to connect COUNT sockets of TCP at once to another process of this
 * machine, to see each accepted, to close all, and to see each closed there: what cmtime does by librdmacm.
 */
#include <arpa/inet.h>
#include <err.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static void check(int result, const char *what)
{
	if (result < 0)
		err(1, "%s", what);
}

/* Answers each connection with a byte, and then each end of one with another. */
static void serve(int listener, int count, int *sockets)
{
	char byte = 1;

	for (int i = 0; i < count; i++) {
		check(sockets[i] = accept(listener, NULL, NULL), "accept");
		check(write(sockets[i], &byte, 1), "write");
	}
	for (int i = 0; i < count; i++) {
		check(read(sockets[i], &byte, 1), "read");
		check(write(sockets[i], &byte, 1), "write");
		close(sockets[i]);
	}
	exit(0);
}

int main(int arguments, char **argument)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t size = sizeof(address);
	int count = arguments > 1 ? atoi(argument[1]) : 1;
	int *sockets = calloc(count, sizeof(*sockets)), listener;
	struct rlimit files = { 2 * count + 64, 2 * count + 64 };
	struct timespec start, end;
	char byte;

	check(setrlimit(RLIMIT_NOFILE, &files), "setrlimit");
	check(listener = socket(AF_INET, SOCK_STREAM, 0), "socket");
	check(bind(listener, (struct sockaddr *)&address, size), "bind");
	check(listen(listener, count), "listen");
	check(getsockname(listener, (struct sockaddr *)&address, &size), "getsockname");
	int child = fork();
	check(child, "fork");
	if (!child)
		serve(listener, count, sockets);
	clock_gettime(CLOCK_MONOTONIC, &start);
	for (int i = 0; i < count; i++) {
		check(sockets[i] = socket(AF_INET, SOCK_STREAM, 0), "socket");
		check(connect(sockets[i], (struct sockaddr *)&address, size), "connect");
	}
	for (int i = 0; i < count; i++)
		check(read(sockets[i], &byte, 1), "read");
	for (int i = 0; i < count; i++)
		check(shutdown(sockets[i], SHUT_WR), "shutdown");
	for (int i = 0; i < count; i++) {
		check(read(sockets[i], &byte, 1), "read");
		close(sockets[i]);
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	printf("%.3f\n", (end.tv_sec - start.tv_sec) * 1e3 + (end.tv_nsec - start.tv_nsec) / 1e6);
	return 0;
}
