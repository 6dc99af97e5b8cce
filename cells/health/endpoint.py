"""This node's health endpoint: probes of it take the path of pods' packets.

Controller: its addresses (claimed before the node is published) in; a network namespace with a link, an
            endpoint with the identity health, and a listening socket out.
Source:     Cilium 1.17, cilium-health/launch and the controller cilium-health-ep.
Why:        a socket belongs to the network namespace in which it was opened, in any process. So the namespace
            needs no process and no name: the agent's sockets keep it alive, the agent's loop answers there,
            and an agent that ends in any way leaves neither namespace nor link behind.
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
"""The node's end of the link."""
PEER: Final = "cilium"
"""The end in the endpoint's namespace."""
ALIAS: Final = "hive health endpoint"
OWNER: Final = "health"
"""Owner of its addresses in IPAM."""

INTERVAL: Final = 60.0
"""Seconds between two checks, in addition to those after the kernel reports a change in its namespace."""
PATIENCE: Final = 180.0
"""Seconds without an answer after which it is recreated."""
REST: Final = 1.0
"""Minimum time between two creations, in seconds, as another program may keep removing its link."""

_LOOPBACK: Final = 1
_LOOPBACK_MTU: Final = 65536
_CHANGES: Final = 0x1 | 0x10 | 0x40 | 0x100 | 0x400
"""RTMGRP_LINK, and of both families RTMGRP_*_IFADDR and RTMGRP_*_ROUTE (rtnetlink(7))."""


# Its addresses.


@after(RestoredEndpoints)
class HealthAddresses:
    """Claims an address of each family after the pods have theirs: the previous one if it is free.

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
                " no addresses to give; set enable-endpoint-health-checking=false"
            )
        try:
            self.claim()
        except IpamError as error:  # the controller tries again, and reports it
            self._log.warning("no address for the health endpoint yet", error=error.text)

    def claim(self) -> tuple[IPAddress, ...]:
        """Its addresses, IPv4 first; claimed and published again if they are no longer its own.

        Raises IpamError.

        Deleting the endpoint over the API releases them.
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
                with suppress(IpamError):  # another one then: it is taken, or the range is a new one
                    return self._ipam.allocate(ip, OWNER, pool).ip
        return self._ipam.allocate_next(OWNER, family=family)[0].ip


@after(HealthAddresses)
def health_addresses_claimed() -> HealthAddressesClaimed:
    """A barrier after which the node may be published."""
    return HealthAddressesClaimed()


# Its namespace and link.


class HealthLink(Protocol):
    """A namespace with one end of a link; the other end is the node's. Methods raise OSError."""

    request: EndpointRequest
    """The request that creates its endpoint."""

    def connect(self) -> None:
        """Bring both ends up, with the addresses and routes of a pod."""
        ...

    async def listen(self) -> None:
        """Answer probes inside."""
        ...

    def watch(self, changed: Callable[[], object]) -> None:
        """Call ``changed`` when the kernel reports a change inside."""
        ...

    def fault(self) -> str:
        """What differs from the result of connect(); empty if nothing does."""
        ...

    async def close(self) -> None:
        """Close the sockets; the kernel removes namespace and link."""
        ...


class HealthNetwork(Protocol):
    """Creates such links."""

    async def create(self, addresses: Sequence[IPAddress], port: int) -> HealthLink:
        """Create a link that is down, replacing an existing one. Raises OSError and HiveError."""
        ...


class _Inside(msgspec.Struct, frozen=True):
    """Sockets of the agent in the namespace, which exists as long as one of them."""

    namespace: int
    requests: int
    """A netlink socket."""
    changes: socket.socket
    listeners: tuple[socket.socket, ...]

    def close(self) -> None:
        for each in (self.changes, *self.listeners):
            each.close()
        os.close(self.requests)
        os.close(self.namespace)


def _open_inside(families: Sequence[Family], port: int) -> _Inside:
    """Open the sockets, in the new namespace's thread. Raises OSError, with nothing left open."""
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
            number, everywhere = kinds[family]
            listeners.append(undo.enter_context(socket.create_server((everywhere, port), family=number)))
        found = _Inside(namespace, requests, changes, tuple(listeners))
        undo.pop_all()
        return found


def _enable_ipv6() -> None:
    """Enable IPv6 in the calling thread's namespace, over /proc/sys/net. Raises OSError.

    A new namespace usually has it, and a container may not be allowed to write there.
    """
    for place in ("all", "default"):
        setting = Path("/proc/sys/net/ipv6/conf", place, "disable_ipv6")
        if setting.read_text(encoding="ascii").strip() != "0":
            setting.write_text("0", encoding="ascii")


class KernelHealthLink:
    """The real :class:`HealthLink`."""

    def __init__(
        self,
        inside: _Inside,
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
        self._inside = inside
        self._pod = PodLink(inside.requests)
        self._peer = peer_ifindex
        self._links = links
        self._gateways = gateways
        self._mtu = mtu
        self._route_mtu = route_mtu
        self._log = log
        self._servers: list[HttpServer] = []
        self._watched = False

    def connect(self) -> None:
        """Raises NetlinkError."""
        addresses, host = self.request.addresses, self.request.ifindex
        gateways = {gateway.version: gateway for gateway in self._gateways}
        self._links.activate(host, ALIAS)
        self._pod.configure(_LOOPBACK, "lo", (), (), _LOOPBACK_MTU)
        self._pod.configure(
            self._peer, PEER, addresses, [gateways[ip.version] for ip in addresses], self._route_mtu()
        )
        self._links.sync_carrier(host)

    async def listen(self) -> None:
        """The sockets listen since they were opened."""
        for listener in self._inside.listeners:
            server = HttpServer(answer_probe, grace=1.0, limits=SCRAPED, log=self._log)
            await server.serve(listener)
            self._servers.append(server)

    def watch(self, changed: Callable[[], object]) -> None:
        """Ignore earlier notifications, which this agent caused."""
        self._drain()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._inside.changes, self._changed, changed)
        self._watched = True

    def _changed(self, changed: Callable[[], object]) -> None:
        self._drain()
        changed()

    def _drain(self) -> None:
        """Discard pending notifications, as the state is read afterwards. Lost ones (ENOBUFS) count, too."""
        with suppress(OSError):
            while True:
                self._inside.changes.recv(1)

    def fault(self) -> str:
        """Raises NetlinkError."""
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
        """Close servers first, as they hold sockets.

        The kernel removes the namespace soon after the last one.
        """
        if self._watched:
            asyncio.get_running_loop().remove_reader(self._inside.changes)
        for server in self._servers:
            await server.close()
        self._inside.close()


class KernelHealthNetwork:
    """The real :class:`HealthNetwork`."""

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
        """Raises OSError and HiveError."""
        left = self._links.find(LINK)
        if left is not None:
            await self._links.reap([left.ifindex])
        families = [Family.of(ip) for ip in addresses]
        with anyio.CancelScope(shield=True):  # what a cancelled call opens nothing would close
            opened = partial(run_in_new, partial(_open_inside, families, port))
            inside = await anyio.to_thread.run_sync(opened)
        try:
            return self._link(inside, addresses)
        except BaseException:
            inside.close()
            raise

    def _link(self, inside: _Inside, addresses: Sequence[IPAddress]) -> HealthLink:
        macs, limits = (random_mac(), random_mac()), self._big_tcp.limits
        pair = VethPair(LINK, macs[0], PEER, macs[1], self._mtu(), inside.namespace, limits)
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
            inside,
            request,
            created.pod_ifindex,
            links=self._links,
            gateways=self._router.gateways,
            mtu=self._mtu,
            route_mtu=self._route_mtu,
            log=self._log,
        )


async def answer_probe(request: Request) -> Response:
    """Answer 200 at /hello, otherwise 404; both without a body."""
    return Response(200 if request.path == "/hello" else 404)


# The endpoint.


@after(PodsExposed)
class HealthEndpoint:
    """Creates the endpoint at the start, and recreates it if it is damaged or does not answer."""

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
        self._made = -REST
        """When it was last created."""
        self._answered = 0.0
        """When it last answered or was created; both by the loop's clock."""
        if settings.endpoints:
            lifecycle.append(Hook("run the health endpoint", self._start, stop=self._stop))

    async def _start(self) -> None:
        self._controllers.update(CONTROLLER, self._check, Rules(interval=INTERVAL, retry_maximum=INTERVAL))

    async def _stop(self) -> None:
        """Remove the link.

        The saved state of the endpoint remains, so that the next agent reuses its addresses.
        """
        self._controllers.remove(CONTROLLER)
        if self._link is not None:
            link, self._link = self._link, None
            await link.close()

    async def _check(self) -> None:
        """Create the endpoint if it does not exist, and wait until it answers. Raises HiveError, OSError."""
        wrong = self._fault()
        if wrong:
            await self._make(wrong)
        failure = await self._failure()
        now = anyio.current_time()
        if not failure:
            self._answered, self._changed = now, False
        elif self._changed:
            await self._make(f"no answer after a change in its namespace: {failure}")
        elif now - self._answered > PATIENCE:
            await self._make(f"no answer for {PATIENCE:g} s: {failure}")
        if failure:
            raise HiveError(f"the health endpoint does not answer: {failure}")

    def _fault(self) -> str:
        link, made = self._link, self._endpoint
        if link is None or made is None:
            return "not made yet"
        there = self._endpoints.get(made.id)
        if there is None or there.created != made.created:
            return "its endpoint was deleted"
        return link.fault()

    async def _failure(self) -> str:
        """Why one of its addresses does not answer; empty if all do."""
        for ip in self._addresses.claim():
            outcome = await self._transport.http(str(ip), self._port)
            if outcome.failure:
                return outcome.failure
        return ""

    async def _make(self, reason: str) -> None:
        """Create it, replacing what exists of it. Raises HiveError, OSError, IpamError, EndpointError."""
        if self._link is not None:
            self._log.warning("creating the health endpoint again", reason=reason)
        await anyio.sleep_until(self._made + REST)
        await self._take_away()
        self._made = self._answered = anyio.current_time()
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
        link.watch(self._look)
        addresses = ", ".join(str(ip) for ip in link.request.addresses)
        self._log.info("health endpoint created", endpoint=self._endpoint.id, addresses=addresses, link=LINK)

    def _look(self) -> None:
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

    async def _take_away(self) -> None:
        link, self._link = self._link, None
        if self._endpoint is not None:
            for problem in self._endpoints.delete(self._endpoint, release_address=False):
                self._log.warning("leftover of the health endpoint not removed", problem=problem)
            self._endpoint = None
        if link is not None:
            await link.close()
