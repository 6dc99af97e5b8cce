/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Service entries: a connection's backend, in an entry beside the flow's, keyed by the frontend's address.
 *
 * Only the client's packets pass it, so a FIN or RST closes both directions.
 */
#pragma once

#include "ct/conntrack.h"

static __always_inline void ct_service_tail(struct ct_tail *tail, const struct flow *flow)
{
	tail->dport = flow->sport;
	tail->sport = flow->dport;
	tail->protocol = flow->protocol;
	tail->flags = CT_KEY_SERVICE;
}

static __always_inline void ct_service_key4(struct ct4_key *key, const struct flow *flow)
{
	key->daddr = flow->daddr.words[0];
	key->saddr = flow->saddr.words[0];
	ct_service_tail(&key->tail, flow);
}

static __always_inline void ct_service_key6(struct ct6_key *key, const struct flow *flow)
{
	key->daddr = flow->daddr;
	key->saddr = flow->saddr;
	ct_service_tail(&key->tail, flow);
}

static __always_inline struct ct_entry *ct_service_find(const struct flow *flow, __u32 now, __u8 family)
{
	struct ct_entry *entry;

	if (family == FAMILY_IPV4) {
		struct ct4_key key __attribute__((aligned(8)));

		ct_service_key4(&key, flow);
		entry = bpf_map_lookup_elem(flow->protocol == IPPROTO_TCP ? (void *)&cilium_ct4_global
									  : (void *)&cilium_ct_any4_global,
					    &key);
	} else {
		struct ct6_key key __attribute__((aligned(8)));

		ct_service_key6(&key, flow);
		entry = bpf_map_lookup_elem(flow->protocol == IPPROTO_TCP ? (void *)&cilium_ct6_global
									  : (void *)&cilium_ct_any6_global,
					    &key);
	}
	return entry && entry->lifetime >= now ? entry : NULL;
}

static __always_inline bool is_connection_start(const struct flow *flow)
{
	return flow->tcp_flags & TCP_SYN && !(flow->tcp_flags & (TCP_RST | TCP_FIN));
}

/* Return whether the packet may start a flow; without connections (UDP) any packet may. */
static __always_inline bool may_start_flow(const struct flow *flow)
{
	return flow->protocol != IPPROTO_TCP || is_connection_start(flow);
}

/* Return whether the packet starts a new connection with the ports of an ended one, after the grace period: then it may
 * get another backend.
 */
static __always_inline bool ct_service_is_reusable(const struct ct_entry *entry, const struct flow *flow, __u32 now)
{
	return is_connection_start(flow) && entry->rx_closing &&
	       entry->last_tx_report + config.ct_service_grace <= now;
}

static __always_inline __u32 ct_service_lifetime(const struct ct_entry *entry, const struct flow *flow)
{
	if (flow->protocol != IPPROTO_TCP)
		return config.ct_lifetime_service_any;
	return entry->seen_non_syn ? config.ct_lifetime_service_tcp : config.ct_lifetime_syn;
}

/* Update the entry by a client's packet. */
static __always_inline void ct_service_update(struct ct_entry *entry, struct flow *flow, __u32 now)
{
	if (entry->rx_closing && is_connection_start(flow)) {
		entry->rx_closing = 0;
		entry->tx_closing = 0;
		entry->seen_non_syn = 0;
		entry->tx_flags_seen = 0;
	}
	if (flow->protocol == IPPROTO_TCP && !(flow->tcp_flags & TCP_SYN))
		entry->seen_non_syn = 1;
	if (!entry->rx_closing)
		ct_refresh(entry, ct_service_lifetime(entry, flow), flow, EGRESS, now);
	if (unlikely(flow->tcp_flags & (TCP_RST | TCP_FIN))) {
		entry->rx_closing = 1;
		entry->tx_closing = 1;
		ct_refresh(entry, config.ct_lifetime_closed, flow, EGRESS, now);
	}
}

/* Create the entry of a new connection; returns 0 or a negative errno. */
static __always_inline long ct_service_create(const struct flow *flow, __u32 backend, __be16 rev_nat_index,
					      __u32 now, __u8 family)
{
	bool tcp = flow->protocol == IPPROTO_TCP;
	struct ct_entry entry = {
		.backend_id = backend,
		.rev_nat_index = rev_nat_index,
		.lifetime = now + (tcp ? config.ct_lifetime_syn : config.ct_lifetime_service_any),
		.tx_flags_seen = tcp ? TCP_SYN : 0,
		.last_tx_report = now,
	};

	if (family == FAMILY_IPV4) {
		struct ct4_key key __attribute__((aligned(8)));

		ct_service_key4(&key, flow);
		return bpf_map_update_elem(tcp ? (void *)&cilium_ct4_global : (void *)&cilium_ct_any4_global, &key,
					   &entry, BPF_ANY);
	} else {
		struct ct6_key key __attribute__((aligned(8)));

		ct_service_key6(&key, flow);
		return bpf_map_update_elem(tcp ? (void *)&cilium_ct6_global : (void *)&cilium_ct_any6_global, &key,
					   &entry, BPF_ANY);
	}
}
