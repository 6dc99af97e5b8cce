/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Entries of flows with a source that this node translates: they determine how long translations are needed.
 *
 * By that of a client's flow to a backend answers find the service. It is one of packets on their way out, though the client
 * sends them in: as if the node itself asked the backend. Errors about these flows find the translation, and need no entry.
 */
#pragma once

#include "ct/conntrack.h"
#include "lib/identity.h"
#include "nodeport/maps.h"

static __always_inline long nodeport_insert(const struct flow *flow, const struct ct_entry *entry, __u8 family)
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

/* Enter a flow, of which `identity` is the source; 0, or the reason to drop the packet. */
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
	return nodeport_insert(flow, &entry, family) ? DROP_CT_CREATE_FAILED : 0;
}

/* Remember the neighbour that the client's packets come by: only the programs in drivers ask for it. */
static __always_inline void nodeport_note_neighbour(context_t *ctx, const struct flow *flow, __u8 family)
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

/* Note a packet of the client's; 0, or the reason to drop. */
static __always_inline int nodeport_note(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	struct ct_entry *known;

	if (ct_lookup_own(flow, EGRESS, now, family, &known) == CT_ESTABLISHED && known->node_port &&
	    known->rev_nat_index == flow->rev_nat_index)
		return 0;
	nodeport_note_neighbour(ctx, flow, family);
	return ct_create_translated(flow, world_identity(family), now, family);
}

VERIFIED_ALONE nodeport4_note(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? nodeport_note(ctx, flow, now, FAMILY_IPV4) : DROP_INVALID;
}

VERIFIED_ALONE nodeport6_note(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? nodeport_note(ctx, flow, now, FAMILY_IPV6) : DROP_INVALID;
}
