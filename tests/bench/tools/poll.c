// SPDX-License-Identifier: Apache-2.0
// Clients that ask an HTTP server on a unix socket again and again, each on a connection of its own.
//
//   poll SOCKET CLIENTS PAUSE_MS PATH... ; ends at the end of its standard input
//
// Each client asks the paths in turn, PAUSE_MS between an answer and its next question. Prints "ready" once
// every client has been answered, and at the end how many answers there were and how many were not 200.
// Written in C because ten clients in Python would take the processor that is measured.

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CLIENTS = 64, MAX_HEAD = 8192 };

struct client {
	int fd;
	int path;
	int waiting; // for an answer
	int answered;
	int64_t due;
	char head[MAX_HEAD];
	size_t have; // of the head
	int64_t left; // of the body; -1 while the head is read
};

static struct client clients[MAX_CLIENTS];
static char **paths;
static int path_count;
static int64_t pause_ns, answers, failures;

static int64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char *what)
{
	fprintf(stderr, "poll: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void ask(struct client *client)
{
	char request[512];
	int length = snprintf(request, sizeof(request), "GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n",
			      paths[client->path]);

	client->path = (client->path + 1) % path_count;
	if (send(client->fd, request, length, MSG_NOSIGNAL) != length)
		die("send");
	client->waiting = 1;
	client->have = 0;
	client->left = -1;
}

static void finish(struct client *client)
{
	client->waiting = 0;
	client->answered = 1;
	client->due = now() + pause_ns;
	answers++;
	failures += strncmp(client->head, "HTTP/1.1 200", 12) != 0;
}

static void read_answer(struct client *client)
{
	static char body[1 << 18];
	char *end, *length;
	ssize_t got;

	if (client->left < 0) {
		got = recv(client->fd, client->head + client->have, MAX_HEAD - 1 - client->have, 0);
		if (got <= 0)
			die("the server closed");
		client->have += got;
		client->head[client->have] = '\0';
		end = strstr(client->head, "\r\n\r\n");
		if (!end) {
			if (client->have == MAX_HEAD - 1)
				die("head too long");
			return;
		}
		length = strcasestr(client->head, "\r\ncontent-length:");
		if (!length || length > end)
			die("no Content-Length");
		client->left = atoll(length + 17) - (client->head + client->have - (end + 4));
	} else {
		got = recv(client->fd, body, sizeof(body), 0);
		if (got <= 0)
			die("the server closed");
		client->left -= got;
	}
	if (client->left == 0)
		finish(client);
}

static int64_t ask_who_is_due(int count)
{
	int64_t next = INT64_MAX, time = now();

	for (int i = 0; i < count; i++) {
		if (clients[i].waiting)
			continue;
		if (clients[i].due <= time)
			ask(&clients[i]);
		else if (clients[i].due < next)
			next = clients[i].due;
	}
	return next == INT64_MAX ? -1 : next - time;
}

int main(int argc, char **argv)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	struct pollfd waits[MAX_CLIENTS + 1] = { { .fd = 0, .events = POLLIN } };
	int count, ready = 0;

	if (argc < 5 || (count = atoi(argv[2])) < 1 || count > MAX_CLIENTS) {
		fprintf(stderr, "usage: poll SOCKET CLIENTS PAUSE_MS PATH...\n");
		return 2;
	}
	snprintf(address.sun_path, sizeof(address.sun_path), "%s", argv[1]);
	pause_ns = atoll(argv[3]) * 1000000;
	paths = argv + 4;
	path_count = argc - 4;
	for (int i = 0; i < count; i++) {
		struct client *client = &clients[i];

		client->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
		if (client->fd < 0 || connect(client->fd, (struct sockaddr *)&address, sizeof(address)))
			die(argv[1]);
		client->path = i % path_count;
		client->due = now() + pause_ns * i / count; // not all at the same time
		waits[i + 1] = (struct pollfd){ .fd = client->fd, .events = POLLIN };
	}
	for (;;) {
		int64_t pause = ask_who_is_due(count);
		struct timespec timeout = { .tv_sec = pause / 1000000000, .tv_nsec = pause % 1000000000 };

		if (ppoll(waits, count + 1, pause < 0 ? NULL : &timeout, NULL) < 0)
			die("poll");
		if (waits[0].revents)
			break;
		for (int i = 0; i < count; i++)
			if (waits[i + 1].revents)
				read_answer(&clients[i]);
		for (int i = 0, all = 1; !ready && i <= count; i++) {
			if (i == count && all) {
				ready = 1;
				printf("ready\n");
				fflush(stdout);
			} else if (i < count)
				all &= clients[i].answered;
		}
	}
	printf("%lld %lld\n", (long long)answers, (long long)failures);
	return 0;
}
