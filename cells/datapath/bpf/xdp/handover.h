/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The word in front of a packet by which the XDP program hands it over to the tc program: it has translated the packet, and
 * cannot send it itself. The first bit is Cilium's.
 */
#pragma once

#define HANDED_LOCAL 1 /* it is for a backend on this node */
#define HANDED_FORWARD 2 /* for one on another node */
#define HANDED_RETURN 4 /* an answer, for a client outside */
#define HANDED_DONE 8 /* an answer for this node or its pods */
#define HANDED_DSR 16 /* for a backend that answers itself; the service's reverse NAT index is in bits 16 to 31 */
