/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The packet's mark: who sent it, for the programs that see it again behind the host's stack.
 *
 * Bits 8 to 11 say what the mark means, 16 to 31 and 0 to 7 hold an identity. A pod cannot set it: it does not
 * leave a network namespace. The program that reads an identity from it clears it.
 */
#pragma once

#include "lib/bpf.h"

#define MARK_KIND 0x0f00
#define MARK_TRANSLATED 0x0100 /* the stack's rules (of kube-proxy, say) have changed its destination */
#define MARK_TO_PROXY 0x0200 /* for a proxy of this node; its port is in bits 16 to 31 */
#define MARK_PORT_CHANGED 0x01 /* with MARK_TO_PROXY: see proxied_again() */
#define MARK_SNAT_DONE 0x0300 /* translated: not once more, by the device below */
#define MARK_OVERLAY 0x0400 /* inside a tunnel: not to be translated on its way out */
#define MARK_INGRESS_PROXY 0x0a00 /* a layer 7 proxy has let it in */
#define MARK_EGRESS_PROXY 0x0b00 /* a proxy sends it: for a pod, with its identity, or to one, without */
#define MARK_DECRYPT 0x0d00 /* ESP of the node in bits 16 to 31, to be decrypted; or decrypted, with none */
#define MARK_ENCRYPT 0x0e00 /* to be encrypted for that node with the key in bits 12 to 15; or encrypted */
#define MARK_KEY_AT 12
#define MARK_NODE_AT 16
#define MARK_IDENTITY 0x0f00
#define MARK_IDENTITY_BITS 24 /* larger ones, which only this node knows, do not fit */

/* In assembly, so that the compiler does not keep the field's address: the verifier allows none within the context. */
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
