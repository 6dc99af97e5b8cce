// SPDX-License-Identifier: Apache-2.0
// The pod's network namespace: its descriptor and an rtnetlink socket inside it, which is all the agent
// needs to work there. Opening it takes CAP_SYS_ADMIN over it.
#pragma once

#include <stdbool.h>
#include <stddef.h>

struct pod_netns {
	int fd; // of the namespace; -1 when there is none
	int netlink; // rtnetlink socket opened inside it; -1 when there is none
};

enum netns_fault {
	NETNS_OPENED,
	NETNS_MISSING, // no file, or no longer a namespace: see errno
	NETNS_OURS, // it is the plugin's own namespace
	NETNS_FAILED, // see errno
};

// Open `path` and a socket in it. The calling process stays in that namespace: it is a plugin's whole
// life, and pathname unix sockets do not care. `allow_ours` is CNI_NETNS_OVERRIDE.
enum netns_fault open_netns(const char *path, bool allow_ours, struct pod_netns *netns);

// Go back to the namespace the process began in, if it has left it: other plugins are to be called there.
bool leave_netns(void);

// Switch IPv6 on for every link of the namespace this process is in. Returns 0, or an errno.
int enable_ipv6(void);

// Add `ports` to what no connection in the namespace this process is in gets by itself. Returns 0, or an errno.
int reserve_ports(const char *ports, size_t length);

// Delete the link `name` in the namespace. Returns 0, or an errno; ENODEV when there is none.
int delete_link(const struct pod_netns *netns, const char *name);
