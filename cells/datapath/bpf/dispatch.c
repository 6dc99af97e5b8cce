// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* What is attached to interfaces, under the names tools look for.
 *
 * Each jumps to the program of the generation in force. So an upgrade replaces entries of one map
 * and touches no interface; these programs stay the same over generations.
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

/* Ingress of the host's end of a pod's link: the pod sends. Never open without its program. */
SEC("tc")
int cil_from_container(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &hive_entry, ENTRY_FROM_CONTAINER);
	count(skb, DROP_MISSED_TAIL_CALL, EGRESS);
	return TC_ACT_SHOT;
}

/* Egress of the host's end of a link that another plugin made: the pod is sent to. Never open either. */
SEC("tc")
int cil_to_container(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &hive_entry, ENTRY_TO_CONTAINER);
	count(skb, DROP_MISSED_TAIL_CALL, INGRESS);
	return TC_ACT_SHOT;
}

/* Egress of cilium_host: the host sends to pods. Without its program the host keeps its network. */
SEC("tc")
int cil_from_host(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &hive_entry, ENTRY_FROM_HOST);
	return TC_ACT_OK;
}

/* Ingress of cilium_host and cilium_net: something reaches the host. */
SEC("tc")
int cil_to_host(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &hive_entry, ENTRY_TO_HOST);
	return TC_ACT_OK;
}

/* Ingress of the tunnel's device: another node sends. Without its program no sender is trusted. */
SEC("tc")
int cil_from_overlay(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &hive_entry, ENTRY_FROM_OVERLAY);
	count(skb, DROP_MISSED_TAIL_CALL, INGRESS);
	return TC_ACT_SHOT;
}

/* Egress of the tunnel's device. */
SEC("tc")
int cil_to_overlay(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &hive_entry, ENTRY_TO_OVERLAY);
	return TC_ACT_OK;
}

/* Ingress and egress of a native device. Without its program the host keeps its network. */
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

/* The same of one without Ethernet headers. */
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

/* A native device's driver. Without its program packets go on to the one above. */
SEC("xdp")
int cil_xdp_entry(struct xdp_md *ctx)
{
	bpf_tail_call(ctx, &hive_xdp_entry, 0);
	return XDP_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
