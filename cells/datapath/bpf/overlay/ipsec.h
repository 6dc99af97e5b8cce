/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What pods of two nodes send each other, encrypted by the kernel (RFC 4303). The programs only mark it: on its way out
 * with the node it is for and the key, on its way in with the node that it is from. The mark chooses the kernel's policy
 * and state, and the routing table in which what is marked leads to cilium_host, or to the node itself.
 *
 * What is marked and not encrypted leaves by no device: the kernel blocks it, and here it is dropped. So is what is for
 * addresses that pods of other nodes have or may have, and for which no key is known.
 */
#pragma once

#include <linux/if_packet.h>
#include <linux/pkt_cls.h>

#include "lib/config.h"
#include "lib/identity.h"
#include "lib/mark.h"
#include "lib/metrics.h"
#include "lib/network.h"
#include "overlay/encrypt.h"
#include "overlay/send.h"
#include "overlay/tunnel.h"
#include "pod/leave.h"

#define IDENTITY_BY_ADDRESS 0xffffffff /* in place of one: no tunnel header any more, a proven address */

/* What a pod sends by the stack: marked for it to encrypt, or as it is. */
VERIFIED_ALONE pod_meets_xfrm(struct __sk_buff *skb, const struct flow *flow, __u32 status, __u32 family)
{
	int verdict;

	if (!flow)
		return DROP(EGRESS, DROP_INVALID);
	verdict = encrypt_mark(skb, flow, false, family);
	return verdict == UNDECIDED ? to_stack(skb, flow, status, family) : verdict;
}

/* What the kernel has encrypted comes by cilium_host: the verdict. It goes on in the tunnel, or by the routes of the main
 * table, which its mark would keep it from.
 */
VERIFIED_ALONE from_host_encrypted(struct __sk_buff *skb, struct flow *flow, __u32 family)
{
	const struct tunnel_config *tunnel = tunnel_facts();
	const struct ipcache_info *to;

	if (!flow || parse_network(skb, flow, family))
		return DROP(EGRESS, DROP_INVALID);
	flow->source_identity = skb->cb[CB_SENDER];
	skb->cb[CB_SENDER] = 0;
	mark_write(skb, 0);
	if (flow->protocol != IPPROTO_ESP)
		return DROP(EGRESS, DROP_UNENCRYPTED);
	if (!tunnel)
		return TC_ACT_OK;
	to = ipcache_lookup(&flow->daddr, family);
	if (!to || !to->tunnel_endpoint)
		return DROP(EGRESS, DROP_UNROUTABLE);
	return tunnel_send(skb, flow, tunnel, to->tunnel_endpoint, TRACE_REASON_UNKNOWN, family);
}

/* Whether the kernel has decrypted it, by its mark. */
static __always_inline bool is_decrypted(const struct __sk_buff *skb)
{
	return (mark_read(skb) & MARK_KIND) == MARK_DECRYPT;
}

/* The verdict on what another node has encrypted: the stack gets it, and brings what is inside by the same device. UNDECIDED:
 * it is not encrypted, or by none of the cluster's nodes.
 */
VERIFIED_ALONE node_decrypts(struct __sk_buff *skb)
{
	__be16 protocol = packet_protocol(skb);
	__u8 family = protocol == bpf_htons(ETH_P_IPV6) ? FAMILY_IPV6 : FAMILY_IPV4;
	struct flow flow = {};
	__u32 number;

	if (protocol != bpf_htons(ETH_P_IP) && protocol != bpf_htons(ETH_P_IPV6))
		return UNDECIDED;
	if (parse_network(skb, &flow, family) || flow.protocol != IPPROTO_ESP)
		return UNDECIDED;
	number = node_number(&flow.saddr, family);
	if (!number)
		return UNDECIDED;
	mark_write(skb, MARK_DECRYPT | number << MARK_NODE_AT);
	bpf_skb_change_type(skb, PACKET_HOST);
	return TC_ACT_OK;
}

/* The same for what a native device brings; and what was decrypted there goes to pods as what the host sends them does. */
VERIFIED_ALONE device_decrypts(struct __sk_buff *skb)
{
	const struct node_config *node = node_facts();
	struct flow flow = {};
	__u8 family;

	if (!is_decrypted(skb))
		return node_decrypts(skb);
	mark_write(skb, 0);
	family = packet_protocol(skb) == bpf_htons(ETH_P_IPV6) ? FAMILY_IPV6 : FAMILY_IPV4;
	if (parse_network(skb, &flow, family))
		return DROP(INGRESS, DROP_INVALID);
	if (is_local_source(&flow.saddr, family))
		return DROP(INGRESS, DROP_INVALID_SOURCE);
	if (!node || packet_frame(skb))
		return DROP(INGRESS, DROP_NO_CONFIG);
	return bpf_redirect(node->host_ifindex, 0);
}

/* The verdict on what leaves by a native device; UNDECIDED: it may pass. What a pod or a proxy has sent to a pod of another
 * node is encrypted by now, and comes from the node.
 */
VERIFIED_ALONE device_meets_xfrm(struct __sk_buff *skb)
{
	__be16 protocol = packet_protocol(skb);
	__u8 family = protocol == bpf_htons(ETH_P_IPV6) ? FAMILY_IPV6 : FAMILY_IPV4;
	__u32 kind = mark_read(skb) & MARK_KIND;
	const struct address_info *local;
	struct flow flow = {};

	if (protocol != bpf_htons(ETH_P_IP) && protocol != bpf_htons(ETH_P_IPV6))
		return UNDECIDED;
	if (parse_network(skb, &flow, family))
		return UNDECIDED;
	local = address_lookup(&flow.saddr, family);
	if (kind != MARK_INGRESS_PROXY && kind != MARK_EGRESS_PROXY && (!local || local->flags & ADDRESS_IS_HOST))
		return UNDECIDED;
	return in_clear(&flow, ipcache_lookup(&flow.daddr, family), false, family);
}
