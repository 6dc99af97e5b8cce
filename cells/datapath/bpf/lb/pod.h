/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Services as pods see them: what they send to one goes to a backend, and what the backend answers comes from it. */
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

static __always_inline bool lb_balances(const struct flow *flow)
{
	return (flow->protocol == IPPROTO_TCP || flow->protocol == IPPROTO_UDP || flow->protocol == IPPROTO_SCTP) &&
	       !flow->related;
}

/* The number of a backend for a new connection, 0 if there is none. `own`: the client is outside. */
static __always_inline __u32 lb_choose(union lb_key *key, const struct lb_service *service, const struct flow *flow,
				       const struct nodeport_config *own, __u8 family)
{
	__u32 number = 0;

	if (own && maglev_serves(service, own) && service->count)
		number = maglev_pick(service, flow, own, family);
	return number ? number : lb_pick(key, service, family);
}

/* The backend that serves the packet's connection, and its number; 0 if there is none. */
static __always_inline __u32 lb_serve(union lb_key *key, const struct lb_service *service, struct flow *flow,
				      struct lb_backend *backend, const struct nodeport_config *own, __u32 now,
				      __u8 family)
{
	struct ct_entry *entry = ct_service_find(flow, now, family);
	__u32 number, affine;

	if (entry && ct_service_over(entry, flow, now))
		entry = NULL;
	if (entry && entry->rev_nat_index == service->rev_nat_index) {
		number = entry->backend_id;
		/* One that is about to end keeps its connections, and gets no new ones. */
		if (lb_backend_of(number, backend, family) &&
		    (backend->state == LB_BACKEND_ACTIVE || !begins(flow))) {
			ct_service_note(entry, flow, now);
			return number;
		}
	}
	affine = lb_affine(service, flow, now, family);
	number = affine;
	if (!number || !lb_backend_of(number, backend, family) ||
	    (backend->state != LB_BACKEND_ACTIVE && may_begin(flow))) {
		number = lb_choose(key, service, flow, own, family);
		if (!number || !lb_backend_of(number, backend, family))
			return 0;
		if (backend->state != LB_BACKEND_ACTIVE && lb_backend_of(affine, backend, family))
			number = affine; /* all that serve are about to end */
	}
	if (entry) {
		entry->backend_id = number;
		entry->rev_nat_index = service->rev_nat_index;
		ct_service_note(entry, flow, now);
		return number;
	}
	return ct_service_create(flow, number, service->rev_nat_index, now, family) ? 0 : number;
}

/* Rewrite the packet, so that it goes to the backend. */
static __always_inline int lb_redirect(context_t *ctx, struct flow *flow, const struct lb_backend *backend,
				       __u8 family)
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

/* Have a packet that would come back to its sender come from an address that no pod has, or the pod would take the
 * answer for its own. IPv6 has no such address.
 */
static __always_inline int lb_loop_back(context_t *ctx, struct flow *flow, const struct lb_backend *backend,
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

/* Whether the service is an externalIP of others, which pods may not use (CVE-2020-8554). */
static __always_inline bool lb_is_foreign(const struct lb_service *service, const struct flow *flow, __u8 family)
{
	return service->flags & LB_EXTERNAL_IP && config.features & FEATURE_OWN_EXTERNAL_IPS &&
	       identity_of(ipcache_lookup(&flow->daddr, family)) != IDENTITY_HOST;
}

static __always_inline int lb_pod(context_t *ctx, struct flow *flow, __u32 now, __u64 netns_cookie, __u8 family)
{
	const struct lb_service *service;
	struct lb_backend backend = {};
	union lb_key key;
	__u32 number;
	int refused;

	service = lb_service_of(&key, flow, family);
	if (likely(!service) || lb_skips_redirect(service, netns_cookie, &flow->daddr, flow->dport, family) ||
	    unlikely(lb_is_foreign(service, flow, family)))
		return 0;
	number = lb_serve(&key, service, flow, &backend, NULL, now, family);
	if (!number) {
		if (config.features & FEATURE_UNREACHABLE)
			return lb_unreachable(ctx, flow, BACK_TO_POD, family);
		return DROP(EGRESS, DROP_NO_SERVICE);
	}
	lb_affinity_note(service, flow, number, now, family);
	flow->rev_nat_index = service->rev_nat_index;
	flow->translated = true;
	refused = lb_loop_back(ctx, flow, &backend, family);
	if (!refused)
		refused = lb_redirect(ctx, flow, &backend, family);
	return refused ? DROP(EGRESS, refused) : LB_TRANSLATED;
}

/* 0 if the packet is for no service, LB_TRANSLATED if it is on its way to a backend now, else the verdict. */
VERIFIED_ALONE lb4_pod(context_t *ctx, struct flow *flow, __u32 now, __u64 netns_cookie)
{
	return flow ? lb_pod(ctx, flow, now, netns_cookie, FAMILY_IPV4) : 0;
}

VERIFIED_ALONE lb6_pod(context_t *ctx, struct flow *flow, __u32 now, __u64 netns_cookie)
{
	return flow ? lb_pod(ctx, flow, now, netns_cookie, FAMILY_IPV6) : 0;
}

/* The address and port of a service by its reverse NAT index; false if it was removed. */
static __always_inline bool lb_frontend_of(__be16 index, struct address *address, __be16 *port, __u8 family)
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

/* Have an answer come from there: 0, or the reason to drop. `loopback`: the backend is the client. */
static __always_inline int lb_answer_from(context_t *ctx, struct flow *flow, const struct address *service,
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

/* Have a backend's answer come from the service. */
static __always_inline int lb_answer(context_t *ctx, struct flow *flow, __be16 index, bool loopback, __u8 family)
{
	struct address service;
	__be16 port;

	if (!lb_frontend_of(index, &service, &port, family))
		return 0;
	return lb_answer_from(ctx, flow, &service, port, loopback, family);
}

VERIFIED_ALONE lb4_answer(context_t *ctx, struct flow *flow, __u32 index, __u32 loopback)
{
	return flow ? lb_answer(ctx, flow, index, loopback, FAMILY_IPV4) : DROP_INVALID;
}

VERIFIED_ALONE lb6_answer(context_t *ctx, struct flow *flow, __u32 index)
{
	return flow ? lb_answer(ctx, flow, index, false, FAMILY_IPV6) : DROP_INVALID;
}
