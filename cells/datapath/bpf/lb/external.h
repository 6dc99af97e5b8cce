/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Services for external clients: NodePort, LoadBalancer, externalIPs, HostPort. */
#pragma once

#include "lb/pod.h"

/* Return whether the service's loadBalancerSourceRanges allow the client. */
static __always_inline bool lb_allows_source(const struct lb_service *service, const struct flow *flow, __u8 family)
{
	bool listed;

	if (likely(!(service->flags & LB_SOURCE_RANGE)))
		return true;
	if (family == FAMILY_IPV4) {
		struct lb4_source_range key = {
			.prefixlen = LB_SOURCE_PREFIX + 32,
			.rev_nat_index = service->rev_nat_index,
			.network = flow->saddr.words[0],
		};

		listed = bpf_map_lookup_elem(&cilium_lb4_source_range, &key);
	} else {
		struct lb6_source_range key = {
			.prefixlen = LB_SOURCE_PREFIX + 128,
			.rev_nat_index = service->rev_nat_index,
			.network = flow->saddr,
		};

		listed = bpf_map_lookup_elem(&cilium_lb6_source_range, &key);
	}
	return listed != !!(service->flags2 & LB_SOURCE_DENY);
}

static __always_inline int lb_from_external(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	const struct lb_service *service;
	struct lb_backend backend = {};
	union lb_key key;
	__u32 number;
	int refused;

	service = lb_lookup_service_external(&key, flow, family);
	if (likely(!service))
		return 0;
	if (!lb_allows_source(service, flow, family))
		return DROP(INGRESS, DROP_SOURCE_RANGE);
	if (!(service->flags & LB_ROUTABLE))
		return DROP(INGRESS, DROP_IS_CLUSTER_IP);
	number = lb_assign_backend(&key, service, flow, &backend, nodeport_facts(), now, family);
	if (!number) {
		if (config.features & FEATURE_UNREACHABLE)
			return lb_send_unreachable(ctx, flow, BACK_TO_DEVICE, family);
		return DROP(INGRESS, DROP_NO_SERVICE);
	}
	lb_update_affinity(service, flow, number, now, family);
	flow->rev_nat_index = service->rev_nat_index;
	flow->node_port = true;
	flow->local_only = service->flags & LB_HOST_PORT;
	flow->direct = service->flags2 & LB_DSR;
	refused = lb_dnat(ctx, flow, &backend, family);
	return refused ? DROP(INGRESS, refused) : LB_TRANSLATED;
}

/* Returns 0 if the destination is not a service, LB_TRANSLATED after DNAT to a backend, or a verdict. */
VERIFIED_ALONE lb4_from_external(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? lb_from_external(ctx, flow, now, FAMILY_IPV4) : 0;
}

VERIFIED_ALONE lb6_from_external(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? lb_from_external(ctx, flow, now, FAMILY_IPV6) : 0;
}
