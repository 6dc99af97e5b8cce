/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Metadata by which the XDP program passes a packet to the tc program that it translated but cannot send. The first bit
 * is Cilium's.
 */
#pragma once

#define HANDED_LOCAL 1 /* for a local backend */
#define HANDED_FORWARD 2 /* for a remote backend */
#define HANDED_RETURN 4 /* a reply to an external client */
#define HANDED_DONE 8 /* a reply to this node or its pods */
#define HANDED_DSR 16 /* for a DSR backend; the service's reverse NAT index is in bits 16 to 31 */
