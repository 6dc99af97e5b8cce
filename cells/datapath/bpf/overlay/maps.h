/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Maps of the tunnel. cilium_* layouts are Cilium 1.17's. Addresses and ports are in network byte order. */
#pragma once

#include "lib/maps.h"

/* hive_tunnel: all zero without a tunnel. */
struct tunnel_config {
	__u32 ifindex;
	__u32 mtu; /* of inner packets, without Ethernet header */
	__be16 port; /* UDP destination port of outer packets */
	__u16 pad;
	__be32 source; /* source address of outer packets; 0: chosen by routing. The first word, for IPv6 */
	__u32 flags;
	__be32 source_rest[3]; /* the other words */
};

#define TUNNEL_GATEWAYS 2 /* packets to egress gateways use the tunnel */
#define TUNNEL_NOT_FOR_PODS 4 /* packets to other nodes' pods do not: native routing */
#define TUNNEL_OVER_IPV6 8 /* outer packets are IPv6 */
#define TUNNEL_OWN_IDENTITIES 1 /* identities are local to each node */

/* cilium_tunnel_map: nodes by pod CIDR, for pods that are not in the ipcache. */
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

/* cilium_node_map_v2: ids of other nodes, by address. */
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
