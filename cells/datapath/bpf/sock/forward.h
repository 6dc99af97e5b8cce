/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Forward translation: replace a service's address at a socket by a backend's. */
#pragma once

#include <linux/errno.h>

#include "lb/skip.h"
#include "sock/affinity.h"
#include "sock/reverse.h"

#define SOCK_NO_SERVICE 1 /* the address is not translated */

/* Return whether another node has the service's address: an externalIP with the mitigation of CVE-2020-8554, or a HostPort. */
static __always_inline bool sock_is_remote_service(const struct lb_service *service, const struct peer *peer,
						   const struct sock_config *config)
{
	bool external = service->flags & LB_EXTERNAL_IP && !(config->flags & SOCK_TRUSTS_EXTERNAL_IP);

	if (!external && (!(service->flags & LB_HOST_PORT) || is_loopback(peer)))
		return false;
	return identity_of(ipcache_lookup(&peer->ip, peer->family)) != IDENTITY_HOST;
}

/* Return the errno for a service without backends: as if a packet had got the ICMP error, or no reply. */
static __always_inline int sock_no_backend(const struct sock_config *config)
{
	return config->flags & SOCK_REJECTS ? -ECONNREFUSED : -EHOSTUNREACH;
}

/* Select a backend: random for TCP; by the socket cookie otherwise, so that all datagrams use the same. */
static __always_inline __u32 sock_select_backend(union lb_key *key, const struct lb_service *service,
						 const struct peer *peer)
{
	__u32 number = peer->protocol == IPPROTO_TCP ? bpf_get_prandom_u32() : (__u32)peer->cookie;
	const struct lb_service *slot;

	if (!service->count)
		return 0;
	slot = lb_lookup_slot(key, number % service->count + 1, peer->family);
	if (!slot) {
		sock_count(REASON_LB_NO_BACKEND_SLOT, EGRESS);
		return 0;
	}
	return slot->backend;
}

/* Replace `peer` by a backend; returns 0, SOCK_NO_SERVICE, or a negative errno for the caller. */
static __always_inline int sock_xlate_fwd(struct peer *peer, const struct sock_config *config)
{
	__u64 now = bpf_ktime_get_coarse_ns() / 1000000000ULL;
	struct lb_backend backend = {};
	const struct lb_service *service;
	union lb_key key;
	__u32 number, affine;

	service = sock_lookup_service(&key, peer, config);
	if (!service || service->flags2 & LB_L7 ||
	    lb_skip_redirect(service, peer->netns_cookie, &peer->ip, peer->port, peer->family) ||
	    sock_is_remote_service(service, peer, config))
		return SOCK_NO_SERVICE;
	affine = sock_lookup_affinity(service, peer, now);
	number = affine;
	if (!number || !lb_lookup_backend(number, &backend, peer->family) || backend.state != LB_BACKEND_ACTIVE) {
		number = sock_select_backend(&key, service, peer);
		if (!number)
			return sock_no_backend(config);
		if (!lb_lookup_backend(number, &backend, peer->family)) {
			sock_count(REASON_LB_NO_BACKEND, EGRESS);
			return sock_no_backend(config);
		}
		if (backend.state != LB_BACKEND_ACTIVE && lb_lookup_backend(affine, &backend, peer->family))
			number = affine; /* all backends are terminating: keep the client's */
	}
	if (!backend.port)
		backend.port = peer->port;
	if (reverse_sk_update(peer, &backend, service->rev_nat_index)) {
		sock_count(REASON_LB_REVNAT_UPDATE, EGRESS);
		return -ENOMEM;
	}
	sock_update_affinity(service, peer, number, now);
	peer->ip = backend.address;
	peer->port = backend.port;
	return 0;
}
