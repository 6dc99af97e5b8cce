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
#include "overlay/egress.h"
#include "overlay/ingress.h"
#include "netdev/egress.h"
#include "netdev/ingress.h"
#include "pod/egress.h"
#include "pod/ingress.h"

/* Turn a drop into its count, its event and the action. */
static __always_inline int finish(struct __sk_buff *skb, const struct flow *flow, int verdict)
{
	if (likely(!DROPPED(verdict)))
		return verdict;
	count(skb, DROP_REASON(verdict), DROP_DIRECTION(verdict));
	tell_drop(skb, flow, DROP_REASON(verdict), DROP_DIRECTION(verdict));
	return TC_ACT_SHOT;
}

SEC("tc")
int hive_from_pod(struct __sk_buff *skb)
{
	struct flow flow = {};

	skb->queue_mapping = 0; /* the pod's choice of queue means nothing to the host's devices */
	return finish(skb, &flow, pod_sends(skb, &flow));
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
	return finish(skb, &flow, host_sends(skb, &flow));
}

SEC("tc")
int hive_to_pod(struct __sk_buff *skb)
{
	struct flow flow = {};

	return finish(skb, &flow, pod_gets(skb, &flow));
}

/* What reaches the host here has been judged where it came from. */
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

	return finish(skb, &flow, overlay_brings(skb, &flow));
}

SEC("tc")
int hive_to_vxlan(struct __sk_buff *skb)
{
	return overlay_takes(skb);
}

SEC("tc")
int hive_from_device(struct __sk_buff *skb)
{
	struct flow flow = {};
	int verdict = device_gets(skb, &flow);

	if (verdict == TC_ACT_OK && unlikely(host_endpoint()))
		verdict = host_guard(skb, &flow, INGRESS);
	return finish(skb, &flow, verdict);
}

SEC("tc")
int hive_to_device(struct __sk_buff *skb)
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

char _license[] SEC("license") = "Dual BSD/GPL";
