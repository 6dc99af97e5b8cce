// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* Socket load balancing: connect() and sendmsg() to a service are translated to a backend.
 *
 * The programs are attached to the root cgroup, so they run for all processes, including pods'. They return 1 to proceed and 0
 * to refuse the call, with the errno set by bpf_set_retval().
 */
#include "sock/bind.h"
#include "sock/context.h"
#include "sock/forward.h"
#include "sock/trace.h"

#define PROCEED 1
#define REFUSE 0

static __always_inline int refuse(int error)
{
	bpf_set_retval(error);
	return REFUSE;
}

static __always_inline int xlate_fwd(struct bpf_sock_addr *ctx, __u8 family, bool connects)
{
	const struct sock_config *config = sock_config();
	struct peer peer = {}, asked;
	int outcome;

	if (!config || !sock_can_balance(ctx->protocol))
		return PROCEED;
	peer_read(ctx, &peer, config, family);
	if (config->flags & SOCK_HOST_ONLY && !peer.in_host)
		return PROCEED;
	asked = peer;
	outcome = sock_xlate_fwd(&peer, config);
	if (!outcome) {
		if (sock_notifies()) {
			send_trace_sock_notify(ctx, &asked, SOCK_XLATE_FWD_BEFORE);
			send_trace_sock_notify(ctx, &peer, SOCK_XLATE_FWD_AFTER);
		}
		peer_write(ctx, &peer, family);
		return PROCEED;
	}
	if (outcome < 0)
		return refuse(outcome);
	/* A UDP socket may have used a service with this backend before; now it connects to it directly. */
	if (connects && peer.protocol != IPPROTO_TCP)
		reverse_sk_delete(peer.cookie, &peer.ip, peer.port, peer.family);
	return PROCEED;
}

static __always_inline int xlate_rev(struct bpf_sock_addr *ctx, __u8 family)
{
	const struct sock_config *config = sock_config();
	struct peer peer = {}, served;

	if (!config || !sock_can_balance(ctx->protocol))
		return PROCEED;
	peer_read(ctx, &peer, config, family);
	served = peer;
	if (sock_xlate_rev(&peer, config)) {
		if (sock_notifies()) {
			send_trace_sock_notify(ctx, &served, SOCK_XLATE_REV_BEFORE);
			send_trace_sock_notify(ctx, &peer, SOCK_XLATE_REV_AFTER);
		}
		peer_write(ctx, &peer, family);
	}
	return PROCEED;
}

SEC("cgroup/connect4")
int cil_sock4_connect(struct bpf_sock_addr *ctx)
{
	return xlate_fwd(ctx, FAMILY_IPV4, true);
}

SEC("cgroup/connect6")
int cil_sock6_connect(struct bpf_sock_addr *ctx)
{
	return xlate_fwd(ctx, FAMILY_IPV6, true);
}

SEC("cgroup/sendmsg4")
int cil_sock4_sendmsg(struct bpf_sock_addr *ctx)
{
	return xlate_fwd(ctx, FAMILY_IPV4, false);
}

SEC("cgroup/sendmsg6")
int cil_sock6_sendmsg(struct bpf_sock_addr *ctx)
{
	return xlate_fwd(ctx, FAMILY_IPV6, false);
}

SEC("cgroup/recvmsg4")
int cil_sock4_recvmsg(struct bpf_sock_addr *ctx)
{
	return xlate_rev(ctx, FAMILY_IPV4);
}

SEC("cgroup/recvmsg6")
int cil_sock6_recvmsg(struct bpf_sock_addr *ctx)
{
	return xlate_rev(ctx, FAMILY_IPV6);
}

SEC("cgroup/getpeername4")
int cil_sock4_getpeername(struct bpf_sock_addr *ctx)
{
	return xlate_rev(ctx, FAMILY_IPV4);
}

SEC("cgroup/getpeername6")
int cil_sock6_getpeername(struct bpf_sock_addr *ctx)
{
	return xlate_rev(ctx, FAMILY_IPV6);
}

SEC("cgroup/post_bind4")
int cil_sock4_post_bind(struct bpf_sock *ctx)
{
	struct peer own = { .family = FAMILY_IPV4, .ip.words[0] = ctx->src_ip4 };

	return bind_conflicts_with_service(ctx, &own) ? refuse(-EADDRINUSE) : PROCEED;
}

SEC("cgroup/post_bind6")
int cil_sock6_post_bind(struct bpf_sock *ctx)
{
	struct peer own = { .family = FAMILY_IPV6 };

	own.ip.words[0] = ctx->src_ip6[0];
	own.ip.words[1] = ctx->src_ip6[1];
	own.ip.words[2] = ctx->src_ip6[2];
	own.ip.words[3] = ctx->src_ip6[3];
	peer_unmap_ipv4(&own);
	return bind_conflicts_with_service(ctx, &own) ? refuse(-EADDRINUSE) : PROCEED;
}

/* Delete the entry of a closed socket. */
SEC("cgroup/sock_release")
int cil_sock_release(struct bpf_sock *ctx)
{
	struct peer peer = {};

	if (!sock_can_balance(ctx->protocol) || !ctx->dst_port)
		return PROCEED;
	if (ctx->family == AF_INET) {
		peer.family = FAMILY_IPV4;
		peer.ip.words[0] = ctx->dst_ip4;
	} else if (ctx->family == AF_INET6) {
		peer.family = FAMILY_IPV6;
		peer.ip.words[0] = ctx->dst_ip6[0];
		peer.ip.words[1] = ctx->dst_ip6[1];
		peer.ip.words[2] = ctx->dst_ip6[2];
		peer.ip.words[3] = ctx->dst_ip6[3];
		peer_unmap_ipv4(&peer);
	} else {
		return PROCEED;
	}
	reverse_sk_delete(bpf_get_socket_cookie(ctx), &peer.ip, ctx->dst_port, peer.family);
	return PROCEED;
}

char _license[] SEC("license") = "Dual BSD/GPL";
