/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the programs know of the devices that packets leave the node through, and of where nothing is translated. */
#pragma once

#include "lib/maps.h"

/* hive_devices: a native device. */
struct device_config {
	__be32 ipv4; /* what packets of pods that leave here come from */
	__u32 flags;
	struct address ipv6;
	__be32 native4; /* the network in which pods' addresses mean something: nothing on its way there is translated */
	__be32 native4_mask;
	struct address native6;
	__u32 native6_prefix;
	__u32 announces; /* milliseconds for which it answers for services after the agent was alive; 0: never */
	mac_t mac;
};

#define DEVICE_MASQUERADE_IPV4 4
#define DEVICE_MASQUERADE_IPV6 8
#define DEVICE_XDP 16 /* it has a program in its driver, too: packets can be sent by it from others' */
#define DEVICE_PROXIES 32 /* a proxy may send in pods' names by it */
#define DEVICE_IP_MASQ 1 /* cilium_ipmasq_v4 and v6 list further networks to which nothing is translated */
#define DEVICE_REMOTE_NODES 2 /* translate to other nodes, too: they know no way to pods but tunnels */

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u32); /* ifindex */
	__type(value, struct device_config);
	__uint(max_entries, 256);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} hive_devices SEC(".maps");

struct ipmasq4_key {
	__u32 prefixlen;
	__be32 network;
};

struct ipmasq6_key {
	__u32 prefixlen;
	struct address network;
};

#define IPMASQ_MAP(name, key_type)                                                                                 \
	struct {                                                                                                   \
		__uint(type, BPF_MAP_TYPE_LPM_TRIE);                                                               \
		__type(key, struct key_type);                                                                      \
		__type(value, __u8);                                                                               \
		__uint(max_entries, 16384);                                                                        \
		__uint(map_flags, BPF_F_NO_PREALLOC);                                                              \
	} name SEC(".maps")

IPMASQ_MAP(cilium_ipmasq_v4, ipmasq4_key);
IPMASQ_MAP(cilium_ipmasq_v6, ipmasq6_key);

/* cilium_egress_gw_policy_v4: which node packets of a pod to a network outside leave the cluster by. */
struct egress_key {
	__u32 prefixlen;
	__be32 saddr;
	__be32 daddr;
};

struct egress_value {
	__be32 egress_ip; /* what they come from there; 0 where this node is not the gateway, or it has none */
	__be32 gateway_ip; /* or one of these */
};

#define EGRESS_NO_GATEWAY 0 /* they are dropped */
#define EGRESS_EXCLUDED bpf_htonl(1) /* they leave as without a policy */
#define EGRESS_PREFIX_FULL 64

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct egress_key);
	__type(value, struct egress_value);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} cilium_egress_gw_policy_v4 SEC(".maps");

_Static_assert(sizeof(struct device_config) == 64, "hive_devices");
_Static_assert(sizeof(struct egress_key) == 12, "cilium_egress_gw_policy_v4");
_Static_assert(sizeof(struct egress_value) == 8, "cilium_egress_gw_policy_v4");
_Static_assert(sizeof(struct ipmasq4_key) == 8, "cilium_ipmasq_v4");
_Static_assert(sizeof(struct ipmasq6_key) == 20, "cilium_ipmasq_v6");
