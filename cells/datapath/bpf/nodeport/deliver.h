/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Deliver external clients' packets to local pods, after ingress policy. */
#pragma once

#include "lib/identity.h"
#include "pod/deliver.h"
#include "pod/links.h"
#include "proxy/redirect.h"

/* Return the client's identity for policy. An external packet is never from the host itself. */
static __always_inline __u32 nodeport_client_identity(const struct flow *flow, __u8 family)
{
	__u32 identity = identity_of(ipcache_lookup(&flow->saddr, family));

	return identity == IDENTITY_HOST || identity == IDENTITY_WORLD ? world_identity(family) : identity;
}

/* Return whether the host's stack or another plugin's bridge routes packets to the pod. */
static __always_inline bool is_routed_by_host(const struct address_info *local)
{
	__u32 epoch;
	const struct endpoint_config *pod = link_endpoint(local->ifindex, &epoch);

	return pod && pod->flags & ENDPOINT_ROUTED_BY_HOST;
}

static __always_inline int nodeport_deliver(context_t *ctx, struct flow *flow, const struct address_info *local,
					    __u32 now, __u8 family)
{
	struct use use = { .packets = 1, .bytes = packet_length(ctx) };
	enum ct_status status;
	int refused, verdict;

	if (local->flags & ADDRESS_IS_HOST)
		return TC_ACT_OK;
	flow->source_identity = nodeport_client_identity(flow, family);
	if (is_routed_by_host(local)) {
		verdict = redirect_proxy_flow(ctx, flow, local, false, now, family);
		return verdict == UNDECIDED ? TC_ACT_OK : verdict;
	}
	flow->destination = local->endpoint_id;
	flow->destination_identity = local->identity;
	if (flow->ttl <= 1)
		return DROP(INGRESS, DROP_TTL_EXCEEDED);
	refused = ingress_check(ctx, flow, use, now, family, &status);
	if (refused)
		return DROP(INGRESS, refused);
	if (is_for_proxy(flow)) /* the proxy's replies get reverse NAT in nodeport_to_netdev() */
		return ingress_to_proxy(ctx, flow, status, family);
	return deliver_to_link(ctx, flow, local->ifindex, local->host_mac, local->pod_mac, status, BY_PEER, family);
}

VERIFIED_ALONE nodeport4_deliver(context_t *ctx, struct flow *flow, const struct address_info *local, __u32 now)
{
	return flow && local ? nodeport_deliver(ctx, flow, local, now, FAMILY_IPV4) : DROP(INGRESS, DROP_INVALID);
}

VERIFIED_ALONE nodeport6_deliver(context_t *ctx, struct flow *flow, const struct address_info *local, __u32 now)
{
	return flow && local ? nodeport_deliver(ctx, flow, local, now, FAMILY_IPV6) : DROP(INGRESS, DROP_INVALID);
}
