// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* What passes native devices with packets that begin with the network header: L3 devices, such as wireguard, tun, ipip.
 *
 * The same sources as those of the programs at other devices (datapath.c). Reached by tail call from dispatch.c.
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
