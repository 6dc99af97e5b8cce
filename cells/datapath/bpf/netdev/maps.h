/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the programs know of the devices that packets leave the node through, of where nothing is translated, and of what is
 * encrypted.
 */
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
#define EGRESS_EXCLUDED bpf_htonl(1) /* the policy excludes the destination: they leave as without it */
#define EGRESS_PREFIX_FULL 64

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct egress_key);
	__type(value, struct egress_value);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} cilium_egress_gw_policy_v4 SEC(".maps");

/* hive_encryption: all zero while nothing is encrypted. */
struct encryption_config {
	__u32 ifindex; /* of cilium_wg0 */
	__u32 flags;
	__be32 strict; /* the network; between its addresses nothing passes in clear text */
	__be32 strict_mask;
	__be32 node_ip;
	__be16 port; /* UDP, of cilium_wg0; the devices of a rotation have the two that follow */
	__u16 pad;
	__u32 rotating[2]; /* ifindexes of cilium_wg1 and cilium_wg2 while keys are rol32; 0: not there */
};

#define ENCRYPTION_NODES 1 /* what nodes themselves send is encrypted, too */
#define ENCRYPTION_STRICT 2
#define ENCRYPTION_STRICT_NODES 4 /* nodes have addresses in that network, too: what goes to them may pass */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct encryption_config);
	__uint(max_entries, 1);
} hive_encryption SEC(".maps");

/* hive_encryption_paths: ifindex of the device by which nodes are sent to, and pods in their ranges, during a rotation; all
 * others are sent to by cilium_wg0.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct ipcache_key);
	__type(value, __u32);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} hive_encryption_paths SEC(".maps");

/* NULL on a node that encrypts nothing. */
static __always_inline const struct encryption_config *encryption_facts(void)
{
	__u32 zero = 0;
	const struct encryption_config *encryption = bpf_map_lookup_elem(&hive_encryption, &zero);

	return encryption && encryption->ifindex ? encryption : NULL;
}

_Static_assert(sizeof(struct device_config) == 64, "hive_devices");
_Static_assert(sizeof(struct egress_key) == 12, "cilium_egress_gw_policy_v4");
_Static_assert(sizeof(struct egress_value) == 8, "cilium_egress_gw_policy_v4");
_Static_assert(sizeof(struct ipmasq4_key) == 8, "cilium_ipmasq_v4");
_Static_assert(sizeof(struct ipmasq6_key) == 20, "cilium_ipmasq_v6");
_Static_assert(sizeof(struct encryption_config) == 32, "hive_encryption");
