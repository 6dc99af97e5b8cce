/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Maps shared with the agent and its tools: names and layouts.
 *
 * The loader replaces each map by the agent's pinned one of the same name; sizes of tables are the agent's. cilium_*
 * layouts are Cilium 1.16's, and read by its tools; hive_* maps are our own. Addresses and ports are in network byte
 * order, everything else in host order.
 */
#pragma once

#include "lib/bpf.h"

#define FAMILY_IPV4 1
#define FAMILY_IPV6 2

/* An address of either family; the last three words are zero for IPv4. */
struct address {
	__be32 words[4];
};

/* A MAC in the low six bytes, in memory order; the other two bytes are zero. */
typedef __u64 mac_t;

/* hive_endpoints: the endpoint at the host side of a pod's link. */
struct endpoint_config {
	__be32 ipv4;
	__u16 id;
	__u16 flags;
	__u32 identity;
	__u32 pad;
	mac_t host_mac;
	mac_t pod_mac;
	struct address ipv6;
	__u64 netns_cookie;
	__u64 reserved;
};

#define ENDPOINT_PASSES_NEIGHBOURS 1 /* the host's stack answers ARP and neighbour discovery */
#define ENDPOINT_ANY_SOURCE 2 /* may send from any source address */
#define ENDPOINT_REQUIRE_EGRESS_PROG 4 /* cil_to_container enforces ingress policy at its link */
#define ENDPOINT_ROUTED_BY_HOST 8 /* the host's stack or a bridge routes its packets */

/* hive_node: configuration of the node. */
struct node_config {
	__be32 router_ip;
	__u32 host_ifindex;
	mac_t host_mac;
	mac_t net_mac;
	__u32 net_ifindex;
	__be32 pod_cidr;
	__be32 pod_mask;
	__u32 flags;
	struct address router_ip6;
	struct address pod_cidr6;
	__u32 pod_prefix6;
	__u32 aggregation; /* aggregation level of trace events */
	__u32 host_endpoint; /* endpoint of the host policy; 0: no host policy */
	__u32 pad[3];
};

#define NODE_NOTIFY_DROP 1
#define NODE_NOTIFY_TRACE 2
#define NODE_NOTIFY_POLICY_VERDICT 4
#define NODE_AUDITS_POLICY 8 /* audit mode: forward and report denied packets */
#define NODE_AUDITS_HOST 16 /* audit mode of the host policy */
#define NODE_NOTIFY_SOCK 32
#define NODE_CIDR_MATCHES_PODS 64 /* CIDRs in policies also select pods */

/* cilium_lxc: local addresses and their endpoints. */
struct address_key {
	struct address ip;
	__u8 family;
	__u8 key;
	__u16 cluster_id;
};

#define ADDRESS_IS_HOST 1

struct address_info {
	__u32 ifindex;
	__u16 unused;
	__u16 endpoint_id;
	__u32 flags;
	__u32 hole;
	mac_t pod_mac;
	mac_t host_mac;
	__u32 identity;
	__u32 pad[3];
};

/* cilium_ipcache: identities of addresses and prefixes. */
struct ipcache_key {
	__u32 prefixlen;
	__u16 cluster_id;
	__u8 pad;
	__u8 family;
	struct address ip;
};

#define IPCACHE_SKIP_TUNNEL 1

#define IPCACHE_PREFIX_IPV4 64 /* 32 bits of cluster id and family, 32 of address */
#define IPCACHE_PREFIX_IPV6 160 /* the same with 128 bits of address */

struct ipcache_info {
	__u32 identity;
	__be32 tunnel_endpoint;
	__u16 pad;
	__u8 key;
	__u8 flags;
};

/* cilium_policy_NNNNN, inside hive_policies. */
struct policy_key {
	__u32 prefixlen;
	__u32 identity;
	__u8 egress;
	__u8 protocol;
	__be16 port;
};

#define POLICY_PREFIX_FULL 64

#define POLICY_DENY (1 << 0)
#define POLICY_ANY_PROTOCOL (1 << 1)
#define POLICY_ANY_PORT (1 << 2)
#define POLICY_ONLY_BY_PROXY (1 << 7) /* our own: drop while the proxy does not listen */

struct policy_entry {
	__be16 proxy_port;
	__u8 bits;
	__u8 auth_type;
	__u32 pad;
	__u64 packets;
	__u64 bytes;
};

/* cilium_ct4_global (TCP), cilium_ct_any4_global (other protocols), and the same for IPv6. The addresses are those of
 * the reply, the ports those of the original packet.
 */
struct ct_tail {
	__be16 dport;
	__be16 sport;
	__u8 protocol;
	__u8 flags;
};

struct ct4_key {
	__be32 daddr;
	__be32 saddr;
	struct ct_tail tail;
} __attribute__((packed, aligned(2)));

struct ct6_key {
	struct address daddr;
	struct address saddr;
	struct ct_tail tail;
} __attribute__((packed, aligned(2)));

#define CT_KEY_OUT 0
#define CT_KEY_IN 1
#define CT_KEY_RELATED 2
#define CT_KEY_SERVICE 4

struct ct_entry {
	__u64 verdict; /* verdict cache, see policy/verdict.h; reserved in Cilium */
	__u64 backend_id;
	__u64 packets;
	__u64 bytes;
	__u32 lifetime; /* expiry in seconds of CLOCK_MONOTONIC */
	__u16 rx_closing : 1, tx_closing : 1, unused_nat46 : 1, lb_loopback : 1, seen_non_syn : 1, node_port : 1,
		proxy_redirect : 1, dsr_internal : 1, from_l7lb : 1, unused : 1, from_tunnel : 1, rest : 4,
		through_stack : 1; /* our own flag */
	__be16 rev_nat_index;
	__u16 ifindex;
	__u8 tx_flags_seen;
	__u8 rx_flags_seen;
	__u32 source_identity;
	__u32 last_tx_report;
	__u32 last_rx_report;
};

/* cilium_ipv4_frag_datagrams, cilium_ipv6_frag_datagrams: ports of fragmented datagrams. */
struct fragment4_key {
	__be32 daddr;
	__be32 saddr;
	__be16 id;
	__u8 protocol;
	__u8 pad;
};

struct fragment6_key {
	struct address daddr;
	struct address saddr;
	__be32 id;
	__u8 protocol;
	__u8 pad[3];
};

struct fragment_ports {
	__be16 sport;
	__be16 dport;
};

/* cilium_metrics: packet and byte counters by reason. */
struct metrics_key {
	__u8 reason;
	__u8 direction;
	__u16 line;
	__u8 file;
	__u8 reserved[3];
};

struct metrics_value {
	__u64 count;
	__u64 bytes;
};

_Static_assert(sizeof(struct endpoint_config) == 64, "hive_endpoints");
_Static_assert(sizeof(struct node_config) == 96, "hive_node");
_Static_assert(sizeof(struct address_key) == 20, "cilium_lxc");
_Static_assert(sizeof(struct address_info) == 48, "cilium_lxc");
_Static_assert(sizeof(struct ipcache_key) == 24, "cilium_ipcache");
_Static_assert(sizeof(struct ipcache_info) == 12, "cilium_ipcache");
_Static_assert(sizeof(struct policy_key) == 12, "cilium_policy");
_Static_assert(sizeof(struct policy_entry) == 24, "cilium_policy");
_Static_assert(sizeof(struct ct4_key) == 14, "cilium_ct4_global");
_Static_assert(sizeof(struct ct6_key) == 38, "cilium_ct6_global");
_Static_assert(sizeof(struct fragment4_key) == 12, "cilium_ipv4_frag_datagrams");
_Static_assert(sizeof(struct fragment6_key) == 40, "cilium_ipv6_frag_datagrams");
_Static_assert(sizeof(struct ct_entry) == 56, "cilium_ct4_global");
_Static_assert(sizeof(struct metrics_key) == 8, "cilium_metrics");
_Static_assert(sizeof(struct metrics_value) == 16, "cilium_metrics");

/* Slots of hive_entry: the active programs. */
#define ENTRY_FROM_CONTAINER 0
#define ENTRY_TO_HOST 1
#define ENTRY_FROM_HOST 2
#define ENTRY_TO_CONTAINER 3
#define ENTRY_FROM_NETDEV 4
#define ENTRY_TO_NETDEV 5
#define ENTRY_FROM_OVERLAY 6
#define ENTRY_TO_OVERLAY 7
#define ENTRIES 8

/* Slots of hive_l3_entry: the active programs of devices without Ethernet headers. */
#define L3_ENTRY_FROM_NETDEV 0
#define L3_ENTRY_TO_NETDEV 1
#define L3_ENTRIES 2
