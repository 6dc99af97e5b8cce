/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Maps of services: frontends, backend slots, backends, reverse NAT, session affinity, source ranges, Maglev tables.
 *
 * Layouts are Cilium 1.17's. Addresses, ports and reverse NAT indexes are in network byte order, the rest in host order.
 * The agent writes all maps except those of session affinity.
 */
#pragma once

#include "lib/maps.h"

struct lb4_key {
	__be32 address;
	__be16 port;
	__u16 slot; /* 0: the service; from 1 on: its backends */
	__u8 protocol; /* 0: any */
	__u8 scope;
	__u8 pad[2];
};

struct lb6_key {
	struct address address;
	__be16 port;
	__u16 slot;
	__u8 protocol;
	__u8 scope;
	__u8 pad[2];
};

#define LB_SCOPE_INTERNAL 1 /* for clients in the cluster, if the service has LB_TWO_SCOPES */

struct lb_service {
	__u32 backend; /* id; in slot 0: timeout of session affinity in seconds, algorithm in the upper byte */
	__u16 count;
	__be16 rev_nat_index;
	__u8 flags;
	__u8 flags2;
	__u16 quarantined;
};

#define LB_EXTERNAL_IP 0x01 /* of flags */
#define LB_NODE_PORT 0x02
#define LB_HOST_PORT 0x08
#define LB_AFFINITY 0x10
#define LB_LOAD_BALANCER 0x20
#define LB_ROUTABLE 0x40 /* external clients may use it */
#define LB_SOURCE_RANGE 0x80 /* cilium_lb4_source_range and cilium_lb6_source_range restrict clients */
#define LB_LOCAL_REDIRECT 0x01 /* of flags2 */
#define LB_LOOPBACK 0x08 /* of flags2: a host port only on loopback addresses */
#define LB_SOURCE_DENY 0x40 /* of flags2: the source ranges deny instead of allow */
#define LB_L7 0x04 /* of flags2 */
#define LB_TWO_SCOPES 0x20 /* of flags2: internal and external scope have different backends */
#define LB_DSR 0x80 /* of flags2: DSR, if NODEPORT_DSR_CHOSEN is set */
#define LB_AFFINITY_TIME 0xffffff /* mask of the timeout; the upper byte is the algorithm, LB_RANDOM or LB_MAGLEV */

struct lb4_backend {
	__be32 address;
	__be16 port;
	__u8 protocol;
	__u8 state;
	__u16 cluster;
	__u8 zone;
	__u8 pad;
};

struct lb6_backend {
	struct address address;
	__be16 port;
	__u8 protocol;
	__u8 state;
	__u16 cluster;
	__u8 zone;
	__u8 pad;
};

#define LB_BACKEND_ACTIVE 0

struct lb4_reverse_nat {
	__be32 address;
	__be16 port;
} __attribute__((packed, aligned(2)));

struct lb6_reverse_nat {
	struct address address;
	__be16 port;
} __attribute__((packed, aligned(2)));

/* `client` is an address (IPv4 in the low bytes), or the netns cookie if `netns_cookie` is set. */
struct lb4_affinity_key {
	__u64 client;
	__be16 rev_nat_index;
	__u8 netns_cookie;
	__u8 pad;
	__u32 pad2;
};

struct lb6_affinity_key {
	struct address client;
	__be16 rev_nat_index;
	__u8 netns_cookie;
	__u8 pad;
	__u32 pad2;
};

struct lb_affinity {
	__u64 last_used; /* seconds of CLOCK_MONOTONIC */
	__u32 backend;
	__u32 pad;
};

struct lb_affinity_match {
	__u32 backend;
	__be16 rev_nat_index;
	__u16 pad;
};

struct lb4_source_range {
	__u32 prefixlen; /* 32 bits of index and padding, plus the network's prefix length */
	__be16 rev_nat_index;
	__u16 pad;
	__be32 network;
};

struct lb6_source_range {
	__u32 prefixlen;
	__be16 rev_nat_index;
	__u16 pad;
	struct address network;
};

#define LB_SOURCE_PREFIX 32

#define LB_MAP(name, kind, map_flags_, key_type, value_type)                                                       \
	struct {                                                                                                   \
		__uint(type, kind);                                                                                \
		__type(key, key_type);                                                                             \
		__type(value, value_type);                                                                         \
		__uint(max_entries, 65536);                                                                        \
		__uint(map_flags, map_flags_);                                                                     \
	} name SEC(".maps")

LB_MAP(cilium_lb4_services_v2, BPF_MAP_TYPE_HASH, BPF_F_NO_PREALLOC, struct lb4_key, struct lb_service);
LB_MAP(cilium_lb6_services_v2, BPF_MAP_TYPE_HASH, BPF_F_NO_PREALLOC, struct lb6_key, struct lb_service);
LB_MAP(cilium_lb4_backends_v3, BPF_MAP_TYPE_HASH, BPF_F_NO_PREALLOC, __u32, struct lb4_backend);
LB_MAP(cilium_lb6_backends_v3, BPF_MAP_TYPE_HASH, BPF_F_NO_PREALLOC, __u32, struct lb6_backend);
LB_MAP(cilium_lb4_reverse_nat, BPF_MAP_TYPE_HASH, BPF_F_NO_PREALLOC, __be16, struct lb4_reverse_nat);
LB_MAP(cilium_lb6_reverse_nat, BPF_MAP_TYPE_HASH, BPF_F_NO_PREALLOC, __be16, struct lb6_reverse_nat);
LB_MAP(cilium_lb4_affinity, BPF_MAP_TYPE_LRU_HASH, 0, struct lb4_affinity_key, struct lb_affinity);
LB_MAP(cilium_lb6_affinity, BPF_MAP_TYPE_LRU_HASH, 0, struct lb6_affinity_key, struct lb_affinity);
LB_MAP(cilium_lb_affinity_match, BPF_MAP_TYPE_HASH, BPF_F_NO_PREALLOC, struct lb_affinity_match, __u8);
LB_MAP(cilium_lb4_source_range, BPF_MAP_TYPE_LPM_TRIE, BPF_F_NO_PREALLOC, struct lb4_source_range, __u8);
LB_MAP(cilium_lb6_source_range, BPF_MAP_TYPE_LPM_TRIE, BPF_F_NO_PREALLOC, struct lb6_source_range, __u8);

#define LB_RANDOM 1 /* in the upper byte of lb_service.backend of slot 0; 0: as hive_nodeport sets */
#define LB_MAGLEV 2

/* Maglev tables by reverse NAT index: a map with one entry, an array of backend ids. */
struct lb_maglev_table {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, 4 * 16381); /* entries: config.maglev_size */
	__uint(max_entries, 1);
};

#define LB_MAGLEV_MAP(name)                                                                                        \
	struct {                                                                                                   \
		__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS);                                                           \
		__type(key, __be16);                                                                               \
		__uint(max_entries, 65536);                                                                        \
		__uint(map_flags, BPF_F_NO_PREALLOC);                                                              \
		__array(values, struct lb_maglev_table);                                                           \
	} name SEC(".maps")

LB_MAGLEV_MAP(cilium_lb4_maglev);
LB_MAGLEV_MAP(cilium_lb6_maglev);

_Static_assert(sizeof(struct lb4_key) == 12, "cilium_lb4_services_v2");
_Static_assert(sizeof(struct lb6_key) == 24, "cilium_lb6_services_v2");
_Static_assert(sizeof(struct lb_service) == 12, "cilium_lb4_services_v2");
_Static_assert(sizeof(struct lb4_backend) == 12, "cilium_lb4_backends_v3");
_Static_assert(sizeof(struct lb6_backend) == 24, "cilium_lb6_backends_v3");
_Static_assert(sizeof(struct lb4_reverse_nat) == 6, "cilium_lb4_reverse_nat");
_Static_assert(sizeof(struct lb6_reverse_nat) == 18, "cilium_lb6_reverse_nat");
_Static_assert(sizeof(struct lb4_affinity_key) == 16, "cilium_lb4_affinity");
_Static_assert(sizeof(struct lb6_affinity_key) == 24, "cilium_lb6_affinity");
_Static_assert(sizeof(struct lb_affinity) == 16, "cilium_lb4_affinity");
_Static_assert(sizeof(struct lb_affinity_match) == 8, "cilium_lb_affinity_match");
_Static_assert(sizeof(struct lb4_source_range) == 12, "cilium_lb4_source_range");
_Static_assert(sizeof(struct lb6_source_range) == 24, "cilium_lb6_source_range");
