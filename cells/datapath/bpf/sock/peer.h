/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A socket's peer, and the lookup of its service. */
#pragma once

#include "lb/affinity.h"
#include "lb/services.h"
#include "lib/identity.h"
#include "sock/maps.h"

/* Client and destination. */
struct peer {
	struct address ip;
	__be16 port;
	__u8 protocol;
	__u8 family;
	__u64 cookie; /* of the socket */
	__u64 netns_cookie;
	bool in_host;
};

static __always_inline const struct sock_config *sock_config(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&hive_sock, &zero);
}

static __always_inline bool sock_can_balance(__u8 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP || protocol == IPPROTO_UDPLITE;
}

/* Return the service at exactly this address, or NULL. */
static __always_inline const struct lb_service *sock_lookup_service_at(union lb_key *key, const struct peer *peer)
{
	struct flow flow = { .daddr = peer->ip, .dport = peer->port, .protocol = peer->protocol };

	return lb_lookup_service(key, &flow, peer->family);
}

static __always_inline bool is_loopback(const struct peer *peer)
{
	const __be32 *ip = peer->ip.words;

	if (peer->family == FAMILY_IPV4)
		return (ip[0] & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
	return !(ip[0] | ip[1] | ip[2]) && ip[3] == bpf_htonl(1);
}

/* Return whether the address is one of this node, or with `remote` also of another node. */
static __always_inline bool is_node(const struct peer *peer, bool remote)
{
	__u32 identity;

	if (peer->in_host && is_loopback(peer))
		return true;
	identity = identity_of(ipcache_lookup(&peer->ip, peer->family));
	return identity == IDENTITY_HOST || (remote && is_remote_node(identity));
}

/* Return the NodePort service at any node's address, or the HostPort at this node's, or NULL. */
static __always_inline const struct lb_service *
sock_lookup_node_service(union lb_key *key, const struct peer *peer, const struct sock_config *config, bool remote)
{
	__u16 port = bpf_ntohs(peer->port);
	bool in_range = port >= config->node_port_min && port <= config->node_port_max;
	const struct lb_service *service;
	struct peer any = *peer;

	if (!is_node(peer, remote && in_range))
		return NULL;
	__builtin_memset(&any.ip, 0, sizeof(any.ip));
	service = sock_lookup_service_at(key, &any);
	if (!service)
		return NULL;
	if (in_range)
		return service->flags & LB_NODE_PORT ? service : NULL;
	if (!(service->flags & LB_HOST_PORT))
		return NULL;
	return service->flags2 & LB_LOOPBACK && !is_loopback(peer) ? NULL : service;
}

/* Return the service at the socket's destination, or NULL. `key` is set for lb_lookup_slot(). */
static __always_inline const struct lb_service *sock_lookup_service(union lb_key *key, const struct peer *peer,
								    const struct sock_config *config)
{
	const struct lb_service *service;

	/* For a pod the unspecified address is its loopback, not the wildcard of NodePort entries. */
	if (!peer->in_host && address_is_zero(&peer->ip))
		return NULL;
	service = sock_lookup_service_at(key, peer);
	return service ? service : sock_lookup_node_service(key, peer, config, true);
}
