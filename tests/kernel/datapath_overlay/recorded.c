// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#define REDIRECTED 7 /* TC_ACT_REDIRECT */
#include "recorded.h"

static __always_inline __u32 handover_of_test(void)
{
	struct recorded *note = recorded();

	return note ? note->handed : 0;
}

/* A packet of BPF_PROG_TEST_RUN has nothing in front of it. */
#define xdp_handover xdp_handover_in_front
#include "netdev/tc_ingress.h"
#undef xdp_handover
#define xdp_handover(skb) handover_of_test()

#include "datapath.c"
