"""Entries of the node's maps as text: a name and a value for each field.

Source of the public layouts: Cilium 1.17; the words are those of ``cilium-dbg bpf ...``.
"""

import struct
from collections.abc import Callable, Mapping
from ipaddress import IPv4Address, ip_address
from typing import Final

from cells.maps.records.cluster import (
    L2_RESPONDER_VALUE,
    TUNNEL_OWN_IDENTITIES,
    EgressKey,
    EgressValue,
    IpcacheKey,
    IpcacheValue,
    L2ResponderKey,
    NodeKey,
    NodeValue,
    TunnelConfig,
    TunnelKey,
    TunnelValue,
)
from cells.maps.records.endpoints import (
    ENDPOINT_FLAGS,
    NODE_EVENTS,
    EndpointConfig,
    LxcKey,
    LxcValue,
    NodeConfig,
    PolicyEntry,
    PolicyKey,
    flags_text,
)
from cells.maps.records.flows import (
    CT_IN,
    CT_RELATED,
    CT_SERVICE,
    CtEntry,
    CtKey,
    FragmentPorts,
    MetricsKey,
    MetricsValue,
)
from cells.observe.events import reason_name

Row = dict[str, object]

_PROTOCOLS: Final = {0: "ANY", 1: "ICMP", 6: "TCP", 17: "UDP", 58: "ICMPv6", 132: "SCTP"}
_CT_FLAGS: Final = (
    *("RxClosing", "TxClosing", "Nat64", "LBLoopback", "SeenNonSyn", "NodePort", "ProxyRedirect"),
    *("DSRInternal", "FromL7LB", "Reserved1", "FromTunnel"),
)
_DIRECTIONS: Final = {1: "ingress", 2: "egress", 3: "service"}
_AUTH: Final = {0: "", 1: "spire"}
_GATEWAYS: Final = {IPv4Address(0): "none, dropped", IPv4Address(1): "excluded"}


def describe(name: str, key: bytes, value: bytes) -> Row | None:
    """Return the text of an entry, or its bytes for an unknown map; None for an unused array slot."""
    try:
        return _READERS[family_of(name)](key, value)
    except KeyError:
        return {"key": key.hex(" "), "value": value.hex(" ")}


def family_of(name: str) -> str:
    """Return the kind of a map: ``cilium_policy_01234`` is a ``cilium_policy``, ``cilium_ct6_global`` a
    ``cilium_ct``.
    """
    if name.startswith("cilium_policy_") and name.removeprefix("cilium_policy_").isdigit():
        return "cilium_policy"
    if name.startswith("cilium_ct") and name.endswith("_global"):
        return "cilium_ct"
    return name


def _lxc(key: bytes, value: bytes) -> Row:
    row = LxcValue.unpack(value)
    address = str(LxcKey.unpack(key).ip)
    if row.is_host:
        return {"address": address, "endpoint": "(localhost)"}
    return {
        "address": address,
        "endpoint": row.endpoint_id,
        "identity": row.identity,
        "ifindex": row.ifindex,
        "mac": row.mac.hex(":"),
        "node mac": row.node_mac.hex(":"),
        "flags": f"0x{row.flags:04X}",
    }


def _ipcache(key: bytes, value: bytes) -> Row:
    row = IpcacheValue.unpack(value)
    return {
        "prefix": str(IpcacheKey.unpack(key).network),
        "identity": row.identity,
        "tunnel endpoint": str(row.tunnel_endpoint),
        "encrypt key": row.encrypt_key,
        "flags": "skiptunnel" if row.flags & 1 else "<none>",
    }


def _ct(key: bytes, value: bytes) -> Row:
    tuple_, entry = CtKey.unpack(key), CtEntry.unpack(value)
    service = bool(tuple_.flags & CT_SERVICE)
    # Except in services, the key has the addresses of the reply and the ports of the original direction.
    source = tuple_.saddr if service else tuple_.daddr
    destination = tuple_.daddr if service else tuple_.saddr
    sport, dport = (tuple_.dport, tuple_.sport) if service else (tuple_.sport, tuple_.dport)
    names = [name for bit, name in enumerate(_CT_FLAGS) if entry.flags >> bit & 1]
    return {
        "protocol": _PROTOCOLS.get(tuple_.protocol, tuple_.protocol),
        "direction": "SVC" if service else "IN" if tuple_.flags & CT_IN else "OUT",
        "source": _socket(str(source), sport),
        "destination": _socket(str(destination), dport),
        "expires": entry.lifetime,
        "packets": entry.packets,
        "bytes": entry.octets,
        "flags": " ".join([*(["related"] if tuple_.flags & CT_RELATED else []), *names]),
        "source identity": entry.source_identity,
        "rx flags": f"0x{entry.rx_flags_seen:02x}",
        "tx flags": f"0x{entry.tx_flags_seen:02x}",
        "last rx report": entry.last_rx_report,
        "last tx report": entry.last_tx_report,
        "rev nat": entry.rev_nat_index,
        "ifindex": entry.ifindex,
        "backend": entry.backend_id,
    }


def _socket(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _policy(key: bytes, value: bytes) -> Row:
    peer, entry = PolicyKey.unpack(key), PolicyEntry.unpack(value)
    protocol = _PROTOCOLS.get(peer.protocol, str(peer.protocol))
    last = peer.port | 0xFFFF >> peer.port_bits
    ports = str(peer.port) if last == peer.port else f"{peer.port}-{last}"
    return {
        "verdict": "deny" if entry.deny else "allow",
        "direction": "egress" if peer.egress else "ingress",
        "identity": peer.identity,
        "port/protocol": f"{ports}/{protocol}" if peer.port_bits else protocol,
        "proxy port": entry.proxy_port or "",
        "auth": _AUTH.get(entry.auth_type, entry.auth_type),
        "bytes": entry.octets,
        "packets": entry.packets,
    }


def _metrics(key: bytes, value: bytes) -> Row:
    which, counted = MetricsKey.unpack(key), MetricsValue.unpack(value)
    return {
        "reason": reason_name(which.reason) if which.reason else "Success",
        "direction": _DIRECTIONS.get(which.direction, which.direction),
        "packets": counted.packets,
        "bytes": counted.octets,
        "line": which.line,
        "file": which.file,
    }


def _fragments(key: bytes, value: bytes) -> Row:
    size = 4 if len(key) == 12 else 16
    ports = FragmentPorts.unpack(value)
    return {
        "source": str(ip_address(key[size : 2 * size])),
        "destination": str(ip_address(key[:size])),
        "id": int.from_bytes(key[2 * size :][: 2 if size == 4 else 4], "big"),
        "protocol": _PROTOCOLS.get(number := key[2 * size + (2 if size == 4 else 4)], number),
        "source port": ports.sport,
        "destination port": ports.dport,
    }


def _endpoint(key: bytes, value: bytes) -> Row:
    row = EndpointConfig.unpack(value)
    return {
        "ifindex": int.from_bytes(key, "little"),
        "endpoint": row.endpoint_id,
        "identity": row.identity,
        "ipv4": str(row.ipv4 or ""),
        "ipv6": str(row.ipv6 or ""),
        "pod mac": row.pod_mac.hex(":"),
        "host mac": row.host_mac.hex(":"),
        "flags": flags_text(row.flags, ENDPOINT_FLAGS),
        "netns cookie": row.netns_cookie,
    }


def _node(_: bytes, value: bytes) -> Row:
    row = NodeConfig.unpack(value)
    return {
        "router ipv4": str(row.router_ip or ""),
        "router ipv6": str(row.router_ip6 or ""),
        "ipv4 range": str(row.pod_cidr or ""),
        "ipv6 range": str(row.pod_cidr6 or ""),
        "cilium_host": row.host_ifindex,
        "cilium_net": row.net_ifindex,
        "events": flags_text(row.flags, NODE_EVENTS),
        "aggregation": row.aggregation,
    }


def _tunnel(_: bytes, value: bytes) -> Row | None:
    row = TunnelConfig.unpack(value)
    if not row.ifindex:
        return None
    identities = "each node's own" if row.flags & TUNNEL_OWN_IDENTITIES else "agreed upon"
    return {
        "ifindex": row.ifindex,
        "mtu": row.mtu,
        "port": row.port,
        "source": str(row.source),
        "identities": identities,
    }


def _tunnel_endpoint(key: bytes, value: bytes) -> Row:
    row = TunnelValue.unpack(value)
    return {
        "network": str(TunnelKey.unpack(key).network),
        "tunnel endpoint": str(row.node),
        "encrypt key": row.encrypt_key,
    }


def _node_id(key: bytes, value: bytes) -> Row:
    row = NodeValue.unpack(value)
    return {"address": str(NodeKey.unpack(key).ip), "node": row.id, "spi": row.spi}


def _number(name: str, what: str) -> Callable[[bytes, bytes], Row | None]:
    def read(key: bytes, value: bytes) -> Row | None:
        number = int.from_bytes(value, "little")
        return {name: struct.unpack("<I", key)[0], what: number} if number else None

    return read


def _announced(key: bytes, value: bytes) -> Row:
    place = L2ResponderKey.unpack(key)
    (responses,) = L2_RESPONDER_VALUE.unpack(value)
    return {"address": str(place.ip), "ifindex": place.ifindex, "responses sent": responses}


def _egress(key: bytes, value: bytes) -> Row:
    which, what = EgressKey.unpack(key), EgressValue.unpack(value)
    return {
        "source": str(which.source),
        "destination": str(which.destination),
        "egress address": str(what.egress_ip),
        "gateway": _GATEWAYS.get(what.gateway_ip, str(what.gateway_ip)),
    }


_READERS: Final[Mapping[str, Callable[[bytes, bytes], Row | None]]] = {
    "cilium_lxc": _lxc,
    "cilium_ipcache": _ipcache,
    "cilium_ct": _ct,
    "cilium_policy": _policy,
    "cilium_metrics": _metrics,
    "cilium_ipv4_frag_datagrams": _fragments,
    "cilium_ipv6_frag_datagrams": _fragments,
    "hive_endpoints": _endpoint,
    "hive_node": _node,
    "hive_tunnel": _tunnel,
    "cilium_tunnel_map": _tunnel_endpoint,
    "cilium_node_map_v2": _node_id,
    "cilium_l2_responder_v4": _announced,
    "cilium_egress_gw_policy_v4": _egress,
    "cilium_runtime_config": _number("index", "value"),
    "hive_epoch": _number("endpoint", "epoch"),
    "hive_policies": _number("endpoint", "map id"),
    "hive_entry": _number("slot", "program id"),
}
