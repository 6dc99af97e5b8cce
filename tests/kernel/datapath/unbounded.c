// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#include "lib/config.h"

/* A program that the verifier takes. */
#define PROGRAM(name)                                                                                              \
	SEC("tc") int name(struct __sk_buff *skb)                                                                  \
	{                                                                                                          \
		return skb->len && config.magic ? 0 : 2;                                                           \
	}

PROGRAM(hive_to_pod)
PROGRAM(hive_from_host)
PROGRAM(hive_to_host)
PROGRAM(hive_from_device)
PROGRAM(hive_to_device)
PROGRAM(hive_from_vxlan)
PROGRAM(hive_to_vxlan)

SEC("tc") int hive_from_pod(struct __sk_buff *skb)
{
	return config.magic ? *(__u32 *)(long)skb->data : 0; /* there may be less than that */
}

char _license[] SEC("license") = "Dual BSD/GPL";
