/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Egress of the tunnel device: marks the packets, so that the programs at native devices neither translate nor drop
 * them.
 */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/mark.h"
#include "overlay/tunnel.h"

static __always_inline int to_overlay(struct __sk_buff *skb)
{
	struct bpf_tunnel_key key = {};
	struct node_key node;

	/* Without a tunnel key: the kernel's own packets, such as MLD reports, which the device drops. */
	if (tunnel_read_key(skb, &key, &node))
		return TC_ACT_OK;
	mark_write(skb, MARK_OVERLAY | key.tunnel_id << 16 | (key.tunnel_id >> 16 & 0xff));
	return TC_ACT_OK;
}
