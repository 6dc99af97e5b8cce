/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Connection tracking: is this packet the start, the continuation or the answer of a flow?
 *
 * Each pod has entries of its own: one with OUT for what it started, one with IN for what it
 * accepted. An entry past its lifetime counts as absent, whether or not the agent has removed it.
 */
#pragma once

#include "lib/config.h"
#include "ct/maps.h"
#include "lib/packet.h"

#define CT_REPORT_INTERVAL 5 /* seconds */
#define CT_REPORT_FLAGS (TCP_SYN | TCP_FIN | TCP_RST)
#define CT_CAPTURE 128 /* bytes of a packet that events show */

enum ct_status {
	CT_NEW,
	CT_ESTABLISHED,
	CT_REPLY,
	CT_RELATED,
};

/* Seconds of CLOCK_MONOTONIC, as entries count time. Coarse: a tick late, and cheap (Linux 5.11). */
static __always_inline __u32 ct_now(void)
{
	return bpf_ktime_get_coarse_ns() / 1000000000ULL;
}

/* Note the packet in the entry: when it ends, and which flags each direction has shown. */
static __always_inline void ct_refresh(struct ct_entry *entry, __u32 lifetime, struct flow *flow,
				       enum direction direction, __u32 now)
{
	__u8 *seen = direction == INGRESS ? &entry->rx_flags_seen : &entry->tx_flags_seen;
	__u32 *reported = direction == INGRESS ? &entry->last_rx_report : &entry->last_tx_report;
	__u8 flags = *seen | (flow->tcp_flags & CT_REPORT_FLAGS);

	/* Once a second at most: an unchanged line stays shared between CPUs. */
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

/* FIN: the direction ends. RST: both do. */
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

/* An error about a flow does not shorten the time for which errors about it are expected. */
static __always_inline __u32 ct_lifetime_noted(const struct ct_entry *entry, const struct flow *flow, __u32 now)
{
	if (flow->related && entry->lifetime > now + config.ct_lifetime_any)
		return entry->lifetime - now;
	return config.ct_lifetime_any;
}

/* Apply a packet to the entry it matched. False if it does not belong to it: a SYN after the end. */
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

/* Whether a packet that does not look like a reply may be one all the same. The ICMP type decides: a redirect, for
 * instance, answers nothing.
 */
static __always_inline bool may_reply(const struct flow *flow)
{
	return flow->protocol != IPPROTO_ICMP && flow->protocol != IPPROTO_ICMPV6;
}

/* The packet's conntrack status for the pod in this `direction`, stored in the entry it belongs to: `*entry`.
 *
 * A flow has entries both ways only when it ended and its other side began anew between the same ports: then
 * the packet belongs to the one it looks like.
 */
static __always_inline enum ct_status ct_lookup(struct flow *flow, enum direction direction, __u32 now, __u8 family,
						struct ct_entry **entry)
{
	bool reply = flow->reply_likely;

	*entry = ct_find(flow, direction, reply, now, family);
	if (!*entry) {
		if (!reply && !may_reply(flow))
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

/* The same for a packet that was addressed to a service: it can only go on with a flow, not answer one. */
static __always_inline enum ct_status ct_lookup_own(struct flow *flow, enum direction direction, __u32 now,
						    __u8 family, struct ct_entry **entry)
{
	*entry = ct_find(flow, direction, false, now, family);
	return *entry ? CT_ESTABLISHED : CT_NEW;
}

/* Whether it may be the first answer to the side that started a connection: yes, or no. */
static __always_inline bool answers_begin(const struct flow *flow)
{
	if (flow->protocol != IPPROTO_TCP)
		return false;
	return flow->tcp_flags & TCP_RST || (flow->tcp_flags & (TCP_SYN | TCP_ACK)) == (TCP_SYN | TCP_ACK);
}

/* Enter the connection that this packet, the first answer, belongs to: a proxy started it for the pod that the packet
 * is for. Only answers are seen, so their end is that of the connection. 0, or the reason to drop.
 */
VERIFIED_ALONE ct_create_answered(struct flow *flow, __u32 now, __u32 family)
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

/* Enter a flow that policy has let through; 0, or the reason to drop the packet. */
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
		entry.rx_flags_seen = tcp ? TCP_SYN : 0; /* also if it joined late */
		entry.last_rx_report = now;
	} else {
		entry.tx_flags_seen = tcp ? TCP_SYN : 0;
		entry.last_tx_report = now;
	}
	flow->report = CT_CAPTURE;
	return ct_insert(flow, direction, &entry, now + lifetime, family) ? DROP_CT_CREATE_FAILED : 0;
}
