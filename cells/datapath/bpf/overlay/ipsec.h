/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* IPsec (RFC 4303) between pods of different nodes, by XFRM. The programs only set marks: at egress with the
 * destination's node id and the key, at ingress with the source's node id. The mark selects XFRM policy and state, and
 * the routing table that leads to cilium_host, or to the node itself.
 *
 * A marked packet that is not encrypted cannot leave: XFRM blocks it, and so do these programs. They also drop packets
 * to addresses that pods of other nodes have, or may have, without a key.
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

#define IDENTITY_BY_ADDRESS 0xffffffff /* decrypted, without tunnel header: use the source address */

/* Pass a pod's packet to the stack, marked for encryption if required; returns the verdict. */
VERIFIED_ALONE pod_to_xfrm(struct __sk_buff *skb, const struct flow *flow, __u32 status, __u32 family)
{
	int verdict;

	if (!flow)
		return DROP(EGRESS, DROP_INVALID);
	verdict = encrypt_mark(skb, flow, false, family);
	return verdict == UNDECIDED ? to_stack(skb, flow, status, family) : verdict;
}

/* Handle an encrypted packet from XFRM at cilium_host: send it by tunnel, or clear the mark so that it uses the main
 * routing table. Returns the verdict.
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

/* Return whether the mark shows that XFRM decrypted the packet. */
static __always_inline bool is_decrypted(const struct __sk_buff *skb)
{
	return (mark_read(skb) & MARK_KIND) == MARK_DECRYPT;
}

/* Mark an ESP packet from another node for decryption: the stack decrypts it, and delivers the inner packet on the same
 * device. Returns the verdict, or UNDECIDED if it is not ESP from a node of the cluster.
 */
VERIFIED_ALONE mark_for_decryption(struct __sk_buff *skb)
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

/* mark_for_decryption() for native devices; decrypted packets are redirected to cilium_host, like packets of the host to
 * pods.
 */
VERIFIED_ALONE device_decrypt(struct __sk_buff *skb)
{
	const struct node_config *node = node_facts();
	struct flow flow = {};
	__u8 family;

	if (!is_decrypted(skb))
		return mark_for_decryption(skb);
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

/* Check a packet to a native device; returns the verdict, or UNDECIDED if it may leave. Packets from pods and proxies
 * to pods of other nodes are encrypted at this point, and have the node's source address.
 */
VERIFIED_ALONE device_check_unencrypted(struct __sk_buff *skb)
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
	return check_unencrypted(&flow, ipcache_lookup(&flow.daddr, family), false, family);
}
