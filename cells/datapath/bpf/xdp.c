// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* Services for clients outside in a device's driver (XDP), before the kernel makes a socket buffer of the packet: what goes
 * on to another node, or back to a client, does so from here. IPv4 and IPv6.
 *
 * The same sources as those of the programs at the stack's door (datapath.c), which get what is left. Reached by tail call
 * from dispatch.c.
 */
#define CONTEXT_XDP
#include "netdev/ingress.h"
#include "lib/metrics.h"

/* Whether the driver leaves room for what is told of a packet; else all is left to the program at the stack's door. */
static __always_inline bool tells(const struct xdp_md *ctx)
{
	return packet_told(ctx) <= packet_start(ctx);
}

SEC("xdp")
int hive_xdp(struct xdp_md *ctx)
{
	struct flow flow = {};
	int verdict;

	if (!nodeport_facts() || !tells(ctx))
		return XDP_PASS;
	verdict = device_gets(ctx, &flow);
	if (likely(!DROPPED(verdict)))
		return verdict;
	count(ctx, DROP_REASON(verdict), DROP_DIRECTION(verdict));
	tell_drop(ctx, &flow, DROP_REASON(verdict), DROP_DIRECTION(verdict));
	return XDP_DROP;
}

char _license[] SEC("license") = "Dual BSD/GPL";
