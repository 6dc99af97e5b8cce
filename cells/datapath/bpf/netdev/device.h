/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The two programs of a native device, whether it has Ethernet headers (datapath.c) or none (l3.c). */
#pragma once

#include <linux/if_packet.h>

#include "host/policy.h"
#include "lib/finish.h"
#include "netdev/egress.h"
#include "netdev/ingress.h"
#include "netdev/proxied.h"

static __always_inline int device_in(struct __sk_buff *skb)
{
	struct flow flow = {};
	int verdict;

	if (unlikely(skb->pkt_type == PACKET_LOOPBACK)) /* what the node itself has sent to a group that it is in */
		return TC_ACT_OK;
	verdict = device_gets(skb, &flow);
	if (verdict == TC_ACT_OK)
		verdict = device_gives_proxy(skb, &flow);
	if (verdict == TC_ACT_OK && unlikely(host_endpoint()))
		verdict = host_guard(skb, &flow, INGRESS);
	return finish(skb, &flow, verdict);
}

static __always_inline int device_out(struct __sk_buff *skb)
{
	struct flow flow = {};
	int verdict;

	if (unlikely(host_endpoint())) {
		verdict = host_guard(skb, &flow, EGRESS);
		if (verdict != TC_ACT_OK)
			return finish(skb, &flow, verdict);
		flow = (struct flow){};
	}
	return finish(skb, &flow, device_sends(skb, &flow));
}
