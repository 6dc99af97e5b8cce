/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Conntrack entries of flows with SNAT, and of NodePort flows: NAT entries live as long as these.
 *
 * The entry of an external client's flow to a backend has the reverse NAT index for replies. It is an egress entry, as if the
 * node itself connected to the backend. ICMP errors use the NAT entries and need no conntrack entry.
 */
#pragma once

#include "ct/conntrack.h"
#include "lib/identity.h"
#include "nodeport/maps.h"

static __always_inline long ct_insert_egress(const struct flow *flow, const struct ct_entry *entry, __u8 family)
{
	bool tcp = flow->protocol == IPPROTO_TCP;

	if (family == FAMILY_IPV4) {
		struct ct4_key key __attribute__((aligned(8)));

		ct_fill_key4(&key, flow, EGRESS, false);
		return bpf_map_update_elem(tcp ? (void *)&cilium_ct4_global : (void *)&cilium_ct_any4_global, &key,
					   entry, BPF_ANY);
	} else {
		struct ct6_key key __attribute__((aligned(8)));

		ct_fill_key6(&key, flow, EGRESS, false);
		return bpf_map_update_elem(tcp ? (void *)&cilium_ct6_global : (void *)&cilium_ct_any6_global, &key,
					   entry, BPF_ANY);
	}
}

/* Create an entry with this source identity; returns 0 or a drop reason. */
VERIFIED_ALONE ct_create_translated(struct flow *flow, __u32 identity, __u32 now, __u32 family)
{
	if (!flow)
		return DROP_CT_CREATE_FAILED;
	bool tcp = flow->protocol == IPPROTO_TCP;
	const struct ct_entry entry = {
		.source_identity = identity,
		.node_port = flow->node_port,
		.rev_nat_index = flow->rev_nat_index,
		.lifetime = now + (tcp ? config.ct_lifetime_syn : config.ct_lifetime_any),
		.tx_flags_seen = tcp ? TCP_SYN : 0,
		.last_tx_report = now,
	};

	flow->report = CT_CAPTURE;
	return ct_insert_egress(flow, &entry, family) ? DROP_CT_CREATE_FAILED : 0;
}

/* Record the source MAC of the client's packets, for XDP programs only. */
static __always_inline void nodeport_record_neighbour(context_t *ctx, const struct flow *flow, __u8 family)
{
	const struct nodeport_config *own = nodeport_facts();
	const struct ethernet *eth = packet_eth(ctx);
	struct nodeport_neighbour neighbour = {};

	if (!LINK_HLEN || !eth || !own || !(own->flags & NODEPORT_XDP))
		return;
	neighbour.mac[0] = eth->source[0];
	neighbour.mac[1] = eth->source[1];
	neighbour.mac[2] = eth->source[2];
	if (family == FAMILY_IPV4)
		bpf_map_update_elem(&cilium_nodeport_neigh4, &flow->saddr.words[0], &neighbour, BPF_ANY);
	else
		bpf_map_update_elem(&cilium_nodeport_neigh6, &flow->saddr, &neighbour, BPF_ANY);
}

/* Create the entry of a client's flow if there is none; returns 0 or a drop reason. */
static __always_inline int nodeport_track(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	struct ct_entry *known;

	if (ct_lookup_own(flow, EGRESS, now, family, &known) == CT_ESTABLISHED && known->node_port &&
	    known->rev_nat_index == flow->rev_nat_index)
		return 0;
	nodeport_record_neighbour(ctx, flow, family);
	return ct_create_translated(flow, world_identity(family), now, family);
}

VERIFIED_ALONE nodeport4_track(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? nodeport_track(ctx, flow, now, FAMILY_IPV4) : DROP_INVALID;
}

VERIFIED_ALONE nodeport6_track(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? nodeport_track(ctx, flow, now, FAMILY_IPV6) : DROP_INVALID;
}
