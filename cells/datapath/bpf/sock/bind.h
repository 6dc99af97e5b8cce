/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Bind protection: processes of the node may not bind to a service's address and port. */
#pragma once

#include "sock/peer.h"

static __always_inline bool bind_conflicts_with_service(struct bpf_sock *ctx, struct peer *own)
{
	const struct sock_config *config = sock_config();
	const struct lb_service *service;
	union lb_key key;

	if (!config || !(config->flags & SOCK_BIND_PROTECTION) || !sock_can_balance(ctx->protocol))
		return false;
	own->netns_cookie = bpf_get_netns_cookie(ctx);
	if (own->netns_cookie != config->host_cookie)
		return false;
	own->in_host = true;
	own->protocol = ctx->protocol;
	own->port = bpf_htons(ctx->src_port);
	service = sock_lookup_service_at(&key, own);
	if (!service)
		service = sock_lookup_node_service(&key, own, config, false);
	return service && service->flags & (LB_NODE_PORT | LB_EXTERNAL_IP | LB_LOAD_BALANCER);
}
