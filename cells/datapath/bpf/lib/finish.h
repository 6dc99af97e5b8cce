/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The end of every program of the traffic control's. */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/events.h"
#include "lib/metrics.h"

/* Turn a drop into its count, its event and the action. Who listens reads an Ethernet header first. */
static __always_inline int finish(struct __sk_buff *skb, const struct flow *flow, int verdict)
{
	if (likely(!DROPPED(verdict)))
		return verdict;
	count(skb, DROP_REASON(verdict), DROP_DIRECTION(verdict));
	if (!packet_frame(skb))
		send_drop_notify(skb, flow, DROP_REASON(verdict), DROP_DIRECTION(verdict));
	return TC_ACT_SHOT;
}
