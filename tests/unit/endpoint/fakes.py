"""A kernel and an address allocator in memory that can refuse any step."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any

import anyio
import structlog

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.base.labels import Label
from cells.cluster.identity.identities import Identities, IdentityAllocator, NodeAllocator, identity_table
from cells.cluster.identity.numbers import CLUSTER
from cells.config.shared import EndpointSettings
from cells.endpoint import (
    Builds,
    ConntrackScrub,
    Endpoint,
    EndpointRequest,
    Endpoints,
    PodFacts,
    PodMetadata,
    PodName,
    RegenerationLevel,
    RegenerationRecovery,
    StateFiles,
    endpoint_table,
)
from cells.endpoint.creation import EndpointCreation
from cells.endpoint.kernel import Realization
from cells.endpoint.labels import Relabel
from cells.endpoint.manager import EndpointResources
from cells.endpoint.registry import Registry
from cells.maps.policy_maps import PoolEmpty
from cells.node.ipam.ranges import IpamError
from cells.policy import PolicySettings
from cells.policy.maps import EndpointPolicies, NodePolicy, PolicyEntries, policy_table, realized_table
from tests.support.policy_maps import write_singly
from tests.unit.ipcache.fakes import FakeIpcacheMap, IpcacheOver


@dataclass
class Slot:
    """A policy map."""

    endpoint_id: int
    entries: PolicyEntries | None = None

    @property
    def filled(self) -> bool:
        """Return whether it was ever written."""
        return self.entries is not None


class SteppingMap(FakeIpcacheMap):
    """cilium_ipcache, with each write as a step."""

    def __init__(self, step: Callable[[str], None]) -> None:
        super().__init__()
        self._step = step

    def refuse(self, what: str, key: str) -> None:
        self._step("put_ipcache" if what == "update" else "drop_ipcache")
        super().refuse(what, key)


@dataclass
class FakeKernel:
    """EndpointMaps, EndpointPrograms and PolicyMapPool. ``refuse`` names the step that fails with OSError."""

    refuse: str = ""
    pool: list[int] = field(default_factory=lambda: [1, 2, 3])
    policies: dict[int, Slot] = field(default_factory=dict)
    configs: dict[int, int] = field(default_factory=dict)
    """ifindex to endpoint id."""
    any_source: dict[int, bool] = field(default_factory=dict)
    lxc: dict[IPAddress, int] = field(default_factory=dict)
    routes: dict[IPAddress, tuple[int, bytes]] = field(default_factory=dict)
    attached: list[int] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    forgotten: list[IPAddress] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefixes = SteppingMap(self._step)
        """cilium_ipcache."""

    @property
    def ipcache(self) -> dict[IPAddress, int]:
        """Return the identity of every address."""
        return {
            ip_network(prefix).network_address: row.identity for prefix, row in self.prefixes.rows.items()
        }

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if self.refuse == name:
            raise OSError(12, f"no {name} today")

    def acquire(self) -> int:
        self._step("acquire")
        if not self.pool:
            raise PoolEmpty("none")
        number = self.pool.pop(0)
        self.adopt(number)
        return number

    def adopt(self, endpoint_id: int) -> PolicyEntries:
        self._step("adopt")
        self.policies[endpoint_id] = Slot(endpoint_id)
        return {}

    def write(self, endpoint_id: int, entries: PolicyEntries) -> None:
        self._step("fill")
        self.policies[endpoint_id].entries = entries

    def held(self, endpoint_id: int) -> PolicyEntries:
        return self.policies[endpoint_id].entries or {}

    def write_all(self, wanted: Mapping[int, PolicyEntries]) -> dict[int, OSError]:
        return write_singly(self.write, wanted)

    def repair(self, endpoint_id: int, entries: PolicyEntries) -> int:
        self._step("reconcile")
        slot = self.policies[endpoint_id]
        wrong = len((slot.entries or {}).keys() ^ entries.keys())
        slot.entries = entries
        return wrong

    def release(self, endpoint_id: int) -> None:
        self._step("release")
        del self.policies[endpoint_id]
        self.pool.append(endpoint_id)

    def put_config(self, endpoint: Endpoint, *, any_source: bool) -> None:
        self._step("put_config")
        self.any_source[endpoint.ifindex] = any_source
        self.configs[endpoint.ifindex] = endpoint.id

    def drop_config(self, endpoint: Endpoint) -> None:
        self._step("drop_config")
        self.configs.pop(endpoint.ifindex, None)

    def put_lxc(self, endpoint: Endpoint) -> None:
        self._step("put_lxc")
        self.lxc.update(dict.fromkeys(endpoint.addresses, endpoint.id))

    def drop_lxc(self, endpoint: Endpoint) -> None:
        self._step("drop_lxc")
        for address in endpoint.addresses:
            self.lxc.pop(address, None)

    def invalidate_once(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def scrub_conntrack(self, addresses: Collection[IPAddress]) -> int:
        self._step("scrub_conntrack")
        self.forgotten.extend(addresses)
        return len(addresses)

    def route_pod(self, ifindex: int, address: IPAddress, mac: bytes) -> None:
        self._step("route")
        self.routes[address] = (ifindex, mac)

    def attach_endpoint(self, ifindex: int, *, egress_prog: bool = False) -> None:
        self._step("attach both ways" if egress_prog else "attach")
        self.attached.append(ifindex)

    @property
    def is_clean(self) -> bool:
        """Return whether no state of any endpoint remains."""
        return not (self.policies or self.configs or self.lxc or self.ipcache)


@dataclass
class FakeAddresses:
    """EndpointAddresses and RestoreAddresses over a set."""

    default_pool: str = "default"
    taken: dict[IPAddress, str] = field(default_factory=dict)
    held: dict[IPAddress, str] = field(default_factory=dict)
    released: list[tuple[IPAddress, str]] = field(default_factory=list)
    timers: dict[IPAddress, str] = field(default_factory=dict)
    ranges: Mapping[Family, IPNetwork] = field(
        default_factory=lambda: {
            Family.IPV6: IPv6Network("fd00::/112"),
            Family.IPV4: IPv4Network("10.0.1.0/24"),
        }
    )
    excluded: set[IPAddress] = field(default_factory=set)

    def covers(self, ip: IPAddress) -> bool:
        return any(ip in network for network in self.ranges.values())

    def allocate(self, ip: IPAddress, owner: str, pool: str) -> object:
        if ip in self.excluded:
            raise IpamError(500, f"IP {ip} is excluded, owned by node-ip")
        if ip in self.taken:
            raise IpamError(500, "provided IP is already allocated")
        self.taken[ip] = owner
        return ip

    def hold(self, ip: IPAddress, owner: str) -> None:
        self.held[ip] = owner

    def release(self, ip: IPAddress, pool: str) -> None:
        self.released.append((ip, pool))
        self.taken.pop(ip, None)

    def stop_expiration(self, ip: IPAddress, pool: str, uuid: str) -> None:
        if ip not in self.timers:
            raise IpamError(500, "no expiration timer registered")
        if self.timers[ip] != uuid:
            raise IpamError(500, "UUID mismatch, not stopping expiration timer")
        del self.timers[ip]


class RecordingScrub(ConntrackScrub):
    """Records requests instead of scrubbing."""

    def __init__(self) -> None:
        self.flows: list[IPAddress] = []

    def scrub_conntrack(self, address: IPAddress) -> None:
        self.flows.append(address)

    async def wait_scrubbed(self, addresses: Collection[IPAddress]) -> None:
        """Return at once."""


class RecordingRecovery(RegenerationRecovery):
    """Records requests instead of recovering."""

    def __init__(self) -> None:
        self.recoveries: list[int] = []
        self.stopped: list[int] = []

    def recover(self, endpoint_id: int, attempt: Callable[[int], Awaitable[str]]) -> None:
        self.recoveries.append(endpoint_id)

    def removed(self, endpoint_id: int) -> None:
        self.stopped.append(endpoint_id)


@dataclass
class FakePods:
    """PodMetadata over a dict, by namespace and name; without a source unless given one."""

    followed: bool = False
    cluster: str = "default"
    known: dict[tuple[str, str], list[Label]] = field(default_factory=dict)
    macs: dict[tuple[str, str], str] = field(default_factory=dict)
    """MACs of annotations."""
    late: bool = False
    """Only callers that wait find a pod."""
    labels_known: anyio.Event = field(default_factory=anyio.Event)
    """Callers that resolve wait for it."""

    def lookup(self, pod: PodName) -> PodFacts | None:
        return None if self.late else self._facts(pod)

    def _facts(self, pod: PodName) -> PodFacts | None:
        labels = self.known.get(pod[:2])
        return None if labels is None else PodFacts(labels, self.macs.get(pod[:2], ""))

    async def resolve(self, pod: PodName) -> PodFacts | None:
        await self.labels_known.wait()
        return self._facts(pod)


class Node:
    """Endpoints over fakes, and the fakes."""

    def __init__(
        self, directory: Path, cluster: IdentityAllocator | None = None, pods: PodMetadata | None = None
    ) -> None:
        self.kernel = FakeKernel()
        self.addresses = FakeAddresses()
        self.scrub = RecordingScrub()
        self.recovery = RecordingRecovery()
        self.identities = Identities(identity_table(), cluster or NodeAllocator(CLUSTER))
        self.policy = NodePolicy(PolicySettings())
        self.policies = EndpointPolicies(
            policy_table(), realized_table(), self.policy, self.kernel, structlog.get_logger()
        )
        self.files = StateFiles(directory)
        self.table = endpoint_table()
        self.ipcache = IpcacheOver(self.kernel.prefixes)
        log = structlog.get_logger()
        registry, builds = Registry(self.table, log), Builds()
        realization = Realization(
            self.kernel,
            self.kernel,
            self.kernel,
            self.ipcache,
            self.policies,
            self.files,
            EndpointSettings(),
            log,
        )
        self.endpoints = Endpoints(
            registry,
            realization,
            EndpointCreation(
                registry,
                self.identities,
                self.policies,
                realization,
                self.addresses,
                builds,
                pods or FakePods(),
            ),
            Relabel(registry, self.identities, realization),
            builds,
            self.recovery,
            EndpointResources(self.identities, self.addresses, self.scrub),
            log,
        )

    def create(self, wanted: EndpointRequest) -> Endpoint:
        """Create an endpoint with an identity that is available at once."""
        return create(self.endpoints, wanted)

    def build(self, endpoint_id: int, level: RegenerationLevel = RegenerationLevel.DATAPATH) -> str:
        """Build an endpoint through the queue; return the error."""
        if not self.endpoints.announce_build(endpoint_id, "a test"):
            return "not now"
        return self.endpoints.build(endpoint_id, level, "a test")

    @property
    def saved(self) -> list[str]:
        """Return the names in the state directory."""
        return sorted(path.name for path in self.files.directory.iterdir())


def request(number: int = 1, **changes: Any) -> EndpointRequest:
    """Return a pod's request; all unique values follow from ``number``."""
    values: dict[str, Any] = {
        "container_id": f"cid{number}",
        "container_ifname": "eth0",
        "ifname": f"lxc{number:012x}",
        "ifindex": 100 + number,
        "pod_mac": bytes([2, 0, 0, 0, 1, number]),
        "host_mac": bytes([2, 0, 0, 0, 2, number]),
        "ipv4": IPv4Address(f"10.0.1.{number}"),
        "pod_name": f"web-{number}",
        "pod_namespace": "default",
        "pod_uid": f"uid-{number}",
        "netns_cookie": 4000 + number,
    }
    return EndpointRequest(**(values | changes))


def create(endpoints: Endpoints, wanted: EndpointRequest) -> Endpoint:
    """Create an endpoint with an identity that is available at once."""
    return endpoints.complete(endpoints.begin(wanted))
