/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Hands a pod's packet to a proxy of this node: to its socket, which takes it in place of the destination.
 *
 * The host's stack must take the packet for its own: a routing rule by the mark sees to that, and the proxy's socket
 * is transparent. While no proxy listens there is no socket, and the packet goes where it was sent.
 */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/events.h"
#include "lib/mark.h"
#include "lib/metrics.h"
#include "lib/packet.h"
#include "lib/rewrite.h"

#define LOOPBACK 1 /* 127.0.0.1, ::1 */
#define LOOPBACK_CHANGED 2 /* 127.0.0.2, ::2: Envoy marks its answers there, rules change the port back */
#define LOOPBACK_NETWORK 0x7f000000
#define CHANGED_PORT bpf_htons(0x8000)

static __always_inline __u32 proxy_tuple_size(const struct bpf_sock_tuple *tuple, __u32 family)
{
	return family == FAMILY_IPV4 ? sizeof(tuple->ipv4) : sizeof(tuple->ipv6);
}

/* Source and destination of the packet: what a connection that the proxy has accepted is known by. */
static __always_inline void proxy_fill_flow(struct bpf_sock_tuple *tuple, const struct flow *flow, __u32 family)
{
	if (family == FAMILY_IPV4) {
		tuple->ipv4.saddr = flow->saddr.words[0];
		tuple->ipv4.daddr = flow->daddr.words[0];
		tuple->ipv4.sport = flow->sport;
		tuple->ipv4.dport = flow->dport;
		return;
	}
	for (int i = 0; i < 4; i++) {
		tuple->ipv6.saddr[i] = flow->saddr.words[i];
		tuple->ipv6.daddr[i] = flow->daddr.words[i];
	}
	tuple->ipv6.sport = flow->sport;
	tuple->ipv6.dport = flow->dport;
}

/* Where the proxy listens: a loopback address, which is unreachable from outside. */
static __always_inline void proxy_fill_listener(struct bpf_sock_tuple *tuple, const struct flow *flow, __u32 family)
{
	__u32 host = flow->dnat ? LOOPBACK_CHANGED : LOOPBACK;

	if (family == FAMILY_IPV4) {
		tuple->ipv4.daddr = bpf_htonl(LOOPBACK_NETWORK | host);
		tuple->ipv4.dport = flow->proxy_port;
		return;
	}
	tuple->ipv6.daddr[3] = bpf_htonl(host);
	tuple->ipv6.dport = flow->proxy_port;
}

/* A connection that the proxy has accepted, or is accepting; not one that has ended, nor who else listens there. */
static __always_inline bool proxy_goes_on(const struct bpf_sock *socket)
{
	return socket->state != BPF_TCP_LISTEN && socket->state != BPF_TCP_TIME_WAIT;
}

/* In assembly, so that the compiler does not keep the field's address: the verifier allows none within a socket. */
#define SOCKET_WORD(socket, field)                                                                                 \
	({                                                                                                         \
		__u32 word;                                                                                        \
		asm volatile("%0 = *(u32 *)(%1 + %2)"                                                              \
			     : "=r"(word)                                                                          \
			     : "r"(socket), "i"(offsetof(struct bpf_sock, field)));                                \
		word;                                                                                              \
	})

/* Whether the socket has the address that the packet is for: not a socket of the node's that takes any. */
static __always_inline bool proxy_is_at(const struct bpf_sock *socket, const struct flow *flow, __u32 family)
{
	if (family == FAMILY_IPV4)
		return SOCKET_WORD(socket, src_ip4) == flow->daddr.words[0];
	return SOCKET_WORD(socket, src_ip6[0]) == flow->daddr.words[0] &&
	       SOCKET_WORD(socket, src_ip6[1]) == flow->daddr.words[1] &&
	       SOCKET_WORD(socket, src_ip6[2]) == flow->daddr.words[2] &&
	       SOCKET_WORD(socket, src_ip6[3]) == flow->daddr.words[3];
}

/* The socket by which a proxy has asked in the name of the pod that the packet is for; to be released. NULL: none. */
static __always_inline struct bpf_sock *proxy_asker(struct __sk_buff *skb, const struct flow *flow, __u32 family)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *socket;

	proxy_fill_flow(&tuple, flow, family);
	/* Each is looked at where it was found: to the verifier they are of different kinds. */
	if (flow->protocol == IPPROTO_UDP) {
		socket = bpf_sk_lookup_udp(skb, &tuple, proxy_tuple_size(&tuple, family), BPF_F_CURRENT_NETNS, 0);
		if (!socket || proxy_is_at(socket, flow, family))
			return socket;
	} else if (flow->protocol == IPPROTO_TCP) {
		socket = bpf_skc_lookup_tcp(skb, &tuple, proxy_tuple_size(&tuple, family), BPF_F_CURRENT_NETNS, 0);
		if (!socket || proxy_goes_on(socket))
			return socket;
	} else {
		return NULL;
	}
	bpf_sk_release(socket);
	return NULL;
}

/* The connection that an ICMP error quotes, as its answers have it; false if it is not one of the error's destination. */
static __always_inline bool proxy_fill_quoted(struct bpf_sock_tuple *tuple, struct __sk_buff *skb,
					      const struct flow *flow, __u32 family)
{
	__u32 offset = flow->l4 + sizeof(struct icmphdr);
	__be16 ports[2];

	if (family == FAMILY_IPV4) {
		struct iphdr quoted;

		if (bpf_skb_load_bytes(skb, offset, &quoted, sizeof(quoted)) || quoted.protocol != IPPROTO_TCP ||
		    quoted.saddr != flow->daddr.words[0] ||
		    bpf_skb_load_bytes(skb, offset + quoted.ihl * 4, ports, sizeof(ports)))
			return false;
		tuple->ipv4.saddr = quoted.daddr;
		tuple->ipv4.daddr = quoted.saddr;
		tuple->ipv4.sport = ports[1];
		tuple->ipv4.dport = ports[0];
	} else {
		struct ipv6hdr quoted;

		if (bpf_skb_load_bytes(skb, offset, &quoted, sizeof(quoted)) || quoted.nexthdr != IPPROTO_TCP ||
		    bpf_skb_load_bytes(skb, offset + sizeof(quoted), ports, sizeof(ports)))
			return false;
		for (int i = 0; i < 4; i++) {
			tuple->ipv6.saddr[i] = quoted.daddr.in6_u.u6_addr32[i];
			tuple->ipv6.daddr[i] = quoted.saddr.in6_u.u6_addr32[i];
			if (tuple->ipv6.daddr[i] != flow->daddr.words[i])
				return false;
		}
		tuple->ipv6.sport = ports[1];
		tuple->ipv6.dport = ports[0];
	}
	return true;
}

/* Whether the packet is an ICMP error about what a proxy has sent in its destination's name: then the stack, which
 * knows the proxy's socket, is to have it ("packet too big" above all).
 */
VERIFIED_ALONE proxy_erred(struct __sk_buff *skb, const struct flow *flow, __u32 family)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *socket;
	bool goes_on;

	if (!flow || !proxy_fill_quoted(&tuple, skb, flow, family))
		return false;
	if (unlikely(flow->dnat) && !flow->to_asker) /* not changed yet, see change_port() */
		*(family == FAMILY_IPV4 ? &tuple.ipv4.sport : &tuple.ipv6.sport) ^= CHANGED_PORT;
	socket = bpf_skc_lookup_tcp(skb, &tuple, proxy_tuple_size(&tuple, family), BPF_F_CURRENT_NETNS, 0);
	if (!socket)
		return false;
	goes_on = proxy_goes_on(socket);
	bpf_sk_release(socket);
	return goes_on;
}

/* Whether a proxy waits for the packet, which answers a flow that was given to one. Else it is the pod's own. */
VERIFIED_ALONE proxy_waits(struct __sk_buff *skb, const struct flow *flow, __u32 family)
{
	struct bpf_sock *socket;

	if (!flow)
		return false;
	socket = proxy_asker(skb, flow, family);
	if (!socket)
		return false;
	bpf_sk_release(socket);
	return true;
}

/* The same, and the packet is that socket's now. */
VERIFIED_ALONE proxy_answer(struct __sk_buff *skb, const struct flow *flow, __u32 family)
{
	struct bpf_sock *socket;
	int refused;

	if (!flow)
		return false;
	socket = proxy_asker(skb, flow, family);
	if (!socket)
		return false;
	refused = bpf_sk_assign(skb, socket, 0);
	bpf_sk_release(socket);
	return !refused;
}

/* Whether the packet is the socket of the proxy's on `flow->proxy_port` now. */
VERIFIED_ALONE proxy_assign(struct __sk_buff *skb, const struct flow *flow, __u32 family)
{
	struct bpf_sock_tuple tuple = {}, listener = {};
	struct bpf_sock *socket = NULL;
	int refused = -1;

	if (!flow)
		return false;
	proxy_fill_listener(&listener, flow, family);
	if (flow->protocol == IPPROTO_UDP) {
		socket = bpf_sk_lookup_udp(skb, &listener, proxy_tuple_size(&listener, family), BPF_F_CURRENT_NETNS,
					   0);
	} else if (flow->protocol == IPPROTO_TCP) {
		proxy_fill_flow(&tuple, flow, family);
		socket = bpf_skc_lookup_tcp(skb, &tuple, proxy_tuple_size(&tuple, family), BPF_F_CURRENT_NETNS, 0);
		if (socket && !proxy_goes_on(socket)) {
			bpf_sk_release(socket);
			socket = NULL;
		}
		if (!socket)
			socket = bpf_skc_lookup_tcp(skb, &listener, proxy_tuple_size(&listener, family),
						    BPF_F_CURRENT_NETNS, 0);
	}
	if (!socket)
		return false;
	refused = bpf_sk_assign(skb, socket, 0);
	bpf_sk_release(socket);
	return !refused;
}

static __always_inline void mark_for_proxy(struct __sk_buff *skb, const struct flow *flow)
{
	mark_write(skb, MARK_TO_PROXY | (flow->dnat ? MARK_PORT_CHANGED : 0) | (__u32)flow->proxy_port << 16);
}

/* Whether a proxy is to have what has come for a pod. */
static __always_inline bool is_proxys(const struct flow *flow)
{
	return unlikely(flow->proxy_port || flow->to_asker);
}

/* Whether the proxy takes the packet. Then the stack is to have it. */
static __always_inline bool proxy_takes(struct __sk_buff *skb, const struct flow *flow, __u8 family)
{
	if (unlikely(flow->related) ? !proxy_erred(skb, flow, family)
	    : flow->to_asker	    ? !proxy_answer(skb, flow, family)
				    : !proxy_assign(skb, flow, family))
		return false;
	mark_for_proxy(skb, flow);
	return true;
}

/* Send the notification that the packet goes to a proxy; the verdict. */
static __always_inline int pass_to_proxy(struct __sk_buff *skb, const struct flow *flow, enum direction direction,
					 __u8 status, __u8 family)
{
	count(skb, REASON_FORWARDED, direction);
	if (unlikely(flow->report))
		send_trace_notify(skb, flow, TRACE_TO_PROXY, 0, TRACED(status, family));
	return TC_ACT_OK;
}

/* What a proxy is to take, by ingress policy or as the answer to it, where the packet enters the host's stack: the
 * verdict.
 */
static __always_inline int ingress_proxied(struct __sk_buff *skb, const struct flow *flow, __u8 status, __u8 family)
{
	if (!proxy_takes(skb, flow, family))
		return DROP(INGRESS, DROP_NO_PROXY);
	return pass_to_proxy(skb, flow, INGRESS, status, family);
}

/* Flip a bit of a port at `offset`, and have the checksum follow: whether that was possible. */
static __always_inline bool flip_port(struct __sk_buff *skb, __u32 offset, __u32 checksum)
{
	__be16 port, changed;

	if (bpf_skb_load_bytes(skb, offset, &port, sizeof(port)))
		return false;
	changed = port ^ CHANGED_PORT;
	return !bpf_l4_csum_replace(skb, checksum, port, changed, sizeof(port)) &&
	       !bpf_skb_store_bytes(skb, offset, &changed, sizeof(changed), 0);
}

/* Give the client's port another number: whether that was possible. conntrack knows the connection already, under the
 * address that the client has asked, and has the answers keep that; to the stack the proxy's connection must be another
 * one: else it finds the proxy's socket before it sends the packet on to here (early demux), and names the service's
 * address to the proxy that asks where the connection was for (SO_ORIGINAL_DST). Rules of nftables change the port back
 * in answers (cells/proxy/envoy/translated.py). A client with two ports that differ in this one bit, which also asks the pod by
 * its own address, cannot have both connections at a time.
 */
static __always_inline bool change_port(struct __sk_buff *skb, const struct flow *flow)
{
	__u32 quoted = flow->l4 + sizeof(struct icmphdr);
	__u8 first;

	if (flow->later_fragment)
		return false;
	if (unlikely(flow->related)) { /* about an answer of the proxy's, which was sent to that port */
		if (bpf_skb_load_bytes(skb, quoted, &first, sizeof(first)))
			return false;
		quoted += first >> 4 == 4 ? (first & 0xf) * 4 : sizeof(struct ipv6hdr);
		return flip_port(skb, quoted + offsetof(struct tcphdr, dest),
				 flow->l4 + offsetof(struct icmphdr, checksum));
	}
	if (flow->protocol != IPPROTO_TCP || !flow->proxy_port)
		return false;
	return flip_port(skb, flow->l4 + offsetof(struct tcphdr, source),
			 flow->l4 + offsetof(struct tcphdr, check));
}

/* Whether a proxy is to have what leaves the stack for a pod: by policy, or as an error about a translated connection. */
static __always_inline bool gets_proxied(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	if (unlikely(flow->related && flow->dnat) && proxy_erred(skb, flow, family))
		flow->to_asker = true;
	return is_proxys(flow);
}

/* The same where it leaves the stack, which has no sockets for it there, or where another plugin's bridge would have it:
 * it enters again by cilium_net, see host_receives(). The verdict.
 */
static __always_inline int proxied_again(struct __sk_buff *skb, struct flow *flow)
{
	const struct node_config *node = node_facts();
	struct ethernet *eth;

	flow->dnat = unlikely(flow->dnat) && change_port(skb, flow);
	eth = packet_eth(skb);
	if (!node || !eth)
		return DROP(INGRESS, DROP_NO_CONFIG);
	mark_for_proxy(skb, flow);
	mac_write(eth->destination, node->net_mac);
	return bpf_redirect(node->net_ifindex, BPF_F_INGRESS);
}
