// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* The tc programs of a generation: packets of pods, from the host, from and to the tunnel, and at native devices.
 *
 * All pods share the programs; maps hold what differs between pods. Called by tail calls from dispatch.c.
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
	struct pod_state *pod_state = pod_state_begin();

	if (!pod_state)
		return TC_ACT_SHOT;
	skb->queue_mapping = 0; /* the pod's queue mapping does not apply to the host's devices */
	return finish(skb, &pod_state->flow, from_container(skb, pod_state));
}

SEC("tc")
int hive_from_host(struct __sk_buff *skb)
{
	struct flow flow = {};
	int verdict;

	if (unlikely(host_endpoint())) {
		verdict = host_firewall(skb, &flow, EGRESS);
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

/* Policy was enforced at the packet's source. */
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
