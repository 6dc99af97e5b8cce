// SPDX-License-Identifier: Apache-2.0
// How many small datagrams a second get there, one processor for each side.
//
//   pps receive CPU PORT MS         counts for MS milliseconds from the first one on, prints how many a second
//   pps send CPU HOST PORT MS       sends as many as it can for MS milliseconds

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>

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
	fprintf(stderr, "pps: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void pin(const char *cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(atoi(cpu), &set);
	check(sched_setaffinity(0, sizeof(set), &set), "sched_setaffinity");
}

static void receive(uint16_t port, int64_t ms)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
	struct timeval patience = { .tv_sec = 5 };
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	int64_t began, until, count = 1;
	char byte[16];

	check(bind(fd, (struct sockaddr *)&address, sizeof(address)), "bind");
	check(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), "SO_RCVTIMEO");
	puts("ready");
	fflush(stdout);
	check(recv(fd, byte, sizeof(byte), 0) < 0, "recv");
	began = now();
	for (until = began + ms * 1000000; now() < until; count++)
		check(recv(fd, byte, sizeof(byte), 0) < 0, "recv");
	printf("%lld\n", (long long)(count * 1000000000LL / (now() - began)));
}

static void send_all(const char *host, uint16_t port, int64_t ms)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	int64_t until = now() + ms * 1000000;

	check(inet_pton(AF_INET, host, &address.sin_addr) != 1, "address");
	check(connect(fd, (struct sockaddr *)&address, sizeof(address)), "connect");
	while (now() < until)
		for (int i = 0; i < 64; i++)
			send(fd, "x", 1, 0); // what finds no room is lost
}

int main(int argc, char **argv)
{
	if (argc == 5 && !strcmp(argv[1], "receive")) {
		pin(argv[2]);
		receive(atoi(argv[3]), atoll(argv[4]));
		return 0;
	}
	if (argc == 6 && !strcmp(argv[1], "send")) {
		pin(argv[2]);
		send_all(argv[3], atoi(argv[4]), atoll(argv[5]));
		return 0;
	}
	fprintf(stderr, "usage: pps receive CPU PORT MS | pps send CPU HOST PORT MS\n");
	return 2;
}
