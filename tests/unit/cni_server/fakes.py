"""A node in memory: links, pods, addresses, endpoints, policy maps; any step can be made to fail."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_interface

import anyio
import anyio.lowlevel
from msgspec.structs import replace

from cells.base.addresses import Family, IPAddress
from cells.cluster.identity.identities import Identity
from cells.cni.attach import host_link_name
from cells.endpoint import Endpoint, EndpointError, EndpointRequest, NewEndpoint, State
from cells.maps.policy_maps import PoolEmpty
from cells.netlink.connection import NetlinkError
from cells.netlink.links import CreatedLink
from cells.netlink.messages import IPInterface, VethPair
from cells.netlink.rows import LinkInfo
from cells.node.ipam.allocator import Allocation
from cells.node.ipam.ranges import IpamError, IpamLaterError
from lifecycle import HiveError

GATEWAY = IPv4Address("10.0.1.5")
GATEWAY6 = IPv6Address("fd00:10:1::5")
MTU = 1450


@dataclass
class FakeLink:
    """A veth pair."""

    host_name: str
    pod: int
    pod_name: str
    mtu: int
    alias: str = ""
    up: bool = False
    configured: tuple[IPAddress | int, ...] | None = None
    addresses: list[IPAddress] = field(default_factory=list)


@dataclass
class OthersLink:
    """A veth pair of another plugin."""

    pod: int
    inner: LinkInfo
    host: LinkInfo
    addresses: list[IPAddress]
    route_mtu: int = 1500


@dataclass
class FakeNode:
    """Links, Addresses, Flows, Endpoints and PolicyPool in one. ``refuse`` names the steps that fail."""

    refuse: set[str] = field(default_factory=set)
    links: dict[int, FakeLink] = field(default_factory=dict)
    addresses: set[IPAddress] = field(default_factory=set)
    gateways: tuple[IPAddress, ...] = (GATEWAY,)
    """One of each enabled family."""
    pods_without_ipv6: set[int] = field(default_factory=set)
    shown: dict[int, State] = field(default_factory=dict)
    """Reported states of endpoints that differ from the real ones."""
    book: dict[int, Endpoint] = field(default_factory=dict)
    policy_maps: int = 100
    others: list[OthersLink] = field(default_factory=list)
    """Pairs that another plugin created."""
    steps: list[str] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    room: int | None = None
    """The number of addresses in the range; None: unlimited."""
    may_reap: anyio.Event | None = None
    cannot_delete: set[int] = field(default_factory=set)
    """Links that the kernel refuses to delete."""
    may_forget: anyio.Event | None = None
    grown: anyio.Event | None = None
    may_refill: anyio.Event | None = None
    may_identify: anyio.Event | None = None
    """Identities are pending until it is set."""
    annotated_mac: bytes = b""
    """The MAC in the pods' annotation."""
    on_create: Callable[[], None] = lambda: None
    _next: int = 100
    _started: VethPair | None = None
    ahead: int = 0
    """Links started in advance."""
    refuse_once: set[str] = field(default_factory=set)

    def _step(self, name: str) -> bool:
        self.steps.append(name)
        if name in self.refuse_once:
            self.refuse_once.remove(name)
            return True
        return name in self.refuse

    def _number(self) -> int:
        self._next += 1
        return self._next

    def clean(self) -> bool:
        """Return whether no state remains."""
        return not self.links and not self.addresses and not self.book

    # Links

    def create_veth(self, pair: VethPair) -> CreatedLink:
        if self._step("create_veth"):
            raise NetlinkError(errno.ENOMEM, "create link")
        assert pair.netns_fd is not None
        pod = os.fstat(pair.netns_fd).st_ino
        if any(
            link.host_name == pair.host_name or (link.pod, link.pod_name) == (pod, pair.pod_name)
            for link in self.links.values()
        ):
            raise NetlinkError(errno.EEXIST, "create link")
        index = self._number()
        self.links[index] = FakeLink(pair.host_name, pod, pair.pod_name, pair.mtu)
        return CreatedLink(index, index + 1000)

    def start_create_veth(self, pair: VethPair) -> None:
        assert self._started is None, "one pair at a time"
        self._started = pair
        self.ahead += 1

    def finish_create_veth(self) -> CreatedLink:
        assert self._started is not None
        pair, self._started = self._started, None
        return self.create_veth(pair)

    def activate(self, ifindex: int, alias: str) -> None:
        if self._step("activate"):
            raise NetlinkError(errno.EPERM, "activate link")
        self.links[ifindex].alias, self.links[ifindex].up = alias, True

    def sync_carrier(self, ifindex: int) -> None:
        if self._step("sync carrier"):
            raise NetlinkError(errno.ENODEV, f"sync carrier of link {ifindex}")

    def find(self, name: str) -> LinkInfo | None:
        for index, link in self.links.items():
            if link.host_name == name:
                return LinkInfo(
                    index, name, bytes(6), link.mtu, "veth", link.alias, link.up, True, 1, 0, 0, 1000
                )
        return None

    def at(self, ifindex: int) -> LinkInfo | None:
        return next((other.host for other in self.others if other.host.ifindex == ifindex), None)

    async def reap(self, ifindexes: Iterable[int]) -> None:
        refused = self._step("reap")
        if self.may_reap is not None:
            await self.may_reap.wait()
        await anyio.lowlevel.checkpoint()
        if refused:
            raise NetlinkError(errno.EBUSY, "delete link")
        indexes = set(ifindexes)
        for index in indexes - self.cannot_delete:
            self.links.pop(index, None)
        if indexes & self.cannot_delete:
            raise NetlinkError(errno.EBUSY, "delete link")

    # Flows

    async def wait_scrubbed(self, addresses: Collection[IPAddress]) -> None:
        if self.may_forget is not None:
            await self.may_forget.wait()

    # Pods

    def open_pod(self, netlink_fd: int) -> FakePod:
        return FakePod(self, os.fstat(netlink_fd).st_ino)

    def cookie(self, netlink_fd: int) -> int:
        return os.fstat(netlink_fd).st_ino

    # Addresses

    def allocate_next(
        self, owner: str, pool: str = "", family: Family | None = None
    ) -> tuple[Allocation, ...]:
        if self._step("allocate") or len(self.addresses) == self.room:
            if self.grown is not None:
                raise IpamLaterError("range is full", self.grown.wait)
            raise IpamError(502, "range is full")
        self.owners.append(owner)
        number = self._number()
        ips = [GATEWAY + number if router.version == 4 else GATEWAY6 + number for router in self.gateways]
        self.addresses.update(ips)
        return tuple(Allocation(ip=ip, pool=pool or "default", owner=owner) for ip in ips)

    def release(self, ip: IPAddress, pool: str) -> None:
        assert pool == "default", "another plugin's addresses are not released here"
        if self._step("release"):
            raise IpamError(500, "cannot release")
        self.addresses.remove(ip)

    # Endpoints

    def begin(self, request: EndpointRequest) -> NewEndpoint:
        if self.policy_maps == 0:
            raise PoolEmpty("none")
        self.policy_maps -= 1
        endpoint = endpoint_of(request, self._number())
        if self.annotated_mac:
            endpoint = replace(endpoint, pod_mac=self.annotated_mac)
        self.book[endpoint.id] = endpoint
        known = None if self.may_identify else Identity(256, ())
        return NewEndpoint(endpoint, request, known)

    async def identify(self, new: NewEndpoint) -> None:
        self._step("identify")
        if self.may_identify is not None:
            await self.may_identify.wait()
        if new.endpoint.id not in self.book:
            raise EndpointError(500, "the endpoint was deleted during its creation")
        new.identity = Identity(256, ())

    def complete(self, new: NewEndpoint) -> Endpoint:
        refused = self._step("create endpoint")
        if refused:
            del self.book[new.endpoint.id]
            raise EndpointError(500, "build failed")
        self.on_create()
        return new.endpoint

    def route(self, endpoint: Endpoint) -> None:
        if "route" in self.refuse:
            raise NetlinkError(errno.ENETDOWN, "set route")

    def delete(self, endpoint: Endpoint, *, release_address: bool = True) -> tuple[str, ...]:
        assert not release_address
        refused = self._step("delete endpoint")
        self.book.pop(endpoint.id, None)
        return ("cilium_lxc: no",) if refused else ()

    def lookup(self, id_text: str) -> Endpoint | None:
        kind, _, name = id_text.partition(":")
        if kind not in {"cni-attachment-id", "cilium-local"}:
            raise EndpointError(400, f'unknown endpoint ID prefix "{kind}"')
        return next((e for e in self.book.values() if e.attachment_id == name), None)

    def by_attachment(self, container_id: str, container_ifname: str) -> Endpoint | None:
        return self.lookup(f"cni-attachment-id:{container_id}:{container_ifname}")

    def by_container(self, container_id: str) -> list[Endpoint]:
        return [e for e in self.book.values() if e.container_id == container_id]

    def all(self) -> list[Endpoint]:
        return list(self.book.values())

    def shown_state(self, endpoint: Endpoint) -> State:
        return self.shown.get(endpoint.id, endpoint.state)

    # Policy maps

    async def ready(self) -> None:
        if self.policy_maps:
            return
        if self._step("wait for a policy map"):
            raise HiveError("no policy map for another endpoint: out of memory")
        if self.may_refill is not None:
            await self.may_refill.wait()
        self.policy_maps = 10


@dataclass
class FakePod:
    """One pod's links."""

    node: FakeNode
    number: int

    def configure(
        self,
        ifindex: int,
        name: str,
        addresses: Sequence[IPAddress],
        gateways: Sequence[IPAddress],
        mtu: int,
    ) -> None:
        if self.node._step("configure"):
            raise NetlinkError(errno.ENETUNREACH, f"add route to {name}")
        if self.number in self.node.pods_without_ipv6 and any(ip.version == 6 for ip in addresses):
            raise NetlinkError(errno.EACCES, f"add address {addresses[0]}/128 to {name}")
        link = self.node.links[ifindex - 1000]
        link.configured, link.addresses = (*addresses, *gateways, mtu), list(addresses)

    def addresses(self, name: str) -> Collection[IPInterface] | None:
        if self.node._step("look into pod"):
            raise NetlinkError(errno.EPERM, "list addresses")
        mine = [link for link in self.node.links.values() if (link.pod, link.pod_name) == (self.number, name)]
        return [ip_interface(ip) for ip in mine[0].addresses] if mine else None

    def links(self) -> list[LinkInfo]:
        if self.node._step("list links of pod"):
            raise NetlinkError(errno.EPERM, "list links")
        return [other.inner for other in self._others()]

    def addresses_of(self, ifindex: int) -> list[IPAddress]:
        (found,) = [other.addresses for other in self._others() if other.inner.ifindex == ifindex]
        return found

    def set_mac(self, ifindex: int, name: str, mac: bytes) -> None:
        if self.node._step(f"set MAC address {mac.hex(':')}"):
            raise NetlinkError(errno.EADDRNOTAVAIL, f"set MAC address of {name}")
        for other in self._others():
            if other.inner.ifindex == ifindex:
                other.inner = replace(other.inner, mac=mac)

    def set_route_mtu(self, mtu: int) -> None:
        if self.node._step("set MTU of routes"):
            raise NetlinkError(errno.EPERM, "set route 0.0.0.0/0")
        for other in self._others():
            other.route_mtu = mtu

    def _others(self) -> list[OthersLink]:
        return [other for other in self.node.others if other.pod == self.number]

    def delete(self, name: str) -> bool:
        if self.node._step("delete in pod"):
            raise NetlinkError(errno.EPERM, f"delete link {name}")
        mine = [i for i, link in self.node.links.items() if (link.pod, link.pod_name) == (self.number, name)]
        for index in mine:
            del self.node.links[index]
        return bool(mine)


def endpoint_of(request: EndpointRequest, number: int) -> Endpoint:
    """Return the endpoint that a request creates."""
    return Endpoint(
        id=number,
        container_id=request.container_id,
        container_ifname=request.container_ifname,
        ifname=request.ifname,
        ifindex=request.ifindex,
        pod_mac=request.pod_mac,
        host_mac=request.host_mac,
        ipv4=request.ipv4,
        pool=request.pool,
        ipv6=request.ipv6,
        ipv6_pool=request.ipv6_pool,
        network=request.network,
        datapath=request.datapath,
        identity=5,
        labels=(),
        pod_name=request.pod_name,
        pod_namespace=request.pod_namespace,
        pod_uid=request.pod_uid,
        netns_cookie=request.netns_cookie,
        state=State.READY,
        created=time.time(),
    )


def leftover(node: FakeNode, container_id: str, pod: int, *, alias: str = "", ifname: str = "eth0") -> int:
    """Create a link without an endpoint, on the node and in the pod; return its index."""
    index = node._number()
    node.links[index] = FakeLink(host_link_name(container_id, ifname), pod, ifname, MTU, alias)
    return index


def others_link(node: FakeNode, pod: int, *addresses: IPAddress, name: str = "eth0") -> OthersLink:
    """Create another plugin's pair with the host's end vethhost<n>."""
    number = len(node.others)
    inner, host = 2 + number, 50 + number
    made = OthersLink(
        pod,
        LinkInfo(inner, name, bytes(5) + b"\1", 1500, "veth", "", True, True, host, 0, 0, 1000),
        LinkInfo(
            host, f"vethhost{number}", bytes(5) + b"\2", 1500, "veth", "", True, True, inner, 0, 0, 1000
        ),
        list(addresses),
    )
    node.others.append(made)
    return made
