/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* skb->mark: passes the sender to programs that see the packet again after the host's stack.
 *
 * Bits 8 to 11 are the kind of mark, 16 to 31 and 0 to 7 hold an identity. A pod cannot set it: the mark is cleared
 * when a packet leaves a network namespace. The program that reads an identity from it clears it.
 */
#pragma once

#include "lib/bpf.h"

#define MARK_KIND 0x0f00
#define MARK_TRANSLATED 0x0100 /* the stack (kube-proxy, for example) did DNAT */
#define MARK_TO_PROXY 0x0200 /* for a local proxy; its port is in bits 16 to 31 */
#define MARK_PORT_CHANGED 0x01 /* with MARK_TO_PROXY: see redirect_to_host_ingress() */
#define MARK_SNAT_DONE 0x0300 /* SNAT is done: not again at the next device */
#define MARK_OVERLAY 0x0400 /* encapsulated: no SNAT at egress */
#define MARK_INGRESS_PROXY 0x0a00 /* from an L7 proxy that enforced ingress policy */
#define MARK_EGRESS_PROXY 0x0b00 /* from a proxy: for a pod, with its identity; or to a pod, without */
#define MARK_DECRYPT 0x0d00 /* ESP from the node in bits 16 to 31, to be decrypted; or decrypted, without a node */
#define MARK_ENCRYPT 0x0e00 /* to be encrypted for that node with the key in bits 12 to 15; or encrypted */
#define MARK_KEY_AT 12
#define MARK_NODE_AT 16
#define MARK_IDENTITY 0x0f00
#define MARK_IDENTITY_BITS 24 /* larger identities are node-local and do not fit */

/* Assembly, because the verifier rejects a register that points to a context field at an offset. */
static __always_inline __u32 mark_read(const struct __sk_buff *skb)
{
	__u32 mark;

	asm volatile("%0 = *(u32 *)(%1 + %2)" : "=r"(mark) : "r"(skb), "i"(offsetof(struct __sk_buff, mark)));
	return mark;
}

static __always_inline void mark_write(struct __sk_buff *skb, __u32 mark)
{
	asm volatile("*(u32 *)(%0 + %2) = %1"
		     :
		     : "r"(skb), "r"(mark), "i"(offsetof(struct __sk_buff, mark))
		     : "memory");
}

static __always_inline void mark_identity(struct __sk_buff *skb, __u32 identity)
{
	if (likely(!(identity >> MARK_IDENTITY_BITS)))
		mark_write(skb, MARK_IDENTITY | identity << 16 | identity >> 16);
}

static __always_inline __u32 marked_identity(__u32 mark)
{
	return (mark & 0xff) << 16 | mark >> 16;
}
