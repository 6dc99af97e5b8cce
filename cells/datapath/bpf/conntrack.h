/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Connection tracking: is this packet the start, the continuation or the answer of a flow?
 *
 * Each pod has entries of its own: one with OUT for what it started, one with IN for what it
 * accepted. An entry past its lifetime counts as absent, whether or not the agent has removed it.
 */
#pragma once

#include "config.h"
#include "ct_maps.h"
#include "packet.h"

#define CT_REPORT_INTERVAL 5 /* seconds */
#define CT_REPORT_FLAGS (TCP_SYN | TCP_FIN | TCP_RST)

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

/* The key of the flow this packet would have started, or with `reply` of the one it answers. */
static __always_inline void ct_fill_key(struct ct_key *key, const struct flow *flow,
					enum direction direction, bool reply)
{
	bool in = (direction == INGRESS) != reply;

	key->daddr = reply ? flow->daddr : flow->saddr;
	key->saddr = reply ? flow->saddr : flow->daddr;
	key->dport = reply ? flow->sport : flow->dport;
	key->sport = reply ? flow->dport : flow->sport;
	key->protocol = flow->protocol;
	key->flags = (in ? CT_KEY_IN : CT_KEY_OUT) | (flow->related ? CT_KEY_RELATED : 0);
}

/* Note the packet in the entry: when it ends, and which flags each direction has shown. */
static __always_inline void ct_refresh(struct ct_entry *entry, __u32 lifetime, __u8 tcp_flags,
				       enum direction direction, __u32 now)
{
	__u8 *seen = direction == INGRESS ? &entry->rx_flags_seen : &entry->tx_flags_seen;
	__u32 *reported = direction == INGRESS ? &entry->last_rx_report : &entry->last_tx_report;
	__u8 flags = *seen | (tcp_flags & CT_REPORT_FLAGS);

	/* Once a second at most: an unchanged line stays shared between CPUs. */
	if (entry->lifetime != now + lifetime)
		entry->lifetime = now + lifetime;
	if (flags != *seen || *reported + CT_REPORT_INTERVAL < now) {
		*seen = flags;
		*reported = now;
	}
}

static __always_inline void ct_refresh_tcp(struct ct_entry *entry, __u8 tcp_flags,
					   enum direction direction, __u32 now)
{
	if (!(tcp_flags & TCP_SYN) && !entry->seen_non_syn)
		entry->seen_non_syn = 1;
	ct_refresh(entry, entry->seen_non_syn ? config.ct_lifetime_tcp : config.ct_lifetime_syn, tcp_flags,
		   direction, now);
}

/* RST or FIN: the direction ends; a RST before both sides have spoken ends both. */
static __always_inline void ct_close(struct ct_entry *entry, __u8 tcp_flags, enum direction direction,
				     __u32 now)
{
	bool both_spoke = entry->rx_flags_seen & entry->tx_flags_seen & TCP_SYN;

	if (tcp_flags & TCP_RST && !both_spoke) {
		entry->rx_closing = 1;
		entry->tx_closing = 1;
	} else if (direction == INGRESS) {
		entry->rx_closing = 1;
	} else {
		entry->tx_closing = 1;
	}
	if (entry->rx_closing && entry->tx_closing)
		ct_refresh(entry, config.ct_lifetime_closed, tcp_flags, direction, now);
}

/* Apply a packet to the entry it matched. False if it does not belong to it: a SYN after the end. */
static __always_inline bool ct_apply(struct ct_entry *entry, const struct flow *flow,
				     enum direction direction, __u32 now)
{
	if (flow->protocol != IPPROTO_TCP) {
		ct_refresh(entry, config.ct_lifetime_any, 0, direction, now);
		return true;
	}
	if (unlikely(flow->tcp_flags & TCP_SYN && !(flow->tcp_flags & (TCP_RST | TCP_FIN)) &&
		     (entry->rx_closing || entry->tx_closing))) {
		entry->rx_closing = 0;
		entry->tx_closing = 0;
		entry->seen_non_syn = 0;
		entry->rx_flags_seen = 0;
		entry->tx_flags_seen = 0;
		ct_refresh_tcp(entry, flow->tcp_flags, direction, now);
		return false;
	}
	if (!(entry->rx_closing && entry->tx_closing))
		ct_refresh_tcp(entry, flow->tcp_flags, direction, now);
	if (unlikely(flow->tcp_flags & (TCP_RST | TCP_FIN)))
		ct_close(entry, flow->tcp_flags, direction, now);
	return true;
}

static __always_inline bool ct_find(const struct flow *flow, enum direction direction, bool reply, __u32 now)
{
	struct ct_key key __attribute__((aligned(8)));
	struct ct_entry *entry;

	ct_fill_key(&key, flow, direction, reply);
	if (flow->protocol == IPPROTO_TCP) {
		entry = bpf_map_lookup_elem(&cilium_ct4_global, &key);
		barrier(); /* one map for each call: only then the kernel inlines it */
	} else {
		entry = bpf_map_lookup_elem(&cilium_ct_any4_global, &key);
	}
	return entry && entry->lifetime >= now && ct_apply(entry, flow, direction, now);
}

/* What the packet is to the pod whose `direction` it travels, noted in the entry it belongs to.
 *
 * No flow has entries both ways but by a race, so which is tried first decides the cost alone.
 */
static __always_inline enum ct_status ct_lookup(const struct flow *flow, enum direction direction, __u32 now)
{
	bool reply = flow->reply_likely;

	if (!ct_find(flow, direction, reply, now)) {
		reply = !reply;
		if (!ct_find(flow, direction, reply, now))
			return CT_NEW;
	}
	if (!reply)
		return CT_ESTABLISHED;
	return flow->related ? CT_RELATED : CT_REPLY;
}

/* Let ICMP errors between the two addresses in for as long as the flow may live. */
static __always_inline long ct_relate(struct ct_key *key, struct ct_entry *entry, __u32 until)
{
	struct ct_entry *known;

	key->dport = 0;
	key->sport = 0;
	key->protocol = IPPROTO_ICMP;
	key->flags |= CT_KEY_RELATED;
	known = bpf_map_lookup_elem(&cilium_ct_any4_global, key);
	if (known && known->source_identity == entry->source_identity) {
		if (known->lifetime < until)
			known->lifetime = until;
		return 0;
	}
	entry->seen_non_syn = 1;
	entry->lifetime = until;
	return bpf_map_update_elem(&cilium_ct_any4_global, key, entry, BPF_ANY);
}

/* Enter a flow that policy has let through; 0, or the reason to drop the packet. */
static __always_inline int ct_create(const struct flow *flow, enum direction direction,
				     __u32 source_identity, __u32 now)
{
	bool tcp = flow->protocol == IPPROTO_TCP;
	__u32 lifetime = tcp ? config.ct_lifetime_tcp : config.ct_lifetime_any;
	struct ct_key key __attribute__((aligned(8)));
	struct ct_entry entry = {
		.source_identity = source_identity,
		.lifetime = now + (tcp ? config.ct_lifetime_syn : config.ct_lifetime_any),
	};
	long failed;

	if (direction == INGRESS) {
		entry.rx_flags_seen = tcp ? TCP_SYN : 0; /* also if it joined late */
		entry.last_rx_report = now;
	} else {
		entry.tx_flags_seen = tcp ? TCP_SYN : 0;
		entry.last_tx_report = now;
	}
	ct_fill_key(&key, flow, direction, false);
	if (tcp) {
		failed = bpf_map_update_elem(&cilium_ct4_global, &key, &entry, BPF_ANY);
		barrier();
	} else {
		failed = bpf_map_update_elem(&cilium_ct_any4_global, &key, &entry, BPF_ANY);
	}
	if (failed || ct_relate(&key, &entry, now + lifetime))
		return DROP_CT_CREATE_FAILED;
	return 0;
}
