/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Maps of native devices, masquerading exceptions, egress gateways, and encryption. */
#pragma once

#include "lib/maps.h"

/* hive_devices: configuration of a native device. */
struct device_config {
	__be32 ipv4; /* masquerade address */
	__u32 flags;
	struct address ipv6;
	__be32 native4; /* native routing CIDR: packets to it are not masqueraded */
	__be32 native4_mask;
	struct address native6;
	__u32 native6_prefix;
	__u32 announces; /* milliseconds after the agent's last heartbeat during which it replies to ARP for services; 0: never */
	mac_t mac;
};

#define DEVICE_MASQUERADE_IPV4 4
#define DEVICE_MASQUERADE_IPV6 8
#define DEVICE_XDP 16 /* it also has an XDP program: others can redirect packets to it */
#define DEVICE_PROXIES 32 /* proxies may send packets with pods' addresses through it */
#define DEVICE_IP_MASQ 1 /* the exceptions in cilium_ipmasq_v4 and v6 apply */
#define DEVICE_REMOTE_NODES 2 /* also masquerade packets to other nodes, which have no routes to pods */

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

/* cilium_egress_gw_policy_v4: gateway by pod and destination CIDR. */
struct egress_key {
	__u32 prefixlen;
	__be32 saddr;
	__be32 daddr;
};

struct egress_value {
	__be32 egress_ip; /* SNAT address; 0 if this node is not the gateway, or has no such address */
	__be32 gateway_ip; /* or one of: */
};

#define EGRESS_NO_GATEWAY 0 /* drop */
#define EGRESS_EXCLUDED bpf_htonl(1) /* excluded CIDR: no gateway */
#define EGRESS_PREFIX_FULL 64

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct egress_key);
	__type(value, struct egress_value);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} cilium_egress_gw_policy_v4 SEC(".maps");

/* hive_encryption: WireGuard; all zero without encryption. */
struct encryption_config {
	__u32 ifindex; /* of cilium_wg0 */
	__u32 flags;
	__be32 strict; /* CIDR of strict mode: packets between its addresses must be encrypted */
	__be32 strict_mask;
	__be32 node_ip;
	__be16 port; /* UDP port of cilium_wg0; the devices of a key rotation use the next two */
	__u16 pad;
	__u32 rotating[2]; /* cilium_wg1 and cilium_wg2 during a key rotation; 0: none */
};

#define ENCRYPTION_NODES 1 /* node encryption: nodes' own packets, too */
#define ENCRYPTION_STRICT 2
#define ENCRYPTION_STRICT_NODES 4 /* nodes have addresses in the CIDR: packets to them may pass */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct encryption_config);
	__uint(max_entries, 1);
} hive_encryption SEC(".maps");

/* hive_encryption_paths: WireGuard device for a node and its pod CIDRs during a key rotation; for others it is
 * cilium_wg0.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct ipcache_key);
	__type(value, __u32);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} hive_encryption_paths SEC(".maps");

/* Return the configuration, or NULL without encryption. */
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
