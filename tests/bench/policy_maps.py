"""Policies up to the kernel: from an object or an identity to the last write of a hundred policy maps.

The maps are real, and so are their epochs; what an endpoint's regeneration does besides (logs, state files)
is left out. Also what a rule and an identity hold in memory, and what packets cost by how many entries there
are. All times are the processor's: the machine may be busy with other things.
"""

from __future__ import annotations

import gc
import struct
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog
from scapy.layers.inet import IP

from cells.cluster.identity.identities import Identity
from cells.maps.map import Epochs, MapSpec, MapType, create_map
from cells.maps.policy_map import PolicyMap
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.maps.specs import policy_spec
from cells.policy import PolicySettings
from cells.policy.compute import in_slices
from cells.policy.control import RulePolicy
from cells.policy.maps import EndpointPolicies, EndpointPolicy, NodePolicy, PolicyEntries, RealizedPolicy
from cells.policy.rules import PolicyOptions
from lifecycle import Table
from tests.bench.packets import HOPS, POD, ns_a_packet
from tests.bench.policies import removed
from tests.bench.stats import Figure, Row, Sample
from tests.kernel.datapath.packets import from_pod, tcp
from tests.kernel.datapath.world import A, B, World

ENDPOINTS, GROUPS = 100, 100
SIZES = ((1, 100), (100, 10_000), (1_000, 10_000))
"""Rules, identities."""
CHANGES = 10
FIRST = 1_000
ENTRIES = (10, 1_000, 16_000)
BATCHES = ((1_000, 1_000), (10_000, 8_000))
"""Policies in one batch, and the limit in ms."""
CHART = (
    (10, 1_000),
    (100, 1_000),
    (1_000, 1_000),
    (10, 10_000),
    (100, 10_000),
    (1_000, 10_000),
    (10_000, 10_000),
)


def measure(folder: Path, rounds: int) -> list[Row | Figure]:
    """Measure everything."""
    del folder
    return [*changes(rounds), *at_once(rounds), *chart(), *memory(), *packets(rounds)]


class Node:
    """A hundred endpoints with real policy maps, and their rules."""

    def __init__(self, rules: int, identities: int) -> None:
        self.size = identities
        self.world = RulePolicy(NodePolicy(PolicySettings()), PolicyOptions())
        self.world.update_identities(Identity(FIRST + number, labels(number)) for number in range(identities))
        self.maps = Maps()
        self.policies = EndpointPolicies(
            Table[int, EndpointPolicy]("endpoint-policies", key=lambda row: row.endpoint_id),
            Table[int, RealizedPolicy]("endpoint-policies-realized", key=lambda row: row.endpoint_id),
            self.world,
            self.maps,
            structlog.get_logger(),
        )
        """Endpoints are regenerated in turns of this size; None: at once."""
        for number in range(rules):
            self.world.apply(rule(number))
        for _ in range(ENDPOINTS):
            self._realize(self.maps.acquire())

    def apply(self, object_: dict[str, Any]) -> None:
        """Apply an object, up to the last write."""
        self.policies.change(self.world.apply(object_), "measured")
        for row in self.policies.outdated.all():
            self._realize(row.endpoint_id)

    async def apply_all(self, objects: Sequence[dict[str, Any]]) -> None:
        """Apply the objects of one batch, up to the last write."""
        changed = [self.world.put(one) async for one in in_slices(objects)]
        self.policies.change(await self.world.follow(changed), "measured")
        for row in self.policies.outdated.all():  # as in the agent, where each is built by a task of its own
            await anyio.lowlevel.checkpoint()
            self._realize(row.endpoint_id)

    def add_identity(self, identity: Identity) -> None:
        """Add an identity, up to the last write."""
        self.policies.ensure_identity(identity.id, identity.labels)

    def forget(self, identity: Identity) -> None:
        """Remove an identity, up to the last write."""
        self.policies.change(removed(self.world, identity.id), "an identity went")
        self._follow()

    def _follow(self) -> None:
        """As the agent's job."""
        for slot in self.maps.slots.values():
            row = self.policies.table.get(slot.endpoint_id)
            if row is not None:
                slot.replace(row.entries)

    def entries(self) -> int:
        """Return the number of entries of all maps."""
        return sum(slot.entries for slot in self.maps.slots.values())

    def close(self) -> None:
        """Close the maps."""
        self.maps.close()

    def _realize(self, endpoint: int) -> None:
        self.policies.realize(endpoint, FIRST + endpoint - 1, labels(endpoint - 1))


class Maps:
    """Policy maps in the kernel, which are not pinned."""

    def __init__(self) -> None:
        self.epochs = create_map(MapSpec("hive_epoch", MapType.ARRAY, 4, 8, 65536))
        self._epochs = Epochs(self.epochs)
        self.slots: dict[int, PolicyMap] = {}

    def acquire(self) -> int:
        """Create one more."""
        number = len(self.slots) + 1
        self.adopt(number)
        return number

    def adopt(self, endpoint_id: int) -> PolicyEntries:
        """Open this one."""
        table = create_map(policy_spec(endpoint_id, 16384))
        table.spec = msgspec.structs.replace(table.spec, invalidates=endpoint_id)
        self.slots[endpoint_id] = PolicyMap(endpoint_id, table, self._epochs)
        return {}

    def write(self, endpoint_id: int, entries: PolicyEntries) -> None:
        """As the agent."""
        self.slots[endpoint_id].replace(entries)

    def held(self, endpoint_id: int) -> PolicyEntries:
        """As the agent."""
        return self.slots[endpoint_id].held

    def write_all(self, wanted: Mapping[int, PolicyEntries]) -> dict[int, OSError]:
        """As the agent, if nothing is refused."""
        with self._epochs:
            for number, entries in wanted.items():
                self.slots[number].replace(entries)
        return {}

    def repair(self, endpoint_id: int, entries: PolicyEntries) -> int:
        """Is never called: there is no other writer."""
        raise NotImplementedError

    def release(self, endpoint_id: int) -> None:
        """Close one."""
        self.slots.pop(endpoint_id).map.close()

    def close(self) -> None:
        """Close all."""
        for slot in self.slots.values():
            slot.map.close()
        self.epochs.close()


@contextmanager
def node(rules: int, identities: int) -> Iterator[Node]:
    """Create one for the block."""
    made = Node(rules, identities)
    try:
        yield made
    finally:
        made.close()


def changes(rounds: int) -> Iterator[Figure]:
    """Measure an object that selects a hundred endpoints, and an identity for which all have rules."""
    for rules, identities in SIZES:
        found: dict[str, list[float]] = defaultdict(list)
        with node(rules, identities) as at:
            gc.freeze()  # as the agent does once it has started
            for turn in range(1, rounds * CHANGES + 1):
                began = time.process_time()
                at.apply(for_everybody(turn))
                found["object"].append((time.process_time() - began) * 1e3)
                came = Identity(FIRST + identities + turn, labels(turn % identities, everybodys=True))
                began = time.process_time()
                at.add_identity(came)
                found["identity"].append((time.process_time() - began) * 1e3)
                at.forget(came)
            entries = at.entries()
        gc.unfreeze()
        size = f"{rules:,} rules, {identities:,} identities"
        yield Figure(
            f"{size}: an object of all endpoints to the last map write",
            "ms",
            Sample(tuple(found["object"])),
            250,
        )
        yield Figure(f"{size}: the slowest of them", "ms", Sample((max(found["object"]),)), 250)
        yield Figure(
            f"{size}: an identity to the maps of all endpoints", "ms", Sample(tuple(found["identity"])), 2
        )
        yield Figure(f"{size}: entries of all maps", "", Sample((float(entries),)))


def at_once(rounds: int) -> Iterator[Figure]:
    """Measure objects of one batch, as at a start; and the longest delay of the event loop meanwhile."""
    for count, target in BATCHES:
        for receiver, make in (("one of 100 endpoints each", rule), ("all of 100 endpoints", of_all)):
            took, waited = [], []
            for _ in range(rounds):
                with node(0, 1_000) as at:
                    gc.freeze()
                    lag = anyio.run(_batch, at, [make(number) for number in range(count)])
                    gc.unfreeze()
                took.append(lag[0])
                waited.append(lag[1])
            what = f"{count:,} policies at once, {receiver}"
            yield Figure(f"{what}: to the last map write", "ms", Sample(tuple(took)), target)
            yield Figure(f"{what}: longest wait of the loop", "ms", Sample(tuple(waited)), 100)


async def _batch(at: Node, objects: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the duration in ms, and the longest time that another task waited for its turn."""
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            began = time.monotonic()
            await anyio.sleep(0.001)
            longest = max(longest, time.monotonic() - began)

    async with anyio.create_task_group() as beating:
        beating.start_soon(beat)
        await anyio.lowlevel.checkpoint()
        began = time.process_time()
        await at.apply_all(objects)
        took = time.process_time() - began
        beating.cancel_scope.cancel()
    return took * 1e3, longest * 1e3


def chart() -> Iterator[Figure]:
    """Measure computing and writing everything from nothing, by size."""
    for rules, identities in CHART:
        began = time.process_time()
        with node(rules, identities) as at:
            took = time.process_time() - began
            entries = at.entries()
        what = f"all from nothing: {rules:,} rules, {identities:,} identities, {entries:,} entries"
        yield Figure(what, "ms", Sample((took * 1e3,)))


def memory() -> Iterator[Figure]:
    """Return the agent's bytes for each rule, and for each identity."""
    world = RulePolicy(NodePolicy(PolicySettings()), PolicyOptions())
    yield Figure("memory an identity", "B", Sample((_held(10_000, lambda n: _know(world, n)),)))
    yield Figure(
        "memory a rule, that nobody here is selected by",
        "B",
        Sample((_held(1_000, lambda n: world.apply(rule(n))),)),
    )


def _know(world: RulePolicy, number: int) -> None:
    world.update_identities([Identity(FIRST + number, labels(number))])


def _held(count: int, add: Any) -> float:
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(count):
        add(number)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / count


def packets(rounds: int) -> Iterator[Figure]:
    """Measure a packet that starts a flow, and so needs a verdict; by number of entries."""
    for count in ENTRIES:
        found = []
        for _ in range(rounds):
            with World() as world:
                world.policies[A.id].close()
                world.policies[A.id] = create_map(policy_spec(A.id, 16384))
                world.maps["hive_policies"].update(
                    struct.pack("<I", A.id), struct.pack("<I", world.policies[A.id].fd)
                )
                others = [(PolicyKey(5000 + n, True, 6, 80, 16), PolicyEntry()) for n in range(count - 1)]
                world.allow(A, [*others, (PolicyKey(B.identity, True, 6, 80, 16), PolicyEntry())])
                packet = from_pod(A) / tcp(A.ip, B.ip, "S")  # a SYN always gets a new verdict
                packet[IP].ttl = HOPS
                found.append(ns_a_packet(world, A, POD, bytes(packet)))
        yield Figure(f"policy verdict of a packet, {count:,} entries", "ns", Sample(tuple(found)))


def labels(number: int, *, everybodys: bool = False) -> tuple[str, ...]:
    """Return the labels of an identity."""
    return (
        f"k8s:app=a{number}",
        f"k8s:group={'all' if everybodys else f'g{number % GROUPS}'}",
        "k8s:io.cilium.k8s.policy.cluster=default",
        "k8s:io.kubernetes.pod.namespace=shop",
        "k8s:tier=web",
    )


def rule(number: int) -> dict[str, Any]:
    """Return a rule of one endpoint, which allows a hundredth of all identities, and one more group."""
    turn, endpoint = divmod(number, ENDPOINTS)
    peers = [{"matchLabels": {"group": f"g{(endpoint * 7 + turn) % GROUPS}"}}]
    return _object(f"p{number}", {"app": f"a{endpoint}"}, peers, 8000 + turn % 1000)


def of_all(number: int) -> dict[str, Any]:
    """Return a rule of all endpoints, on one of ten ports."""
    peers = [{"matchLabels": {"app": f"a{number % 1_000}"}}]
    return _object(f"p{number}", {"tier": "web"}, peers, 8000 + number % 10)


def for_everybody(turn: int) -> dict[str, Any]:
    """Return a rule of all endpoints, with other peers each time."""
    peers = [{"matchLabels": {"group": f"g{turn % GROUPS}"}}, {"matchLabels": {"group": "all"}}]
    return _object("everybody", {"tier": "web"}, peers, 9000)


def _object(name: str, subject: dict[str, str], peers: list[dict[str, Any]], port: int) -> dict[str, Any]:
    ports = [{"ports": [{"port": str(port), "protocol": "TCP"}]}]
    return {
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {
            "endpointSelector": {"matchLabels": subject},
            "ingress": [{"fromEndpoints": peers, "toPorts": ports}],
        },
    }
