/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Maps of socket load balancing. */
#pragma once

#include "lb/maps.h"

/* cilium_lb4_reverse_sk: the original destination of a socket that uses this backend; written by the programs. */
struct reverse_sk4_key {
	__u64 cookie;
	__be32 address;
	__be16 port;
	__u16 pad;
};

struct reverse_sk4 {
	__be32 address;
	__be16 port;
	__be16 rev_nat_index;
};

/* Explicit padding: all bytes of a hash key are compared. */
struct reverse_sk6_key {
	__u64 cookie;
	struct address address;
	__be16 port;
	__u16 pad;
	__u32 pad2;
};

struct reverse_sk6 {
	struct address address;
	__be16 port;
	__be16 rev_nat_index;
};

/* hive_sock: configuration of the node. */
struct sock_config {
	__u64 host_cookie; /* of the host's network namespace */
	__u16 node_port_min;
	__u16 node_port_max;
	__u32 flags;
};

#define SOCK_HOST_ONLY 1 /* only translate sockets of the host's network namespace */
#define SOCK_BIND_PROTECTION 2 /* see bind.h */
#define SOCK_TRUSTS_EXTERNAL_IP 4 /* also serve externalIPs that the node does not have */
#define SOCK_REJECTS 8 /* services without backends return ECONNREFUSED */

LB_MAP(cilium_lb4_reverse_sk, BPF_MAP_TYPE_LRU_HASH, 0, struct reverse_sk4_key, struct reverse_sk4);
LB_MAP(cilium_lb6_reverse_sk, BPF_MAP_TYPE_LRU_HASH, 0, struct reverse_sk6_key, struct reverse_sk6);

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct sock_config);
	__uint(max_entries, 1);
} hive_sock SEC(".maps");

_Static_assert(sizeof(struct reverse_sk4_key) == 16, "cilium_lb4_reverse_sk");
_Static_assert(sizeof(struct reverse_sk4) == 8, "cilium_lb4_reverse_sk");
_Static_assert(sizeof(struct reverse_sk6_key) == 32, "cilium_lb6_reverse_sk");
_Static_assert(sizeof(struct reverse_sk6) == 20, "cilium_lb6_reverse_sk");
_Static_assert(sizeof(struct sock_config) == 16, "hive_sock");
