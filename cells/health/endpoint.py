"""This node's health endpoint: an endpoint with identity health that answers probes as a pod would.

``HealthAddresses`` allocates its addresses before the node is published. ``HealthEndpoint`` is the controller
cilium-health-ep: it creates the network namespace, the link and the endpoint, listens inside, and recreates
them after faults.

Source: Cilium 1.17, cilium-health/launch.

Why: a socket belongs to the network namespace in which it was opened. So the namespace needs no process and
no name: the agent's sockets keep it alive, the agent's event loop answers, and namespace and link disappear
with the agent.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final, Protocol

import anyio
import anyio.to_thread
import msgspec

from cells.base.addresses import Family, IPAddress
from cells.cluster.identity.numbers import HEALTH, RESERVED_IDENTITIES
from cells.cluster.nodes.local import HealthAddress, LocalNodeStore
from cells.endpoint import Endpoint, EndpointRequest, Endpoints, NewEndpoint
from cells.endpoint.restore import OldEndpoints, RestoredEndpoints
from cells.health.prober import NodeHealthSettings, ProbeTransport
from cells.maps.policy_maps import PolicyMaps, PoolEmpty
from cells.netlink.connection import open_socket
from cells.netlink.links import HostLinks, is_present
from cells.netlink.messages import VethPair
from cells.netlink.namespaces import PodLink, run_in_new
from cells.netlink.rows import random_mac
from cells.node.big_tcp import BigTcp
from cells.node.devices import PodMtu
from cells.node.ipam import Ipam
from cells.node.ipam.ranges import IpamError
from cells.node.router import Router
from cells.observe.bootstrap import HealthAddressesClaimed, PodsExposed
from cells.observe.controllers import Controllers, Rules
from cells.tunnel.settings import RouteMtu
from lifecycle import HiveError, Hook, Lifecycle, Logger, UsageError, after
from lifecycle.http import SCRAPED, HttpServer, Request, Response

__all__ = ["HealthAddresses", "HealthEndpoint", "HealthNetwork"]

CONTROLLER: Final = "cilium-health-ep"
CONTAINER: Final = "cilium-health"
LINK: Final = "lxc_health"
"""The host side of the link."""
PEER: Final = "cilium"
"""The side in the endpoint's namespace."""
ALIAS: Final = "hive health endpoint"
OWNER: Final = "health"
"""The owner of its addresses in IPAM."""

INTERVAL: Final = 60.0
"""Seconds between two checks, in addition to those after notifications from its namespace."""
UNREACHABLE_TIMEOUT: Final = 180.0
"""Seconds without an answer after which it is recreated."""
MIN_RECREATE_INTERVAL: Final = 1.0
"""Minimum number of seconds between two creations, in case another program keeps deleting its link."""

_LOOPBACK: Final = 1
_LOOPBACK_MTU: Final = 65536
_CHANGES: Final = 0x1 | 0x10 | 0x40 | 0x100 | 0x400
"""RTMGRP_LINK, and RTMGRP_*_IFADDR and RTMGRP_*_ROUTE of both families (rtnetlink(7))."""


# The addresses of the health endpoint.


@after(RestoredEndpoints)
class HealthAddresses:
    """Allocates an address of each family after those of pods: the previous one if it is free.

    Its hook runs before this node is published, so that other nodes never see it without these addresses.
    """

    def __init__(
        self,
        settings: NodeHealthSettings,
        old: OldEndpoints,
        ipam: Ipam,
        store: LocalNodeStore,
        *,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self._old = old
        self._ipam = ipam
        self._table = store.health
        self._log = log
        if settings.endpoints:
            lifecycle.append(Hook("claim addresses of the health endpoint", self._start))

    async def _start(self) -> None:
        if self._ipam.delegated:
            raise UsageError(
                f"enable-endpoint-health-checking cannot be used with ipam={self._ipam.mode}: the agent has"
                " no addresses to allocate; set enable-endpoint-health-checking=false"
            )
        try:
            self.claim()
        except IpamError as error:  # the controller retries and reports the error
            self._log.warning(
                "no address allocated for the health endpoint, will be retried", error=error.text
            )

    def claim(self) -> tuple[IPAddress, ...]:
        """Return the addresses, IPv4 first; allocate and publish them again if they were released.

        Deleting the endpoint over the API releases them. Raises IpamError.
        """
        for family in sorted(self._ipam.families, key=lambda family: family.value):
            row = self._table.get(family)
            if row is None or self._ipam.owner(row.ip) != OWNER:
                with self._table.txn() as txn:
                    txn.put(HealthAddress(self._claimed(family, row)))
        return tuple(row.ip for row in sorted(self._table.all(), key=lambda row: row.ip.version))

    def _claimed(self, family: Family, row: HealthAddress | None) -> IPAddress:
        before = {row.ip: self._ipam.default_pool} if row is not None else {}
        for saved in self._old.scan.endpoints.values():
            endpoint = saved.endpoint
            if endpoint.labels == RESERVED_IDENTITIES[HEALTH]:
                before |= {ip: endpoint.pool_of(ip) or self._ipam.default_pool for ip in endpoint.addresses}
        for ip, pool in before.items():
            if Family.of(ip) is family:
                with suppress(IpamError):  # in use, or outside the current pod CIDRs: allocate another
                    return self._ipam.allocate(ip, OWNER, pool).ip
        return self._ipam.allocate_next(OWNER, family=family)[0].ip


@after(HealthAddresses)
def health_addresses_claimed() -> HealthAddressesClaimed:
    """Provide the barrier after which the node may be published."""
    return HealthAddressesClaimed()


# The network namespace and link of the health endpoint.


class HealthLink(Protocol):
    """A network namespace with one side of a link; the other is on the host. Methods raise OSError."""

    request: EndpointRequest
    """The request for its endpoint."""

    def connect(self) -> None:
        """Set both sides up, with the addresses and routes of a pod."""
        ...

    async def listen(self) -> None:
        """Answer probes in the namespace."""
        ...

    def watch(self, changed: Callable[[], object]) -> None:
        """Call ``changed`` after each notification of the kernel from the namespace."""
        ...

    def fault(self) -> str:
        """Return what differs from the result of connect(); empty if nothing does."""
        ...

    async def close(self) -> None:
        """Close the sockets; the kernel then removes namespace and link."""
        ...


class HealthNetwork(Protocol):
    """The interface that creates health links."""

    async def create(self, addresses: Sequence[IPAddress], port: int) -> HealthLink:
        """Create a link that is down, and delete an existing one. Raises OSError and HiveError."""
        ...


class _NamespaceSockets(msgspec.Struct, frozen=True):
    """The agent's sockets in the namespace, which exists as long as one of them is open."""

    namespace: int
    requests: int
    """A netlink socket for requests."""
    changes: socket.socket
    listeners: tuple[socket.socket, ...]

    def close(self) -> None:
        for each in (self.changes, *self.listeners):
            each.close()
        os.close(self.requests)
        os.close(self.namespace)


def _open_sockets(families: Sequence[Family], port: int) -> _NamespaceSockets:
    """Open the sockets in the new namespace's thread. Raises OSError, with nothing left open."""
    with ExitStack() as undo:
        if Family.IPV6 in families:
            _enable_ipv6()
        namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        undo.callback(os.close, namespace)
        requests = open_socket()
        undo.callback(os.close, requests)
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        changes = undo.enter_context(socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE))
        changes.bind((0, _CHANGES))
        listeners = []
        for family in families:
            kinds = {Family.IPV4: (socket.AF_INET, "0.0.0.0"), Family.IPV6: (socket.AF_INET6, "::")}
            number, any_address = kinds[family]
            listeners.append(undo.enter_context(socket.create_server((any_address, port), family=number)))
        found = _NamespaceSockets(namespace, requests, changes, tuple(listeners))
        undo.pop_all()
        return found


def _enable_ipv6() -> None:
    """Enable IPv6 in the calling thread's namespace, over /proc/sys/net. Raises OSError.

    Writes only if IPv6 is disabled, as a container may not be allowed to write there.
    """
    for scope in ("all", "default"):
        setting = Path("/proc/sys/net/ipv6/conf", scope, "disable_ipv6")
        if setting.read_text(encoding="ascii").strip() != "0":
            setting.write_text("0", encoding="ascii")


class KernelHealthLink:
    """Implements :class:`HealthLink` by the kernel."""

    def __init__(
        self,
        sockets: _NamespaceSockets,
        request: EndpointRequest,
        peer_ifindex: int,
        *,
        links: HostLinks,
        gateways: Sequence[IPAddress],
        mtu: PodMtu,
        route_mtu: RouteMtu,
        log: Logger,
    ) -> None:
        self.request = request
        self._sockets = sockets
        self._pod = PodLink(sockets.requests)
        self._peer = peer_ifindex
        self._links = links
        self._gateways = gateways
        self._mtu = mtu
        self._route_mtu = route_mtu
        self._log = log
        self._servers: list[HttpServer] = []
        self._watched = False

    def connect(self) -> None:
        """Configure both sides. Raises NetlinkError."""
        addresses, host = self.request.addresses, self.request.ifindex
        gateways = {gateway.version: gateway for gateway in self._gateways}
        self._links.activate(host, ALIAS)
        self._pod.configure(_LOOPBACK, "lo", (), (), _LOOPBACK_MTU)
        self._pod.configure(
            self._peer, PEER, addresses, [gateways[ip.version] for ip in addresses], self._route_mtu()
        )
        self._links.sync_carrier(host)

    async def listen(self) -> None:
        """Serve the sockets, which listen since they were opened."""
        for listener in self._sockets.listeners:
            server = HttpServer(answer_probe, grace=1.0, limits=SCRAPED, log=self._log)
            await server.serve(listener)
            self._servers.append(server)

    def watch(self, changed: Callable[[], object]) -> None:
        """Watch notifications, without those that this agent has caused so far."""
        self._drain()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._sockets.changes, self._changed, changed)
        self._watched = True

    def _changed(self, changed: Callable[[], object]) -> None:
        self._drain()
        changed()

    def _drain(self) -> None:
        """Discard pending notifications, as the state is read afterwards; ENOBUFS is ignored, too."""
        with suppress(OSError):
            while True:
                self._sockets.changes.recv(1)

    def fault(self) -> str:
        """Check both sides of the link. Raises NetlinkError."""
        if not is_present(self.request.ifindex, LINK):
            return f"its link {LINK} is missing"
        node_end = self._links.at(self.request.ifindex)
        if node_end is None or not node_end.up:
            return f"its link {LINK} is down"
        if node_end.mtu != (mtu := self._mtu()):
            return f"its link {LINK} has an MTU of {node_end.mtu}, pods' links have {mtu}"
        found = self._pod.addresses(PEER)
        if found is None:
            return f"the link {PEER} in its namespace is missing"
        missing = [str(ip) for ip in self.request.addresses if ip not in found]
        return f"its address {', '.join(missing)} is missing" if missing else ""

    async def close(self) -> None:
        """Close the servers, then the other sockets.

        The kernel removes the namespace soon after the last socket is closed.
        """
        if self._watched:
            asyncio.get_running_loop().remove_reader(self._sockets.changes)
        for server in self._servers:
            await server.close()
        self._sockets.close()


class KernelHealthNetwork:
    """Implements :class:`HealthNetwork` by the kernel."""

    def __init__(
        self,
        links: HostLinks,
        router: Router,
        mtu: PodMtu,
        route_mtu: RouteMtu,
        big_tcp: BigTcp,
        log: Logger,
    ) -> None:
        self._links = links
        self._router = router
        self._mtu = mtu
        self._route_mtu = route_mtu
        self._big_tcp = big_tcp
        self._log = log

    async def create(self, addresses: Sequence[IPAddress], port: int) -> HealthLink:
        """Create namespace, sockets and link. Raises OSError and HiveError."""
        existing = self._links.find(LINK)
        if existing is not None:
            await self._links.reap([existing.ifindex])
        families = [Family.of(ip) for ip in addresses]
        with anyio.CancelScope(shield=True):  # a cancelled call would leak its sockets
            opened = partial(run_in_new, partial(_open_sockets, families, port))
            sockets = await anyio.to_thread.run_sync(opened)
        try:
            return self._link(sockets, addresses)
        except BaseException:
            sockets.close()
            raise

    def _link(self, sockets: _NamespaceSockets, addresses: Sequence[IPAddress]) -> HealthLink:
        macs, limits = (random_mac(), random_mac()), self._big_tcp.limits
        pair = VethPair(LINK, macs[0], PEER, macs[1], self._mtu(), sockets.namespace, limits)
        created = self._links.create_veth(pair)
        request = EndpointRequest(
            container_name=CONTAINER,
            container_ifname=PEER,
            ifname=LINK,
            ifindex=created.host_ifindex,
            pod_mac=pair.pod_mac,
            host_mac=pair.host_mac,
            ipv4=next((ip for ip in addresses if isinstance(ip, IPv4Address)), None),
            ipv6=next((ip for ip in addresses if isinstance(ip, IPv6Address)), None),
            reserved=HEALTH,
        )
        return KernelHealthLink(
            sockets,
            request,
            created.pod_ifindex,
            links=self._links,
            gateways=self._router.gateways,
            mtu=self._mtu,
            route_mtu=self._route_mtu,
            log=self._log,
        )


async def answer_probe(request: Request) -> Response:
    """Answer 200 at /hello, otherwise 404; without a body."""
    return Response(200 if request.path == "/hello" else 404)


# The controller cilium-health-ep.


@after(PodsExposed)
class HealthEndpoint:
    """Creates the endpoint at the start, and recreates it if it is damaged or unreachable."""

    def __init__(
        self,
        settings: NodeHealthSettings,
        addresses: HealthAddresses,
        endpoints: Endpoints,
        pool: PolicyMaps,
        network: HealthNetwork,
        transport: ProbeTransport,
        controllers: Controllers,
        *,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self._port = settings.cluster_health_port
        self._addresses = addresses
        self._endpoints = endpoints
        self._pool = pool
        self._network = network
        self._transport = transport
        self._controllers = controllers
        self._log = log
        self._link: HealthLink | None = None
        self._endpoint: Endpoint | None = None
        self._changed = False
        """Whether the kernel has reported a change since the last answer."""
        self._created_at = -MIN_RECREATE_INTERVAL
        """Time of the last creation."""
        self._last_answer = 0.0
        """Time of the last answer or creation, by the event loop's clock."""
        if settings.endpoints:
            lifecycle.append(Hook("run the health endpoint", self._start, stop=self._stop))

    async def _start(self) -> None:
        self._controllers.update(CONTROLLER, self._check, Rules(interval=INTERVAL, retry_maximum=INTERVAL))

    async def _stop(self) -> None:
        """Close the link.

        The endpoint's saved state stays, so that the next agent reuses its addresses.
        """
        self._controllers.remove(CONTROLLER)
        if self._link is not None:
            link, self._link = self._link, None
            await link.close()

    async def _check(self) -> None:
        """Create the endpoint if necessary, and probe it. Raises HiveError, OSError."""
        fault = self._fault()
        if fault:
            await self._recreate(fault)
        failure = await self._probe_failure()
        now = anyio.current_time()
        if not failure:
            self._last_answer, self._changed = now, False
        elif self._changed:
            await self._recreate(f"no answer after a change in its namespace: {failure}")
        elif now - self._last_answer > UNREACHABLE_TIMEOUT:
            await self._recreate(f"no answer for {UNREACHABLE_TIMEOUT:g} s: {failure}")
        if failure:
            raise HiveError(f"the health endpoint does not answer: {failure}")

    def _fault(self) -> str:
        link, created = self._link, self._endpoint
        if link is None or created is None:
            return "not created yet"
        current = self._endpoints.get(created.id)
        if current is None or current.created != created.created:
            return "its endpoint was deleted"
        return link.fault()

    async def _probe_failure(self) -> str:
        """Return the error of the first address that does not answer; empty if all do."""
        for ip in self._addresses.claim():
            outcome = await self._transport.http(str(ip), self._port)
            if outcome.failure:
                return outcome.failure
        return ""

    async def _recreate(self, reason: str) -> None:
        """Create link and endpoint, and delete existing ones.

        Raises HiveError, OSError, IpamError, EndpointError.
        """
        if self._link is not None:
            self._log.warning("recreating the health endpoint", reason=reason)
        await anyio.sleep_until(self._created_at + MIN_RECREATE_INTERVAL)
        await self._delete()
        self._created_at = self._last_answer = anyio.current_time()
        self._changed = False
        link = await self._network.create(self._addresses.claim(), self._port)
        try:
            self._endpoint = await self._complete(link)
            link.connect()
            self._endpoints.route(self._endpoint)
            await link.listen()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await link.close()
            raise
        self._link = link
        link.watch(self._on_change)
        addresses = ", ".join(str(ip) for ip in link.request.addresses)
        self._log.info("health endpoint created", endpoint=self._endpoint.id, addresses=addresses, link=LINK)

    def _on_change(self) -> None:
        self._changed = True
        self._controllers.trigger(CONTROLLER)

    async def _complete(self, link: HealthLink) -> Endpoint:
        new = await self._begin(link.request)
        await self._endpoints.identify(new)
        return self._endpoints.complete(new)

    async def _begin(self, request: EndpointRequest) -> NewEndpoint:
        while True:
            try:
                return self._endpoints.begin(request)
            except PoolEmpty:
                await self._pool.ready()

    async def _delete(self) -> None:
        link, self._link = self._link, None
        if self._endpoint is not None:
            for problem in self._endpoints.delete(self._endpoint, release_address=False):
                self._log.warning("health endpoint not removed completely", problem=problem)
            self._endpoint = None
        if link is not None:
            await link.close()
