// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* One generation of the datapath: what a pod sends, what the host sends to pods. IPv4.
 *
 * One set of programs serves all pods; what differs between pods is in maps. Reached by tail call
 * from dispatch.c.
 */
#include <linux/pkt_cls.h>

#include "arp.h"
#include "deliver.h"
#include "identity.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u32); /* ifindex of the host's end of the link */
	__type(value, struct endpoint_config);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} hive_endpoints SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct node_config);
	__uint(max_entries, 1);
} hive_node SEC(".maps");

/* Turn a drop into its count and the action. */
static __always_inline int finish(struct __sk_buff *skb, int verdict)
{
	if (likely(!DROPPED(verdict)))
		return verdict;
	count(skb, DROP_REASON(verdict), DROP_DIRECTION(verdict));
	return TC_ACT_SHOT;
}

static __always_inline int to_stack(struct __sk_buff *skb)
{
	count(skb, REASON_FORWARDED, EGRESS);
	return TC_ACT_OK;
}

/* 0 if the pod may send the packet, else the reason to drop it. */
static __always_inline int egress_check(struct __sk_buff *skb, const struct flow *flow,
					const struct endpoint_config *self,
					const struct address_info *local, __u32 now)
{
	enum ct_status status = ct_lookup(flow, EGRESS, now);
	__u32 identity;
	int refused;

	if (status == CT_REPLY || status == CT_RELATED)
		return 0;
	identity = local ? identity_of_local(local) : identity_of(flow->daddr);
	refused = policy_check(flow, EGRESS, self->id, identity, skb->len);
	if (refused)
		return refused;
	return status == CT_NEW ? ct_create(flow, EGRESS, self->identity, now) : 0;
}

static __always_inline int pod_sends_ipv4(struct __sk_buff *skb, const struct endpoint_config *self)
{
	struct address_info *local;
	struct flow flow = {};
	__u32 now = ct_now();
	int refused;

	refused = parse_ipv4(skb, &flow);
	if (flow.saddr != self->ipv4 && refused != DROP_INVALID)
		return DROP(EGRESS, DROP_INVALID_SOURCE);
	if (refused)
		return DROP(EGRESS, refused);

	local = address_lookup(flow.daddr);
	refused = egress_check(skb, &flow, self, local, now);
	if (refused)
		return DROP(EGRESS, refused);

	if (!local || local->flags & ADDRESS_IS_HOST)
		return to_stack(skb);
	return deliver(skb, &flow, local, self->identity, now, EGRESS, BY_PEER);
}

static __always_inline int pod_sends(struct __sk_buff *skb)
{
	struct endpoint_config *self;
	struct ethernet *eth;
	__u32 ifindex = skb->ifindex;

	self = bpf_map_lookup_elem(&hive_endpoints, &ifindex);
	if (!self)
		return DROP(EGRESS, DROP_NO_CONFIG);
	if (skb->vlan_present)
		return DROP(EGRESS, DROP_VLAN); /* the host would take the inner packet for an untagged one */
	eth = packet_eth(skb);
	if (!eth)
		return DROP(EGRESS, DROP_INVALID);
	if (likely(eth->protocol == bpf_htons(ETH_P_IP)))
		return pod_sends_ipv4(skb, self);
	if (eth->protocol == bpf_htons(ETH_P_ARP))
		return arp_respond(skb, self);
	if (bpf_ntohs(eth->protocol) < ETH_TYPE_MIN)
		return DROP(EGRESS, DROP_UNSUPPORTED_L2);
	return DROP(EGRESS, DROP_UNKNOWN_L3);
}

static __always_inline int host_sends_ipv4(struct __sk_buff *skb)
{
	struct address_info *local;
	struct flow flow = {};
	int refused = parse_ipv4(skb, &flow);

	if (refused)
		return DROP(INGRESS, refused);
	local = address_lookup(flow.daddr);
	if (!local)
		return DROP(INGRESS, DROP_UNROUTABLE); /* handed back, the stack would send it here again */
	if (local->flags & ADDRESS_IS_HOST)
		return TC_ACT_OK;
	return deliver(skb, &flow, local, identity_of(flow.saddr), ct_now(), INGRESS, BY_LINK);
}

/* What passes cilium_host reaches the host again through cilium_net: address it so. */
static __always_inline int pass_to_net(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct node_config *node = bpf_map_lookup_elem(&hive_node, &zero);
	struct ethernet *eth = packet_eth(skb);

	if (node && eth)
		mac_write(eth->destination, node->net_mac);
	return TC_ACT_OK;
}

static __always_inline int host_sends(struct __sk_buff *skb)
{
	struct ethernet *eth = packet_eth(skb);
	int verdict;

	if (!eth)
		return DROP(INGRESS, DROP_INVALID);
	if (eth->protocol != bpf_htons(ETH_P_IP))
		return pass_to_net(skb);
	verdict = host_sends_ipv4(skb);
	return verdict == TC_ACT_OK ? pass_to_net(skb) : verdict;
}

SEC("tc")
int hive_from_pod(struct __sk_buff *skb)
{
	skb->queue_mapping = 0; /* the pod's choice of queue means nothing to the host's devices */
	return finish(skb, pod_sends(skb));
}

SEC("tc")
int hive_from_host(struct __sk_buff *skb)
{
	return finish(skb, host_sends(skb));
}

/* Everything may reach the host: it has no policy of its own. */
SEC("tc")
int hive_to_host(struct __sk_buff *skb)
{
	(void)skb;
	return TC_ACT_OK;
}

char _license[] SEC("license") = "Dual BSD/GPL";
