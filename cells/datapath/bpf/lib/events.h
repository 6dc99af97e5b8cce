/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Events on cilium_events: drops, traces and policy verdicts.
 *
 * Layouts are Cilium 1.17's, version 1. Without a reader an event costs one failed map lookup.
 */
#pragma once

#include "lib/maps.h"
#include "lib/packet.h"
#include "lib/reasons.h"

struct {
	__uint(type, BPF_MAP_TYPE_PERF_EVENT_ARRAY);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(__u32));
} cilium_events SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct node_config);
	__uint(max_entries, 1);
} hive_node SEC(".maps");

#define EVENT_DROP 1
#define EVENT_TRACE 4
#define EVENT_VERDICT 5
#define EVENT_VERSION 1
#define EVENT_CAPTURE 128

/* Observation point of a trace event: its subtype. */
enum trace_point {
	TRACE_TO_POD = 0,
	TRACE_TO_PROXY = 1,
	TRACE_TO_STACK = 3,
	TRACE_TO_OVERLAY = 4,
	TRACE_FROM_POD = 5,
	TRACE_FROM_OVERLAY = 9,
	TRACE_TO_NETWORK = 11,
};

/* Conntrack status in a trace event; same values as enum ct_status. */
#define TRACE_REASON_UNKNOWN 5

#define AGGREGATION_LOW 1 /* no from-* events */
#define AGGREGATION_MEDIUM 3 /* to-* events only if conntrack reports a change */

/* Match type of a policy entry. */
enum policy_match {
	MATCH_NONE,
	MATCH_L3,
	MATCH_L3_L4,
	MATCH_L4,
	MATCH_ALL,
	MATCH_L3_PROTOCOL,
	MATCH_PROTOCOL,
};

struct event_header {
	__u8 type;
	__u8 subtype;
	__u16 source; /* endpoint id */
	__u32 hash;
	__u32 length;
	__u16 captured;
	__u16 version;
};

struct drop_event {
	struct event_header header;
	__u32 source_identity;
	__u32 destination_identity;
	__u32 destination;
	__u16 line;
	__u8 file;
	__s8 extended_error;
	__u32 ifindex;
};

struct trace_event {
	struct event_header header;
	__u32 source_identity;
	__u32 destination_identity;
	__u16 destination;
	__u8 reason;
	__u8 ipv6 : 1, pad : 7;
	__u32 ifindex;
	struct address original;
};

struct verdict_event {
	struct event_header header;
	__u32 remote_identity;
	__s32 verdict;
	__u16 port;
	__u8 protocol;
	__u8 direction : 2, ipv6 : 1, match : 3, audited : 1, pad : 1;
	__u32 auth; /* authentication type, with padding */
};

_Static_assert(sizeof(struct drop_event) == 36, "drop event");
_Static_assert(sizeof(struct trace_event) == 48, "trace event");
_Static_assert(sizeof(struct verdict_event) == 32, "policy verdict event");

static __always_inline const struct node_config *node_facts(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&hive_node, &zero);
}

static __always_inline bool node_notifies(__u32 what)
{
	const struct node_config *node = node_facts();

	return node && node->flags & what;
}

/* Return whether every packet is traced, regardless of conntrack. */
static __always_inline bool traces_every_packet(void)
{
	const struct node_config *node = node_facts();

	return node && node->flags & NODE_NOTIFY_TRACE && node->aggregation < AGGREGATION_MEDIUM;
}

static __always_inline __u32 event_begin(context_t *ctx, struct event_header *header, __u8 type, __u8 subtype,
					 __u16 endpoint)
{
	__u32 captured = packet_length(ctx) < EVENT_CAPTURE ? packet_length(ctx) : EVENT_CAPTURE;

	header->type = type;
	header->subtype = subtype;
	header->source = endpoint;
	header->hash = packet_hash(ctx);
	header->length = packet_length(ctx);
	header->captured = captured;
	header->version = EVENT_VERSION;
	return captured;
}

static __always_inline void event_send(context_t *ctx, void *event, __u64 size, __u64 captured)
{
	bpf_perf_event_output(ctx, &cilium_events, captured << 32 | BPF_F_CURRENT_CPU, event, size);
}

/* The return values of these three functions are not used. */
VERIFIED_ALONE send_drop_notify(context_t *ctx, const struct flow *flow, __u32 reason, __u32 direction)
{
	if (!flow)
		return 0;
	struct drop_event event = {
		.source_identity = flow->source_identity,
		.destination_identity = flow->destination_identity,
		.destination = flow->destination,
		.ifindex = packet_ifindex(ctx),
	};
	__u16 endpoint = direction == EGRESS ? flow->source : flow->destination;

	if (node_notifies(NODE_NOTIFY_DROP))
		event_send(ctx, &event, sizeof(event),
			   event_begin(ctx, &event.header, EVENT_DROP, reason, endpoint));
	return 0;
}

VERIFIED_ALONE send_trace_notify(context_t *ctx, const struct flow *flow, __u32 point, __u32 ifindex, __u32 how)
{
	const struct node_config *node = node_facts();

	if (!flow)
		return 0;
	struct trace_event event = {
		.source_identity = flow->source_identity,
		.destination_identity = flow->destination_identity,
		.destination = flow->destination,
		.reason = how & 0xff,
		.ipv6 = how >> 8 == FAMILY_IPV6,
		.ifindex = ifindex,
	};

	if (!node || !(node->flags & NODE_NOTIFY_TRACE))
		return 0;
	if (node->aggregation >= AGGREGATION_LOW && (point == TRACE_FROM_POD || point == TRACE_FROM_OVERLAY))
		return 0;
	if (node->aggregation >= AGGREGATION_MEDIUM && !flow->report)
		return 0;
	event_send(ctx, &event, sizeof(event),
		   event_begin(ctx, &event.header, EVENT_TRACE, point,
			       point == TRACE_TO_POD ? flow->destination : flow->source));
	return 0;
}

/* Conntrack status and family of a traced packet. */
#define TRACED(status, family) ((status) | (family) << 8)

/* `verdict`: 0, the proxy port of a redirect, or a negative drop reason. */
VERIFIED_ALONE send_policy_verdict_notify(context_t *ctx, const struct flow *flow, __u32 direction, int verdict,
					  __u32 how)
{
	const struct node_config *node;

	if (!flow)
		return 0;
	struct verdict_event event = {
		.remote_identity = direction == EGRESS ? flow->destination_identity : flow->source_identity,
		.verdict = verdict,
		.port = bpf_ntohs(flow->policy_port),
		.protocol = flow->protocol,
		.direction = direction,
		.ipv6 = (how >> 8 & 0xff) == FAMILY_IPV6,
		.match = how,
		.audited = how >> 16,
	};
	__u16 endpoint = direction == EGRESS ? flow->source : flow->destination;

	node = bpf_map_lookup_elem(&hive_node,
				   &event.auth); /* any zero value: only 32 bytes of stack are left here */
	if (node && node->flags & NODE_NOTIFY_POLICY_VERDICT)
		event_send(ctx, &event, sizeof(event), event_begin(ctx, &event.header, EVENT_VERDICT, 0, endpoint));
	return 0;
}

/* Match type and family of a policy verdict. */
#define MATCHED(match, family) ((match) | (family) << 8)
#define AUDITED (1 << 16) /* denied, but forwarded in audit mode */
