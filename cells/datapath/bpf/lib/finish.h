/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Common end of all tc programs. */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/events.h"
#include "lib/metrics.h"

/* Convert a drop verdict to its counter, event and TC_ACT_SHOT. Readers of events expect an Ethernet header. */
static __always_inline int finish(struct __sk_buff *skb, const struct flow *flow, int verdict)
{
	if (likely(!DROPPED(verdict)))
		return verdict;
	count(skb, DROP_REASON(verdict), DROP_DIRECTION(verdict));
	if (!packet_frame(skb))
		send_drop_notify(skb, flow, DROP_REASON(verdict), DROP_DIRECTION(verdict));
	return TC_ACT_SHOT;
}
