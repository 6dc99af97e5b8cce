/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* context_t: struct __sk_buff of tc programs, or struct xdp_md of XDP programs.
 *
 * Common code uses context_t and the packet_*() functions, and is compiled for either: CONTEXT_XDP selects XDP.
 */
#pragma once

#ifdef CONTEXT_XDP
#include "context/xdp.h"
#else
#include "context/skb.h"
#endif

#include "context/link.h"
