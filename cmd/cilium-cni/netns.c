// SPDX-License-Identifier: Apache-2.0
// setns(2), rtnetlink(7): see netns.h.
#define _GNU_SOURCE
#include "netns.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

// From linux/magic.h, netlink.h, rtnetlink.h, if_link.h: musl-gcc does not look where Debian keeps them.
#define NSFS_MAGIC 0x6e736673
enum { NETLINK_ROUTE = 0, NLM_F_REQUEST = 1, NLM_F_ACK = 4, NLMSG_ERROR = 2, RTM_DELLINK = 17, IFLA_IFNAME = 3 };

struct netlink_header {
	uint32_t length;
	uint16_t type, flags;
	uint32_t sequence, port;
};

static int own = -1; // the namespace this process began in, once it has left it

static bool same_as_ours(int fd)
{
	struct stat theirs, ours;
	return !fstat(fd, &theirs) && !stat("/proc/self/ns/net", &ours) && theirs.st_ino == ours.st_ino &&
	       theirs.st_dev == ours.st_dev;
}

enum netns_fault open_netns(const char *path, bool allow_ours, struct pod_netns *netns)
{
	struct statfs about;
	*netns = (struct pod_netns){ -1, -1 };
	netns->fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); // a pipe would wait for a writer
	if (netns->fd < 0)
		return errno == ENOENT || errno == ENOTDIR ? NETNS_MISSING : NETNS_FAILED;
	if (fstatfs(netns->fd, &about))
		return NETNS_FAILED;
	if ((unsigned long)about.f_type != NSFS_MAGIC) { // the file below an unmounted namespace
		close(netns->fd);
		netns->fd = -1;
		errno = EINVAL;
		return NETNS_MISSING;
	}
	if (!allow_ours && same_as_ours(netns->fd))
		return NETNS_OURS;
	own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
	if (own < 0 || setns(netns->fd, CLONE_NEWNET))
		return NETNS_FAILED;
	netns->netlink = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
	return netns->netlink < 0 ? NETNS_FAILED : NETNS_OPENED;
}

bool leave_netns(void)
{
	return own < 0 || !setns(own, CLONE_NEWNET);
}

int enable_ipv6(void)
{
	// The files under /proc/sys/net are those of the reader's namespace, whichever process mounted /proc.
	int fd = open("/proc/sys/net/ipv6/conf/all/disable_ipv6", O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return errno;
	int error = write(fd, "0\n", 2) < 0 ? errno : 0;
	close(fd);
	return error;
}

int reserve_ports(const char *ports, size_t length)
{
	int fd = open("/proc/sys/net/ipv4/ip_local_reserved_ports", O_WRONLY | O_CLOEXEC); // of both families
	if (fd < 0)
		return errno;
	// Only a write at the beginning replaces the ports that are reserved (proc_do_large_bitmap in kernel/sysctl.c),
	// and one behind that adds to them.
	int error = 0;
	for (off_t at = 1; length && !error;) {
		ssize_t written = pwrite(fd, ports, length, at);
		if (written <= 0) {
			error = written < 0 ? errno : EIO;
		} else {
			ports += written;
			length -= written;
			at += written;
		}
	}
	close(fd);
	return error;
}

int delete_link(const struct pod_netns *netns, const char *name)
{
	struct {
		struct netlink_header header;
		uint8_t family, pad;
		uint16_t type;
		uint32_t index, flags, change;
		uint16_t name_length, name_type;
		char name[16]; // IFNAMSIZ
	} request = {
		.header = { sizeof(request), RTM_DELLINK, NLM_F_REQUEST | NLM_F_ACK, 1, 0 },
		.name_length = 4 + sizeof(request.name),
		.name_type = IFLA_IFNAME,
	};
	struct answer {
		struct netlink_header header;
		int32_t error;
		char rest[512]; // the kernel may echo the request
	} answer;
	strncpy(request.name, name, sizeof(request.name) - 1);
	if (send(netns->netlink, &request, sizeof(request), 0) < 0)
		return errno;
	ssize_t length = recv(netns->netlink, &answer, sizeof(answer), 0);
	if (length < 0)
		return errno;
	if (length < (ssize_t)offsetof(struct answer, rest) || answer.header.type != NLMSG_ERROR)
		return EPROTO;
	return -answer.error;
}
