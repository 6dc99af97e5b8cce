/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* ARP replies for addresses of services that this node announces (L2 announcements).
 *
 * One node announces each service. Another takes over when the agent no longer renews its lease; so there are no
 * replies once the agent's last heartbeat is older than the lease duration.
 */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/arp.h"
#include "netdev/maps.h"

/* cilium_l2_responder_v4: an address, and the device that replies for it. */
struct l2_responder_key {
	__be32 ipv4;
	__u32 ifindex;
};

struct l2_responder_value {
	__u64 responses_sent;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct l2_responder_key);
	__type(value, struct l2_responder_value);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} cilium_l2_responder_v4 SEC(".maps");

/* cilium_runtime_config: values that change at run time. */
#define RUNTIME_AGENT_LIVENESS 1 /* time of the agent's last heartbeat, in nanoseconds of CLOCK_MONOTONIC */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, 256);
} cilium_runtime_config SEC(".maps");

_Static_assert(sizeof(struct l2_responder_key) == 8, "cilium_l2_responder_v4");
_Static_assert(sizeof(struct l2_responder_value) == 8, "cilium_l2_responder_v4");

static __always_inline bool agent_is_alive(__u32 milliseconds)
{
	__u32 index = RUNTIME_AGENT_LIVENESS;
	__u64 *last = bpf_map_lookup_elem(&cilium_runtime_config, &index);

	return last && bpf_ktime_get_ns() - *last <= (__u64)milliseconds * 1000000;
}

/* Reply to an ARP request for an announced address; returns the verdict. Other ARP packets pass to the stack. */
static __always_inline int answer_arp(struct __sk_buff *skb, const struct device_config *device)
{
	struct l2_responder_value *held;
	struct l2_responder_key key = {
		.ifindex = skb->ifindex,
	};
	struct arp_ipv4 *packet;
	mac_t mac = device->mac;

	if (!device->announces || !agent_is_alive(device->announces))
		return TC_ACT_OK;
	if (!packet_pull(skb, sizeof(*packet)))
		return TC_ACT_OK;
	packet = packet_start(skb);
	if ((void *)(packet + 1) > packet_end(skb))
		return TC_ACT_OK;
	if (!arp_is_request(packet))
		return TC_ACT_OK;
	if (!mac_is_broadcast(packet->eth.destination) && !mac_equals(packet->eth.destination, mac))
		return TC_ACT_OK;
	key.ipv4 = packet->target_ip[0] | (__u32)packet->target_ip[1] << 16;
	if (ip_equals(packet->sender_ip, key.ipv4)) /* an announcement of another node (RFC 5227), not a request */
		return TC_ACT_OK;
	held = bpf_map_lookup_elem(&cilium_l2_responder_v4, &key);
	if (!held)
		return TC_ACT_OK;
	arp_reply(packet, mac);
	__sync_fetch_and_add(&held->responses_sent, 1);
	return bpf_redirect(skb->ifindex, 0);
}
