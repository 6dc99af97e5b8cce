/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Redirects of pods' packets to local proxies: assigns them to the proxy's socket (bpf_sk_assign).
 *
 * A fwmark rule makes the host's stack deliver the packet locally, and the proxy's socket is transparent. If no proxy
 * listens there is no socket, and the packet is forwarded without it.
 */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/events.h"
#include "lib/mark.h"
#include "lib/metrics.h"
#include "lib/packet.h"
#include "lib/rewrite.h"

#define LOOPBACK 1 /* 127.0.0.1, ::1 */
#define LOOPBACK_CHANGED 2 /* 127.0.0.2, ::2: Envoy marks replies from there, and nftables rules restore the port */
#define LOOPBACK_NETWORK 0x7f000000
#define CHANGED_PORT bpf_htons(0x8000)

static __always_inline __u32 proxy_tuple_size(const struct bpf_sock_tuple *tuple, __u32 family)
{
	return family == FAMILY_IPV4 ? sizeof(tuple->ipv4) : sizeof(tuple->ipv6);
}

/* Fill the packet's tuple, which identifies an accepted connection of the proxy. */
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

/* Fill the proxy's listening address: a loopback address, which is not reachable from outside. */
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

/* Return whether the socket is an established or pending connection: not closed, and not a listener. */
static __always_inline bool proxy_is_connection(const struct bpf_sock *socket)
{
	return socket->state != BPF_TCP_LISTEN && socket->state != BPF_TCP_TIME_WAIT;
}

/* Assembly, because the verifier rejects a register that points to a socket field at an offset. */
#define SOCKET_WORD(socket, field)                                                                                 \
	({                                                                                                         \
		__u32 word;                                                                                        \
		asm volatile("%0 = *(u32 *)(%1 + %2)"                                                              \
			     : "=r"(word)                                                                          \
			     : "r"(socket), "i"(offsetof(struct bpf_sock, field)));                                \
		word;                                                                                              \
	})

/* Return whether the socket is bound to the packet's destination: not a wildcard socket of the node. */
static __always_inline bool proxy_is_bound_to(const struct bpf_sock *socket, const struct flow *flow, __u32 family)
{
	if (family == FAMILY_IPV4)
		return SOCKET_WORD(socket, src_ip4) == flow->daddr.words[0];
	return SOCKET_WORD(socket, src_ip6[0]) == flow->daddr.words[0] &&
	       SOCKET_WORD(socket, src_ip6[1]) == flow->daddr.words[1] &&
	       SOCKET_WORD(socket, src_ip6[2]) == flow->daddr.words[2] &&
	       SOCKET_WORD(socket, src_ip6[3]) == flow->daddr.words[3];
}

/* Look up the socket with which a proxy connected from the address of the pod that the packet is for, or NULL. The
 * caller releases it.
 */
static __always_inline struct bpf_sock *proxy_lookup_client_socket(struct __sk_buff *skb, const struct flow *flow,
								   __u32 family)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *socket;

	proxy_fill_flow(&tuple, flow, family);
	/* Checked separately, because the verifier treats them as different types. */
	if (flow->protocol == IPPROTO_UDP) {
		socket = bpf_sk_lookup_udp(skb, &tuple, proxy_tuple_size(&tuple, family), BPF_F_CURRENT_NETNS, 0);
		if (!socket || proxy_is_bound_to(socket, flow, family))
			return socket;
	} else if (flow->protocol == IPPROTO_TCP) {
		socket = bpf_skc_lookup_tcp(skb, &tuple, proxy_tuple_size(&tuple, family), BPF_F_CURRENT_NETNS, 0);
		if (!socket || proxy_is_connection(socket))
			return socket;
	} else {
		return NULL;
	}
	bpf_sk_release(socket);
	return NULL;
}

/* Fill the reply tuple of an ICMP error's embedded packet; false if its source is not the error's destination. */
static __always_inline bool proxy_fill_embedded(struct bpf_sock_tuple *tuple, struct __sk_buff *skb,
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

/* Return whether the packet is an ICMP error about a packet that a proxy sent with the destination's address: then it
 * is passed to the stack, which finds the proxy's socket (above all for "packet too big").
 */
VERIFIED_ALONE is_error_for_proxy(struct __sk_buff *skb, const struct flow *flow, __u32 family)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *socket;
	bool has_valid_verdict;

	if (!flow || !proxy_fill_embedded(&tuple, skb, flow, family))
		return false;
	if (unlikely(flow->dnat) &&
	    !flow->to_proxy_client) /* its port is not changed yet, see proxy_change_port() */
		*(family == FAMILY_IPV4 ? &tuple.ipv4.sport : &tuple.ipv6.sport) ^= CHANGED_PORT;
	socket = bpf_skc_lookup_tcp(skb, &tuple, proxy_tuple_size(&tuple, family), BPF_F_CURRENT_NETNS, 0);
	if (!socket)
		return false;
	has_valid_verdict = proxy_is_connection(socket);
	bpf_sk_release(socket);
	return has_valid_verdict;
}

/* Return whether a proxy has a socket for this reply of a redirected flow. Otherwise it is for the pod. */
VERIFIED_ALONE proxy_has_socket(struct __sk_buff *skb, const struct flow *flow, __u32 family)
{
	struct bpf_sock *socket;

	if (!flow)
		return false;
	socket = proxy_lookup_client_socket(skb, flow, family);
	if (!socket)
		return false;
	bpf_sk_release(socket);
	return true;
}

/* Assign the reply to the proxy's socket; false if there is none. */
VERIFIED_ALONE proxy_assign_reply(struct __sk_buff *skb, const struct flow *flow, __u32 family)
{
	struct bpf_sock *socket;
	int refused;

	if (!flow)
		return false;
	socket = proxy_lookup_client_socket(skb, flow, family);
	if (!socket)
		return false;
	refused = bpf_sk_assign(skb, socket, 0);
	bpf_sk_release(socket);
	return !refused;
}

/* Assign the packet to the proxy's connection, or its listener on `flow->proxy_port`; false if there is none. */
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
		if (socket && !proxy_is_connection(socket)) {
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

/* Return whether the packet must be passed to a proxy. */
static __always_inline bool is_for_proxy(const struct flow *flow)
{
	return unlikely(flow->proxy_port || flow->to_proxy_client);
}

/* Assign the packet to the proxy's socket and mark it for local delivery; false if there is no socket. */
static __always_inline bool proxy_assign_and_mark(struct __sk_buff *skb, const struct flow *flow, __u8 family)
{
	if (unlikely(flow->related) ? !is_error_for_proxy(skb, flow, family)
	    : flow->to_proxy_client ? !proxy_assign_reply(skb, flow, family)
				    : !proxy_assign(skb, flow, family))
		return false;
	mark_for_proxy(skb, flow);
	return true;
}

/* Count and trace a packet that is passed to a proxy; returns the verdict. */
static __always_inline int pass_to_proxy(struct __sk_buff *skb, const struct flow *flow, enum direction direction,
					 __u8 status, __u8 family)
{
	count(skb, REASON_FORWARDED, direction);
	if (unlikely(flow->report))
		send_trace_notify(skb, flow, TRACE_TO_PROXY, 0, TRACED(status, family));
	return TC_ACT_OK;
}

/* Pass a packet to a proxy at ingress of the host's stack; returns the verdict. */
static __always_inline int ingress_to_proxy(struct __sk_buff *skb, const struct flow *flow, __u8 status,
					    __u8 family)
{
	if (!proxy_assign_and_mark(skb, flow, family))
		return DROP(INGRESS, DROP_NO_PROXY);
	return pass_to_proxy(skb, flow, INGRESS, status, family);
}

/* Flip the top bit of the port at `offset` and update the checksum; false on failure. */
static __always_inline bool flip_port(struct __sk_buff *skb, __u32 offset, __u32 checksum)
{
	__be16 port, changed;

	if (bpf_skb_load_bytes(skb, offset, &port, sizeof(port)))
		return false;
	changed = port ^ CHANGED_PORT;
	return !bpf_l4_csum_replace(skb, checksum, port, changed, sizeof(port)) &&
	       !bpf_skb_store_bytes(skb, offset, &changed, sizeof(changed), 0);
}

/* Change the client's port; false on failure. conntrack already has the connection with its original destination, and
 * reverses the DNAT of replies. For the stack the proxy's connection must be another one: otherwise early demux would
 * find the proxy's socket before the packet is redirected here, and SO_ORIGINAL_DST would return the service's address.
 * nftables rules restore the port of replies (cells/proxy/envoy/translated.py). A client cannot have two connections at
 * a time with ports that differ only in this bit, one to the service and one to the pod.
 */
static __always_inline bool proxy_change_port(struct __sk_buff *skb, const struct flow *flow)
{
	__u32 quoted = flow->l4 + sizeof(struct icmphdr);
	__u8 first;

	if (flow->later_fragment)
		return false;
	if (unlikely(flow->related)) { /* about a reply of the proxy to the changed port */
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

/* Return whether a packet from the stack to a pod must be passed to a proxy: by policy, or as an ICMP error about a
 * translated connection.
 */
static __always_inline bool must_pass_to_proxy(struct __sk_buff *skb, struct flow *flow, __u8 family)
{
	if (unlikely(flow->related && flow->dnat) && is_error_for_proxy(skb, flow, family))
		flow->to_proxy_client = true;
	return is_for_proxy(flow);
}

/* Redirect a packet for a proxy to ingress of cilium_net (see host_receives()): at egress of the stack, or before
 * another plugin's bridge, it cannot be assigned to a socket. Returns the verdict.
 */
static __always_inline int redirect_to_host_ingress(struct __sk_buff *skb, struct flow *flow)
{
	const struct node_config *node = node_facts();
	struct ethernet *eth;

	flow->dnat = unlikely(flow->dnat) && proxy_change_port(skb, flow);
	eth = packet_eth(skb);
	if (!node || !eth)
		return DROP(INGRESS, DROP_NO_CONFIG);
	mark_for_proxy(skb, flow);
	mac_write(eth->destination, node->net_mac);
	return bpf_redirect(node->net_ifindex, BPF_F_INGRESS);
}
