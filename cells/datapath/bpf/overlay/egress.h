/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What leaves in the tunnel, once more: marked, so that no program of the device outside translates or refuses it. */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/mark.h"
#include "overlay/tunnel.h"

static __always_inline int to_overlay(struct __sk_buff *skb)
{
	struct bpf_tunnel_key key = {};
	struct node_key node;

	/* Without one it is the kernel's own (listener reports and the like): the device lets it go nowhere. */
	if (tunnel_brought(skb, &key, &node))
		return TC_ACT_OK;
	mark_write(skb, MARK_OVERLAY | key.tunnel_id << 16 | (key.tunnel_id >> 16 & 0xff));
	return TC_ACT_OK;
}
