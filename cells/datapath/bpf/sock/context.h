/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Conversion between struct bpf_sock_addr and struct peer. IPv4-mapped IPv6 addresses are IPv4 peers. */
#pragma once

#include "sock/peer.h"

#define AF_INET 2
#define AF_INET6 10

/* Convert an IPv4-mapped address (RFC 4291, 2.5.5.2) to IPv4. */
static __always_inline void peer_unmap_ipv4(struct peer *peer)
{
	__be32 *ip = peer->ip.words;

	if (ip[0] | ip[1] || ip[2] != bpf_htonl(0xffff))
		return;
	peer->family = FAMILY_IPV4;
	ip[0] = ip[3];
	ip[2] = 0;
	ip[3] = 0;
}

/* Read client and destination. */
static __always_inline void peer_read(struct bpf_sock_addr *ctx, struct peer *peer,
				      const struct sock_config *config, __u8 family)
{
	peer->family = family;
	if (family == FAMILY_IPV4) {
		peer->ip.words[0] = ctx->user_ip4;
	} else {
		peer->ip.words[0] = ctx->user_ip6[0];
		peer->ip.words[1] = ctx->user_ip6[1];
		peer->ip.words[2] = ctx->user_ip6[2];
		peer->ip.words[3] = ctx->user_ip6[3];
		peer_unmap_ipv4(peer);
	}
	peer->port = (__be16) * (volatile __u32 *)&ctx->user_port;
	peer->protocol = ctx->protocol;
	peer->cookie = bpf_get_socket_cookie(ctx);
	peer->netns_cookie = bpf_get_netns_cookie(ctx);
	peer->in_host = peer->netns_cookie == config->host_cookie;
}

static __always_inline void peer_write(struct bpf_sock_addr *ctx, const struct peer *peer, __u8 family)
{
	if (family == FAMILY_IPV4) {
		ctx->user_ip4 = peer->ip.words[0];
	} else if (peer->family == FAMILY_IPV4) { /* it was mapped: keep the prefix */
		ctx->user_ip6[3] = peer->ip.words[0];
	} else {
		ctx->user_ip6[0] = peer->ip.words[0];
		ctx->user_ip6[1] = peer->ip.words[1];
		ctx->user_ip6[2] = peer->ip.words[2];
		ctx->user_ip6[3] = peer->ip.words[3];
	}
	ctx->user_port = peer->port;
}
