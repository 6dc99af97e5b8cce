// SPDX-License-Identifier: Apache-2.0
// Request-response and connection time over TCP, pinned to a processor.
//
//   traffic serve CPU PORT [COUNT]       answers one byte with one byte, on every connection, at COUNT ports
//   traffic rr CPU HOST PORT COUNT       one connection, COUNT round trips
//   traffic crr CPU HOST PORT COUNT      COUNT times connect, one round trip, close
//   traffic connect CPU HOST PORT COUNT  the same, of which only the call of connect is timed
//
// The clients print the mean and the median of one round in ns.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CONNECTIONS = 64 };

static int64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void check(int failed, const char *what)
{
	if (!failed)
		return;
	fprintf(stderr, "traffic: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void pin(const char *cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(atoi(cpu), &set);
	check(sched_setaffinity(0, sizeof(set), &set), "sched_setaffinity");
}

static void no_delay(int fd)
{
	int one = 1;

	check(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)), "TCP_NODELAY");
}

static int listen_at(uint16_t port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
	int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;

	check(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)), "SO_REUSEADDR");
	check(bind(fd, (struct sockaddr *)&address, sizeof(address)), "bind");
	check(listen(fd, 128), "listen");
	return fd;
}

static void serve(uint16_t port, int ports)
{
	struct pollfd fds[MAX_CONNECTIONS] = {};
	int count = ports;
	char byte;

	for (int i = 0; i < ports; i++) {
		fds[i].fd = listen_at(port + i);
		fds[i].events = POLLIN;
	}
	puts("ready");
	fflush(stdout);
	for (;;) {
		check(poll(fds, count, -1) < 0, "poll");
		for (int i = count - 1; i >= ports; i--) {
			if (!fds[i].revents)
				continue;
			if (read(fds[i].fd, &byte, 1) == 1 && write(fds[i].fd, &byte, 1) == 1)
				continue;
			close(fds[i].fd);
			fds[i] = fds[--count];
		}
		for (int i = 0; i < ports; i++) {
			if (!fds[i].revents || count == MAX_CONNECTIONS)
				continue;
			fds[count].fd = accept(fds[i].fd, NULL, NULL);
			check(fds[count].fd < 0, "accept");
			fds[count].events = POLLIN;
			fds[count].revents = 0;
			no_delay(fds[count++].fd);
		}
	}
}

static int connect_to(const struct sockaddr_in *address)
{
	struct linger reset = { .l_onoff = 1 };
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	// Closing with a reset leaves no TIME_WAIT, so that the ports do not run out.
	check(setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)), "SO_LINGER");
	check(connect(fd, (const struct sockaddr *)address, sizeof(*address)), "connect");
	no_delay(fd);
	return fd;
}

static void round_trip(int fd)
{
	char byte = 'x';

	check(write(fd, &byte, 1) != 1, "write");
	check(read(fd, &byte, 1) != 1, "read");
}

static int by_size(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return (x > y) - (x < y);
}

static void measure(int connecting, int trips, const struct sockaddr_in *address, int count)
{
	int64_t *times = calloc(count, sizeof(*times)), total = 0;
	int fd = connecting ? -1 : connect_to(address);

	check(!times, "calloc");
	for (int i = -count / 10; i < count; i++) { // the first tenth warms up
		int64_t begin = now();

		int64_t connected;

		if (connecting)
			fd = connect_to(address);
		connected = now();
		round_trip(fd);
		if (connecting)
			close(fd);
		if (i >= 0)
			total += times[i] = (trips ? now() : connected) - begin;
	}
	qsort(times, count, sizeof(*times), by_size);
	printf("%lld %lld\n", (long long)(total / count), (long long)times[count / 2]);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET };

	if ((argc == 4 || argc == 5) && !strcmp(argv[1], "serve")) {
		int ports = argc == 5 ? atoi(argv[4]) : 1;

		pin(argv[2]);
		if (ports < 1 || ports > MAX_CONNECTIONS / 2) {
			fprintf(stderr, "traffic: %s ports: expected 1 to %d\n", argv[4], MAX_CONNECTIONS / 2);
			return 2;
		}
		serve(atoi(argv[3]), ports);
	}
	if (argc != 6 || (strcmp(argv[1], "rr") && strcmp(argv[1], "crr") && strcmp(argv[1], "connect"))) {
		fprintf(stderr,
			"usage: traffic serve CPU PORT [COUNT] | traffic rr|crr|connect CPU HOST PORT COUNT\n");
		return 2;
	}
	pin(argv[2]);
	check(inet_pton(AF_INET, argv[3], &address.sin_addr) != 1, argv[3]);
	address.sin_port = htons(atoi(argv[4]));
	measure(strcmp(argv[1], "rr") != 0, strcmp(argv[1], "connect") != 0, &address, atoi(argv[5]));
	return 0;
}
