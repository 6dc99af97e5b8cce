/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Maps of NodePort: the node's configuration, and the neighbours of external clients. */
#pragma once

#include "lib/config.h"
#include "lib/maps.h"
#include "lib/packet.h"

/* hive_nodeport: all zero while external clients are not served. */
struct nodeport_config {
	__be32 ipv4; /* SNAT address for remote backends */
	__u32 flags;
	struct address ipv6;
	__u32 seed4; /* Maglev hash seeds */
	__u32 seed6;
};

#define NODEPORT_ON 1
#define NODEPORT_DSR_TCP 2 /* DSR for TCP */
#define NODEPORT_DSR_OTHER 4 /* DSR for other protocols */
#define NODEPORT_DSR_CHOSEN 32 /* each service selects DSR or SNAT (LB_DSR) */
#define NODEPORT_XDP 16 /* XDP programs run before tc */
#define NODEPORT_MAGLEV 8 /* default algorithm is Maglev */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct nodeport_config);
	__uint(max_entries, 1);
} hive_nodeport SEC(".maps");

/* cilium_nodeport_neigh4 and 6: source MAC of a client's packets. */
struct nodeport_neighbour {
	__be16 mac[3];
	__u16 pad;
};

#define NODEPORT_NEIGHBOURS(name, key_type)                                                                        \
	struct {                                                                                                   \
		__uint(type, BPF_MAP_TYPE_LRU_HASH);                                                               \
		__type(key, key_type);                                                                             \
		__type(value, struct nodeport_neighbour);                                                          \
		__uint(max_entries, 524288);                                                                       \
	} name SEC(".maps")

NODEPORT_NEIGHBOURS(cilium_nodeport_neigh4, __be32);
NODEPORT_NEIGHBOURS(cilium_nodeport_neigh6, struct address);

_Static_assert(sizeof(struct nodeport_config) == 32, "hive_nodeport");
_Static_assert(sizeof(struct nodeport_neighbour) == 8, "cilium_nodeport_neigh4");

/* Return the configuration, or NULL if external clients are not served. */
static __always_inline const struct nodeport_config *nodeport_facts(void)
{
	__u32 zero = 0;
	const struct nodeport_config *node = NULL;

	if (!without(WITHOUT_NODE_PORTS))
		node = bpf_map_lookup_elem(&hive_nodeport, &zero);
	return node && node->flags & NODEPORT_ON ? node : NULL;
}
