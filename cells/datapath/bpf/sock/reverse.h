/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Reverse translation: replace a backend's address at a socket by the original destination. */
#pragma once

#include "sock/metrics.h"
#include "sock/peer.h"

union reverse_key {
	struct reverse_sk4_key v4;
	struct reverse_sk6_key v6;
};

static __always_inline void reverse_sk_fill_key(union reverse_key *key, __u64 cookie, const struct address *ip,
						__be16 port, __u8 family)
{
	__builtin_memset(key, 0, sizeof(*key));
	if (family == FAMILY_IPV4) {
		key->v4.cookie = cookie;
		key->v4.address = ip->words[0];
		key->v4.port = port;
	} else {
		key->v6.cookie = cookie;
		key->v6.address = *ip;
		key->v6.port = port;
	}
}

static __always_inline void reverse_sk_delete(__u64 cookie, const struct address *ip, __be16 port, __u8 family)
{
	union reverse_key key;

	reverse_sk_fill_key(&key, cookie, ip, port, family);
	if (family == FAMILY_IPV4)
		bpf_map_delete_elem(&cilium_lb4_reverse_sk, &key.v4);
	else
		bpf_map_delete_elem(&cilium_lb6_reverse_sk, &key.v6);
}

/* Record the socket's original destination; returns 0 or a negative errno, after which it must not be translated. */
static __always_inline int reverse_sk_update(const struct peer *peer, const struct lb_backend *backend,
					     __be16 index)
{
	__u8 family = peer->family;
	union reverse_key key;

	reverse_sk_fill_key(&key, peer->cookie, &backend->address, backend->port, family);
	if (family == FAMILY_IPV4) {
		struct reverse_sk4 value = {
			.address = peer->ip.words[0],
			.port = peer->port,
			.rev_nat_index = index,
		};
		const struct reverse_sk4 *known = bpf_map_lookup_elem(&cilium_lb4_reverse_sk, &key.v4);

		if (known && known->address == value.address && known->port == value.port &&
		    known->rev_nat_index == index)
			return 0;
		return bpf_map_update_elem(&cilium_lb4_reverse_sk, &key.v4, &value, BPF_ANY);
	}

	struct reverse_sk6 value = { .address = peer->ip, .port = peer->port, .rev_nat_index = index };
	const struct reverse_sk6 *known = bpf_map_lookup_elem(&cilium_lb6_reverse_sk, &key.v6);

	if (known && address_equals(&known->address, &value.address) && known->port == value.port &&
	    known->rev_nat_index == index)
		return 0;
	return bpf_map_update_elem(&cilium_lb6_reverse_sk, &key.v6, &value, BPF_ANY);
}

/* Replace `peer`, a backend, by the original destination; false if the socket used no service. */
static __always_inline bool sock_xlate_rev(struct peer *peer, const struct sock_config *config)
{
	struct peer asked = *peer;
	const struct lb_service *service;
	union reverse_key key;
	union lb_key slots;
	__be16 index;

	reverse_sk_fill_key(&key, peer->cookie, &peer->ip, peer->port, peer->family);
	if (peer->family == FAMILY_IPV4) {
		const struct reverse_sk4 *known = bpf_map_lookup_elem(&cilium_lb4_reverse_sk, &key.v4);

		if (!known)
			return false;
		asked.ip.words[0] = known->address;
		asked.port = known->port;
		index = known->rev_nat_index;
	} else {
		const struct reverse_sk6 *known = bpf_map_lookup_elem(&cilium_lb6_reverse_sk, &key.v6);

		if (!known)
			return false;
		asked.ip = known->address;
		asked.port = known->port;
		index = known->rev_nat_index;
	}
	service = sock_lookup_service(&slots, &asked, config);
	if (!service || service->rev_nat_index != index || !service->count) {
		reverse_sk_delete(peer->cookie, &peer->ip, peer->port, peer->family);
		sock_count(REASON_LB_REVNAT_STALE, INGRESS);
		return false;
	}
	*peer = asked;
	return true;
}
