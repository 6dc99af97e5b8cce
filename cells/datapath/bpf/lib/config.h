/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Constants of one generation, written by the loader before the verifier sees the programs.
 *
 * The agent finds the generation in force by reading this back from the programs in hive_entry.
 */
#pragma once

#include "lib/bpf.h"

#define CONFIG_MAGIC 0x48495645 /* "HIVE" */

#define FEATURE_SCTP 1
#define FEATURE_UNREACHABLE 2 /* services without a backend answer */
#define FEATURE_HOST_ROUTING 4 /* pods and native devices pass each other packets, past the host's stack */
#define FEATURE_OWN_EXTERNAL_IPS 8 /* pods reach only those externalIPs that the node has: CVE-2020-8554 */
#define FEATURE_IPSEC 16 /* what pods send to other nodes' pods is marked for the kernel to encrypt */
/* What the node does not have. The verifier knows these bits, and does not follow what they exclude (since Linux 6.8
 * into functions that are VERIFIED_ALONE neither).
 */
#define WITHOUT_IPV6 32 /* no pod has an IPv6 address, and no host policy is about the node's */
#define WITHOUT_HOST_POLICY 64
#define WITHOUT_NODE_PORTS 128 /* no client outside is served */
#define WITHOUT_GATEWAYS 256 /* no policy has pods leave the cluster by a gateway */
#define WITHOUT_TUNNEL 512

struct config {
	__u32 magic;
	__u32 generation;
	__u32 ct_lifetime_tcp; /* seconds, as all of these */
	__u32 ct_lifetime_syn; /* TCP before anything but a SYN was seen */
	__u32 ct_lifetime_any;
	__u32 ct_lifetime_closed;
	__u32 ct_lifetime_service_tcp; /* of the entry that holds a connection's backend */
	__u32 ct_lifetime_service_any;
	__u32 ct_service_grace; /* after its end, until another backend may serve the same ports */
	__be32 service_loopback; /* what a pod that is its own backend is reached from */
	__u32 features;
	__u16 nat_port_min; /* ports that translated flows may get */
	__u16 nat_port_max;
	__u32 maglev_size; /* numbers in a lookup table of backends */
	char build[16]; /* digest of the object, text */
	char tag[32]; /* written into a compiled object: distinguishes two of one source */
};

_Static_assert(sizeof(struct config) == 100, ".rodata.cfg");

volatile const struct config config SEC(".rodata.cfg") = {
	.magic = CONFIG_MAGIC,
	.ct_lifetime_tcp = 8000,
	.ct_lifetime_syn = 60,
	.ct_lifetime_any = 60,
	.ct_lifetime_closed = 10,
	.ct_lifetime_service_tcp = 8000,
	.ct_lifetime_service_any = 60,
	.ct_service_grace = 60,
	.nat_port_min = 32768,
	.nat_port_max = 65535,
	.maglev_size = 16381,
};

static __always_inline bool host_routing(void)
{
	return config.features & FEATURE_HOST_ROUTING;
}

static __always_inline bool ipsec(void)
{
	return config.features & FEATURE_IPSEC;
}

static __always_inline bool without(__u32 feature)
{
	return config.features & feature;
}
