// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* For the far end of a veth pair: only with a program of its own it takes what the near one's driver sends. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

SEC("xdp")
int wire(struct xdp_md *context)
{
	(void)context;
	return XDP_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
