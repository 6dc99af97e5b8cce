// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* The tc programs of native devices without Ethernet headers (wireguard, tun, ipip): packets begin with the network
 * header.
 *
 * Compiled from the same headers as datapath.c. Called by tail calls from dispatch.c.
 */
#define CONTEXT_L3
#include "netdev/device.h"

SEC("tc")
int hive_from_l3_device(struct __sk_buff *skb)
{
	return device_in(skb);
}

SEC("tc")
int hive_to_l3_device(struct __sk_buff *skb)
{
	return device_out(skb);
}

char _license[] SEC("license") = "Dual BSD/GPL";
