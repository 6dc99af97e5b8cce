/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* WireGuard at egress of a native device: packets to encrypt are redirected to the WireGuard device, which sends them
 * in its own datagrams. Those are marked, and pass.
 *
 * The map stays while no agent runs: if the WireGuard device is removed meanwhile, such packets are dropped.
 */
#pragma once

#include <linux/pkt_cls.h>

#include "lib/identity.h"
#include "lib/mark.h"
#include "lib/network.h"
#include "netdev/maps.h"
#include "overlay/tunnel.h"

#define MARK_ENCRYPTED 0x1e00 /* mark of the WireGuard socket, as in Cilium; other marks do not use bit 12 */

/* Return whether packets of this sender are encrypted: pods', proxies', and with node encryption the node's. Forwarded
 * packets from outside the cluster are not.
 */
static __always_inline bool is_encrypted_sender(const struct encryption_config *encryption, __u32 identity,
						__u32 mark)
{
	__u32 kind = mark & MARK_KIND;

	if (identity == IDENTITY_HOST)
		return encryption->flags & ENCRYPTION_NODES || kind == MARK_INGRESS_PROXY ||
		       kind == MARK_EGRESS_PROXY;
	return identity != IDENTITY_WORLD && identity != IDENTITY_WORLD_IPV4 && identity != IDENTITY_WORLD_IPV6 &&
	       !is_cidr(identity) && !is_remote_node(identity);
}

/* Return whether the packet is a neighbour solicitation or advertisement (RFC 4861) of the node, which must not be
 * encrypted.
 */
static __always_inline bool is_neighbour_discovery(struct __sk_buff *skb, const struct flow *flow, __u32 identity)
{
	__u8 type;

	if (identity != IDENTITY_HOST || flow->protocol != IPPROTO_ICMPV6)
		return false;
	return !packet_load(skb, flow->l4, &type, sizeof(type)) && (type == 135 || type == 136);
}

/* Return whether strict mode allows the packet to leave unencrypted. */
static __always_inline bool strict_mode_allows(const struct encryption_config *encryption, const struct flow *flow)
{
	const struct node_config *node = node_facts();
	__be32 source = flow->saddr.words[0], destination = flow->daddr.words[0], mask = encryption->strict_mask;
	__u32 identity;

	if ((source & mask) != encryption->strict || (destination & mask) != encryption->strict)
		return true;
	if (source == encryption->node_ip || (node && source == node->router_ip))
		return true;
	if (!tunnel_facts() && !(encryption->flags & ENCRYPTION_STRICT_NODES))
		return false;
	identity = identity_at(&flow->daddr, FAMILY_IPV4);
	return identity == IDENTITY_HOST || is_remote_node(identity);
}

/* Return whether the device is one of our WireGuard devices. */
static __always_inline bool is_encrypting(const struct encryption_config *encryption, __u32 ifindex)
{
	return ifindex == encryption->ifindex || ifindex == encryption->rotating[0] ||
	       ifindex == encryption->rotating[1];
}

static __always_inline __u32 path_to(const struct encryption_config *encryption, const struct address *ip,
				     __u8 family)
{
	const struct ipcache_key key = {
		.prefixlen = family == FAMILY_IPV4 ? IPCACHE_PREFIX_IPV4 : IPCACHE_PREFIX_IPV6,
		.family = family,
		.ip = *ip,
	};
	const __u32 *path = bpf_map_lookup_elem(&hive_encryption_paths, &key);

	return path ? *path : encryption->ifindex;
}

/* Return the WireGuard device for the destination's node. `to` is the destination's ipcache entry, NULL for a node's
 * own address.
 */
static __always_inline __u32 encrypting_device(const struct encryption_config *encryption, const struct flow *flow,
					       const struct ipcache_info *to, __u8 family)
{
	struct address node = {};

	if (likely(!encryption->rotating[0] && !encryption->rotating[1]))
		return encryption->ifindex;
	if (!to || !to->tunnel_endpoint)
		return path_to(encryption, &flow->daddr, family);
	node.words[0] = to->tunnel_endpoint;
	return path_to(encryption, &node, FAMILY_IPV4);
}

/* Encrypt a tunnel packet: its destination is the other node. Returns the verdict. */
static __always_inline int encrypt_tunnelled(struct __sk_buff *skb, struct flow *flow,
					     const struct encryption_config *encryption, __u8 family)
{
	if (likely(!encryption->rotating[0] && !encryption->rotating[1]) || parse_network(skb, flow, family))
		return bpf_redirect(encryption->ifindex, 0);
	return bpf_redirect(encrypting_device(encryption, flow, NULL, family), 0);
}

static __always_inline int encrypt_ip(struct __sk_buff *skb, struct flow *flow,
				      const struct encryption_config *encryption, __u32 mark, __u8 family)
{
	const struct ipcache_info *to;
	bool strict = encryption->flags & ENCRYPTION_STRICT && family == FAMILY_IPV4;
	__u32 identity;

	if (parse_network(skb, flow, family))
		return strict ? DROP(EGRESS, DROP_INVALID) : UNDECIDED;
	to = ipcache_lookup(&flow->daddr, family);
	identity = identity_at(&flow->saddr, family);
	if (to && to->key && is_encrypted_sender(encryption, identity, mark) &&
	    !(family == FAMILY_IPV6 && is_neighbour_discovery(skb, flow, identity)))
		return bpf_redirect(encrypting_device(encryption, flow, to, family), 0);
	return strict && !strict_mode_allows(encryption, flow) ? DROP(EGRESS, DROP_UNENCRYPTED) : UNDECIDED;
}

/* Encrypt a packet to a native device if required; returns the verdict, or UNDECIDED if it may leave unencrypted. */
VERIFIED_ALONE device_encrypt(struct __sk_buff *skb)
{
	const struct encryption_config *encryption = encryption_facts();
	struct flow flow = {};
	__u32 mark = mark_read(skb);
	__be16 protocol;

	if (likely(!encryption))
		return UNDECIDED;
	if (is_encrypting(encryption, skb->ifindex) || (mark & MARK_ENCRYPTED) == MARK_ENCRYPTED)
		return TC_ACT_OK; /* on its way into the WireGuard device, or sent by it */
	protocol = packet_protocol(skb);
	if ((mark & MARK_KIND) == MARK_OVERLAY)
		return encrypt_tunnelled(skb, &flow, encryption,
					 protocol == bpf_htons(ETH_P_IPV6) ? FAMILY_IPV6 : FAMILY_IPV4);
	if (protocol == bpf_htons(ETH_P_IP))
		return encrypt_ip(skb, &flow, encryption, mark, FAMILY_IPV4);
	if (protocol == bpf_htons(ETH_P_IPV6))
		return encrypt_ip(skb, &flow, encryption, mark, FAMILY_IPV6);
	return UNDECIDED;
}
