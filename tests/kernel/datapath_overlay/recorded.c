// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#define REDIRECTED 7 /* TC_ACT_REDIRECT */
#include "recorded.h"

static __always_inline __u32 told_in_driver(void)
{
	struct recorded *note = recorded();

	return note ? note->handed : 0;
}

/* A packet of BPF_PROG_TEST_RUN has nothing in front of it. */
#define device_handed device_handed_in_front
#include "netdev/brings.h"
#undef device_handed
#define device_handed(skb) told_in_driver()

#include "datapath.c"
