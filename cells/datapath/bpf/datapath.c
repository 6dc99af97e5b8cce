// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* One generation of the datapath: what a pod sends, what the host sends to pods, what other nodes
 * send in the tunnel, what passes the devices by which the node is in the world. IPv4 and IPv6.
 *
 * One set of programs serves all pods; what differs between pods is in maps. Reached by tail call
 * from dispatch.c.
 */
#include <linux/pkt_cls.h>

#include "host/egress.h"
#include "host/ingress.h"
#include "host/policy.h"
#include "lib/finish.h"
#include "netdev/device.h"
#include "overlay/egress.h"
#include "overlay/ingress.h"
#include "pod/egress.h"
#include "pod/ingress.h"

SEC("tc")
int hive_from_pod(struct __sk_buff *skb)
{
	struct passage *passage = passage_begin();

	if (!passage)
		return TC_ACT_SHOT;
	skb->queue_mapping = 0; /* the pod's choice of queue means nothing to the host's devices */
	return finish(skb, &passage->flow, from_container(skb, passage));
}

SEC("tc")
int hive_from_host(struct __sk_buff *skb)
{
	struct flow flow = {};
	int verdict;

	if (unlikely(host_endpoint())) {
		verdict = host_guard(skb, &flow, EGRESS);
		if (verdict != TC_ACT_OK)
			return finish(skb, &flow, verdict);
		flow = (struct flow){};
	}
	return finish(skb, &flow, from_host(skb, &flow));
}

SEC("tc")
int hive_to_pod(struct __sk_buff *skb)
{
	struct flow flow = {};

	return finish(skb, &flow, to_container(skb, &flow));
}

/* What reaches the host here was evaluated where it came from. */
SEC("tc")
int hive_to_host(struct __sk_buff *skb)
{
	struct flow flow = {};

	return finish(skb, &flow, host_receives(skb, &flow));
}

SEC("tc")
int hive_from_vxlan(struct __sk_buff *skb)
{
	struct flow flow = {};

	return finish(skb, &flow, from_overlay(skb, &flow));
}

SEC("tc")
int hive_to_vxlan(struct __sk_buff *skb)
{
	return to_overlay(skb);
}

SEC("tc")
int hive_from_device(struct __sk_buff *skb)
{
	return device_in(skb);
}

SEC("tc")
int hive_to_device(struct __sk_buff *skb)
{
	return device_out(skb);
}

char _license[] SEC("license") = "Dual BSD/GPL";
