// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#define REDIRECTED 7 /* TC_ACT_REDIRECT */
#include "recorded.h"

#define CONTEXT_L3
#include "context/skb.h"

/* To BPF_PROG_TEST_RUN every packet begins with an Ethernet header: here its own version tells what it is. */
static __always_inline __be16 version_protocol(const struct __sk_buff *skb)
{
	__u8 first = 0;

	bpf_skb_load_bytes(skb, 0, &first, sizeof(first));
	return first >> 4 == 6 ? bpf_htons(0x86dd) : bpf_htons(0x0800);
}

#define l3_protocol(skb) version_protocol(skb)
#include "l3.c"
