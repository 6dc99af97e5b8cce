"""Views of this node, the cluster's nodes and the status, computed for each request.

They implement the interfaces NodeSummary and StatusSummary of ``status``.

Source: Cilium 1.17, NodeElement of api/v1/openapi.yaml, and GET /cluster/nodes with its Client-Id.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Final

import msgspec
from msgspec.structs import replace

from cells.api.models import NodeAddressing, NodeAddressingElement
from cells.api.models import node as node_models
from cells.api.models.status import NodeElement
from cells.api.operations.config_mapping import NodeFacts, NodeSection
from cells.api.operations.status import NodeSummary, StatusFacts, StatusSection
from cells.base.addresses import Family, IPAddress
from cells.cluster.identity.numbers import ClusterNumbers
from cells.cluster.nodes.node import ClusterNode
from cells.cni import PodNetworking
from cells.config import AgentConfig, ChainingMode
from cells.datapath.datapath import Datapath
from cells.datapath.settings import MonitorNotifications
from cells.kvstore.store import KVStore
from cells.maps.records.endpoints import NODE_AUDITS_POLICY
from cells.node.addresses import NodeAddresses
from cells.node.devices import Device, uplinks
from cells.node.ipam import Ipam
from cells.node.router import Addressing, Router
from cells.observe.health import agent_version
from cells.tunnel.settings import PodTunnel
from lifecycle import Member, ReadTable, Table
from lifecycle.process import log_level, set_log_level

CLIENT_SECONDS: Final = 900.0
"""Seconds without a request after which a client of GET /cluster/nodes is removed."""


def node_element(node: ClusterNode, families: Collection[Family]) -> NodeElement:
    """Return the model of a node: its node IPs are primary, its other addresses secondary.

    ``enabled`` means that the address family is enabled on this agent (``families``). Both families are
    present, and secondary addresses never enabled, as in Cilium: cilium-health probes enabled addresses, and
    crashes if a family is missing.
    """
    primary = {family: node.node_ip(family) for family in Family}
    return NodeElement(
        name=node.full_name,
        primary_address=_addressing(primary, families, node),
        secondary_addresses=[
            NodeAddressingElement(ip=str(each.ip))
            for each in node.addresses
            if each.ip not in primary.values()
        ],
        health_endpoint_address=_pair(node.health, families),
        ingress_address=_pair(node.ingress, families),
        source=node.source.value,
    )


def _pair(addresses: Sequence[IPAddress], families: Collection[Family]) -> NodeAddressing | None:
    return _addressing({Family.of(ip): ip for ip in addresses}, families) if addresses else None


def _addressing(
    found: Mapping[Family, IPAddress | None], families: Collection[Family], node: ClusterNode | None = None
) -> NodeAddressing:
    elements = {
        family: NodeAddressingElement(
            enabled=family in families,
            ip=str(found.get(family) or ""),
            alloc_range=str(next(iter(node.alloc_cidrs(family) if node is not None else ()), "")),
        )
        for family in Family
    }
    return NodeAddressing(ipv4=elements[Family.IPV4], ipv6=elements[Family.IPV6])


class _Watcher(msgspec.Struct):
    requested: float
    """Time of its last request, by the monotonic clock."""
    shown: dict[str, NodeElement]


class NodeWatchers:
    """Clients that poll GET /cluster/nodes for changes."""

    def __init__(self) -> None:
        self._watchers: dict[int, _Watcher] = {}

    def answer(
        self, name: str, number: int | None, nodes: Iterable[NodeElement], now: float | None = None
    ) -> node_models.ClusterNodeStatus:
        """Return all nodes to a new client, else the nodes added and removed since its last request.

        A changed node is removed with its old and added with its new properties. ``name`` is that of this
        node. A client without a ``number`` does not poll: it gets all nodes and is not stored.
        """
        if number is None:
            return node_models.ClusterNodeStatus(self_name=name, nodes_added=list(nodes) or None)
        now = time.monotonic() if now is None else now
        self._watchers = {
            known: each for known, each in self._watchers.items() if now - each.requested < CLIENT_SECONDS
        }
        found = {node.name: node for node in nodes}
        watcher = self._watchers.get(number)
        if watcher is None:
            number = secrets.randbelow(1 << 31) + 1  # differs from revisions before a restart
            watcher = self._watchers[number] = _Watcher(now, {})
        before, watcher.shown, watcher.requested = watcher.shown, found, now
        added = [node for key, node in found.items() if before.get(key) != node]
        removed = [node for key, node in before.items() if found.get(key) != node]
        return node_models.ClusterNodeStatus(
            self_name=name, client_id=number, nodes_added=added or None, nodes_removed=removed or None
        )


# Views. Nothing is cached, so nothing becomes stale.


class PodLinks:
    """Properties of pod links and routes, and the routing mode."""

    def __init__(
        self,
        pods: PodNetworking,
        tunnel: PodTunnel,
        modes: list[Member[ChainingMode]],
    ) -> None:
        self._pods = pods
        self._tunnel = tunnel
        self._chaining = next((mode.name for mode in modes), "none")

    @property
    def routing_mode(self) -> str:
        """``tunnel`` or ``native``."""
        return self._tunnel.routing_mode

    def described(self, addressing: Mapping[Family, Addressing], ipam_mode: str) -> NodeFacts:
        """Return the facts that the CNI plugin reads."""
        return NodeFacts(
            addressing=addressing,
            mtu=self._pods.link_mtu(),
            route_mtu=self._pods.route_mtu(),
            tunnel_protocol=self._tunnel.protocol,
            ipam_mode=ipam_mode,
            chaining=self._chaining,
            route_mtu_in_chains=self._pods.route_mtu_in_chains,
            reserved_ports=self._pods.reserved_ports(),
            limits=self._pods.big_tcp.limits,
            big_tcp=self._pods.big_tcp.enabled,
        )


class NodeView:
    """Implements NodeSummary."""

    def __init__(
        self,
        config: AgentConfig,
        router: Router,
        ipam: Ipam,
        datapath: Datapath,
        links: PodLinks,
        kvstore: KVStore | None,
        sections: list[Member[NodeSection]],
    ) -> None:
        self._config = config
        self._router = router
        self._ipam = ipam
        self._datapath = datapath
        self._links = links
        self._kvstore = kvstore
        self._sections = sections

    def node(self) -> NodeFacts:
        """Return routers, pod CIDRs, MTU, and the fields of NodeSections."""
        facts = replace(
            self._links.described(self._router.addressing(), self._ipam.mode),
            notifications=self._datapath.notifications,
            debug=log_level() == "debug",
            kvstore=self._kvstore.settings.kvstore if self._kvstore is not None else "",
            kvstore_options=self._kvstore.settings.kvstore_opt if self._kvstore is not None else {},
        )
        for section in self._sections:
            facts = section.added(facts)
        return facts

    def audited(self) -> bool:
        """Whether policies of this node are in audit mode: drops are only reported."""
        return bool(self._datapath.notifications.flags & NODE_AUDITS_POLICY)

    def set_notifications(self, notifications: MonitorNotifications) -> None:
        """Select the packet notifications of the datapath; no effect if unchanged."""
        if notifications != self._datapath.notifications:
            self._datapath.set_notifications(notifications)

    def log_debug(self, on: bool) -> None:
        """Enable or disable debug logging of the agent; the CNI plugin's log level is a setting."""
        if on != (log_level() == "debug"):
            set_log_level("debug" if on else "info")

    def settings(self) -> Mapping[str, object]:
        """Return the daemon's configuration by the names in ``cilium-dbg config``."""
        config = self._config
        return {
            "BPFRoot": str(config.bpf_root),
            "ClusterID": config.cluster_id,
            "ClusterName": config.cluster_name,
            "DatapathMode": "veth",
            "EnableIPv4": config.ipv4,
            "EnableIPv6": config.ipv6,
            "IPAM": self._ipam.mode,
            "MTU": config.mtu,
            "RoutingMode": self._links.routing_mode,
            "SocketPath": str(config.api_socket),
            "StateDir": str(config.state),
        }


class StatusView:
    """Implements StatusSummary from the node, its cluster, and all StatusSections."""

    def __init__(
        self,
        config: AgentConfig,
        summary: NodeSummary,
        datapath: Datapath,
        devices: Table[int, Device],
        addresses: NodeAddresses,
        nodes: ReadTable[str, ClusterNode],
        sections: list[Member[StatusSection]],
    ) -> None:
        self._config = config
        self._summary = summary
        self._datapath = datapath
        self._devices = devices
        self._addresses = addresses
        on = {Family.IPV4: config.ipv4, Family.IPV6: config.ipv6}
        families = frozenset(family for family, enabled in on.items() if enabled)
        self._nodes = nodes.map(partial(node_element, families=families), name="node-elements")
        self._sections = sections

    def version(self) -> tuple[str, str]:
        """Return the agent's version, and the digest of its datapath."""
        return agent_version(), self._datapath.build

    def status(self) -> StatusFacts:
        """Return the contents of GET /healthz except the overall health."""
        version, revision = self.version()
        facts = StatusFacts(
            version=version,
            revision=revision,
            cluster_name=self._config.cluster_name,
            identities=ClusterNumbers.of_agent(self._config).own,
            node_name=self._config.node_name,
            node=self._summary.node(),
            node_ips=self._addresses.all(),
            nodes=sorted(self._nodes.all(), key=attrgetter("name")),
            uplinks={
                device.name: tuple(str(address.ip) for address in device.addresses)
                for device in uplinks(self._devices.all())
            },
            host_routing=self._datapath.routing.mode,
        )
        for section in self._sections:
            section.fill(facts)
        return facts
