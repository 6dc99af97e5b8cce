/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Why a packet is dropped. The numbers are public: metrics, events and tools print them as text. */
#pragma once

#define REASON_FORWARDED 0
#define DROP_INVALID_SOURCE 132
#define DROP_POLICY 133 /* nothing allows it */
#define DROP_INVALID 134
#define DROP_CT_INVALID_HEADER 135
#define DROP_CT_UNKNOWN_PROTOCOL 137
#define DROP_UNKNOWN_L3 139
#define DROP_MISSED_TAIL_CALL 140
#define DROP_WRITE_ERROR 141
#define DROP_NO_TUNNEL_KEY 147
#define DROP_UNKNOWN_TARGET 150 /* neighbour discovery for an address without an owner */
#define DROP_UNROUTABLE 151 /* stale or unroutable address */
#define DROP_L4_CHECKSUM 154
#define DROP_CT_CREATE_FAILED 155
#define DROP_INVALID_EXTENSION 156
#define DROP_NO_SERVICE 158 /* a service without a backend */
#define DROP_NO_CONFIG 165
#define DROP_UNSUPPORTED_L2 166
#define DROP_NAT_NO_MAPPING 167
#define DROP_NAT_UNSUPPORTED 168
#define DROP_NO_FIB 169 /* no route, or none that may be taken */
#define DROP_ENCAP_PROHIBITED 170 /* a pod plays the tunnel itself */
#define DROP_INVALID_IDENTITY 171
#define DROP_UNKNOWN_SENDER 172 /* out of the tunnel, and from no node */
#define DROP_IS_CLUSTER_IP 174 /* a service that is closed to clients outside */
#define DROP_FRAGMENT_UNKNOWN 175 /* its first fragment was not seen */
#define DROP_SOURCE_RANGE 177 /* a client that the service does not serve */
#define DROP_NO_PROXY 178 /* the proxy that is to take it does not listen */
#define DROP_POLICY_DENY 181
#define DROP_VLAN 182
#define DROP_AUTH_REQUIRED 189
#define DROP_NO_EGRESS_GATEWAY 194 /* a policy has the pod leave by a node, and there is none */
#define DROP_UNENCRYPTED 195 /* it would leave the node in clear text */
#define DROP_TTL_EXCEEDED 196
#define DROP_NO_NODE_ID 197 /* to be encrypted for a node that has no number here */
#define DROP_ENDPOINT_NOT_READY 203
#define DROP_NO_EGRESS_IP 204 /* this node is the gateway, and has no address to be one */

/* Which way a packet was going, seen from the pod. */
enum direction {
	INGRESS = 1,
	EGRESS = 2,
};

/* A verdict is a TC_ACT_* (not negative), or one of these: a reason and where it was found. */
#define DROP(direction, reason) (-(((direction) << 8) | (reason)))
#define DROPPED(verdict) ((verdict) < 0)
#define DROP_REASON(verdict) ((__u8)(-(verdict)))
#define DROP_DIRECTION(verdict) ((enum direction)(-(verdict) >> 8))

#define UNDECIDED 0x10000 /* neither an action nor a drop: left to another function */
