/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Trace events of socket translations on cilium_events, in Cilium 1.17's layout. */
#pragma once

#include "lib/events.h"
#include "sock/peer.h"

#define EVENT_SOCK 7

/* Point of the event: before or after the forward or reverse translation. */
enum sock_point {
	SOCK_XLATE_FWD_BEFORE = 1,
	SOCK_XLATE_FWD_AFTER = 2,
	SOCK_XLATE_REV_BEFORE = 3,
	SOCK_XLATE_REV_AFTER = 4,
};

#define SOCK_EVENT_TCP 1
#define SOCK_EVENT_UDP 2

struct sock_event {
	__u8 type;
	__u8 point;
	struct address ip;
	__u16 port; /* in the host's order */
	__u64 cookie;
	__u64 cgroup;
	__u8 protocol;
	__u8 ipv6;
} __attribute__((packed, aligned(2)));

_Static_assert(sizeof(struct sock_event) == 38, "socket trace event");

static __always_inline bool sock_notifies(void)
{
	return node_notifies(NODE_NOTIFY_SOCK);
}

/* Send an event with the peer at that point. */
static __always_inline void send_trace_sock_notify(struct bpf_sock_addr *ctx, const struct peer *peer,
						   enum sock_point point)
{
	struct sock_event event = {
		.type = EVENT_SOCK,
		.point = point,
		.ip = peer->ip,
		.port = bpf_ntohs(peer->port),
		.cookie = peer->cookie,
		.cgroup = bpf_get_current_cgroup_id(),
		.protocol = peer->protocol == IPPROTO_TCP ? SOCK_EVENT_TCP : SOCK_EVENT_UDP,
		.ipv6 = peer->family == FAMILY_IPV6,
	};

	bpf_perf_event_output(ctx, &cilium_events, BPF_F_CURRENT_CPU, &event, sizeof(event));
}
