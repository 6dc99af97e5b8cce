/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A socket means a service: it goes to a backend instead, before there is any packet. */
#pragma once

#include <linux/errno.h>

#include "lb/skip.h"
#include "sock/affinity.h"
#include "sock/reverse.h"

#define SOCK_UNTOUCHED 1 /* the address is none of a service */

/* Whether the service is left to the node that has its address: an externalIP where the mitigation of CVE-2020-8554 is
 * on, and the host port of a pod.
 */
static __always_inline bool sock_is_elsewhere(const struct lb_service *service, const struct peer *peer,
					      const struct sock_config *config)
{
	bool external = service->flags & LB_EXTERNAL_IP && !(config->flags & SOCK_TRUSTS_EXTERNAL_IP);

	if (!external && (!(service->flags & LB_HOST_PORT) || is_loopback(peer)))
		return false;
	return identity_of(ipcache_lookup(&peer->ip, peer->family)) != IDENTITY_HOST;
}

/* The error of a socket that asks a service without backends: what the answer to its packet would be. */
static __always_inline int sock_no_backend(const struct sock_config *config)
{
	return config->flags & SOCK_REJECTS ? -ECONNREFUSED : -EHOSTUNREACH;
}

/* A TCP connection goes to any backend; what a socket sends without one always to the same. */
static __always_inline __u32 sock_pick(union lb_key *key, const struct lb_service *service, const struct peer *peer)
{
	__u32 number = peer->protocol == IPPROTO_TCP ? bpf_get_prandom_u32() : (__u32)peer->cookie;
	const struct lb_service *slot;

	if (!service->count)
		return 0;
	slot = lb_slot(key, number % service->count + 1, peer->family);
	if (!slot) {
		sock_count(REASON_LB_NO_BACKEND_SLOT, EGRESS);
		return 0;
	}
	return slot->backend;
}

/* Put a backend of the service in `peer`. SOCK_UNTOUCHED, 0, or the error the socket's owner gets, negative. */
static __always_inline int sock_forward(struct peer *peer, const struct sock_config *config)
{
	__u64 now = bpf_ktime_get_coarse_ns() / 1000000000ULL;
	struct lb_backend backend = {};
	const struct lb_service *service;
	union lb_key key;
	__u32 number, affine;

	service = sock_service_of(&key, peer, config);
	if (!service || service->flags2 & LB_L7 ||
	    lb_skips_redirect(service, peer->netns_cookie, &peer->ip, peer->port, peer->family) ||
	    sock_is_elsewhere(service, peer, config))
		return SOCK_UNTOUCHED;
	affine = sock_affine(service, peer, now);
	number = affine;
	if (!number || !lb_backend_of(number, &backend, peer->family) || backend.state != LB_BACKEND_ACTIVE) {
		number = sock_pick(&key, service, peer);
		if (!number)
			return sock_no_backend(config);
		if (!lb_backend_of(number, &backend, peer->family)) {
			sock_count(REASON_LB_NO_BACKEND, EGRESS);
			return sock_no_backend(config);
		}
		if (backend.state != LB_BACKEND_ACTIVE && lb_backend_of(affine, &backend, peer->family))
			number = affine; /* all that serve are about to end */
	}
	if (!backend.port)
		backend.port = peer->port;
	if (reverse_note(peer, &backend, service->rev_nat_index)) {
		sock_count(REASON_LB_REVNAT_UPDATE, EGRESS);
		return -ENOMEM;
	}
	sock_affinity_note(service, peer, number, now);
	peer->ip = backend.address;
	peer->port = backend.port;
	return 0;
}
