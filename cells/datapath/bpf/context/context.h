/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What a program sees a packet through: a socket buffer of the traffic control's, or in a device's driver XDP's own.
 *
 * What both do is written once, in terms of context_t and the functions here, and compiled for either: the file that is
 * compiled defines CONTEXT_XDP, or does not.
 */
#pragma once

#ifdef CONTEXT_XDP
#include "context/xdp.h"
#else
#include "context/skb.h"
#endif

#include "context/link.h"
