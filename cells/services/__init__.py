"""Types of services: frontends, backends, their addresses, and the options of load balancing.

``model`` computes frontends from Kubernetes objects, ``control`` writes them to the maps, and other cells
read the tables. Load balancing in eBPF replaces kube-proxy.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum, IntFlag
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from socket import AF_INET, inet_pton
from typing import Final, Literal, NamedTuple, Self, TypeGuard

import msgspec

__all__ = [
    "DEFAULT_SEED",
    "EXPOSURE_LABEL",
    "INTERNAL",
    "PROTOCOLS",
    "ZONE_LABEL",
    "Backend",
    "BackendState",
    "Frontend",
    "FrontendKey",
    "IPAddress",
    "LoadBalancerOptions",
    "Seed",
    "ServiceAddress",
    "ServiceFlag",
    "ServiceName",
    "ServiceType",
    "ServingNode",
    "parse_address",
]


# Frontends and backends: packets to frontends are translated to backends.

IPAddress = IPv4Address | IPv6Address

ANY_PROTOCOL = 0
PROTOCOLS = {"ANY": 0, "TCP": 6, "UDP": 17, "SCTP": 132}
"""IANA protocol numbers by Kubernetes' names; 0 means any protocol."""

_PROTOCOL_NAMES = {number: name for name, number in PROTOCOLS.items()}

IPV4, IPV6 = 4, 6

EXTERNAL, INTERNAL = 0, 1
"""Scopes of a frontend: for clients outside the cluster, and for clients in the cluster."""

DEFAULT_WEIGHT = 100


class BackendState(IntEnum):
    """Whether new connections may go to a backend (flags in ``cilium_lb*_backends_v3``)."""

    ACTIVE = 0
    TERMINATING = 1
    QUARANTINED = 2
    MAINTENANCE = 3


class ServiceType(IntEnum):
    """The kind of a frontend."""

    CLUSTER_IP = 0
    NODE_PORT = 1
    EXTERNAL_IPS = 2
    HOST_PORT = 3
    LOAD_BALANCER = 4
    LOCAL_REDIRECT = 5

    @property
    def text(self) -> str:
        """The name that Cilium's commands print."""
        return _TYPE_NAMES[self]


_HEALTH_CHECKED = (ServiceType.NODE_PORT, ServiceType.LOAD_BALANCER, ServiceType.EXTERNAL_IPS)
_TYPE_NAMES = {
    ServiceType.CLUSTER_IP: "ClusterIP",
    ServiceType.NODE_PORT: "NodePort",
    ServiceType.EXTERNAL_IPS: "ExternalIPs",
    ServiceType.HOST_PORT: "HostPort",
    ServiceType.LOAD_BALANCER: "LoadBalancer",
    ServiceType.LOCAL_REDIRECT: "LocalRedirect",
}


class ServiceFlag(IntFlag):
    """Bits of a service entry's ``flags`` and ``flags2``."""

    EXTERNAL_IP = 1 << 0
    NODE_PORT = 1 << 1
    EXT_LOCAL_SCOPE = 1 << 2
    HOST_PORT = 1 << 3
    AFFINITY = 1 << 4
    LOAD_BALANCER = 1 << 5
    ROUTABLE = 1 << 6
    SOURCE_RANGE = 1 << 7
    LOCAL_REDIRECT = 1 << 8
    NAT_46X64 = 1 << 9
    L7_LOAD_BALANCER = 1 << 10
    LOOPBACK = 1 << 11
    INT_LOCAL_SCOPE = 1 << 12
    TWO_SCOPES = 1 << 13
    QUARANTINED = 1 << 14
    """In a slot; in slot 0 the bit is SOURCE_RANGE_DENY."""
    DSR = 1 << 15
    """Backends on other nodes answer clients directly, if services may choose the forwarding mode."""


class ServiceAddress(bytes):
    """An IP address, port and protocol; protocol 0 means any.

    The object is its bytes: family (4 or 6), IP address, port and protocol, in network order, so addresses
    sort by family, address, port, protocol. There are as many as backends, and they are looked up often:
    creating and hashing a structure with an ``IPv4Address`` takes ten times as long.
    """

    __slots__ = ()

    def __new__(cls, ip: IPAddress, port: int, protocol: int = ANY_PROTOCOL) -> Self:
        """Raises struct.error for an invalid port or protocol."""
        return cls.read(host_of(ip) + address_end(port, protocol))

    @classmethod
    def read(cls, raw: bytes) -> Self:
        """Return the address with these bytes, without checking them."""
        return _new_bytes(cls, raw)

    @property
    def version(self) -> int:
        """The family, 4 or 6."""
        return self[0]

    @property
    def ip(self) -> IPAddress:
        """The IP address."""
        return IPv4Address(self[1:-3]) if self[0] == IPV4 else IPv6Address(self[1:-3])

    @property
    def is_wildcard(self) -> bool:
        """Whether the address is unspecified, which means all addresses of the node."""
        return self[1:-3] in _UNSPECIFIED

    @property
    def port(self) -> int:
        """The port."""
        return self[-3] << 8 | self[-2]

    @property
    def protocol(self) -> int:
        """IANA protocol number."""
        return self[-1]

    @property
    def of_any_protocol(self) -> ServiceAddress:
        """The address and port without a protocol."""
        return ServiceAddress.read(self[:-1] + bytes([ANY_PROTOCOL]))

    def __str__(self) -> str:
        ip = self.ip
        return f"[{ip}]:{self.port}" if ip.version == IPV6 else f"{ip}:{self.port}"

    def __repr__(self) -> str:
        return f"{self}/{_PROTOCOL_NAMES.get(self.protocol, self.protocol)}"

    def __getnewargs__(self) -> tuple[IPAddress, int, int]:  # type: ignore[override]  # the parameters of __new__
        return self.ip, self.port, self.protocol


_new_bytes = bytes.__new__
_FAMILIES = {4: b"\4", 6: b"\6"}
_UNSPECIFIED = {bytes(4), bytes(16)}

address_end = struct.Struct(">HB").pack
"""The bytes of a :class:`ServiceAddress` after its IP address, from port and protocol."""


class FrontendKey(NamedTuple):
    """The key of a frontend."""

    address: ServiceAddress
    scope: int = EXTERNAL

    def __str__(self) -> str:
        return f"{self.address}/i" if self.scope == INTERNAL else str(self.address)

    @property
    def of_any_protocol(self) -> FrontendKey:
        """The key without a protocol, as with bpf-lb-proto-diff=false."""
        return FrontendKey(self.address.of_any_protocol, self.scope)


class ServiceName(NamedTuple):
    """Namespace and name of a service, or of a pod or policy that claims frontends."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Backend(msgspec.Struct, frozen=True, gc=False):
    """A backend of one service."""

    address: ServiceAddress
    state: BackendState = BackendState.ACTIVE
    node: str = ""
    port_name: str = ""
    weight: int = DEFAULT_WEIGHT
    hinted_zones: tuple[str, ...] | None = None
    preferred: bool = False
    """Whether other backends are used only while no preferred one is active."""
    manual: bool = False
    """Whether its state was set manually, and overrides the state in its source."""
    cluster: str = ""
    """The remote cluster of the backend; empty: the local cluster."""


class Frontend(msgspec.Struct, frozen=True, gc=False):
    """An address and port at which a service is served; new connections go to its selectable backends."""

    key: FrontendKey
    type: ServiceType
    service: ServiceName
    backends: Sequence[Backend] = ()
    ext_local: bool = False
    int_local: bool = False
    two_scopes: bool = False
    affinity_timeout: int = 0
    source_ranges: tuple[str, ...] = ()
    source_ranges_deny: bool = False
    algorithm: str = ""
    """How backends are chosen for clients outside, random or maglev; empty: as configured for all services.
    """
    direct: bool = False
    """Whether backends on other nodes answer clients outside directly, if services may choose it."""
    health_check_node_port: int = 0
    loopback: bool = False
    l7_proxy_port: int = 0
    routable: bool = True
    port_name: str = ""
    number: int = 0
    """The requested service ID; 0: any."""
    partial: bool = False
    """Whether remote backends may be missing; then backends of an earlier agent stay."""

    @property
    def answered_port(self) -> int:
        """The health check port that answers by this frontend's backends; 0: none.

        Only frontends for clients outside count, with the traffic policy Local.
        """
        counts = self.ext_local and self.key.scope == EXTERNAL and self.type in _HEALTH_CHECKED
        return self.health_check_node_port if counts else 0


def parse_address(text: str) -> IPAddress | None:
    """Return an IP address; None if the text is invalid or has an IPv6 zone, which is local to a host."""
    try:
        return IPv4Address(inet_pton(AF_INET, text))  # a third of the time of parsing it in Python
    except (OSError, ValueError):
        pass
    try:
        return ip_address(text) if "%" not in text else None
    except ValueError:
        return None


def host_of(ip: IPAddress) -> bytes:
    """Return the first bytes of a :class:`ServiceAddress`: family and IP address."""
    return _FAMILIES[ip.version] + ip.packed


def parse_host(text: str) -> bytes | None:
    """Parse an address and return its ``host_of``; None if the text is invalid."""
    try:
        return _FAMILIES[IPV4] + inet_pton(AF_INET, text)
    except (OSError, ValueError):
        ip = parse_address(text)
        return host_of(ip) if ip is not None else None


def parse_prefix(text: str) -> IPv4Network | IPv6Network | None:
    """Return a prefix, ignoring host bits; None if the text is invalid."""
    try:
        return ip_network(text.strip(), strict=False)
    except ValueError:
        return None


def is_port(number: int | None) -> TypeGuard[int]:
    """Whether the number is a valid port, 1 to 65535."""
    return number is not None and 0 < number < 1 << 16


def is_wildcard(address: IPAddress) -> bool:
    """Whether the address is unspecified, which means all addresses of the node."""
    return int(address) == 0


SPECIAL: Final[tuple[IPv4Network | IPv6Network, ...]] = tuple(
    map(
        ip_network,
        ("0.0.0.0", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "::", "::1", "fe80::/10", "ff00::/8"),
    )
)
"""Unspecified, loopback, link-local and multicast: Kubernetes refuses them as addresses of endpoints, too."""
FIRST_BYTES_OF_SPECIAL: Final = frozenset({0, 127, 169, *range(224, 240), 0xFE, 0xFF})
"""First bytes of special addresses of both families: other addresses need no further check."""


def plain(ip: IPAddress) -> IPAddress:
    """Return the IPv4 address of an IPv4-mapped IPv6 address, and any other address unchanged."""
    return (ip.ipv4_mapped or ip) if isinstance(ip, IPv6Address) else ip


def is_special(ip: IPAddress) -> bool:
    """Whether the address is unspecified, loopback, link-local or multicast: no other host can reach it."""
    address = plain(ip)
    return address.packed[0] in FIRST_BYTES_OF_SPECIAL and any(
        address in network for network in SPECIAL if network.version == address.version
    )


# The seeds of a cluster's Maglev tables and hashes.

DEFAULT_SEED = "JLfvgnHc2kaSUFaI"


class Seed(NamedTuple):
    """The hash seeds of a cluster: of backend names, and of packets of each family."""

    names: int
    ipv4: int
    ipv6: int

    @classmethod
    def parse(cls, text: str) -> Seed:
        """Parse base64 of exactly 12 bytes (``bpf-lb-maglev-hash-seed``). Raises ValueError."""
        try:
            raw = base64.b64decode(text, validate=True)
        except ValueError:  # also for characters outside ASCII
            raise ValueError("expected base64 of 12 bytes, as of: head -c12 /dev/urandom | base64") from None
        if len(raw) != 12:
            raise ValueError(f"expected base64 of 12 bytes, this is of {len(raw)}")
        return cls(*struct.unpack(">III", raw))


# Options of services.


class LoadBalancerOptions(msgspec.Struct, frozen=True, gc=False):
    """Options of load balancing, named as in Cilium. Defaults: the chart's, without kube-proxy."""

    enable_ipv4: bool = True
    enable_ipv6: bool = True
    enable_node_port: bool = True
    enable_external_ips: bool = True
    enable_external_ips_of_nodes: bool = False
    enable_host_port: bool = True
    enable_session_affinity: bool = True
    enable_svc_source_range_check: bool = True
    bpf_lb_source_range_all_types: bool = False
    enable_internal_traffic_policy: bool = True
    enable_health_check_nodeport: bool = True
    enable_k8s_terminating_endpoint: bool = True
    enable_service_topology: bool = False
    enable_local_redirect_policy: bool = False
    bpf_lb_external_clusterip: bool = False
    bpf_lb_algorithm_annotation: bool = False
    bpf_lb_algorithm: Literal["random", "maglev"] = "random"
    bpf_lb_mode_annotation: bool = False
    bpf_lb_mode: Literal["snat", "dsr", "hybrid"] = "snat"
    bpf_lb_maglev_table_size: int = 16381
    bpf_lb_maglev_hash_seed: str = DEFAULT_SEED
    bpf_lb_proto_diff: bool = True
    enable_sctp: bool = False
    global_services: bool = False
    """Whether global services have backends in remote clusters."""
    k8s_service_proxy_name: str = ""
    """The agent serves services with this label ``service.kubernetes.io/service-proxy-name``."""
    cluster_name: str = "default"
    node_port_min: int = 30000
    node_port_max: int = 32767

    @property
    def outside(self) -> bool:
        """Whether external clients can reach any service."""
        return (
            self.enable_node_port
            or self.enable_external_ips
            or self.enable_host_port
            or self.bpf_lb_external_clusterip
        )

    @property
    def maglev(self) -> bool:
        """Whether any service may need Maglev tables."""
        return self.outside and (self.bpf_lb_algorithm == "maglev" or self.bpf_lb_algorithm_annotation)

    def serves(self, address: IPAddress) -> bool:
        """Whether the address's family is enabled."""
        return self.enable_ipv4 if address.version == 4 else self.enable_ipv6


class ServingNode(msgspec.Struct, frozen=True, gc=False):
    """The node of this agent."""

    name: str
    zone: str = ""
    exposure: str = ""
    """The value of its label ``service.cilium.io/node``."""
    node_port_addresses: tuple[IPAddress, ...] = ()
    labels: Mapping[str, str] | None = None


ZONE_LABEL = "topology.kubernetes.io/zone"
EXPOSURE_LABEL = "service.cilium.io/node"
MAGLEV_SIZES: Sequence[int] = (251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521, 131071)
