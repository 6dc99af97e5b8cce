"""Addresses of API servers have the kube-apiserver label beside their other labels."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from ipaddress import IPv4Address

import pytest
import structlog
from msgspec.structs import replace

from cells.cluster import apiservers, prefix_labels
from cells.cluster.identity.identities import Identities, NodeAllocator, identity_table
from cells.cluster.identity.numbers import CLUSTER, HOST, KUBE_APISERVER, REMOTE_NODE
from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry, Source
from cells.cluster.prefix_labels import PrefixLabels, PrefixMetadata
from cells.config import AgentConfig, AgentSettings
from cells.kubernetes.objects.core import EndpointConditions, EndpointSlice, SliceEndpoint
from cells.kubernetes.objects.kind import Meta
from lifecycle import Hive, Lifecycle, Table, supply
from lifecycle.testing import eventually
from tests.unit.ipcache.fakes import FakeIpcacheMap, IpcacheOver

pytestmark = pytest.mark.anyio
SERVER = "192.0.2.1"


class World:
    """The cell over fakes."""

    def __init__(self) -> None:
        self.kernel = FakeIpcacheMap()
        self.identities = Identities(identity_table(), NodeAllocator(CLUSTER))
        self.ipcache = IpcacheOver(self.kernel, self.identities, [self])
        self.slices: Table[tuple[str, str], EndpointSlice] = Table(
            "slices",
            key=lambda row: row.key,
            indexes={"service": lambda row: ((row.namespace, row.service),)},
        )
        self.known: set[int] = set()
        """Identities that policies know."""

    def servers(self, *addresses: str, ready: bool | None = True, serving: bool | None = None) -> None:
        """The slices of the Service name these."""
        meta = Meta(
            name="kubernetes", namespace="default", labels={"kubernetes.io/service-name": "kubernetes"}
        )
        endpoints = tuple(
            SliceEndpoint(addresses=(one,), conditions=EndpointConditions(ready=ready, serving=serving))
            for one in addresses
        )
        with self.slices.txn() as txn:
            txn.put(EndpointSlice(metadata=meta, endpoints=endpoints))

    def claim(
        self, prefix: str, identity: int, source: Source, resource: str = "x//y", peer: str = ""
    ) -> None:
        """Another owner's."""
        entry = IpcacheEntry(
            prefix=prefix,
            identity=identity,
            source=source,
            resource="x//y",
            tunnel_endpoint=IPv4Address(peer or 0),
        )
        self.ipcache.upsert(entry)

    def withdraw(self, prefix: str) -> None:
        self.ipcache.withdraw("x//y", [prefix])

    @property
    def identity(self) -> int:
        return self.kernel.identities.get(f"{SERVER}/32", 0)

    @property
    def source(self) -> Source | None:
        row = self.ipcache.table.get(f"{SERVER}/32")
        return row.source if row else None

    def labels(self, number: int) -> tuple[str, ...]:
        known = self.identities.get(number)
        return known.labels if known else ()

    def ensure_identity(self, identity: int, labels: Collection[str]) -> None:
        """As policies do."""
        del labels
        packets_have = self.kernel.identities.get(f"{SERVER}/32") == identity
        assert identity in self.known or not packets_have, "policies know it before packets"
        self.known.add(identity)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        known = AgentConfig(AgentSettings(), Lifecycle("test"), structlog.get_logger())
        hive = Hive(
            prefix_labels.cell,
            apiservers.cell,
            supply(known),
            supply(self.slices, type=Table[tuple[str, str], EndpointSlice]),
            supply(self.ipcache, type=Ipcache),
            supply(self.identities),
        )
        async with hive.started():
            self.metadata = hive.get(PrefixMetadata)
            yield


async def test_a_server_outside_has_an_identity_of_its_own() -> None:
    world = World()
    world.servers(SERVER)
    async with world.running():
        await eventually(lambda: world.identity != 0)
        assert world.labels(world.identity) == ("reserved:kube-apiserver", "reserved:world")
        assert world.known == {world.identity}
        number = world.identity
        world.servers(SERVER, ready=False)
        await eventually(lambda: world.identity == 0)
        assert world.labels(number) == (), "nobody has it any more"


async def test_a_server_that_shuts_down_is_one_for_as_long_as_it_serves() -> None:
    world = World()
    world.servers(SERVER, "192.0.2.2", "2001:db8::1", ready=False, serving=True)
    async with world.running():
        await eventually(
            lambda: {f"{SERVER}/32", "192.0.2.2/32", "2001:db8::1/128"} <= world.kernel.identities.keys()
        )
        assert len({*world.kernel.identities.values()}) == 1
        world.servers(SERVER, ready=False, serving=False)
        await eventually(lambda: not world.kernel.identities)


async def test_a_slice_that_becomes_another_services_names_no_server_any_more() -> None:
    world = World()
    world.servers(SERVER)
    async with world.running():
        await eventually(lambda: world.identity != 0)
        (known,) = world.slices.all()
        labels = {"kubernetes.io/service-name": "web"}
        world.slices.put(replace(known, metadata=replace(known.metadata, labels=labels)))
        await eventually(lambda: world.identity == 0)


async def test_rules_for_the_prefix_around_it_hold_for_it_too() -> None:
    world = World()
    world.servers(SERVER)
    async with world.running():
        await eventually(lambda: world.identity != 0)
        plain = world.identity
        cidr = world.identities.acquire_now(("cidr:192.0.2.0/24", "reserved:world"))
        assert cidr is not None
        world.claim("192.0.2.0/24", cidr.id, Source.GENERATED)
        await eventually(lambda: world.identity != plain)
        both = ("cidr:192.0.2.0/24", "reserved:kube-apiserver", "reserved:world")
        assert world.labels(world.identity) == both
        world.withdraw("192.0.2.0/24")
        await eventually(lambda: "cidr:192.0.2.0/24" not in world.labels(world.identity))


async def test_rules_hold_for_a_prefix_in_them_though_the_kernel_refuses_its_entry_at_first() -> None:
    world = World()
    world.servers(SERVER)
    async with world.running():
        await eventually(lambda: world.identity != 0)
        cidr = world.identities.acquire_now(("cidr:192.0.2.0/24", "reserved:world"))
        assert cidr is not None

        async def refused(change: Callable[[], None]) -> None:
            change()
            world.kernel.writes.clear()
            world.kernel.broken = True
            await eventually(lambda: ("update", f"{SERVER}/32") in world.kernel.writes)
            world.kernel.broken = False

        await refused(lambda: world.claim("192.0.2.0/24", cidr.id, Source.GENERATED))
        await eventually(lambda: "cidr:192.0.2.0/24" in world.labels(world.identity))
        await refused(lambda: world.withdraw("192.0.2.0/24"))
        await eventually(lambda: "cidr:192.0.2.0/24" not in world.labels(world.identity))


async def test_an_api_server_on_another_node_keeps_the_label_remote_node() -> None:
    world = World()
    world.servers(SERVER)
    world.claim(f"{SERVER}/32", REMOTE_NODE, Source.CUSTOM_RESOURCE, peer="192.0.2.1")
    async with world.running():
        await eventually(lambda: world.identity == KUBE_APISERVER)
        assert str(world.kernel.rows[f"{SERVER}/32"].tunnel_endpoint) == "192.0.2.1"
        world.servers()
        await eventually(lambda: world.identity == REMOTE_NODE)


async def test_an_api_server_on_this_node_labels_the_host() -> None:
    world = World()
    world.claim(f"{SERVER}/32", HOST, Source.LOCAL)
    world.servers(SERVER)
    async with world.running():
        await eventually(lambda: world.labels(HOST) == ("reserved:host", "reserved:kube-apiserver"))
        assert world.identity == HOST
        world.withdraw(f"{SERVER}/32")
        await eventually(lambda: world.labels(HOST) == ("reserved:host",))
        await eventually(lambda: world.identity not in {0, HOST})


async def test_an_api_server_in_a_pod_keeps_the_identity_of_the_pod() -> None:
    world = World()
    world.claim(f"{SERVER}/32", 4711, Source.LOCAL)
    world.servers(SERVER)
    async with world.running():
        await eventually(lambda: world.ipcache.table.initialized)
        assert world.identity == 4711
        world.withdraw(f"{SERVER}/32")
        await eventually(lambda: world.identity not in {0, 4711})


async def test_without_slices_the_start_does_not_wait() -> None:
    world = World()
    async with world.running():
        await eventually(lambda: world.ipcache.table.initialized)
    assert world.identities.references(HOST) == 0


async def test_any_source_may_add_to_what_others_say_of_an_address() -> None:
    world = World()
    world.servers(SERVER)
    prefix = f"{SERVER}/32"
    async with world.running():
        await eventually(lambda: world.identity != 0)
        alone = world.identity
        more = PrefixLabels(prefix=prefix, resource="x//z", source=Source.API, labels=("cidrgroup:blue",))
        world.metadata.upsert(more)
        await eventually(lambda: world.identity not in {0, alone})
        assert world.labels(world.identity) == (
            "cidrgroup:blue",
            "reserved:kube-apiserver",
            "reserved:world",
        )
        assert world.source is Source.KUBE_APISERVER, "the strongest of them"
        with pytest.raises(ValueError, match="expected sources reserved, cidr"):
            world.metadata.upsert(
                PrefixLabels(prefix=prefix, resource="x//k", source=Source.API, labels=("k8s:a=b",))
            )
        world.servers()
        await eventually(lambda: "reserved:kube-apiserver" not in world.labels(world.identity))
        assert world.labels(world.identity) == ("cidrgroup:blue", "reserved:world")
        # A claim as strong as this one comes later, and the labels still apply to it.
        node = PrefixLabels(
            prefix=prefix,
            resource="x//z",
            source=Source.API,
            labels=("node:role=worker", "reserved:remote-node"),
        )
        world.metadata.upsert(node)
        world.claim(prefix, REMOTE_NODE, Source.CUSTOM_RESOURCE, peer="192.0.2.1")
        await eventually(
            lambda: world.labels(world.identity) == node.labels and world.source is Source.CUSTOM_RESOURCE
        )
        assert str(world.kernel.rows[prefix].tunnel_endpoint) == "192.0.2.1"
        override = PrefixLabels(
            prefix=prefix, resource="x//o", source=Source.API, labels=("reserved:ingress",), override=True
        )
        world.metadata.upsert(override)
        await eventually(lambda: world.labels(world.identity) == ("reserved:ingress",))
        world.metadata.remove("x//o", [prefix])
        world.metadata.remove("x//z", [prefix])
        await eventually(lambda: world.identity == REMOTE_NODE)
        assert all(world.identities.references(one.id) == 0 for one in world.identities.all())
