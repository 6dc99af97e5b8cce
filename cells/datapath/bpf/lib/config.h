/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Constants of a generation, which the loader writes before the verifier runs.
 *
 * The agent identifies the active generation by reading them back from the programs in hive_entry.
 */
#pragma once

#include "lib/bpf.h"

#define CONFIG_MAGIC 0x48495645 /* "HIVE" */

#define FEATURE_SCTP 1
#define FEATURE_UNREACHABLE 2 /* reply with ICMP errors for services without backends */
#define FEATURE_HOST_ROUTING 4 /* BPF host routing: bypass the host stack between pods and native devices */
#define FEATURE_OWN_EXTERNAL_IPS 8 /* pods only reach externalIPs that the node has */
#define FEATURE_IPSEC 16 /* mark packets to other nodes' pods for XFRM */
/* Features that the node does not use. The verifier knows these bits and skips the code that they exclude (since Linux
 * 6.8 also VERIFIED_ALONE functions).
 */
#define WITHOUT_IPV6 32 /* pods have no IPv6 addresses, and there is no IPv6 host policy */
#define WITHOUT_HOST_POLICY 64
#define WITHOUT_NODE_PORTS 128 /* no external clients are served */
#define WITHOUT_GATEWAYS 256 /* no egress gateways */
#define WITHOUT_TUNNEL 512

struct config {
	__u32 magic;
	__u32 generation;
	__u32 ct_lifetime_tcp; /* lifetimes in seconds */
	__u32 ct_lifetime_syn; /* TCP until a packet without SYN is seen */
	__u32 ct_lifetime_any;
	__u32 ct_lifetime_closed;
	__u32 ct_lifetime_service_tcp; /* of service entries, which have a connection's backend */
	__u32 ct_lifetime_service_any;
	__u32 ct_service_grace; /* time after a connection's end until the same ports may get another backend */
	__be32 service_loopback; /* SNAT address for a pod that is its own backend */
	__u32 features;
	__u16 nat_port_min; /* port range of SNAT */
	__u16 nat_port_max;
	__u32 maglev_size; /* entries of a Maglev table */
	char build[16]; /* digest of the object, as text */
	char tag[32]; /* build tag, written into a compiled object to distinguish it from others of the same source */
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
