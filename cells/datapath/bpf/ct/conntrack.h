/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Connection tracking: whether a packet starts, continues or replies to a flow.
 *
 * Each pod has its own entries: OUT for flows that it started, IN for flows that it accepted. An expired entry counts
 * as missing, whether or not the garbage collector has deleted it.
 */
#pragma once

#include "lib/config.h"
#include "ct/maps.h"
#include "lib/packet.h"

#define CT_REPORT_INTERVAL 5 /* seconds */
#define CT_REPORT_FLAGS (TCP_SYN | TCP_FIN | TCP_RST)
#define CT_CAPTURE 128 /* bytes of a packet in trace events */

enum ct_status {
	CT_NEW,
	CT_ESTABLISHED,
	CT_REPLY,
	CT_RELATED,
};

/* Return the time in seconds of CLOCK_MONOTONIC, as in entries. The coarse clock is up to a tick late, and cheap (Linux
 * 5.11).
 */
static __always_inline __u32 ct_now(void)
{
	return bpf_ktime_get_coarse_ns() / 1000000000ULL;
}

/* Extend the entry's lifetime and record the packet's TCP flags. */
static __always_inline void ct_refresh(struct ct_entry *entry, __u32 lifetime, struct flow *flow,
				       enum direction direction, __u32 now)
{
	__u8 *seen = direction == INGRESS ? &entry->rx_flags_seen : &entry->tx_flags_seen;
	__u32 *reported = direction == INGRESS ? &entry->last_rx_report : &entry->last_tx_report;
	__u8 flags = *seen | (flow->tcp_flags & CT_REPORT_FLAGS);

	/* At most once a second: an unmodified cache line stays shared between CPUs. */
	if (entry->lifetime != now + lifetime)
		entry->lifetime = now + lifetime;
	if (flags != *seen || *reported + CT_REPORT_INTERVAL < now) {
		*seen = flags;
		*reported = now;
		flow->report = CT_CAPTURE;
	}
}

static __always_inline __u32 ct_lifetime(const struct ct_entry *entry, const struct flow *flow)
{
	if (flow->protocol != IPPROTO_TCP)
		return config.ct_lifetime_any;
	return entry->seen_non_syn ? config.ct_lifetime_tcp : config.ct_lifetime_syn;
}

static __always_inline void ct_refresh_tcp(struct ct_entry *entry, struct flow *flow, enum direction direction,
					   __u32 now)
{
	if (!(flow->tcp_flags & TCP_SYN) && !entry->seen_non_syn)
		entry->seen_non_syn = 1;
	ct_refresh(entry, ct_lifetime(entry, flow), flow, direction, now);
}

/* FIN closes one direction, RST both. */
static __always_inline void ct_close(struct ct_entry *entry, struct flow *flow, enum direction direction, __u32 now)
{
	if (flow->tcp_flags & TCP_RST) {
		entry->rx_closing = 1;
		entry->tx_closing = 1;
	} else if (direction == INGRESS) {
		entry->rx_closing = 1;
	} else {
		entry->tx_closing = 1;
	}
	if (entry->rx_closing && entry->tx_closing)
		ct_refresh(entry, config.ct_lifetime_closed, flow, direction, now);
}

/* An ICMP error does not shorten the lifetime of its RELATED entry. */
static __always_inline __u32 ct_lifetime_noted(const struct ct_entry *entry, const struct flow *flow, __u32 now)
{
	if (flow->related && entry->lifetime > now + config.ct_lifetime_any)
		return entry->lifetime - now;
	return config.ct_lifetime_any;
}

/* Update the matching entry by a packet. Returns false for a SYN after the connection's end, which starts another one.
 */
VERIFIED_ALONE ct_apply(struct ct_entry *entry, struct flow *flow, enum direction direction, __u32 now)
{
	if (!entry || !flow)
		return false;
	if (flow->protocol != IPPROTO_TCP) {
		ct_refresh(entry, ct_lifetime_noted(entry, flow, now), flow, direction, now);
		return true;
	}
	if (unlikely(flow->tcp_flags & TCP_SYN && !(flow->tcp_flags & (TCP_RST | TCP_FIN)) &&
		     (entry->rx_closing || entry->tx_closing))) {
		entry->rx_closing = 0;
		entry->tx_closing = 0;
		entry->seen_non_syn = 0;
		entry->rx_flags_seen = 0;
		entry->tx_flags_seen = 0;
		ct_refresh_tcp(entry, flow, direction, now);
		return false;
	}
	if (!(entry->rx_closing && entry->tx_closing))
		ct_refresh_tcp(entry, flow, direction, now);
	if (unlikely(flow->tcp_flags & (TCP_RST | TCP_FIN)))
		ct_close(entry, flow, direction, now);
	return true;
}

static __always_inline struct ct_entry *ct_find(struct flow *flow, enum direction direction, bool reply, __u32 now,
						__u8 family)
{
	struct ct_entry *entry = ct_entry_of(flow, direction, reply, family);

	if (!entry || entry->lifetime < now)
		return NULL;
	flow->lifetime = entry->lifetime;
	return ct_apply(entry, flow, direction, now) ? entry : NULL;
}

/* Return whether a packet without signs of a reply may be one. For ICMP the type decides: a redirect, for instance, is
 * never a reply.
 */
static __always_inline bool may_be_reply(const struct flow *flow)
{
	return flow->protocol != IPPROTO_ICMP && flow->protocol != IPPROTO_ICMPV6;
}

/* Return the packet's conntrack status for the pod in this `direction`, and its entry in `*entry`.
 *
 * A flow has entries in both directions only if it ended and the other side started a new one between the same ports:
 * then the more likely direction wins.
 */
static __always_inline enum ct_status ct_lookup(struct flow *flow, enum direction direction, __u32 now, __u8 family,
						struct ct_entry **entry)
{
	bool reply = flow->reply_likely;

	*entry = ct_find(flow, direction, reply, now, family);
	if (!*entry) {
		if (!reply && !may_be_reply(flow))
			return CT_NEW;
		reply = !reply;
		*entry = ct_find(flow, direction, reply, now, family);
		if (!*entry)
			return CT_NEW;
	}
	if (!reply)
		return CT_ESTABLISHED;
	return flow->related ? CT_RELATED : CT_REPLY;
}

/* Look up a packet to a service, in the forward direction only: it cannot be a reply. */
static __always_inline enum ct_status ct_lookup_own(struct flow *flow, enum direction direction, __u32 now,
						    __u8 family, struct ct_entry **entry)
{
	*entry = ct_find(flow, direction, false, now, family);
	return *entry ? CT_ESTABLISHED : CT_NEW;
}

/* Return whether the packet may be the first reply of a connection: SYN+ACK or RST. */
static __always_inline bool is_first_reply(const struct flow *flow)
{
	if (flow->protocol != IPPROTO_TCP)
		return false;
	return flow->tcp_flags & TCP_RST || (flow->tcp_flags & (TCP_SYN | TCP_ACK)) == (TCP_SYN | TCP_ACK);
}

/* Create the entry of a connection by its first reply: a proxy started it with the address of the pod that the packet
 * is for. Only replies are seen, so their end is the connection's. Returns 0 or a drop reason.
 */
VERIFIED_ALONE ct_create_from_reply(struct flow *flow, __u32 now, __u32 family)
{
	if (!flow)
		return DROP_CT_CREATE_FAILED;
	const struct ct_entry entry = {
		.source_identity = flow->destination_identity,
		.proxy_redirect = 1,
		.tx_closing = 1,
		.lifetime = now + config.ct_lifetime_syn,
		.tx_flags_seen = TCP_SYN,
		.rx_flags_seen = TCP_SYN,
		.last_tx_report = now,
		.last_rx_report = now,
	};

	flow->report = CT_CAPTURE;
	if (family == FAMILY_IPV4) {
		struct ct4_key key __attribute__((aligned(8)));

		ct_fill_key4(&key, flow, INGRESS, true);
		return bpf_map_update_elem(&cilium_ct4_global, &key, &entry, BPF_ANY) ? DROP_CT_CREATE_FAILED : 0;
	} else {
		struct ct6_key key __attribute__((aligned(8)));

		ct_fill_key6(&key, flow, INGRESS, true);
		return bpf_map_update_elem(&cilium_ct6_global, &key, &entry, BPF_ANY) ? DROP_CT_CREATE_FAILED : 0;
	}
}

/* Create the entry of a flow that policy allows; returns 0 or a drop reason. */
VERIFIED_ALONE ct_create(struct flow *flow, enum direction direction, __u32 now, __u32 family)
{
	if (!flow)
		return DROP_CT_CREATE_FAILED;
	bool tcp = flow->protocol == IPPROTO_TCP;
	__u32 lifetime = tcp ? config.ct_lifetime_tcp : config.ct_lifetime_any;
	struct ct_entry entry = {
		.source_identity = flow->source_identity,
		.through_stack = flow->through_stack,
		.lb_loopback = flow->loopback,
		.node_port = flow->node_port,
		.dsr_internal = flow->dsr,
		.from_tunnel = flow->from_tunnel,
		.proxy_redirect = flow->proxy_port || flow->from_proxy,
		.rev_nat_index = direction == EGRESS ? flow->rev_nat_index : 0,
		.lifetime = now + (tcp ? config.ct_lifetime_syn : config.ct_lifetime_any),
	};

	if (direction == INGRESS) {
		entry.rx_flags_seen = tcp ? TCP_SYN : 0; /* also if the SYN was not seen */
		entry.last_rx_report = now;
	} else {
		entry.tx_flags_seen = tcp ? TCP_SYN : 0;
		entry.last_tx_report = now;
	}
	flow->report = CT_CAPTURE;
	return ct_insert(flow, direction, &entry, now + lifetime, family) ? DROP_CT_CREATE_FAILED : 0;
}
