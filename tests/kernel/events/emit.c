/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Outputs each packet it is run on as an event: for the tests of the reader. */
#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

struct {
	__uint(type, BPF_MAP_TYPE_PERF_EVENT_ARRAY);
	__uint(key_size, 4);
	__uint(value_size, 4);
} cilium_events SEC(".maps");

SEC("tc")
int emit(struct __sk_buff *skb)
{
	__u64 whole = BPF_F_CURRENT_CPU | (__u64)skb->len << 32;
	__u64 nothing = 0;

	return bpf_perf_event_output(skb, &cilium_events, whole, &nothing, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";
