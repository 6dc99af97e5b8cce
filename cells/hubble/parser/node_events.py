"""Converts agent notifications to agent events, and formats datapath debug messages.

Source: Cilium 1.17, pkg/monitor/api (notifications), pkg/hubble/parser/agent, pkg/monitor/datapath_debug.go.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import msgspec

from cells.hubble.enums import AgentEventType
from cells.hubble.enums import DebugEventType as D
from cells.hubble.flow import (
    AgentEvent,
    AgentEventUnknown,
    EndpointRegenNotification,
    EndpointUpdateNotification,
    IPCacheNotification,
    PolicyUpdateNotification,
    ServiceDeleteNotification,
    ServiceUpsertNotification,
    ServiceUpsertNotificationAddr,
    TimeNotification,
)
from cells.hubble.notifications import (
    ENDPOINT_CREATED,
    ENDPOINT_DELETED,
    IPCACHE_DELETED,
    IPCACHE_UPSERTED,
    POLICY_DELETED,
    POLICY_UPDATED,
    REGENERATED,
    REGENERATION_FAILED,
    SERVICE_DELETED,
    SERVICE_UPSERTED,
    START,
    AgentStarted,
    EndpointChanged,
    EndpointRegenerated,
    PolicyChanged,
    PrefixChanged,
    ServiceDeleted,
    ServiceUpserted,
)
from cells.hubble.parser.packet import ip_text
from cells.hubble.scalars import DecodeError, parse_rfc3339


def _start(body: AgentStarted) -> dict[str, Any]:
    try:
        time: int | None = parse_rfc3339(body.time)
    except DecodeError:
        time = None
    return {"agent_start": TimeNotification(time=time)}


def _policy(body: PolicyChanged) -> dict[str, Any]:
    return {
        "policy_update": PolicyUpdateNotification(
            labels=tuple(body.labels or ()), revision=body.revision, rule_count=body.rule_count
        )
    }


def _regeneration(body: EndpointRegenerated) -> dict[str, Any]:
    return {
        "endpoint_regenerate": EndpointRegenNotification(
            id=body.id, labels=tuple(body.labels or ()), error=body.error
        )
    }


def _endpoint(body: EndpointChanged) -> dict[str, Any]:
    return {
        "endpoint_update": EndpointUpdateNotification(
            id=body.id,
            labels=tuple(body.labels or ()),
            error=body.error,
            pod_name=body.pod_name,
            namespace=body.namespace,
        )
    }


def _prefix(body: PrefixChanged) -> dict[str, Any]:
    return {
        "ipcache_update": IPCacheNotification(
            cidr=body.cidr,
            identity=body.id,
            old_identity=body.old_id,
            host_ip=body.host_ip,
            old_host_ip=body.old_host_ip,
            encrypt_key=body.encrypt_key,
            namespace=body.namespace,
            pod_name=body.pod_name,
        )
    }


def _service(body: ServiceUpserted) -> dict[str, Any]:
    frontend = body.frontend_address
    return {
        "service_upsert": ServiceUpsertNotification(
            id=body.id,
            frontend_address=ServiceUpsertNotificationAddr(ip=frontend.ip or "<nil>", port=frontend.port),
            backend_addresses=tuple(
                ServiceUpsertNotificationAddr(ip=backend.ip, port=backend.port)
                for backend in body.backend_addresses or ()
            ),
            type=body.type,
            traffic_policy=body.ext_traffic_policy,
            name=body.name,
            namespace=body.namespace,
            ext_traffic_policy=body.ext_traffic_policy,
            int_traffic_policy=body.int_traffic_policy,
        )
    }


def _service_deleted(body: ServiceDeleted) -> dict[str, Any]:
    return {"service_delete": ServiceDeleteNotification(id=body.id)}


_EVENTS: Final[dict[int, tuple[AgentEventType, type[Any], Callable[[Any], dict[str, Any]]]]] = {
    START: (AgentEventType.AGENT_STARTED, AgentStarted, _start),
    REGENERATED: (AgentEventType.ENDPOINT_REGENERATE_SUCCESS, EndpointRegenerated, _regeneration),
    REGENERATION_FAILED: (AgentEventType.ENDPOINT_REGENERATE_FAILURE, EndpointRegenerated, _regeneration),
    POLICY_UPDATED: (AgentEventType.POLICY_UPDATED, PolicyChanged, _policy),
    POLICY_DELETED: (AgentEventType.POLICY_DELETED, PolicyChanged, _policy),
    ENDPOINT_CREATED: (AgentEventType.ENDPOINT_CREATED, EndpointChanged, _endpoint),
    ENDPOINT_DELETED: (AgentEventType.ENDPOINT_DELETED, EndpointChanged, _endpoint),
    IPCACHE_UPSERTED: (AgentEventType.IPCACHE_UPSERTED, PrefixChanged, _prefix),
    IPCACHE_DELETED: (AgentEventType.IPCACHE_DELETED, PrefixChanged, _prefix),
    SERVICE_UPSERTED: (AgentEventType.SERVICE_UPSERTED, ServiceUpserted, _service),
    SERVICE_DELETED: (AgentEventType.SERVICE_DELETED, ServiceDeleted, _service_deleted),
}


def agent_event(kind: int, notification: object) -> AgentEvent:
    """Convert a notification to an agent event; unknown if its number and body do not match."""
    if (known := _EVENTS.get(kind)) is not None and isinstance(notification, known[1]):
        return AgentEvent(type=known[0], **known[2](notification))
    text = msgspec.json.encode(notification).decode()
    return AgentEvent(unknown=AgentEventUnknown(type=str(kind), notification=text))


def debug_text(kind: int, a: int, b: int, c: int) -> str:
    """Format a debug message of this type with its three arguments."""
    text = _TEXTS.get(kind)
    return text(a, b, c) if text else f"Unknown message type={kind} arg1={a} arg2={b}"


def _port(value: int) -> int:
    """Return the port in the lower half of an argument, which is in network byte order."""
    return (value & 0xFF) << 8 | value >> 8 & 0xFF


def _ip4(value: int) -> str:
    return ip_text(value.to_bytes(4, "little"))


def _ip6(value: int) -> str:
    """Format the last four bytes of an IPv6 address."""
    high, low = divmod(int.from_bytes(value.to_bytes(4, "little"), "big"), 1 << 16)
    return f"{high:x}:{low:x}"


def _flags(value: int) -> str:
    return "OUT" if value & 1 else "RELATED" if value & 2 else "IN"


def _tuple(a: int, b: int) -> str:
    return f"sport={a >> 16} dport={a & 0xFFFF} nexthdr={b >> 8} flags={_flags(b)}"


def _proxied(a: int, b: int) -> str:
    return f"sport={_port(a >> 16)} dport={_port(a)} saddr={_ip4(b)}"


def _revnat(value: int) -> str:
    return f"revnat={_port(value)}"


def _errno(value: int) -> str:
    text = os.strerror(value) if 0 < value < 134 else ""
    return text[:1].lower() + text[1:] if text and "Unknown" not in text else f"errno {value}"


def _slot_lookup(a: int, b: int, _: int) -> str:
    return f"Service backend slot lookup: slot={a}, dport={_port(b)}"


def _slot_failed(a: int, b: int, _: int) -> str:
    return f"Service backend slot lookup failed: slot={a}, dport={_port(b)}"


def _backend_failed(a: int, _b: int, _c: int) -> str:
    return f"Backend service lookup failed: backend_id={a}"


def _reverse_lookup(a: int, _b: int, _c: int) -> str:
    return f"Reverse NAT lookup, index={_port(a)}"


def _conntrack_second(a: int, b: int, c: int) -> str:
    return f"Conntrack lookup 2/2: nexthdr={a >> 8} flags={a & 0xFF} dir={b} scope={c}"


_STATES: Final = ("New", "Established", "Reply", "Related")
_DIRECTIONS: Final = {0: "egress", 1: "ingress"}
_TEXTS: Final[dict[int, Callable[[int, int, int], str]]] = {
    D.DBG_GENERIC: lambda a, b, _: f"No message, arg1={a} ({a:#x}) arg2={b} ({b:#x})",
    D.DBG_LOCAL_DELIVERY: lambda a, b, _: f"Attempting local delivery for container id {a} from seclabel {b}",
    D.DBG_ENCAP: lambda a, b, _: f"Encapsulating to node {a} ({a:#x}) from seclabel {b}",
    D.DBG_LXC_FOUND: lambda _a, b, _c: f"Local container found ifindex  seclabel {_port(b)}",
    D.DBG_POLICY_DENIED: lambda a, b, _: f"Policy evaluation would deny packet from {a} to {b}",
    D.DBG_CT_LOOKUP: lambda a, b, _: f"CT lookup: {_tuple(a, b)}",
    D.DBG_CT_LOOKUP_REV: lambda a, b, _: f"CT reverse lookup: {_tuple(a, b)}",
    D.DBG_CT_MATCH: lambda a, b, _: f"CT entry found lifetime={a}, {_revnat(b)}",
    D.DBG_CT_CREATED: lambda a, b, c: f"CT created 1/2: {_tuple(a, b)} {_revnat(c)}",
    D.DBG_CT_CREATED2: lambda a, b, _: f"CT created 2/2: {_ip4(a)} {_revnat(b)}",
    D.DBG_ICMP6_HANDLE: lambda a, _b, _c: f"Handling ICMPv6 type={a}",
    D.DBG_ICMP6_REQUEST: lambda a, _b, _c: f"ICMPv6 echo request for router offset={a}",
    D.DBG_ICMP6_NS: lambda a, b, _: f"ICMPv6 neighbour soliciation for address {a:x}:{b:x}",
    D.DBG_ICMP6_TIME_EXCEEDED: lambda _a, _b, _c: "Sending ICMPv6 time exceeded",
    D.DBG_CT_VERDICT: lambda a, b, _: f"CT verdict: {_STATES[a] if a < 4 else a}, {_revnat(b)}",
    D.DBG_DECAP: lambda a, b, _: f"Tunnel decap: id={a} flowlabel={b:x}",
    D.DBG_PORT_MAP: lambda a, b, _: f"Mapping port from={a} to={b}",
    D.DBG_ERROR_RET: lambda a, b, _: f"BPF function {a} returned error {b}",
    D.DBG_TO_HOST: lambda a, _b, _c: f"Going to host, policy-skip={a}",
    D.DBG_TO_STACK: lambda a, _b, _c: f"Going to the stack, policy-skip={a}",
    D.DBG_PKT_HASH: lambda a, b, _: f"Packet hash={a} ({a:#x}), selected_service={b}",
    D.DBG_LB6_LOOKUP_FRONTEND: lambda a, b, _: f"Frontend service lookup, addr.p4={a:x} key.dport={_port(b)}",
    D.DBG_LB6_LOOKUP_FRONTEND_FAIL: lambda a, b, _: (
        f"Frontend service lookup failed, addr.p2={a:x} addr.p3={b:x}"
    ),
    D.DBG_LB6_LOOKUP_BACKEND_SLOT: _slot_lookup,
    D.DBG_LB6_LOOKUP_BACKEND_SLOT_SUCCESS: lambda a, b, _: (
        f"Service backend slot lookup result: target.p4={a:x} port={_port(b)}"
    ),
    D.DBG_LB6_LOOKUP_BACKEND_SLOT_V2_FAIL: _slot_failed,
    D.DBG_LB6_LOOKUP_BACKEND_FAIL: _backend_failed,
    D.DBG_LB6_REVERSE_NAT_LOOKUP: _reverse_lookup,
    D.DBG_LB6_REVERSE_NAT: lambda a, b, _: f"Performing reverse NAT, address.p4={a:x} port={_port(b)}",
    D.DBG_LB4_LOOKUP_FRONTEND: lambda a, b, _: (
        f"Frontend service lookup, addr={_ip4(a)} key.dport={_port(b)}"
    ),
    D.DBG_LB4_LOOKUP_FRONTEND_FAIL: lambda _a, _b, _c: "Frontend service lookup failed",
    D.DBG_LB4_LOOKUP_BACKEND_SLOT: _slot_lookup,
    D.DBG_LB4_LOOKUP_BACKEND_SLOT_SUCCESS: lambda a, b, _: (
        f"Service backend slot lookup result: target={_ip4(a)} port={_port(b)}"
    ),
    D.DBG_LB4_LOOKUP_BACKEND_SLOT_V2_FAIL: _slot_failed,
    D.DBG_LB4_LOOKUP_BACKEND_FAIL: _backend_failed,
    D.DBG_LB4_REVERSE_NAT_LOOKUP: _reverse_lookup,
    D.DBG_LB4_REVERSE_NAT: lambda a, b, _: f"Performing reverse NAT, address={_ip4(a)} port={_port(b)}",
    D.DBG_LB4_LOOPBACK_SNAT: lambda a, b, _: f"Loopback SNAT from={_ip4(a)} to={_ip4(b)}",
    D.DBG_LB4_LOOPBACK_SNAT_REV: lambda a, b, _: f"Loopback reverse SNAT from={_ip4(a)} to={_ip4(b)}",
    D.DBG_CT_LOOKUP4: lambda a, _b, _c: f"CT lookup address: {_ip4(a)}",
    D.DBG_RR_BACKEND_SLOT_SEL: lambda a, b, _: (
        f"RR backend slot selection hash={a} ({a:#x}), selected_service={b}"
    ),
    D.DBG_REV_PROXY_LOOKUP: lambda a, b, c: f"Reverse proxy lookup {_proxied(a, b)} nexthdr={c}",
    D.DBG_REV_PROXY_FOUND: lambda a, b, _: f"Reverse proxy entry found, orig-daddr={_ip4(a)} orig-dport={b}",
    D.DBG_REV_PROXY_UPDATE: lambda a, b, c: f"Reverse proxy updated {_proxied(a, b)} nexthdr={c}",
    D.DBG_L4_POLICY: lambda a, b, _: f"Resolved L4 policy to: {_port(a)} / {_DIRECTIONS.get(b & 0xFFFF, '')}",
    D.DBG_NETDEV_IN_CLUSTER: lambda a, _b, _c: f"Destination is inside cluster prefix, source identity: {a}",
    D.DBG_NETDEV_ENCAP4: lambda a, b, _: f"Attempting encapsulation, lookup key: {_ip4(a)}, identity: {b}",
    D.DBG_CT_LOOKUP4_1: lambda a, b, c: (
        f"Conntrack lookup 1/2: src={_ip4(a)}:{c & 0xFFFF} dst={_ip4(b)}:{c >> 16}"
    ),
    D.DBG_CT_LOOKUP4_2: _conntrack_second,
    D.DBG_CT_CREATED4: lambda a, b, c: (
        f"Conntrack create: proxy-port={a >> 16} {_revnat(a)} src-identity={b} lb={_ip4(c)}"
    ),
    D.DBG_CT_LOOKUP6_1: lambda a, b, c: (
        f"Conntrack lookup 1/2: src=[::{_ip6(a)}]:{c & 0xFFFF} dst=[::{_ip6(b)}]:{c >> 16}"
    ),
    D.DBG_CT_LOOKUP6_2: _conntrack_second,
    D.DBG_CT_CREATED6: lambda a, b, _: (
        f"Conntrack create: proxy-port={a >> 16} {_revnat(a)} src-identity={b}"
    ),
    D.DBG_SKIP_PROXY: lambda a, _b, _c: f"Skipping proxy, tc_index is set={a:x}",
    D.DBG_L4_CREATE: lambda a, b, c: (
        f"Matched L4 policy; creating conntrack src={a} dst={b} dport={_port(c >> 16)} proto={c & 0xFF}"
    ),
    D.DBG_IP_ID_MAP_FAILED4: lambda a, _b, _c: f"Failed to map addr={_ip4(a)} to identity",
    D.DBG_IP_ID_MAP_FAILED6: lambda a, _b, _c: f"Failed to map addr.p4=[::{_ip6(a)}] to identity",
    D.DBG_IP_ID_MAP_SUCCEED4: lambda a, b, _: f"Successfully mapped addr={_ip4(a)} to identity={b}",
    D.DBG_IP_ID_MAP_SUCCEED6: lambda a, b, _: f"Successfully mapped addr.p4=[::{_ip6(a)}] to identity={b}",
    D.DBG_LB_STALE_CT: lambda a, b, _: f"Stale CT entry found stale_ct.rev_nat_id={b}, svc.rev_nat_id={a}",
    D.DBG_INHERIT_IDENTITY: lambda a, _b, _c: f"Inheriting identity={a} from stack",
    D.DBG_SK_LOOKUP4: lambda a, b, c: f"Socket lookup: src={_ip4(a)}:{c & 0xFFFF} dst={_ip4(b)}:{c >> 16}",
    D.DBG_SK_LOOKUP6: lambda a, b, c: (
        f"Socket lookup: src=[::{_ip6(a)}]:{c & 0xFFFF} dst=[::{_ip6(b)}]:{c >> 16}"
    ),
    D.DBG_SK_ASSIGN: lambda a, _b, _c: f"Socket assign: {_errno(a)}",
    D.DBG_L7_LB: lambda a, b, c: f"L7 LB from {_ip4(a)} to {_ip4(b)}: proxy port {_port(c)}",
}
