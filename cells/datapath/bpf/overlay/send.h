/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Encapsulation: send packets to other nodes by tunnel, with the sender's identity. */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/events.h"
#include "lib/config.h"
#include "lib/metrics.h"
#include "overlay/encrypt.h"
#include "overlay/too_big.h"
#include "overlay/tunnel.h"

/* Set the tunnel key for the IPv6 node with the destination's pod CIDR; returns 0 or a negative errno. The outer
 * checksum is not zero: other nodes may drop such datagrams (RFC 8200, section 8.1). The map key and the tunnel key
 * share memory, because callers have little stack left.
 */
VERIFIED_ALONE tunnel_set_key6(struct __sk_buff *skb, const struct flow *flow, __u32 family)
{
	const struct tunnel_config *tunnel = tunnel_any();
	const struct address *node;
	union {
		struct tunnel_key range;
		struct bpf_tunnel_key end;
	} key;

	if (!flow || !tunnel)
		return -1;
	node = tunnel_lookup_node(&key.range, &flow->daddr, family, FAMILY_IPV6);
	if (!node)
		return -1;
	key.end = (struct bpf_tunnel_key){ .tunnel_id = tunnel_identity(flow->source_identity),
					   .tunnel_ttl = TUNNEL_TTL };
	__builtin_memcpy(key.end.remote_ipv6, node, sizeof(key.end.remote_ipv6));
	key.end.local_ipv6[0] = tunnel->source;
	__builtin_memcpy(&key.end.local_ipv6[1], tunnel->source_rest, sizeof(tunnel->source_rest));
	return bpf_skb_set_tunnel_key(skb, &key.end, tunnel->source ? sizeof(key.end) : TUNNEL_KEY_SIZE,
				      BPF_F_TUNINFO_IPV6);
}

/* Redirect the packet to the tunnel device; returns the verdict. `node` is in network byte order, or TUNNEL_IPV6_NODE.
 */
static __always_inline int tunnel_send(struct __sk_buff *skb, const struct flow *flow,
				       const struct tunnel_config *tunnel, __be32 node, __u8 status, __u8 family)
{
	struct bpf_tunnel_key key = {
		.tunnel_id = tunnel_identity(flow->source_identity),
		.remote_ipv4 = bpf_ntohl(node),
		.tunnel_ttl = TUNNEL_TTL,
		.local_ipv4 = bpf_ntohl(tunnel->source),
	};
	__u32 size = tunnel->source && !(tunnel->flags & TUNNEL_OVER_IPV6) ? sizeof(key) : TUNNEL_KEY_SIZE;

	if (packet_frame(skb))
		return DROP(EGRESS, DROP_WRITE_ERROR);
	if (node == TUNNEL_IPV6_NODE ? tunnel_set_key6(skb, flow, family)
				     : bpf_skb_set_tunnel_key(skb, &key, size, BPF_F_ZERO_CSUM_TX))
		return DROP(EGRESS, DROP_WRITE_ERROR);
	count(skb, REASON_FORWARDED, EGRESS);
	if (unlikely(flow->report))
		send_trace_notify(skb, flow, TRACE_TO_OVERLAY, tunnel->ifindex, TRACED(status, family));
	return bpf_redirect(tunnel->ifindex, 0);
}

#define GATEWAY_NONE 0xffffffff /* instead of a node: the egress gateway policy has no gateway */

/* Send a pod's packet by tunnel; returns the verdict. Sends an ICMP error if it exceeds the MTU, because the stack does
 * not see it.
 */
VERIFIED_ALONE container_to_overlay(struct __sk_buff *skb, const struct flow *flow, __be32 node, __u32 status,
				    __u32 family)
{
	const struct tunnel_config *tunnel = tunnel_any();

	if (!flow || !tunnel)
		return DROP(EGRESS, DROP_NO_CONFIG);
	if (unlikely(node == GATEWAY_NONE))
		return DROP(EGRESS, DROP_NO_EGRESS_GATEWAY);
	if (ipsec()) {
		int verdict = encrypt_mark(skb, flow, true, family);

		if (verdict != UNDECIDED)
			return verdict;
	}
	if (unlikely(skb->len > LINK_HLEN + tunnel->mtu) && exceeds(skb, flow, tunnel->mtu, family))
		return family == FAMILY_IPV4 ? too_big4(skb, flow, tunnel->mtu) : too_big6(skb, flow, tunnel->mtu);
	return tunnel_send(skb, flow, tunnel, node, status, family);
}

/* Return whether a pod's packet could be taken for a tunnel packet: masqueraded, it has a node's source address, which
 * other nodes trust.
 */
static __always_inline bool imitates_tunnel(const struct flow *flow)
{
	const struct tunnel_config *tunnel;

	if (flow->protocol != IPPROTO_UDP)
		return false;
	tunnel = tunnel_any();
	return tunnel && flow->dport == tunnel->port;
}

/* Send the host's packet to a remote pod by tunnel, or drop it, because the stack would route it here again; returns
 * the verdict.
 */
static __always_inline int host_to_overlay(struct __sk_buff *skb, const struct flow *flow, __u8 family)
{
	const struct ipcache_info *info = ipcache_lookup(&flow->daddr, family);
	const struct tunnel_config *tunnel = tunnel_facts();
	__be32 node;

	if (!tunnel)
		return DROP(INGRESS, DROP_UNROUTABLE);
	node = tunnel_node_of(tunnel, &flow->daddr, info, family);
	if (!node)
		return info && info->flags & IPCACHE_SKIP_TUNNEL ? TC_ACT_OK : DROP(INGRESS, DROP_UNROUTABLE);
	if (flow->ttl <= 1)
		return DROP(EGRESS, DROP_TTL_EXCEEDED);
	if (ipsec() && flow->source_identity != IDENTITY_HOST) {
		int verdict = encrypt_mark(skb, flow, true, family);

		if (verdict != UNDECIDED)
			return verdict;
	}
	return tunnel_send(skb, flow, tunnel, node, TRACE_REASON_UNKNOWN, family);
}
