"""Settings of the tunnel, named as in Cilium 1.17, and values derived from them for other cells."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from cells.base.addresses import Family
from cells.base.metrics import Collector, features
from cells.cluster.encryption import EncryptionKey
from cells.datapath.datapath import TUNNEL_LINKS
from cells.node.devices import PodMtu
from lifecycle import Duration, Member, ReadTable, Settings, Table, seconds

__all__ = [
    "PORTS",
    "EgressGatewayUse",
    "PodTunnel",
    "RouteMtu",
    "TunnelSettings",
    "egress_gateway_use",
    "pod_tunnel",
    "tunnel_features",
]


PORTS: Final = {"vxlan": 8472, "geneve": 6081}
"""Default UDP ports. VXLAN: the kernel's, older than IANA's, as Cilium and flannel use; Geneve: IANA's (RFC
8926).
"""


class TunnelSettings(Settings, frozen=True):
    """How pods' packets reach other nodes."""

    routing_mode: Literal["native", "tunnel"] = "tunnel"
    """How packets reach pods on other nodes: tunnel, encapsulated between nodes; native, by the network's own
    routes. A change takes effect at the next start.
    """

    tunnel_protocol: Literal["vxlan", "geneve"] = "vxlan"
    """The encapsulation, the same on all nodes: vxlan (RFC 7348), geneve (RFC 8926). The kernel must support
    its devices. A change takes effect at the next start.
    """

    underlay_protocol: Literal["ipv4", "ipv6"] = "ipv4"
    """IP version of the packets between nodes that carry those of pods: ipv4, ipv6. Each node needs an
    address of it. Nodes accept packets of both: a cluster can change from one to the other node by node.
    """

    tunnel_port: int = 0
    """UDP port of the tunnel, the same on all nodes; 0: 8472 for vxlan, 6081 for geneve."""

    tunnel_source_port_range: str = "0-0"
    """Source UDP ports of encapsulated packets, LOW-HIGH, for vxlan; 0-0: the kernel's default."""

    enable_ipv4_egress_gateway: bool = False
    """Let pods that CiliumEgressGatewayPolicies select leave the cluster through their gateway, with its
    source address. Packets to the gateway use the tunnel, also with routing-mode=native.
    """

    egress_gateway_reconciliation_trigger_interval: Duration = seconds(1)
    """Minimum interval between reconciliations of egress gateways after changes of policies, pods and nodes.
    """

    @property
    def tunnelled(self) -> bool:
        """Whether packets between pods of different nodes use the tunnel."""
        return self.routing_mode == "tunnel"

    @property
    def has_tunnel(self) -> bool:
        """Whether the node has a tunnel device: for pods' packets, or only for egress gateways."""
        return self.tunnelled or self.enable_ipv4_egress_gateway

    @property
    def underlay(self) -> Family:
        """Address family of the outer packets."""
        return Family(self.underlay_protocol)

    @property
    def overhead(self) -> int:
        """Bytes that encapsulation adds to a pod's packet; 0 without a tunnel."""
        return _OVERHEADS[self.underlay] if self.has_tunnel else 0

    @property
    def link(self) -> str:
        """Name of the tunnel device; empty without a tunnel."""
        return TUNNEL_LINKS[self.tunnel_protocol] if self.has_tunnel else ""

    @property
    def port(self) -> int:
        return self.tunnel_port or PORTS[self.tunnel_protocol]

    @property
    def source_ports(self) -> tuple[int, int]:
        """The range of UDP source ports; (0, 0) for the kernel's default."""
        low, _, high = self.tunnel_source_port_range.partition("-")
        return int(low), int(high)

    def faults(self) -> Iterator[str]:
        if self.enable_ipv4_egress_gateway and self.underlay is Family.IPV6:
            yield (
                "underlay-protocol=ipv6: egress gateways are reached over IPv4: expected ipv4, or"
                " enable-ipv4-egress-gateway=false"
            )
        if self.egress_gateway_reconciliation_trigger_interval < 0:
            every = self.egress_gateway_reconciliation_trigger_interval
            yield f"egress-gateway-reconciliation-trigger-interval={every}: expected a duration, such as 1s"
        if not 0 <= self.tunnel_port <= 0xFFFF:
            yield f"tunnel-port={self.tunnel_port}: expected a UDP port, 1 to 65535, or 0"
        if not re.fullmatch(r"\d{1,5}-\d{1,5}", self.tunnel_source_port_range):
            yield f"tunnel-source-port-range={self.tunnel_source_port_range}: expected LOW-HIGH"
            return
        low, high = self.source_ports
        if (low, high) != (0, 0) and not 0 < low <= high <= 0xFFFF:
            yield (
                f"tunnel-source-port-range={self.tunnel_source_port_range}: expected ports from 1 to 65535,"
                " the lower first, or 0-0 for the kernel's choice"
            )
        elif (low, high) != (0, 0) and self.tunnel_protocol != "vxlan":
            yield (
                f"tunnel-source-port-range={self.tunnel_source_port_range}: the kernel chooses the ports of"
                f" {self.tunnel_protocol}: expected 0-0, or tunnel-protocol=vxlan"
            )


# Values for other cells.


class EgressGatewayUse(msgspec.Struct, frozen=True):
    """Whether egress gateways are enabled, and how often they are reconciled."""

    served: bool
    every: float
    """Minimum seconds between two reconciliations."""


class PodTunnel(msgspec.Struct, frozen=True):
    """How pods' packets reach other nodes."""

    used: bool
    """Whether packets use the tunnel; else the network's own routes."""
    protocol: str = ""
    """The encapsulation; empty if ``used`` is false."""
    port: int = 0
    """UDP port of the tunnel device, also if only egress gateways use it; 0: no device."""

    @property
    def routing_mode(self) -> str:
        """``tunnel`` or ``native``."""
        return "tunnel" if self.used else "native"


def pod_tunnel(settings: TunnelSettings) -> PodTunnel:
    protocol = settings.tunnel_protocol if settings.tunnelled else ""
    return PodTunnel(settings.tunnelled, protocol, settings.port if settings.has_tunnel else 0)


def tunnel_features(tunnel: PodTunnel) -> Member[Collector]:
    """How pods' packets reach other nodes, as a feature in use."""
    mode = f"overlay-{tunnel.protocol}" if tunnel.used else "direct-routing"
    return features("tunnel-features", lambda: {"datapath_network": mode})


def egress_gateway_use(settings: TunnelSettings) -> EgressGatewayUse:
    return EgressGatewayUse(
        settings.enable_ipv4_egress_gateway, settings.egress_gateway_reconciliation_trigger_interval
    )


# MTU of pods' routes.

_ENCAPSULATION: Final = 14 + 8 + 8
"""Bytes of the inner Ethernet header, of VXLAN or Geneve without options, and of UDP."""
_OVERHEADS: Final = {Family.IPV4: _ENCAPSULATION + 20, Family.IPV6: _ENCAPSULATION + 40}
"""With the outer IP header."""


class RouteMtu:
    """Computes the MTU of pods' routes: that of their links, less tunnel and encryption overhead."""

    tunnelled: bool
    """Whether pods' packets go through the tunnel."""
    tunnel_link: str
    """The device they go through then."""

    def __init__(
        self, mtu: PodMtu, settings: TunnelSettings, keys: Table[str, EncryptionKey] | None = None
    ) -> None:
        self._mtu = mtu
        self.devices = mtu.devices
        self.sources: tuple[ReadTable[Any, Any], ...] = (mtu.devices, *([keys] if keys is not None else []))
        """The tables that the MTU depends on."""
        self.tunnelled = settings.tunnelled
        """Whether pods' packets use the tunnel."""
        self.tunnel_link = settings.link
        """Name of the tunnel device; empty without a tunnel."""
        self._overhead = settings.overhead
        self._keys = keys

    @property
    def encryption(self) -> int:
        """Bytes that encryption adds to a packet; 0 without encryption."""
        keys = self._keys.all() if self._keys is not None else ()
        return max((key.overhead for key in keys), default=0)

    def __call__(self) -> int:
        return self.encrypted() - self.encryption

    def encrypted(self) -> int:
        """Return the MTU of routes for packets that are already encrypted: less only the tunnel overhead."""
        return self._mtu() - self._overhead
