"""Settings of the tunnel between nodes.

Source: Cilium 1.17, option names and defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal

import msgspec

from cells.base.addresses import Family
from cells.base.metrics import Collector, MetricFamily, one_of
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
    "tunnel_metrics",
]


PORTS: Final = {"vxlan": 8472, "geneve": 6081}
"""Of VXLAN, Linux' own, older than IANA's, which Cilium and flannel use; of Geneve, IANA's (RFC 8926)."""
_NETWORKS: Final = ("overlay-vxlan", "overlay-geneve", "direct-routing")


class TunnelSettings(Settings, frozen=True):
    """How pods' packets reach other nodes."""

    routing_mode: Literal["native", "tunnel"] = "tunnel"
    """How packets reach pods on other nodes: tunnel, encapsulated between nodes; native, by the network's own
    routes. A change takes effect at the next start."""

    tunnel_protocol: Literal["vxlan", "geneve"] = "vxlan"
    """The encapsulation, the same on all nodes: vxlan (RFC 7348), geneve (RFC 8926). The kernel needs
    devices of it. A change takes effect at the next start."""

    underlay_protocol: Literal["ipv4", "ipv6"] = "ipv4"
    """IP version of the packets between nodes that carry those of pods: ipv4, ipv6. Each node needs an
    address of it. Nodes take packets of both: a cluster can change from one to the other node by node."""

    tunnel_port: int = 0
    """UDP port of the tunnel, the same on all nodes; 0: 8472 for vxlan, 6081 for geneve."""

    tunnel_source_port_range: str = "0-0"
    """Source UDP ports of encapsulated packets, LOW-HIGH, for vxlan; 0-0: the kernel chooses."""

    enable_ipv4_egress_gateway: bool = False
    """Let pods that CiliumEgressGatewayPolicies select leave the cluster by their gateway, from its address.
    They get to it in the tunnel, also with routing-mode=native."""

    egress_gateway_reconciliation_trigger_interval: Duration = seconds(1)
    """How long changes of policies, pods and nodes may wait, to be followed together with others."""

    @property
    def tunnelled(self) -> bool:
        """Whether pods' packets go through the tunnel."""
        return self.routing_mode == "tunnel"

    @property
    def has_tunnel(self) -> bool:
        """Whether the node has a tunnel, for all of that or for egress gateways alone."""
        return self.tunnelled or self.enable_ipv4_egress_gateway

    @property
    def underlay(self) -> Family:
        """Of the packets between nodes."""
        return Family(self.underlay_protocol)

    @property
    def overhead(self) -> int:
        """Bytes that the tunnel puts before a pod's packet; 0 without a tunnel."""
        return _OVERHEADS[self.underlay] if self.has_tunnel else 0

    @property
    def link(self) -> str:
        """The tunnel's device; empty without a tunnel."""
        return TUNNEL_LINKS[self.tunnel_protocol] if self.has_tunnel else ""

    @property
    def port(self) -> int:
        """The UDP port."""
        return self.tunnel_port or PORTS[self.tunnel_protocol]

    @property
    def source_ports(self) -> tuple[int, int]:
        """The range that packets are sent from; (0, 0): the kernel's choice."""
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


# Facts for other cells.


class EgressGatewayUse(msgspec.Struct, frozen=True):
    """Whether egress gateways are served, and how often what they follow from is looked at."""

    served: bool
    every: float
    """Seconds, at least, between two looks."""


class PodTunnel(msgspec.Struct, frozen=True):
    """How pods' packets reach other nodes."""

    used: bool
    """Whether in a tunnel; else by the network's own routes."""
    protocol: str = ""
    """The encapsulation; empty where it is not used."""
    port: int = 0
    """The UDP port of the node's tunnel, also where only egress gateways use it; 0: it has none."""

    @property
    def routing_mode(self) -> str:
        """``tunnel`` or ``native``."""
        return "tunnel" if self.used else "native"


def pod_tunnel(settings: TunnelSettings) -> PodTunnel:
    """As the settings have it."""
    protocol = settings.tunnel_protocol if settings.tunnelled else ""
    return PodTunnel(settings.tunnelled, protocol, settings.port if settings.has_tunnel else 0)


def tunnel_metrics(tunnel: PodTunnel) -> Member[Collector]:
    """How pods' packets reach other nodes, as a metric."""
    mode = f"overlay-{tunnel.protocol}" if tunnel.used else "direct-routing"
    family = one_of(
        "cilium_feature_datapath_network", "Network mode enabled on the agent", "mode", _NETWORKS, mode
    )

    async def collect() -> Iterable[MetricFamily]:
        return [family]

    return Collector("tunnel", collect)


def egress_gateway_use(settings: TunnelSettings) -> EgressGatewayUse:
    """What the settings say."""
    return EgressGatewayUse(
        settings.enable_ipv4_egress_gateway, settings.egress_gateway_reconciliation_trigger_interval
    )


# How large packets may be that pods send to other nodes.

_ENCAPSULATION: Final = 14 + 8 + 8
"""Bytes before a packet that is inside: Ethernet, VXLAN or Geneve without options, and UDP."""
_OVERHEADS: Final = {Family.IPV4: _ENCAPSULATION + 20, Family.IPV6: _ENCAPSULATION + 40}
"""With the header outside."""


class RouteMtu:
    """Called, it gives the MTU of pods' routes, in bytes: their links' own, less what the tunnel and
    encryption need.
    """

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
        """What it follows from."""
        self.tunnelled = settings.tunnelled
        self.tunnel_link = settings.link
        self._overhead = settings.overhead
        self._keys = keys

    @property
    def encryption(self) -> int:
        """Bytes of a packet that encryption needs; 0: nothing is encrypted."""
        keys = self._keys.all() if self._keys is not None else ()
        return max((key.overhead for key in keys), default=0)

    def __call__(self) -> int:
        return self.encrypted() - self.encryption

    def encrypted(self) -> int:
        """That of routes of what is encrypted already: less what the tunnel needs."""
        return self._mtu() - self._overhead
