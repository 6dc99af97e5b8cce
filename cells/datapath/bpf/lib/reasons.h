/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Drop reasons, with Cilium's numbers, which metrics, events and tools show. */
#pragma once

#define REASON_FORWARDED 0
#define DROP_INVALID_SOURCE 132
#define DROP_POLICY 133 /* no entry allows it */
#define DROP_INVALID 134
#define DROP_CT_INVALID_HEADER 135
#define DROP_CT_UNKNOWN_PROTOCOL 137
#define DROP_UNKNOWN_L3 139
#define DROP_MISSED_TAIL_CALL 140
#define DROP_WRITE_ERROR 141
#define DROP_NO_TUNNEL_KEY 147
#define DROP_UNKNOWN_TARGET 150 /* neighbour discovery for an unknown address */
#define DROP_UNROUTABLE 151 /* stale or unroutable address */
#define DROP_L4_CHECKSUM 154
#define DROP_CT_CREATE_FAILED 155
#define DROP_INVALID_EXTENSION 156
#define DROP_NO_SERVICE 158 /* a service without backends */
#define DROP_NO_CONFIG 165
#define DROP_UNSUPPORTED_L2 166
#define DROP_NAT_NO_MAPPING 167
#define DROP_NAT_UNSUPPORTED 168
#define DROP_NO_FIB 169 /* no route, or no usable one */
#define DROP_ENCAP_PROHIBITED 170 /* a pod sends encapsulated packets */
#define DROP_INVALID_IDENTITY 171
#define DROP_UNKNOWN_SENDER 172 /* from the tunnel, but not from a node */
#define DROP_IS_CLUSTER_IP 174 /* a ClusterIP service, from an external client */
#define DROP_FRAGMENT_UNKNOWN 175 /* the first fragment is unknown */
#define DROP_SOURCE_RANGE 177 /* not allowed by loadBalancerSourceRanges */
#define DROP_NO_PROXY 178 /* the proxy does not listen */
#define DROP_POLICY_DENY 181
#define DROP_VLAN 182
#define DROP_AUTH_REQUIRED 189
#define DROP_NO_EGRESS_GATEWAY 194 /* the egress gateway policy has no gateway */
#define DROP_UNENCRYPTED 195 /* it would leave the node unencrypted */
#define DROP_TTL_EXCEEDED 196
#define DROP_NO_NODE_ID 197 /* to be encrypted for a node without a node id */
#define DROP_ENDPOINT_NOT_READY 203
#define DROP_NO_EGRESS_IP 204 /* this node is the gateway, and has no egress address */

/* Direction of a packet, from the pod's point of view. */
enum direction {
	INGRESS = 1,
	EGRESS = 2,
};

/* A verdict is a TC_ACT_* (not negative), or a negative drop: reason and direction. */
#define DROP(direction, reason) (-(((direction) << 8) | (reason)))
#define DROPPED(verdict) ((verdict) < 0)
#define DROP_REASON(verdict) ((__u8)(-(verdict)))
#define DROP_DIRECTION(verdict) ((enum direction)(-(verdict) >> 8))

#define UNDECIDED 0x10000 /* no verdict: the caller continues */
