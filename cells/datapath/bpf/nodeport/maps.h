/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What serving clients outside takes: the node's facts, and who the clients' neighbours are. */
#pragma once

#include "lib/config.h"
#include "lib/maps.h"
#include "lib/packet.h"

/* hive_nodeport: all zero while clients outside are not served. */
struct nodeport_config {
	__be32 ipv4; /* what packets to backends on other nodes come from */
	__u32 flags;
	struct address ipv6;
	__u32 seed4; /* of the hashes of packets, for Maglev */
	__u32 seed6;
};

#define NODEPORT_ON 1
#define NODEPORT_DSR_TCP 2 /* backends on other nodes answer the client themselves: in TCP */
#define NODEPORT_DSR_OTHER 4 /* in other protocols */
#define NODEPORT_DSR_CHOSEN 32 /* which of them do is each service's to say */
#define NODEPORT_XDP 16 /* programs in drivers have looked at packets before */
#define NODEPORT_MAGLEV 8 /* backends are chosen by lookup tables, where a service does not say otherwise */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct nodeport_config);
	__uint(max_entries, 1);
} hive_nodeport SEC(".maps");

/* cilium_nodeport_neigh4 and 6: by which neighbour a client's packets come. */
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

/* The node's facts, or NULL if clients outside are not served. */
static __always_inline const struct nodeport_config *nodeport_facts(void)
{
	__u32 zero = 0;
	const struct nodeport_config *node = NULL;

	if (!without(WITHOUT_NODE_PORTS))
		node = bpf_map_lookup_elem(&hive_nodeport, &zero);
	return node && node->flags & NODEPORT_ON ? node : NULL;
}
