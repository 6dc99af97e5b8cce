"""The container runtime's side: the CNI configuration it reads, and the server its plugin calls."""

from __future__ import annotations

from collections.abc import Iterable

from cells.base.metrics import Collector, MetricFamily
from cells.cluster.host_ip_sync import HostIPSync
from cells.cni.attach import Attacher
from cells.cni.check import Checker
from cells.cni.detach import Detacher, LinkTeardown
from cells.cni.queue import DeleteQueue, QueueLock
from cells.cni.server import CallTimes, CniServer
from cells.config import AgentConfig
from cells.config.shared import ChainingSettings
from cells.endpoint import Endpoints
from cells.endpoint.restore import ExposedEndpoints
from cells.maps.policy_maps import PolicyMaps
from cells.netlink.links import HostLinks
from cells.netlink.namespaces import PodLink
from cells.node.devices import PodMtu
from cells.node.ipam import Ipam
from cells.node.router import Router
from cells.tunnel.settings import RouteMtu
from cells.tunnel.tunnel import Tunnel
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

__all__ = ["CniServer", "DeleteQueue", "PodMtus", "QueueLock", "cell"]


# How the CNI server is put together from the other cells.


def link_teardown(
    links: HostLinks, ipam: Ipam, endpoints: Endpoints, *, lifecycle: Lifecycle, health: Health, log: Logger
) -> LinkTeardown:
    """Links on their way out of this node."""
    return LinkTeardown(links, ipam, endpoints, lifecycle=lifecycle, health=health, log=log)


class PodMtus:
    """The MTUs of pods' links and routes, in bytes."""

    def __init__(self, link: PodMtu, route: RouteMtu, chaining: ChainingSettings) -> None:
        self.link = link
        self.route = route
        self.route_in_chains = chaining.enable_route_mtu_for_cni_chaining
        """Whether routes of pods on other plugins' links get it."""


@after(Tunnel)
def attacher(
    config: AgentConfig,
    links: HostLinks,
    ipam: Ipam,
    endpoints: Endpoints,
    leaving: LinkTeardown,
    router: Router,
    mtus: PodMtus,
    log: Logger,
) -> Attacher:
    """Attaches pods to this node."""
    return Attacher(
        links,
        ipam,
        endpoints,
        leaving,
        gateways=lambda: router.gateways,
        mtu=mtus.link,
        route_mtu=mtus.route,
        state=config.state,
        log=log,
        route_mtu_in_chains=mtus.route_in_chains,
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

    async def collect() -> Iterable[MetricFamily]:
        return times.families()

    return Collector("cni", collect)


cell = module(
    "cni-server",
    "Attaches and detaches pods for the CNI plugin",
    config(ChainingSettings),
    provide_private(link_teardown, attacher, detacher, checker, CallTimes),
    provide(PodMtus, queue_lock, delete_queue, cni_server, call_metrics),
    invoke(CniServer),
)
