// SPDX-License-Identifier: Apache-2.0
// unix(7) with SCM_RIGHTS: see agent.h.
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { RETRY_MS = 20, ENV_LIMIT = 64 << 10, REPLY_LIMIT = 256 << 10 };

struct request_header {
	char magic[4];
	uint16_t version, flags;
	uint32_t env_length, stdin_length;
};

struct reply_header {
	char magic[4];
	uint16_t version, action;
	uint32_t exit_code, stdout_length;
};

int64_t now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void pause_ms(unsigned milliseconds)
{
	struct timespec span = { milliseconds / 1000, milliseconds % 1000 * 1000000L };
	nanosleep(&span, NULL);
}

static void limit(int fd, int option, int64_t milliseconds)
{
	if (milliseconds < 1)
		milliseconds = 1; // zero would be for ever
	struct timeval span = { milliseconds / 1000, milliseconds % 1000 * 1000 };
	setsockopt(fd, SOL_SOCKET, option, &span, sizeof(span));
}

int connect_agent(const char *path, int64_t deadline)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	strncpy(address.sun_path, path, sizeof(address.sun_path) - 1);
	for (;;) {
		int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
		if (fd < 0)
			return -1;
		limit(fd, SO_SNDTIMEO, deadline - now_ms()); // a full backlog makes connect(2) wait
		if (!connect(fd, (struct sockaddr *)&address, sizeof(address)))
			return fd;
		int why = errno;
		close(fd);
		errno = why;
		bool later = why == ENOENT || why == ECONNREFUSED || why == EAGAIN || why == EINTR;
		if (!later || now_ms() >= deadline)
			return -1;
		pause_ms(RETRY_MS);
	}
}

// Copy the CNI_* variables with their zeros; returns their length, or -1 when they do not fit.
static ssize_t collect_environment(char *to)
{
	extern char **environ;
	size_t used = 0;
	for (char **entry = environ; *entry; entry++) {
		if (strncmp(*entry, "CNI_", 4))
			continue;
		size_t length = strlen(*entry) + 1;
		if (length > ENV_LIMIT - used)
			return -1;
		memcpy(to + used, *entry, length);
		used += length;
	}
	return used;
}

static enum exchange receive(int fd, struct agent_reply *reply)
{
	static struct {
		struct reply_header header;
		char body[REPLY_LIMIT];
	} packet;
	ssize_t length = recv(fd, &packet, sizeof(packet), MSG_TRUNC);
	if (length < 0) {
		// unix(7): a peer closed with our packet unread, accepted or not, resets the connection.
		if (errno == ECONNRESET)
			return NOT_DELIVERED;
		return errno == EAGAIN || errno == EINTR ? TIMED_OUT : NO_ANSWER;
	}
	if (length == 0)
		return NO_ANSWER;
	// The header is the same in every version: an agent of another version answers with an error.
	if (length < (ssize_t)sizeof(packet.header) || memcmp(packet.header.magic, "HCNI", 4) ||
	    packet.header.stdout_length > length - sizeof(packet.header) || length > (ssize_t)sizeof(packet))
		return MALFORMED;
	*reply = (struct agent_reply){
		.exit_code = packet.header.exit_code,
		.stdout_length = packet.header.stdout_length,
		.ports_length = length - sizeof(packet.header) - packet.header.stdout_length,
		.stdout_text = packet.body,
		.ports = packet.body + packet.header.stdout_length,
		.action = packet.header.action,
	};
	return reply->ports_length && reply->action != RESERVE_PORTS ? MALFORMED : ANSWERED;
}

enum exchange ask_agent(int fd, const struct agent_request *request, unsigned patience_ms,
			struct agent_reply *reply)
{
	static char environment[ENV_LIMIT];
	ssize_t env_length = collect_environment(environment);
	if (env_length < 0) {
		close(fd);
		return TOO_LONG;
	}
	struct request_header header = { "HCNI", CNI_PROTOCOL, request->flags, env_length, request->stdin_length };
	struct iovec parts[] = {
		{ &header, sizeof(header) },
		{ environment, env_length },
		{ (void *)request->stdin_text, request->stdin_length },
		{ (void *)request->addresses, request->addresses_length },
	};
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(2 * sizeof(int))];
	} rights = { .header = { .cmsg_len = CMSG_LEN(2 * sizeof(int)),
				 .cmsg_level = SOL_SOCKET,
				 .cmsg_type = SCM_RIGHTS } };
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = 4 };
	if (request->netns->netlink >= 0) {
		int fds[] = { request->netns->fd, request->netns->netlink };
		memcpy(CMSG_DATA(&rights.header), fds, sizeof(fds));
		message.msg_control = &rights;
		message.msg_controllen = sizeof(rights);
	}
	limit(fd, SO_SNDTIMEO, patience_ms);
	limit(fd, SO_RCVTIMEO, patience_ms);
	enum exchange result;
	if (sendmsg(fd, &message, MSG_NOSIGNAL) >= 0)
		result = receive(fd, reply);
	else
		result = errno == EPIPE || errno == ECONNRESET ? NOT_DELIVERED
			 : errno == EMSGSIZE		       ? TOO_LONG
			 : errno == EAGAIN		       ? TIMED_OUT
							       : NOT_SENT;
	int why = errno;
	close(fd);
	errno = why;
	return result;
}
