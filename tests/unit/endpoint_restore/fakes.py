"""A node as the last agent left it, and a hive that restores it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from cells.cluster.identity.identities import Identities
from cells.cluster.ipcache import Ipcache
from cells.config.shared import PodRouting
from cells.endpoint import (
    Endpoint,
    EndpointMaps,
    Endpoints,
    IPAddress,
    RegenerationRecovery,
    Regenerations,
    StateFiles,
)
from cells.endpoint.restore import (
    ExposedEndpoints,
    LinkEvents,
    LxcRow,
    OldEndpoints,
    PreviousAgent,
    QuarantinedEndpoints,
    RegeneratedEndpoints,
    RestoreAddresses,
    RestoredEndpoints,
    RestoreLinks,
    StaleMaps,
)
from cells.endpoint.restore.restored import EndpointClaims
from cells.endpoint.restore.stale_state import StaleStateCleanup
from cells.netlink.rows import LinkInfo
from cells.policy.maps import EndpointPolicies, RealizedPolicy
from lifecycle import Cell, Hive, HiveError, Table, invoke, module, provide, supply
from tests.unit.endpoint.fakes import FakeAddresses, FakeKernel, Node


def link(
    ifindex: int, name: str, *, alias: str = "", up: bool = True, peer: int = 2, here: bool = False
) -> LinkInfo:
    """Return a veth with its peer in a pod, or in this namespace."""
    return LinkInfo(
        ifindex=ifindex,
        name=name,
        mac=bytes(6),
        mtu=1500,
        kind="veth",
        alias=alias,
        up=up,
        arp=True,
        peer_ifindex=peer,
        link_netnsid=None if here else 0,
        group=0,
        tx_queue_length=1000,
    )


@dataclass
class FakeLinks:
    """RestoreLinks and LinkEvents over a list."""

    present: list[LinkInfo] = field(default_factory=list)
    reaped: list[int] = field(default_factory=list)
    went: anyio.Event = field(default_factory=anyio.Event)

    @asynccontextmanager
    async def removals(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        async def removed() -> None:
            await self.went.wait()
            self.went = anyio.Event()

        yield removed

    def links(self) -> Sequence[LinkInfo]:
        return list(self.present)

    async def reap(self, ifindexes: Iterable[int]) -> None:
        self.reaped.extend(ifindexes)


@dataclass
class FakeLeft:
    """StaleMaps over the dicts of a FakeKernel, plus host rows."""

    kernel: FakeKernel
    rows: dict[IPAddress, LxcRow] = field(default_factory=dict)
    hosts: list[LxcRow] = field(default_factory=list)
    retained: list[IPAddress] = field(default_factory=list)
    prepared: list[int] = field(default_factory=list)
    swept: bool = False
    still_served: list[int] | None = None
    refuse: str = ""

    def _step(self, name: str) -> None:
        if name == self.refuse:
            raise OSError(5, f"no {name} today")

    def addresses(self) -> list[LxcRow]:
        return [*self.rows.values(), *self.hosts]

    def keep_addresses(self, ips: Collection[IPAddress]) -> None:
        self.retained.extend(ips)

    def drop_address(self, ip: IPAddress, endpoint_id: int) -> None:
        self._step("drop_address")
        assert self.rows.pop(ip).endpoint_id == endpoint_id
        self.kernel.lxc.pop(ip, None)

    def configs(self) -> list[int]:
        return list(self.kernel.configs)

    def drop_config(self, ifindex: int) -> None:
        del self.kernel.configs[ifindex]

    async def prepare_policies(self, endpoint_ids: Collection[int]) -> None:
        self.prepared.extend(endpoint_ids)
        if self.refuse == "prepare":
            raise HiveError("no policy maps")

    async def sweep_policies(self) -> None:
        self.swept = True

    def release_previous(self, keep: Collection[int]) -> None:
        """Record the endpoints that remain: the method of PreviousAgent."""
        self._step("release")
        self.still_served = list(keep)


class Left:
    """The node's state before the restart, and the hive after it."""

    def __init__(self, directory: Path) -> None:
        self.node = Node(directory)
        self.kernel, self.addresses = self.node.kernel, self.node.addresses
        self.links = FakeLinks()
        self.left = FakeLeft(self.kernel)

    @property
    def endpoints(self) -> Endpoints:
        return self.node.endpoints

    def running(self, endpoint: Endpoint) -> None:
        """Add the state, rows and link of an endpoint with a running pod."""
        self.node.files.write(endpoint)
        self.kernel.configs[endpoint.ifindex] = endpoint.id
        for address in endpoint.addresses:
            self.kernel.lxc[address] = endpoint.id
            self.kernel.prefixes.put({str(address): endpoint.identity})
            row = LxcRow(address, endpoint.id, endpoint.ifindex, endpoint.identity, is_host=False)
            self.left.rows[address] = row
        self.links.present.append(
            link(endpoint.ifindex, endpoint.ifname, alias=f"hive endpoint {endpoint.id}")
        )

    def remove_link(self, endpoint: Endpoint) -> None:
        self.links.present = [link for link in self.links.present if link.ifindex != endpoint.ifindex]

    def change_link(self, endpoint: Endpoint, changed: LinkInfo) -> None:
        self.remove_link(endpoint)
        self.links.present.append(changed)

    def hive(self, *more: Cell) -> Hive:
        """Return a new agent's hive up to restore."""
        self.node.ipcache.read()
        cell = module(
            "agent",
            "restore over fakes",
            supply(self.kernel, EndpointMaps),
            supply(self.node.policies, EndpointPolicies),
            supply(Table("endpoint-policies-realized", key=_id), Table[int, RealizedPolicy]),
            supply(self.left, StaleMaps),
            supply(self.left, PreviousAgent),
            supply(self.links, RestoreLinks),
            supply(self.links, LinkEvents),
            supply(self.addresses, RestoreAddresses),
            supply(self.node.identities, Identities),
            supply(self.node.files, StateFiles),
            supply(self.node.ipcache, Ipcache),
            supply(self.endpoints, Endpoints),
            supply(PodRouting(endpoint_routes=False)),
            supply(self.node.recovery, RegenerationRecovery),
            provide(Regenerations, OldEndpoints, RestoredEndpoints, QuarantinedEndpoints),
            provide(EndpointClaims, StaleStateCleanup, ExposedEndpoints, RegeneratedEndpoints),
            invoke(_needed),
            *more,
        )
        return Hive(cell)


def _id(row: RealizedPolicy) -> int:
    return row.endpoint_id


def _needed(_: RegeneratedEndpoints, __: QuarantinedEndpoints) -> None:
    """Depend on the last steps, and so on all."""


__all__ = ["FakeAddresses", "Left", "link"]
