/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* For programs compiled with a tunnel and routes that a test can look into: what is asked of the kernel is noted in
 * hive_recorded, and where a packet came from, and where it is routed, is what the test has put there.
 * BPF_PROG_TEST_RUN has neither of its own. REDIRECTED is the verdict of a redirected packet.
 */
#pragma once

#include "lib/bpf.h"

struct recorded {
	__u32 known; /* there is a tunnel key to get */
	__u32 vni;
	__u32 remote;
	__u32 remote6[4]; /* all zero: the packets outside are of IPv4 */
	__u32 local6[4];
	__u32 ttl;
	__u32 size;
	__u32 flags;
	__u32 redirects;
	__u32 ifindex;
	__u32 redirect_flags;
	__u32 set; /* tunnel keys set */
	__s32 fib_answer; /* of routes: BPF_FIB_LKUP_RET_*, and what comes with it */
	__u32 fib_ifindex;
	__u8 fib_source[8];
	__u8 fib_destination[8];
	__u32 next_hop[4];
	__u32 handed; /* what the program in the driver has said of the packet */
	__u32 mtu; /* of the next hop; 0: whatever is sent */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct recorded);
	__uint(max_entries, 1);
} hive_recorded SEC(".maps");

static __always_inline struct recorded *recorded(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&hive_recorded, &zero);
}

static __always_inline long set_tunnel_key(void *ctx, struct bpf_tunnel_key *key, __u32 size, __u64 flags)
{
	struct recorded *note = recorded();

	asm volatile("" : : "r"(ctx)); /* see fib_lookup() */
	if (!note)
		return -1;
	note->set++;
	note->vni = key->tunnel_id;
	if (flags & BPF_F_TUNINFO_IPV6) {
		__builtin_memcpy(note->remote6, key->remote_ipv6, sizeof(note->remote6));
		__builtin_memcpy(note->local6, key->local_ipv6, sizeof(note->local6));
	} else {
		note->remote = key->remote_ipv4;
	}
	note->ttl = key->tunnel_ttl;
	note->size = size;
	note->flags = flags;
	return 0;
}

/* As bpf_skb_get_tunnel_key(): it answers about the family that it is asked about (bpf-helpers(7)). */
static __always_inline long get_tunnel_key(void *ctx, struct bpf_tunnel_key *key, __u64 flags)
{
	struct recorded *note = recorded();

	asm volatile("" : : "r"(ctx)); /* see fib_lookup() */
	if (!note || !note->known)
		return -22;
	if (flags & BPF_F_TUNINFO_IPV6 ? note->remote : !note->remote)
		return -71;
	key->tunnel_id = note->vni;
	if (note->remote)
		key->remote_ipv4 = note->remote;
	else
		__builtin_memcpy(key->remote_ipv6, note->remote6, sizeof(note->remote6));
	return 0;
}

static __always_inline long redirect(__u32 ifindex, __u64 flags)
{
	struct recorded *note = recorded();

	if (note) {
		note->redirects++;
		note->ifindex = ifindex;
		note->redirect_flags = flags;
	}
	return REDIRECTED;
}

/* It reads the context as the kernel does: clang 17 hands no function what nothing in it reads, and the verifier expects
 * the context of each.
 */
static __always_inline long fib_lookup(void *ctx, struct bpf_fib_lookup *fib)
{
	struct recorded *note = recorded();

	asm volatile("" : : "r"(ctx));
	if (!note)
		return -1;
	fib->ifindex = note->fib_ifindex;
	if (note->mtu && fib->tot_len > note->mtu) {
		fib->mtu_result = note->mtu;
		return BPF_FIB_LKUP_RET_FRAG_NEEDED;
	}
	__builtin_memcpy(fib->smac, note->fib_source, sizeof(fib->smac));
	__builtin_memcpy(fib->dmac, note->fib_destination, sizeof(fib->dmac));
	__builtin_memcpy(fib->ipv6_dst, note->next_hop, sizeof(fib->ipv6_dst));
	return note->fib_answer;
}

#define bpf_fib_lookup(skb, fib, size, flags) fib_lookup(skb, fib)
#define bpf_skb_set_tunnel_key(skb, key, size, flags) set_tunnel_key(skb, key, size, flags)
#define bpf_skb_get_tunnel_key(skb, key, size, flags) get_tunnel_key(skb, key, flags)
#define bpf_redirect(ifindex, flags) redirect(ifindex, flags)
