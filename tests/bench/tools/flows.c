// SPDX-License-Identifier: Apache-2.0
// A UDP flow from every pod to the next one in a ring, each paced, and what of them arrived.
//
//   flows RATE PORT < "netns-path address" lines
//
// Prints "ready" once the sockets are there, sends until standard input ends a second time (an empty
// line), waits until nothing is under way, and prints packets sent, received, repeated, refused by the
// sender's own kernel, and the longest silence of one flow in ns. One process and one processor for all
// pods: ten senders in Python would take both of the machine.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PODS = 64, QUIET_MS = 500, ROOM = 8 << 20 };

struct pod {
	int socket;
	struct sockaddr_in address;
	uint64_t sent, received, next; // next: the number expected, of the flow that ends here
	int64_t last, gap;
};

static struct pod pods[MAX_PODS];
static int count;
static uint64_t repeated, refused;

static int64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char *what)
{
	fprintf(stderr, "flows: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void open_pod(const char *netns, const char *address, int port)
{
	struct pod *pod = &pods[count++];
	int room = ROOM, ns = open(netns, O_RDONLY | O_CLOEXEC);

	if (ns < 0 || setns(ns, CLONE_NEWNET) < 0)
		die(netns);
	close(ns);
	pod->socket = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	pod->address.sin_family = AF_INET;
	pod->address.sin_port = htons(port);
	if (inet_pton(AF_INET, address, &pod->address.sin_addr) != 1)
		die(address);
	if (pod->socket < 0 || setsockopt(pod->socket, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room)) < 0 ||
	    bind(pod->socket, (struct sockaddr *)&pod->address, sizeof(pod->address)) < 0)
		die(address);
}

static void send_one(int i)
{
	struct pod *next = &pods[(i + 1) % count];

	// A refused packet is lost as well: its number is spent.
	if (sendto(pods[i].socket, &pods[i].sent, sizeof(pods[i].sent), 0, (struct sockaddr *)&next->address,
		   sizeof(next->address)) < 0)
		refused++;
	pods[i].sent++;
}

static int receive_all(void)
{
	uint64_t number;
	int any = 0;

	for (int i = 0; i < count; i++)
		while (recv(pods[i].socket, &number, sizeof(number), 0) == sizeof(number)) {
			int64_t at = now();

			any = 1;
			if (number < pods[i].next) { // one path, one queue: nothing overtakes
				repeated++;
				continue;
			}
			pods[i].next = number + 1;
			pods[i].received++;
			if (pods[i].last && at - pods[i].last > pods[i].gap)
				pods[i].gap = at - pods[i].last;
			pods[i].last = at;
		}
	return any;
}

int main(int argc, char **argv)
{
	char line[512], netns[256], address[64];
	struct pollfd input = { .fd = 0, .events = POLLIN };
	int64_t began, quiet;
	uint64_t round = 0, sent = 0, received = 0;
	int64_t gap = 0;

	if (argc != 3)
		return 2;
	setvbuf(stdin, NULL, _IONBF, 0);
	while (fgets(line, sizeof(line), stdin) && line[0] != '\n' && count < MAX_PODS)
		if (sscanf(line, "%255s %63s", netns, address) == 2)
			open_pod(netns, address, atoi(argv[2]));
	puts("ready");
	fflush(stdout);
	began = now();
	while (poll(&input, 1, 0) == 0) {
		int64_t due = began + (int64_t)(round * 1000000000ULL / atoi(argv[1]));
		struct timespec until = { due / 1000000000, due % 1000000000 };

		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL); // late rounds are caught up
		for (int i = 0; i < count; i++)
			send_one(i);
		receive_all();
		round++;
	}
	for (quiet = now(); now() - quiet < QUIET_MS * 1000000LL; usleep(1000))
		if (receive_all())
			quiet = now();
	for (int i = 0; i < count; i++) {
		sent += pods[i].sent;
		received += pods[i].received;
		gap = pods[i].gap > gap ? pods[i].gap : gap;
	}
	printf("%llu %llu %llu %llu %lld\n", (unsigned long long)sent, (unsigned long long)received,
	       (unsigned long long)repeated, (unsigned long long)refused, (long long)gap);
	return 0;
}
