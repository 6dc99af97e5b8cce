// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* Services for external clients at XDP, in the device's driver, before the kernel allocates an skb. Packets to another node, or
 * back to a client, are sent from here. IPv4 and IPv6.
 *
 * Built from the same headers as the tc programs (datapath.c), which handle every packet passed on from here. Reached by tail
 * call from dispatch.c.
 */
#define CONTEXT_XDP
#include "netdev/ingress.h"
#include "lib/metrics.h"

/* Whether the driver supports the metadata area, which carries the result to the tc program. Without it, tc does everything. */
static __always_inline bool hands_over(const struct xdp_md *ctx)
{
	return packet_meta(ctx) <= packet_start(ctx);
}

SEC("xdp")
int hive_xdp(struct xdp_md *ctx)
{
	struct flow flow = {};
	int verdict;

	if (!nodeport_facts() || !hands_over(ctx))
		return XDP_PASS;
	verdict = from_netdev(ctx, &flow);
	if (likely(!DROPPED(verdict)))
		return verdict;
	count(ctx, DROP_REASON(verdict), DROP_DIRECTION(verdict));
	send_drop_notify(ctx, &flow, DROP_REASON(verdict), DROP_DIRECTION(verdict));
	return XDP_DROP;
}

char _license[] SEC("license") = "Dual BSD/GPL";
