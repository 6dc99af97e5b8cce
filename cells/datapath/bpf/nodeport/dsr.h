/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Direct server return: a backend on another node replies directly to the client. The first packet of a TCP connection, and
 * every packet of other protocols, names the frontend to the backend's node in an IPv4 option (RFC 791) or an IPv6 destination
 * option (RFC 8200), in Cilium's format.
 */
#pragma once

#include "ct/conntrack.h"
#include "nat/maps.h"
#include "nodeport/conntrack.h"
#include "nodeport/output.h"
#include "nodeport/maps.h"
#include "nodeport/frag_needed.h"

#define DSR4_OPTION 0x9a08 /* type and length */
#define DSR6_OPTION 0x1b14 /* of the IPv6 destination option */

/* Address and port are byte-swapped, as in Cilium. */
struct dsr4_option {
	__be16 kind;
	__u16 port;
	__u32 address;
};

/* A destination options header with one option. */
struct dsr6_header {
	__u8 next;
	__u8 length; /* in units of 8 bytes, without the first */
	__be16 kind;
	struct address address;
	__be16 port;
	__u16 pad;
};

_Static_assert(sizeof(struct dsr4_option) == 8, "option");
_Static_assert(sizeof(struct dsr6_header) == 24, "destination options header");

/* Return whether the node uses DSR for this protocol. */
static __always_inline bool dsr_is_enabled(const struct nodeport_config *own, const struct flow *flow)
{
	return own->flags & (flow->protocol == IPPROTO_TCP ? NODEPORT_DSR_TCP : NODEPORT_DSR_OTHER);
}

/* Return whether this flow uses DSR. */
static __always_inline bool dsr_is_used(const struct nodeport_config *own, const struct flow *flow)
{
	return own->flags & NODEPORT_DSR_CHOSEN ? flow->direct : dsr_is_enabled(own, flow);
}

static __always_inline int dsr4_set_option(context_t *ctx, const struct address *service, __be16 port)
{
	const struct dsr4_option option = {
		.kind = bpf_htons(DSR4_OPTION),
		.port = bpf_ntohs(port),
		.address = bpf_ntohl(service->words[0]),
	};
	const __u32 size = sizeof(option);
	__be32 before, after;
	struct iphdr *ip = packet_ipv4(ctx);
	__s64 sum;

	if (!ip || ip->ihl + size / 4 > 15)
		return DROP_INVALID;
	before = *(__be32 *)ip;
	ip->ihl += size / 4;
	ip->tot_len = bpf_htons(bpf_ntohs(ip->tot_len) + size);
	after = *(__be32 *)ip;
	sum = bpf_csum_diff(&before, sizeof(before), &after, sizeof(after), 0);
	sum = bpf_csum_diff(NULL, 0, (void *)&option, sizeof(option), sum);
	if (packet_make_room(ctx, sizeof(*ip), size) ||
	    packet_store(ctx, LINK_HLEN + sizeof(*ip), &option, sizeof(option)) ||
	    packet_sum3(ctx, LINK_HLEN + offsetof(struct iphdr, check), 0, sum, 0))
		return DROP_WRITE_ERROR;
	return 0;
}

static __always_inline int dsr6_set_option(context_t *ctx, const struct address *service, __be16 port)
{
	struct dsr6_header header = {
		.length = sizeof(header) / 8 - 1,
		.kind = bpf_htons(DSR6_OPTION),
		.address = *service,
		.port = port,
	};
	struct ipv6hdr *ip = packet_ipv6(ctx);

	if (!ip)
		return DROP_INVALID;
	header.next = ip->nexthdr;
	ip->nexthdr = IPPROTO_DSTOPTS;
	ip->payload_len = bpf_htons(bpf_ntohs(ip->payload_len) + sizeof(header));
	if (packet_make_room(ctx, sizeof(*ip), sizeof(header)) ||
	    packet_store(ctx, LINK_HLEN + sizeof(*ip), &header, sizeof(header)))
		return DROP_WRITE_ERROR;
	return 0;
}

/* Forward a client's packet to a remote backend, with the frontend in an option; returns the verdict. */
static __always_inline int dsr_forward(context_t *ctx, struct flow *flow, __u8 family)
{
	__u32 mtu, size = family == FAMILY_IPV4 ? sizeof(struct dsr4_option) : sizeof(struct dsr6_header);
	struct address service;
	__be16 port;
	int refused;

	if (flow->protocol == IPPROTO_TCP && !(flow->tcp_flags & TCP_SYN))
		return nodeport_send(ctx, flow, 0, family);
	if (!lb_lookup_rev_nat(flow->rev_nat_index, &service, &port, family))
		return DROP(EGRESS, DROP_NO_SERVICE);
	mtu = exceeded_mtu(ctx, flow, size, family);
	if (unlikely(mtu) && !may_be_fragmented(ctx, family))
		return send_frag_needed(ctx, flow, &service, port, mtu - size, family);
	refused =
		family == FAMILY_IPV4 ? dsr4_set_option(ctx, &service, port) : dsr6_set_option(ctx, &service, port);
	if (refused)
		return DROP(EGRESS, refused);
	return unlikely(mtu) ? VERDICT_PASS : nodeport_send(ctx, flow, 0, family);
}

VERIFIED_ALONE dsr4_forward(context_t *ctx, struct flow *flow)
{
	return flow ? dsr_forward(ctx, flow, FAMILY_IPV4) : DROP(EGRESS, DROP_INVALID);
}

VERIFIED_ALONE dsr6_forward(context_t *ctx, struct flow *flow)
{
	return flow ? dsr_forward(ctx, flow, FAMILY_IPV6) : DROP(EGRESS, DROP_INVALID);
}

/* Read the frontend from the packet's option; false if there is none. */
static __always_inline bool dsr4_read_option(context_t *ctx, struct address *service, __be16 *port)
{
	const struct iphdr *ip = packet_ipv4(ctx);
	struct dsr4_option option;

	if (!ip || ip->ihl < (sizeof(*ip) + sizeof(option)) / 4 ||
	    packet_load(ctx, LINK_HLEN + sizeof(*ip), &option, sizeof(option)) ||
	    option.kind != bpf_htons(DSR4_OPTION))
		return false;
	*service = (struct address){ .words = { bpf_htonl(option.address) } };
	*port = bpf_htons(option.port);
	return true;
}

static __always_inline bool dsr6_read_option(context_t *ctx, struct address *service, __be16 *port)
{
	const struct ipv6hdr *ip = packet_ipv6(ctx);
	struct dsr6_header header;

	if (!ip || ip->nexthdr != IPPROTO_DSTOPTS ||
	    packet_load(ctx, LINK_HLEN + sizeof(*ip), &header, sizeof(header)) ||
	    header.kind != bpf_htons(DSR6_OPTION))
		return false;
	*service = header.address;
	*port = header.port;
	return true;
}

/* Return whether a local pod sent the packet to a service on another node, which forwarded it back to a backend here: the
 * pod's flow to the frontend has a conntrack entry.
 */
static __always_inline bool dsr_is_hairpin(context_t *ctx, const struct flow *flow, __u32 now, __u8 family)
{
	struct flow asked = { .saddr = flow->saddr, .sport = flow->sport, .protocol = flow->protocol };
	const struct ct_entry *entry = ct_entry_of(flow, EGRESS, false, family);

	if (entry && entry->lifetime >= now && entry->dsr_internal)
		return true;
	if (!(family == FAMILY_IPV4 ? dsr4_read_option(ctx, &asked.daddr, &asked.dport)
				    : dsr6_read_option(ctx, &asked.daddr, &asked.dport)))
		return false;
	entry = ct_entry_of(&asked, EGRESS, false, family);
	return entry && entry->lifetime >= now;
}

VERIFIED_ALONE dsr4_is_hairpin(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? dsr_is_hairpin(ctx, flow, now, FAMILY_IPV4) : false;
}

VERIFIED_ALONE dsr6_is_hairpin(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? dsr_is_hairpin(ctx, flow, now, FAMILY_IPV6) : false;
}

/* Look up the frontend for a DSR reply in the NAT map. */
static __always_inline bool dsr_lookup_frontend(const struct flow *answer, struct nat_entry *service, __u8 family)
{
	union nat_key key;

	nat_fill_key(&key, &answer->saddr, answer->sport, &answer->daddr, answer->dport, answer->protocol,
		     NAT_KEY_OUT, family);
	return nat_lookup(&key, service, family);
}

#define DSR_TRACKED 1

/* Create NAT and conntrack entries of a DSR packet from another node: returns DSR_TRACKED, 0 if it is none, or a negative
 * drop reason.
 */
static __always_inline int dsr_track(context_t *ctx, struct flow *flow, __u32 now, __u8 family)
{
	bool tcp = flow->protocol == IPPROTO_TCP, named;
	struct nat_entry service = {};
	struct ct_entry *known;
	union nat_key key;

	named = family == FAMILY_IPV4 ? dsr4_read_option(ctx, &service.address, &service.port)
				      : dsr6_read_option(ctx, &service.address, &service.port);
	flow->dsr = ct_lookup_own(flow, EGRESS, now, family, &known) == CT_ESTABLISHED && known->dsr_internal;
	if (flow->dsr || !named) {
		if (!named || !tcp || !(flow->tcp_flags & TCP_SYN))
			return flow->dsr ? DSR_TRACKED : 0;
	}
	const struct ct_entry entry = {
		.source_identity = world_identity(family),
		.dsr_internal = true,
		.lifetime = now + (tcp ? config.ct_lifetime_syn : config.ct_lifetime_any),
		.tx_flags_seen = tcp ? TCP_SYN : 0,
		.last_tx_report = now,
	};

	nat_fill_key(&key, &flow->daddr, flow->dport, &flow->saddr, flow->sport, flow->protocol, NAT_KEY_OUT,
		     family);
	if (nat_insert(&key, &service, BPF_ANY, family))
		return -DROP_NAT_NO_MAPPING;
	flow->dsr = true;
	flow->report = CT_CAPTURE;
	return ct_insert_egress(flow, &entry, family) ? -DROP_CT_CREATE_FAILED : DSR_TRACKED;
}

VERIFIED_ALONE dsr4_track(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? dsr_track(ctx, flow, now, FAMILY_IPV4) : 0;
}

VERIFIED_ALONE dsr6_track(context_t *ctx, struct flow *flow, __u32 now)
{
	return flow ? dsr_track(ctx, flow, now, FAMILY_IPV6) : 0;
}
