/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Fragmented datagrams: the first fragment's ports are stored for later ones, which have none. */
#pragma once

#include "lib/maps.h"
#include "lib/packet.h"
#include "lib/transport.h"

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct fragment4_key);
	__type(value, struct fragment_ports);
	__uint(max_entries, 8192);
} cilium_ipv4_frag_datagrams SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct fragment6_key);
	__type(value, struct fragment_ports);
	__uint(max_entries, 8192);
} cilium_ipv6_frag_datagrams SEC(".maps");

/* Look up the first fragment's ports for a later one. */
static __always_inline int fragment_continue(struct flow *flow, const struct fragment_ports *ports)
{
	if (!ports)
		return DROP_FRAGMENT_UNKNOWN;
	flow->sport = ports->sport;
	flow->dport = ports->dport;
	switch (flow->protocol) {
	case IPPROTO_ICMP: /* echo: the id, which may be 0, is on the requesting side */
		flow->policy_port = bpf_htons(ports->dport ? ICMP_ECHOREPLY : ICMP_ECHO);
		break;
	case IPPROTO_ICMPV6:
		flow->policy_port = bpf_htons(ports->dport ? ICMPV6_ECHO_REPLY : ICMPV6_ECHO_REQUEST);
		break;
	default:
		flow->policy_port = ports->dport;
		flow->tcp_flags = TCP_ACK;
	}
	flow->reply_likely = bpf_ntohs(ports->sport) < bpf_ntohs(ports->dport);
	return 0;
}

/* Get a fragment's ports: read and store those of the first, look up those of later ones; returns 0 or a drop reason.
 */
static __always_inline int fragment4_transport(context_t *ctx, struct flow *flow)
{
	struct fragment4_key key = {
		.daddr = flow->daddr.words[0],
		.saddr = flow->saddr.words[0],
		.id = flow->fragment_id,
		.protocol = flow->protocol,
	};
	struct fragment_ports ports;
	int refused;

	if (flow->later_fragment)
		return fragment_continue(flow, bpf_map_lookup_elem(&cilium_ipv4_frag_datagrams, &key));
	refused = parse_transport(ctx, flow, FAMILY_IPV4);
	if (refused)
		return refused;
	ports.sport = flow->sport;
	ports.dport = flow->dport;
	bpf_map_update_elem(&cilium_ipv4_frag_datagrams, &key, &ports, BPF_ANY);
	return 0;
}

static __always_inline int fragment6_transport(context_t *ctx, struct flow *flow)
{
	struct fragment6_key key = { .id = flow->fragment_id, .protocol = flow->protocol };
	struct fragment_ports ports;
	int refused;

	key.daddr = flow->daddr;
	key.saddr = flow->saddr;
	if (flow->later_fragment)
		return fragment_continue(flow, bpf_map_lookup_elem(&cilium_ipv6_frag_datagrams, &key));
	refused = parse_transport(ctx, flow, FAMILY_IPV6);
	if (refused)
		return refused;
	ports.sport = flow->sport;
	ports.dport = flow->dport;
	bpf_map_update_elem(&cilium_ipv6_frag_datagrams, &key, &ports, BPF_ANY);
	return 0;
}
