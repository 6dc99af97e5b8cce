// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* Dispatchers: the programs attached to interfaces, with Cilium's names, which tools expect.
 *
 * Each tail-calls the active program from its slot in a map. So an upgrade replaces map entries, not attachments;
 * dispatchers are the same in all generations.
 */
#include <linux/pkt_cls.h>

#include "lib/metrics.h"

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, ENTRIES);
} hive_entry SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, L3_ENTRIES);
} hive_l3_entry SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 1);
} hive_xdp_entry SEC(".maps");

/* Ingress of a pod's host-side link: packets that the pod sends. Drops without a program. */
SEC("tc")
int cil_from_container(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &hive_entry, ENTRY_FROM_CONTAINER);
	count(skb, DROP_MISSED_TAIL_CALL, EGRESS);
	return TC_ACT_SHOT;
}

/* Egress of a host-side link that another plugin made: packets to the pod. Drops without a program. */
SEC("tc")
int cil_to_container(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &hive_entry, ENTRY_TO_CONTAINER);
	count(skb, DROP_MISSED_TAIL_CALL, INGRESS);
	return TC_ACT_SHOT;
}

/* Egress of cilium_host: the host's packets to pods. Passes without a program, so that the host keeps its network. */
SEC("tc")
int cil_from_host(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &hive_entry, ENTRY_FROM_HOST);
	return TC_ACT_OK;
}

/* Ingress of cilium_host and cilium_net: packets to the host. */
SEC("tc")
int cil_to_host(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &hive_entry, ENTRY_TO_HOST);
	return TC_ACT_OK;
}

/* Ingress of the tunnel device: packets from other nodes. Drops without a program: no sender could be trusted. */
SEC("tc")
int cil_from_overlay(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &hive_entry, ENTRY_FROM_OVERLAY);
	count(skb, DROP_MISSED_TAIL_CALL, INGRESS);
	return TC_ACT_SHOT;
}

/* Egress of the tunnel device. */
SEC("tc")
int cil_to_overlay(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &hive_entry, ENTRY_TO_OVERLAY);
	return TC_ACT_OK;
}

/* Ingress and egress of a native device. Passes without a program, so that the host keeps its network. */
SEC("tc")
int cil_from_netdev(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &hive_entry, ENTRY_FROM_NETDEV);
	return TC_ACT_OK;
}

SEC("tc")
int cil_to_netdev(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &hive_entry, ENTRY_TO_NETDEV);
	return TC_ACT_OK;
}

/* Ingress and egress of a native device without Ethernet headers. */
SEC("tc")
int cil_from_netdev_l3(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &hive_l3_entry, L3_ENTRY_FROM_NETDEV);
	return TC_ACT_OK;
}

SEC("tc")
int cil_to_netdev_l3(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &hive_l3_entry, L3_ENTRY_TO_NETDEV);
	return TC_ACT_OK;
}

/* XDP of a native device. Without a program, packets pass to cil_from_netdev. */
SEC("xdp")
int cil_xdp_entry(struct xdp_md *ctx)
{
	bpf_tail_call(ctx, &hive_xdp_entry, 0);
	return XDP_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
