"""A node for the API's tests: real endpoints and addresses, with dictionaries in the kernel's place."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_address
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import anyio
from yarl import URL

from cells import api, endpoint, kubernetes, netlink
from cells.api import Api
from cells.api.operations.config_mapping import SILENT, NodeFacts
from cells.api.operations.node_view import NodeView, PodLinks, StatusView, node_element
from cells.api.operations.status import StatusFacts
from cells.api.rate_limits import NAMES, Limits
from cells.base.addresses import Family, IPAddress
from cells.bgp import rest as bgp
from cells.bgp.speaker_state import (
    RouteListing,
    WantedSpeakers,
    instance_table,
    observed_peers,
    path_table,
    peer_table,
    policy_table,
)
from cells.cluster import identity, ipcache
from cells.cluster.host_ip_sync import HostIPSync
from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import IpcacheTarget, Source
from cells.cluster.nodes.node import INTERNAL_IP, ClusterNode, NodeIP
from cells.cni import DeleteQueue, QueueLock
from cells.config import AgentConfig
from cells.config.drift import ConfigDrift
from cells.datapath.datapath import Datapath
from cells.datapath.settings import MonitorNotifications
from cells.endpoint import Endpoint, EndpointMaps, EndpointPrograms, EndpointRoutes, Endpoints
from cells.endpoint.restore import ExposedEndpoints, RegeneratedEndpoints
from cells.maps.map_log import MapLog
from cells.maps.policy_maps import PoolEmpty
from cells.maps.records.endpoints import NODE_AUDITS_POLICY
from cells.node import ipam
from cells.node.devices import Device
from cells.node.ipam import Ipam
from cells.node.router import Addressing
from cells.observe import controllers, metrics
from cells.observe.health import Probes, StatusCollector
from cells.policy import maps as policy_maps
from cells.policy.control import PolicyView, RulePolicy
from cells.policy.maps import PolicyEntries, PolicyMapPool, RuleComputer
from cells.policy.rules import PolicyOptions
from cells.services import LoadBalancerOptions
from cells.services.control.manual import ManualServices, manual_services, manual_states
from cells.services.control.tables import local_redirects, served_frontends
from lifecycle import Cell, HealthTree, Hive, Member, Table, provide, replace, supply
from lifecycle.testing import fake
from tests.support.policy_maps import write_singly
from tests.unit.ipcache.fakes import FakeIpcacheMap

T = TypeVar("T")

ROUTER = IPv4Address("10.0.1.5")
ROUTER6 = IPv6Address("fd00:1::5")
POD_CIDR = IPv4Network("10.0.1.0/24")
UNLIMITED: Mapping[str, object] = {
    "api-rate-limit": ",".join(f"{name}=rate-limit:0/s,parallel-requests:0" for name in NAMES)
}
"""Settings of an API without rate limits."""


@dataclass
class FakeKernel:
    """The maps and programs of endpoints in memory; single steps can be made to fail."""

    routes: dict[IPAddress, int] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=lambda: list(range(1, 200)))
    rows: dict[tuple[str, int], Endpoint] = field(default_factory=dict)
    attached: set[int] = field(default_factory=set)
    fault: OSError | None = None
    policies: dict[int, PolicyEntries] = field(default_factory=dict)
    prefixes: FakeIpcacheMap = field(default_factory=FakeIpcacheMap)
    any_source: bool = False
    policy_fault: OSError | None = None
    drop_fault: OSError | None = None
    empty_once: bool = False
    may_forget: anyio.Event | None = None
    waited: int = 0

    async def ready(self) -> None:
        self.waited += 1

    def acquire(self) -> int:
        if self.empty_once:
            self.empty_once = False
            raise PoolEmpty
        return self.numbers.pop(0)

    def adopt(self, endpoint_id: int) -> PolicyEntries:
        """Accept the endpoint."""
        return self.policies.get(endpoint_id, {})

    def write(self, endpoint_id: int, entries: PolicyEntries) -> None:
        if self.policy_fault:
            raise self.policy_fault
        self.policies[endpoint_id] = entries

    def held(self, endpoint_id: int) -> PolicyEntries:
        return self.policies[endpoint_id]

    def write_all(self, wanted: Mapping[int, PolicyEntries]) -> dict[int, OSError]:
        return write_singly(self.write, wanted)

    def repair(self, endpoint_id: int, entries: PolicyEntries) -> int:
        self.policies[endpoint_id] = entries
        return 0

    def release(self, endpoint_id: int) -> None:
        self.numbers.append(endpoint_id)

    def put_config(self, endpoint: Endpoint, *, any_source: bool) -> None:
        self.any_source = any_source
        self.rows["config", endpoint.id] = endpoint

    def drop_config(self, endpoint: Endpoint) -> None:
        if self.drop_fault:
            raise self.drop_fault
        self.rows.pop(("config", endpoint.id), None)

    def put_lxc(self, endpoint: Endpoint) -> None:
        self.rows["lxc", endpoint.id] = endpoint

    def drop_lxc(self, endpoint: Endpoint) -> None:
        self.rows.pop(("lxc", endpoint.id), None)

    def invalidate_once(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def scrub_conntrack(self, addresses: Collection[IPAddress]) -> int:
        if self.may_forget is not None:
            await self.may_forget.wait()
        return len(addresses)

    def route_pod(self, ifindex: int, address: IPAddress, mac: bytes) -> None:
        self.routes[address] = ifindex

    def attach_endpoint(self, ifindex: int, *, egress_prog: bool = False) -> None:
        if self.fault:
            raise self.fault
        self.attached.add(ifindex)


class Loaded(Datapath):
    """A loaded datapath that does nothing."""

    build = "0123456789ab"

    def __init__(self) -> None: ...


@dataclass
class FakeTable:
    """A map that only the agent writes to."""

    rows: dict[bytes, bytes] = field(default_factory=dict)
    log: MapLog | None = field(default_factory=MapLog)

    def items(self) -> Iterable[tuple[bytes, bytes]]:
        return self.rows.items()


@dataclass
class FakeMaps:
    """The node's maps: two with a cache of the agent, one without."""

    directory: Path
    lxc: FakeTable = field(default_factory=FakeTable)
    ipcache: FakeTable = field(default_factory=FakeTable)

    def names(self) -> Sequence[str]:
        return "cilium_ct4_global", "cilium_ipcache", "cilium_lxc"

    def cached(self, name: str) -> FakeTable | None:
        return {"cilium_ipcache": self.ipcache, "cilium_lxc": self.lxc}.get(name)


@dataclass
class FixedFacts:
    """A node with constant facts except for its addresses."""

    addresses: Ipam | None = None
    notifications: MonitorNotifications = SILENT
    debug: bool = False

    def node(self) -> NodeFacts:
        networks = self.addresses.ranges if self.addresses else {Family.IPV4: POD_CIDR}
        routers: dict[Family, IPAddress] = {Family.IPV4: ROUTER, Family.IPV6: ROUTER6}
        addressing = {family: Addressing(routers[family], network) for family, network in networks.items()}
        return NodeFacts(addressing=addressing, mtu=1500, notifications=self.notifications, debug=self.debug)

    def own(self) -> ClusterNode:
        addressing = self.node().addressing
        found = {family: (each.alloc_range,) for family, each in addressing.items() if each.alloc_range}
        return ClusterNode(
            cluster="default",
            name="node1",
            source=Source.LOCAL,
            addresses=(NodeIP(INTERNAL_IP, ip_address("192.0.2.10")),),
            ipv4_alloc_cidrs=found.get(Family.IPV4, ()),
            ipv6_alloc_cidrs=found.get(Family.IPV6, ()),
        )

    def audited(self) -> bool:
        return bool(self.notifications.flags & NODE_AUDITS_POLICY)

    def set_notifications(self, notifications: MonitorNotifications) -> None:
        self.notifications = notifications

    def log_debug(self, on: bool) -> None:
        self.debug = on

    def settings(self) -> Mapping[str, object]:
        return {"ClusterName": "default", "EnableIPv4": True, "MTU": 0}

    def version(self) -> tuple[str, str]:
        return "1.17.0", "abcdef"

    def status(self) -> StatusFacts:
        version, revision = self.version()
        return StatusFacts(
            version=version,
            revision=revision,
            cluster_name="default",
            node_name="node1",
            node=self.node(),
            node_ips={Family.IPV4: ip_address("192.0.2.10")},
            nodes=[node_element(self.own(), tuple(Family))],
            uplinks={"eth0": ("192.0.2.10",)},
            ipam_status="IPv4: 3/254 allocated from 10.0.1.0/24, ",
            allocations=self.addresses.dump() if self.addresses else {},
            map_sizes={"TCP connection tracking": 524288},
            map_size_ratio=0.0025,
        )


@dataclass
class Answer:
    """A response."""

    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        """Return the decoded body, or None without one."""
        return json.loads(self.raw) if self.raw else None


class Client:
    """Sends requests unchanged: the path is not quoted again, headers are only those given."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def __call__(
        self, method: str, path: str, body: object = None, *, headers: Mapping[str, str] | None = None
    ) -> Answer:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if data is not None else {}
        url = URL(f"http://localhost{path}", encoded=True)
        stream = io.BytesIO(data) if data else None
        async with self._session.request(
            method, url, data=stream, headers={**sent, **(headers or {})}
        ) as got:
            return Answer(got.status, got.headers, await got.read())


@dataclass
class Node:
    """A started hive of the API and its dependencies, and a client of its socket."""

    ask: Client
    endpoints: Endpoints
    ipam: Ipam
    kernel: FakeKernel
    health: HealthTree
    socket: Path
    maps: FakeMaps
    api: Api
    limits: Limits
    prefixes: Ipcache

    def given(self) -> set[str]:
        """Return the addresses in use other than the router's."""
        return self.ipam.dump().keys() - {str(ROUTER), str(ROUTER6)}


class Config(AgentConfig):
    """Paths below a test's directory; no lock on the node is taken."""

    def __init__(self, directory: Path, *, ipv6: bool) -> None:
        self.state_dir = directory
        self.state = directory / "state"
        self.api_socket = directory / "cilium.sock"
        self.cluster_name = "default"
        self.ipv4, self.ipv6 = True, ipv6


def untouched(kind: type[T]) -> T:
    """Return an object of the type without its constructor, only to be injected."""
    return kind.__new__(kind)


NOTHING_TO_REGENERATE = replace(RegeneratedEndpoints, untouched(RegeneratedEndpoints))


def rules_in_force(policy: RulePolicy) -> RuleComputer:
    """Return the policies computed from rules: none."""
    return policy


BY_RULES = (supply(PolicyOptions()), provide(RulePolicy, PolicyView, rules_in_force))
"""Cells of a node that explains its policies."""


NO_BGP = bgp.BGPState(
    enabled=False,
    wanted=WantedSpeakers(instance_table(), peer_table(), policy_table(), path_table()),
    observed=observed_peers(),
    listing=fake(RouteListing),
)


@asynccontextmanager
async def running_node(
    directory: Path,
    cidr: str = str(POD_CIDR),
    cidr6: str = "",
    *,
    settings: Mapping[str, object] | None = None,
    regenerated: Cell = NOTHING_TO_REGENERATE,
    more: Iterable[Cell] = (),
) -> AsyncIterator[Node]:
    """Run a node with an API: the real cells of API, endpoints and addresses in a hive.

    It has IPv6 if ``cidr6`` is given.
    """
    kernel, facts, maps = FakeKernel(), FixedFacts(), FakeMaps(directory)
    config = Config(directory, ipv6=bool(cidr6))
    config.state.mkdir()
    hive = Hive(
        api.cell,
        controllers.cell,
        endpoint.cell,
        ipam.cell,
        kubernetes.cell,
        metrics.cell,
        bgp.cell,
        supply(NO_BGP),
        provide(Probes, StatusCollector, ConfigDrift),
        supply(Loaded(), Datapath),
        supply(Table[int, Device]("devices", key=lambda device: device.ifindex), type=Table[int, Device]),
        provide(served_frontends, local_redirects, manual_services, manual_states, ManualServices),
        supply(LoadBalancerOptions()),
        replace(AgentConfig, config),
        replace(EndpointMaps, kernel),
        replace(EndpointPrograms, kernel),
        netlink.cell,
        replace(EndpointRoutes, kernel),
        policy_maps.cell,
        replace(PolicyMapPool, kernel),
        identity.cell,
        ipcache.cell,
        replace(IpcacheTarget, kernel.prefixes.target),
        replace(api.PolicyPool, kernel),
        replace(NodeView, facts),
        replace(StatusView, facts),
        replace(PodLinks, fake(PodLinks)),
        replace(Member[api.StatusSection], api.StatusSection(lambda _: None)),
        replace(Member[api.NodeSection], api.NodeSection(lambda facts: facts)),
        replace(api.MapReader, maps),
        replace(ExposedEndpoints, untouched(ExposedEndpoints)),
        regenerated,
        *more,
        replace(DeleteQueue, untouched(DeleteQueue)),
        replace(QueueLock, untouched(QueueLock)),
        replace(HostIPSync, untouched(HostIPSync)),
        settings={"ipv4-range": cidr, **({"ipv6-range": cidr6} if cidr6 else {}), **(settings or {})},
    )
    async with (
        hive.started(),
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(config.api_socket))) as session,
    ):
        addresses = facts.addresses = hive.get(Ipam)
        for router in (ROUTER, ROUTER6):
            if addresses.covers(router):
                addresses.allocate(router, "router", addresses.default_pool)
        yield Node(
            ask=Client(session),
            endpoints=hive.get(Endpoints),
            ipam=addresses,
            kernel=kernel,
            health=hive.health,
            socket=config.api_socket,
            maps=maps,
            api=hive.get(Api),
            limits=hive.get(Limits),
            prefixes=hive.get(Ipcache),
        )
