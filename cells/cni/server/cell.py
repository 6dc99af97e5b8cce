"""How the CNI server is put together from the other cells.

Needs: ChainingSettings, AgentConfig, HostLinks, Ipam, Endpoints, PolicyMaps, Router, PodMtu,
RouteMtu, Tunnel, ExposedEndpoints, HostIPSync.
Gives: cell, and the constructors of all that CniServer, QueueLock and DeleteQueue are made of.
"""

from __future__ import annotations

from collections.abc import Iterable

from cells.cni.server.attachment.attach import Attacher
from cells.cni.server.attachment.check import Checker
from cells.cni.server.attachment.detach import Detacher
from cells.cni.server.attachment.link_teardown import LinkTeardown
from cells.cni.server.delete_queue import DeleteQueue
from cells.cni.server.queue_lock import QueueLock
from cells.cni.server.server import CniServer
from cells.cni.server.settings import ChainingSettings
from cells.cni.server.times import CallTimes
from cells.config import AgentConfig
from cells.endpoint import Endpoints
from cells.endpoint.restore import ExposedEndpoints
from cells.ipam import Ipam
from cells.maps import PolicyMaps
from cells.node.devices import PodMtu
from cells.node.host_ip_sync import HostIPSync
from cells.node.netlink import HostLinks, PodLink
from cells.node.router import Router
from cells.observe.metrics import Collector, Family
from cells.tunnel import RouteMtu, Tunnel
from lifecycle import (
    Health,
    Lifecycle,
    Logger,
    Member,
    after,
    config,
    invoke,
    module,
    provide,
    provide_private,
)


def link_teardown(
    links: HostLinks, ipam: Ipam, endpoints: Endpoints, *, lifecycle: Lifecycle, health: Health, log: Logger
) -> LinkTeardown:
    """Links on their way out of this node."""
    return LinkTeardown(links, ipam, endpoints, lifecycle=lifecycle, health=health, log=log)


@after(Tunnel)
def attacher(
    config: AgentConfig,
    links: HostLinks,
    ipam: Ipam,
    endpoints: Endpoints,
    *,
    leaving: LinkTeardown,
    router: Router,
    mtu: PodMtu,
    route_mtu: RouteMtu,
    chaining: ChainingSettings,
    log: Logger,
) -> Attacher:
    """Attaches pods to this node."""
    return Attacher(
        links,
        ipam,
        endpoints,
        leaving,
        gateways=lambda: router.gateways,
        mtu=mtu,
        route_mtu=route_mtu,
        state=config.state,
        log=log,
        route_mtu_in_chains=chaining.enable_route_mtu_for_cni_chaining,
        delegated=ipam.delegated,
    )


def detacher(endpoints: Endpoints, leaving: LinkTeardown, log: Logger) -> Detacher:
    """Detaches pods from this node."""
    return Detacher(endpoints, leaving, log)


def checker(endpoints: Endpoints) -> Checker:
    """Compares this node's attachments with their results."""
    return Checker(endpoints)


def queue_lock(config: AgentConfig, lifecycle: Lifecycle, log: Logger) -> QueueLock:
    """The lock of this node's delete queue."""
    return QueueLock(config.delete_queue, lifecycle, log)


@after(QueueLock, ExposedEndpoints, HostIPSync)
def delete_queue(
    config: AgentConfig,
    detach: Detacher,
    *,
    lifecycle: Lifecycle,
    log: Logger,
) -> DeleteQueue:
    """This node's delete queue, drained once restored endpoints and the node's addresses are known."""
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
    """This node's cni.sock, served once the queue is drained."""
    return CniServer(
        config.cni_socket, attach, detach, check, pool, PodLink, lifecycle=lifecycle, log=log, times=times
    )


def call_metrics(times: CallTimes) -> Member[Collector]:
    """The plugin's calls as metrics."""

    async def collect() -> Iterable[Family]:
        return times.families()

    return Collector("cni", collect)


cell = module(
    "cni-server",
    "Attaches and detaches pods for the CNI plugin",
    config(ChainingSettings),
    provide_private(link_teardown, attacher, detacher, checker, CallTimes),
    provide(queue_lock, delete_queue, cni_server, call_metrics),
    invoke(CniServer),
)
