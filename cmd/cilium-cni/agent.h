// SPDX-License-Identifier: Apache-2.0
// The agent behind cni.sock (SOCK_SEQPACKET). One request, one reply.
//
// request: "HCNI" | u16 version | u16 flags | u32 env_len | u32 stdin_len | env | stdin | addresses
// reply:   "HCNI" | u16 version | u16 action | u32 exit_code | u32 stdout_len | stdout | ports
// All little endian. env is every CNI_* variable as "NAME=value\0"; with a pod namespace the request
// carries its descriptor and the rtnetlink socket in it (SCM_RIGHTS, unix(7)). Action 1: nothing was done, because
// IPv6 is off in the namespace; switch it on, which the agent's own container does not let it, and ask again.
// Action 2: nothing was done, because another plugin assigns addresses; call that one, and ask again with what it
// printed behind stdin. Flag 1: an agent died over this very request. What it may have left of the attachment is to be
// replaced. Flag 2: there are addresses, up to the end of the packet. Flag 4: this plugin knows action 3: what was
// asked for is done, and connections of the pod are not to get the ports, up to the end of the packet, by themselves.
#pragma once

#include "netns.h"

#include <stddef.h>
#include <stdint.h>

enum { CNI_PROTOCOL = 1, REQUEST_REPEATED = 1, REQUEST_ADDRESSED = 2, REQUEST_RESERVES_PORTS = 4 };
#define DEFAULT_AGENT_SOCKET "/var/run/cilium/cni.sock"

struct agent_reply {
	uint32_t exit_code, stdout_length, ports_length;
	const char *stdout_text, *ports; // as in ip_local_reserved_ports, with RESERVE_PORTS
	enum { NO_ACTION, ENABLE_IPV6, GET_ADDRESSES, RESERVE_PORTS } action;
};

enum exchange {
	ANSWERED,
	NOT_DELIVERED, // the agent never read the request (errno): sending it again is safe
	NO_ANSWER, // the agent read it and went away: what it did is unknown
	TIMED_OUT, // the agent is there and silent
	NOT_SENT, // this side's kernel refused (errno)
	TOO_LONG, // the request does not fit in a packet
	MALFORMED, // not an agent, or one with another framing
};

int64_t now_ms(void);
void pause_ms(unsigned milliseconds);

// Connect, retrying until `deadline` (now_ms) while no agent listens. Returns a descriptor, or -1 with errno.
int connect_agent(const char *path, int64_t deadline);

struct agent_request {
	const struct pod_netns *netns;
	const char *stdin_text;
	size_t stdin_length;
	uint16_t flags;
	const char *addresses; // the result of another plugin, with REQUEST_ADDRESSED
	size_t addresses_length;
};

// Send environment, stdin and namespace over `fd`, wait up to `patience_ms` for the reply; closes `fd`.
enum exchange ask_agent(int fd, const struct agent_request *request, unsigned patience_ms,
			struct agent_reply *reply);
