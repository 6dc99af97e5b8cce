/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the programs of the tunnel share with the agent and its tools. Of the cilium_* ones the layouts are Cilium
 * 1.17's. Addresses and ports are in network order.
 */
#pragma once

#include "lib/maps.h"

/* hive_tunnel: all zero while the node has no tunnel. */
struct tunnel_config {
	__u32 ifindex;
	__u32 mtu; /* of the packets inside, without Ethernet header */
	__be16 port; /* UDP, of the packets outside */
	__u16 pad;
	__be32 source; /* of the packets outside; 0: routing chooses. Of an IPv6 address it is the first word */
	__u32 flags;
	__be32 source_rest[3]; /* the other words of that */
};

#define TUNNEL_GATEWAYS 2 /* what policies have leave by gateways goes to them in it */
#define TUNNEL_NOT_FOR_PODS 4 /* what is for other nodes' pods does not: it is routed */
#define TUNNEL_OVER_IPV6 8 /* the packets outside are of IPv6 */
#define TUNNEL_OWN_IDENTITIES 1 /* each node gives its pods numbers of its own: another's mean nothing here */

/* cilium_tunnel_map: which node has these pods, for those that the ipcache does not know. */
struct tunnel_key {
	struct address network;
	__u8 family;
	__u8 pad;
	__u16 cluster_id;
};

struct tunnel_value {
	struct address node;
	__u8 family;
	__u8 key;
	__u16 pad;
};

/* cilium_node_map_v2: addresses of the other nodes. */
struct node_key {
	__u16 pad;
	__u8 pad2;
	__u8 family;
	struct address ip;
};

struct node_value {
	__u16 id;
	__u8 spi;
	__u8 pad;
};

_Static_assert(sizeof(struct tunnel_config) == 32, "hive_tunnel");
_Static_assert(sizeof(struct tunnel_key) == 20, "cilium_tunnel_map");
_Static_assert(sizeof(struct tunnel_value) == 20, "cilium_tunnel_map");
_Static_assert(sizeof(struct node_key) == 20, "cilium_node_map_v2");
_Static_assert(sizeof(struct node_value) == 4, "cilium_node_map_v2");
