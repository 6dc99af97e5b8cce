"""The CNI server: attaches and detaches pods for the CNI plugin, which calls it on cni.sock.

``server`` dispatches calls; ``add``, ``attach`` and ``chained_attach`` carry out ADD, ``detach`` DEL and GC;
``queue`` drains deletions that plugins queued without an agent. ``configuration`` writes the CNI
configuration file, and ``link_mtu`` updates the MTU of running pods.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from cells.base.metrics import Collector, MetricFamily
from cells.cluster.encryption import WIREGUARD_PORT, EncryptionKey
from cells.cluster.host_ip_sync import HostIPSync
from cells.cni.attach import Attacher
from cells.cni.detach import Detacher, LinkTeardown
from cells.cni.queue import DeleteQueue, QueueLock
from cells.cni.server import CallTimes, Checker, CniServer
from cells.config import AgentConfig
from cells.config.shared import ChainingSettings
from cells.endpoint import Endpoints
from cells.endpoint.restore import ExposedEndpoints
from cells.maps.policy_maps import PolicyMaps
from cells.netlink.links import HostLinks
from cells.netlink.namespaces import PodLink
from cells.node.big_tcp import BigTcp
from cells.node.devices import PodMtu
from cells.node.ipam import Ipam
from cells.node.router import Router
from cells.proxy.dns import QuerySource
from cells.tunnel.settings import PodTunnel, RouteMtu
from cells.tunnel.tunnel import Tunnel
from lifecycle import (
    Health,
    Lifecycle,
    Logger,
    Member,
    Settings,
    Table,
    after,
    config,
    invoke,
    module,
    provide,
    provide_private,
)

__all__ = [
    "CniServer",
    "DeleteQueue",
    "PodNetworking",
    "QueueLock",
    "ReservedPortSettings",
    "ReservedPorts",
    "cell",
]


# Parameters of new pods.

AUTO: Final = "auto"
_PORTS: Final = r"\d+(-\d+)?(,\d+(-\d+)?)*"  # as in Cilium 1.17


def link_teardown(
    links: HostLinks, ipam: Ipam, endpoints: Endpoints, *, lifecycle: Lifecycle, health: Health, log: Logger
) -> LinkTeardown:
    """Return the LinkTeardown of this node."""
    return LinkTeardown(links, ipam, endpoints, lifecycle=lifecycle, health=health, log=log)


class ReservedPortSettings(Settings, frozen=True):
    """Ports that the kernel must not use as ephemeral ports in pods."""

    container_ip_local_reserved_ports: str = "auto"
    """Ports that are never ephemeral ports of a new pod, such as 8472,30000-32767. Auto: the ports of the
    tunnel and of WireGuard, if the DNS proxy queries from pods' addresses; empty: none.
    """

    def faults(self) -> Iterator[str]:
        text = self.container_ip_local_reserved_ports
        if text not in {"", AUTO} and not _are_ports(text):
            yield (
                f"container-ip-local-reserved-ports={text}: expected auto, or ports and ranges from 1 to"
                " 65535, separated by commas"
            )


def _are_ports(text: str) -> bool:
    if not re.fullmatch(_PORTS, text):
        return False
    ranges = (part.partition("-") for part in text.split(","))
    return all(0 < int(low) <= int(high or low) <= 0xFFFF for low, _, high in ranges)


class ReservedPorts:
    """Returns, when called, the ports to add to ip_local_reserved_ports of a new pod.

    A transparent DNS proxy sends queries from a pod's address and port, so that port must also be free on the
    node, where tunnel and WireGuard have sockets.
    """

    def __init__(
        self,
        settings: ReservedPortSettings,
        queries: QuerySource,
        tunnel: PodTunnel,
        keys: Table[str, EncryptionKey] | None,
    ) -> None:
        self._wanted = settings.container_ip_local_reserved_ports
        self._queries = queries
        self._tunnel = tunnel
        self._keys = keys

    def __call__(self) -> str:
        if self._wanted != AUTO:
            return self._wanted
        if not self._queries.transparent:
            return ""
        keys = self._keys.all() if self._keys is not None else ()
        ports = [WIREGUARD_PORT] if any(key.wireguard for key in keys) else []
        return ",".join(map(str, [*ports, *([self._tunnel.port] if self._tunnel.port else [])]))


class PodNetworking:
    """Parameters of new pods' links, routes and namespaces. MTUs are in bytes."""

    def __init__(
        self,
        link_mtu: PodMtu,
        route_mtu: RouteMtu,
        ports: ReservedPorts,
        big_tcp: BigTcp,
        chaining: ChainingSettings,
    ) -> None:
        self.link_mtu = link_mtu
        self.route_mtu = route_mtu
        self.reserved_ports = ports
        self.big_tcp = big_tcp
        self.route_mtu_in_chains = chaining.enable_route_mtu_for_cni_chaining
        """Whether routes of pods with links of other plugins get the MTU."""


@after(Tunnel)
def attacher(
    config: AgentConfig,
    links: HostLinks,
    ipam: Ipam,
    endpoints: Endpoints,
    leaving: LinkTeardown,
    router: Router,
    pods: PodNetworking,
    log: Logger,
) -> Attacher:
    """Return the Attacher of this node."""
    return Attacher(
        links,
        ipam,
        endpoints,
        leaving,
        gateways=lambda: router.gateways,
        mtu=pods.link_mtu,
        route_mtu=pods.route_mtu,
        state=config.state,
        log=log,
        route_mtu_in_chains=pods.route_mtu_in_chains,
        delegated=ipam.delegated,
        reserved_ports=pods.reserved_ports,
        limits=lambda: pods.big_tcp.limits,
    )


def detacher(endpoints: Endpoints, leaving: LinkTeardown, log: Logger) -> Detacher:
    """Return the Detacher of this node."""
    return Detacher(endpoints, leaving, log)


def checker(endpoints: Endpoints) -> Checker:
    """Return the Checker of this node."""
    return Checker(endpoints)


def queue_lock(config: AgentConfig, lifecycle: Lifecycle, log: Logger) -> QueueLock:
    """Return the lock of this node's delete queue."""
    return QueueLock(config.delete_queue, lifecycle, log)


@after(QueueLock, ExposedEndpoints, HostIPSync)
def delete_queue(
    config: AgentConfig,
    detach: Detacher,
    *,
    lifecycle: Lifecycle,
    log: Logger,
) -> DeleteQueue:
    """Return this node's delete queue. It is drained once endpoints are restored and addresses known."""
    return DeleteQueue(config.delete_queue, detach, lifecycle, log)


@after(DeleteQueue)
def cni_server(
    config: AgentConfig,
    attach: Attacher,
    detach: Detacher,
    check: Checker,
    *,
    pool: PolicyMaps,
    times: CallTimes,
    lifecycle: Lifecycle,
    log: Logger,
) -> CniServer:
    """Return the server of cni.sock. It starts once the delete queue is drained."""
    return CniServer(
        config.cni_socket, attach, detach, check, pool, PodLink, lifecycle=lifecycle, log=log, times=times
    )


def call_metrics(times: CallTimes) -> Member[Collector]:
    """Return the collector of the plugin calls' metrics."""

    async def collect() -> Iterable[MetricFamily]:
        return times.families()

    return Collector("cni", collect)


cell = module(
    "cni-server",
    "Attaches and detaches pods for the CNI plugin",
    config(ChainingSettings, ReservedPortSettings),
    provide_private(link_teardown, attacher, detacher, checker, CallTimes, ReservedPorts),
    provide(PodNetworking, queue_lock, delete_queue, cni_server, call_metrics),
    invoke(CniServer),
)
