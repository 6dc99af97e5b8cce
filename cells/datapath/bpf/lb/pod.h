/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Services for pods: DNAT from the frontend to a backend, and reverse NAT of replies. */
#pragma once

#include "ct/service.h"
#include "lb/affinity.h"
#include "lb/maglev.h"
#include "lb/services.h"
#include "lb/skip.h"
#include "lb/translate.h"
#include "lb/unreachable.h"
#include "lib/identity.h"

#define LB_TRANSLATED 1

static __always_inline bool lb_can_balance(const struct flow *flow)
{
	return (flow->protocol == IPPROTO_TCP || flow->protocol == IPPROTO_UDP || flow->protocol == IPPROTO_SCTP) &&
	       !flow->related;
}

/* Select a backend for a new connection; 0 if there is none. `own` is set for external clients, which may use Maglev. */
static __always_inline __u32 lb_select_backend(union lb_key *key, const struct lb_service *service,
					       const struct flow *flow, const struct nodeport_config *own,
					       __u8 family)
{
	__u32 number = 0;

	if (own && maglev_is_used(service, own) && service->count)
		number = maglev_select_backend(service, flow, own, family);
	return number ? number : lb_select_random_backend(key, service, family);
}

/* Return id and address of the connection's backend, from its conntrack entry or newly selected; 0 if there is none. */
static __always_inline __u32 lb_assign_backend(union lb_key *key, const struct lb_service *service,
					       struct flow *flow, struct lb_backend *backend,
					       const struct nodeport_config *own, __u32 now, __u8 family)
{
	struct ct_entry *entry = ct_service_find(flow, now, family);
	__u32 number, affine;

	if (entry && ct_service_is_reusable(entry, flow, now))
		entry = NULL;
	if (entry && entry->rev_nat_index == service->rev_nat_index) {
		number = entry->backend_id;
		/* A terminating backend keeps its connections and gets no new ones. */
		if (lb_lookup_backend(number, backend, family) &&
		    (backend->state == LB_BACKEND_ACTIVE || !is_connection_start(flow))) {
			ct_service_update(entry, flow, now);
			return number;
		}
	}
	affine = lb_lookup_affinity(service, flow, now, family);
	number = affine;
	if (!number || !lb_lookup_backend(number, backend, family) ||
	    (backend->state != LB_BACKEND_ACTIVE && may_start_flow(flow))) {
		number = lb_select_backend(key, service, flow, own, family);
		if (!number || !lb_lookup_backend(number, backend, family))
			return 0;
		if (backend->state != LB_BACKEND_ACTIVE && lb_lookup_backend(affine, backend, family))
			number = affine; /* all backends are terminating: keep the client's */
	}
	if (entry) {
		entry->backend_id = number;
		entry->rev_nat_index = service->rev_nat_index;
		ct_service_update(entry, flow, now);
		return number;
	}
	return ct_service_create(flow, number, service->rev_nat_index, now, family) ? 0 : number;
}

/* DNAT to the backend; returns 0 or a drop reason. */
static __always_inline int lb_dnat(context_t *ctx, struct flow *flow, const struct lb_backend *backend, __u8 family)
{
	__be16 port = backend->port ? backend->port : flow->dport;
	int refused = translate_address(ctx, flow, DESTINATION, &flow->daddr, &backend->address, family);

	if (!refused)
		refused = translate_port(ctx, flow, DESTINATION, flow->dport, port);
	flow->daddr = backend->address;
	flow->dport = port;
	flow->policy_port = port;
	return refused;
}

/* SNAT to the loopback service address if the client is the backend: with its own source address the pod would handle
 * the reply locally. Only for IPv4. Returns 0 or a drop reason.
 */
static __always_inline int lb_loopback_snat(context_t *ctx, struct flow *flow, const struct lb_backend *backend,
					    __u8 family)
{
	struct address loopback = { .words = { config.service_loopback } };
	int refused;

	if (family != FAMILY_IPV4 || flow->saddr.words[0] != backend->address.words[0])
		return 0;
	refused = translate_address(ctx, flow, SOURCE, &flow->saddr, &loopback, family);
	flow->saddr = loopback;
	flow->loopback = true;
	return refused;
}

/* Return whether the service is an externalIP that the node does not have, and pods may not use it (CVE-2020-8554). */
static __always_inline bool lb_is_foreign_external_ip(const struct lb_service *service, const struct flow *flow,
						      __u8 family)
{
	return service->flags & LB_EXTERNAL_IP && config.features & FEATURE_OWN_EXTERNAL_IPS &&
	       identity_of(ipcache_lookup(&flow->daddr, family)) != IDENTITY_HOST;
}

static __always_inline int lb_from_pod(context_t *ctx, struct flow *flow, __u32 now, __u64 netns_cookie,
				       __u8 family)
{
	const struct lb_service *service;
	struct lb_backend backend = {};
	union lb_key key;
	__u32 number;
	int refused;

	service = lb_lookup_service(&key, flow, family);
	if (likely(!service) || lb_skip_redirect(service, netns_cookie, &flow->daddr, flow->dport, family) ||
	    unlikely(lb_is_foreign_external_ip(service, flow, family)))
		return 0;
	number = lb_assign_backend(&key, service, flow, &backend, NULL, now, family);
	if (!number) {
		if (config.features & FEATURE_UNREACHABLE)
			return lb_send_unreachable(ctx, flow, BACK_TO_POD, family);
		return DROP(EGRESS, DROP_NO_SERVICE);
	}
	lb_update_affinity(service, flow, number, now, family);
	flow->rev_nat_index = service->rev_nat_index;
	flow->translated = true;
	refused = lb_loopback_snat(ctx, flow, &backend, family);
	if (!refused)
		refused = lb_dnat(ctx, flow, &backend, family);
	return refused ? DROP(EGRESS, refused) : LB_TRANSLATED;
}

/* Returns 0 if the destination is not a service, LB_TRANSLATED after DNAT to a backend, or a verdict. */
VERIFIED_ALONE lb4_from_pod(context_t *ctx, struct flow *flow, __u32 now, __u64 netns_cookie)
{
	return flow ? lb_from_pod(ctx, flow, now, netns_cookie, FAMILY_IPV4) : 0;
}

VERIFIED_ALONE lb6_from_pod(context_t *ctx, struct flow *flow, __u32 now, __u64 netns_cookie)
{
	return flow ? lb_from_pod(ctx, flow, now, netns_cookie, FAMILY_IPV6) : 0;
}

/* Look up the frontend of a reverse NAT index; false if the service was removed. */
static __always_inline bool lb_lookup_rev_nat(__be16 index, struct address *address, __be16 *port, __u8 family)
{
	if (family == FAMILY_IPV4) {
		const struct lb4_reverse_nat *found = bpf_map_lookup_elem(&cilium_lb4_reverse_nat, &index);

		if (!found)
			return false;
		*address = (struct address){ .words = { found->address } };
		*port = found->port;
	} else {
		const struct lb6_reverse_nat *found = bpf_map_lookup_elem(&cilium_lb6_reverse_nat, &index);

		if (!found)
			return false;
		__builtin_memcpy(address, &found->address, sizeof(*address));
		*port = found->port;
	}
	return true;
}

/* Rewrite a reply's source to this frontend; returns 0 or a drop reason. `loopback` also undoes lb_loopback_snat(). */
static __always_inline int lb_apply_rev_nat(context_t *ctx, struct flow *flow, const struct address *service,
					    __be16 port, bool loopback, __u8 family)
{
	int refused;

	flow->translated = true;
	if (family == FAMILY_IPV4 && loopback) {
		refused = translate_address(ctx, flow, DESTINATION, &flow->daddr, &flow->saddr, family);
		if (refused)
			return refused;
		flow->daddr = flow->saddr;
	}
	refused = translate_address(ctx, flow, SOURCE, &flow->saddr, service, family);
	if (!refused)
		refused = translate_port(ctx, flow, SOURCE, flow->sport, port);
	flow->saddr = *service;
	flow->sport = port;
	return refused;
}

/* Reverse NAT of a backend's reply by its index; returns 0 or a drop reason. */
static __always_inline int lb_rev_nat(context_t *ctx, struct flow *flow, __be16 index, bool loopback, __u8 family)
{
	struct address service;
	__be16 port;

	if (!lb_lookup_rev_nat(index, &service, &port, family))
		return 0;
	return lb_apply_rev_nat(ctx, flow, &service, port, loopback, family);
}

VERIFIED_ALONE lb4_rev_nat(context_t *ctx, struct flow *flow, __u32 index, __u32 loopback)
{
	return flow ? lb_rev_nat(ctx, flow, index, loopback, FAMILY_IPV4) : DROP_INVALID;
}

VERIFIED_ALONE lb6_rev_nat(context_t *ctx, struct flow *flow, __u32 index)
{
	return flow ? lb_rev_nat(ctx, flow, index, false, FAMILY_IPV6) : DROP_INVALID;
}
