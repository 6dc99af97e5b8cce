/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Link-layer headers: Ethernet, or none on L3 devices (wireguard, tun, ipip).
 *
 * Common code is compiled for either: CONTEXT_L3 selects devices without Ethernet headers.
 */
#pragma once

#include <linux/if_ether.h>

#include "lib/bpf.h"

/* Like linux/if_ether.h's struct ethhdr, but not packed, which would mean access by bytes. */
struct ethernet {
	__be16 destination[3];
	__be16 source[3];
	__be16 protocol;
};

/* Return the Ethernet header, or NULL. */
static __always_inline struct ethernet *packet_eth(const context_t *ctx)
{
	struct ethernet *eth = packet_start(ctx);

	return (void *)(eth + 1) <= packet_end(ctx) ? eth : NULL;
}

#ifdef CONTEXT_L3

#define LINK_HLEN 0

#ifndef l3_protocol
#define l3_protocol(ctx) ((__be16)(ctx)->protocol)
#endif

/* Return the EtherType. */
static __always_inline __be16 packet_protocol(const context_t *ctx)
{
	return l3_protocol(ctx);
}

/* Add an Ethernet header, which pods and other devices need. MACs are zero; earlier packet pointers and offsets become
 * invalid. Returns 0 or an error.
 */
static __always_inline long packet_frame(context_t *ctx)
{
	__be16 protocol = packet_protocol(ctx);
	struct ethernet *eth;

	if (bpf_skb_change_head(ctx, ETH_HLEN, 0))
		return -1;
	eth = packet_eth(ctx);
	if (!eth)
		return -1;
	eth->protocol = protocol;
	return 0;
}

#else

#define LINK_HLEN ETH_HLEN

/* Return the protocol by the IP version; 0 for neither. */
static __always_inline __be16 packet_protocol(const context_t *ctx)
{
	const struct ethernet *eth = packet_eth(ctx);

	return eth ? eth->protocol : 0;
}

/* It has an Ethernet header. */
static __always_inline long packet_frame(context_t *ctx)
{
	(void)ctx;
	return 0;
}

#endif
