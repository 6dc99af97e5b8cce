"""After every write, failure or crash, no frontend names a missing or another frontend's backend."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address, ip_network

import msgspec
import pytest

from cells.kubernetes.objects.core import EndpointSlice, Service
from cells.services import (
    DEFAULT_SEED,
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    LoadBalancerOptions,
    Seed,
    ServiceAddress,
    ServiceName,
    ServiceType,
    ServingNode,
)
from cells.services.control.balancer import LoadBalancer
from cells.services.control.tables import MapFullError, served_frontends
from cells.services.control.target import ServicesTarget
from cells.services.maglev import MaglevTables
from cells.services.map_entries import TABLE, Batch, Entries, MapKey, backend_value, service_key
from cells.services.model.backends import WEIGHT, backends_of
from cells.services.model.claims import frontends
from cells.services.model.frontends import frontends_of
from lifecycle import BatchError

pytestmark = pytest.mark.anyio

OPTIONS = LoadBalancerOptions(bpf_lb_algorithm="maglev")
SERVICES, BACKENDS = "cilium_lb4_services_v2", "cilium_lb4_backends_v3"
REVERSE_NAT, MAGLEV = "cilium_lb4_reverse_nat", "cilium_lb4_maglev"
AFFINITY, RANGES = "cilium_lb_affinity_match", "cilium_lb4_source_range"
Wanted = dict[FrontendKey, Frontend]


class KilledError(BaseException):
    """The agent dies."""


class WatchedMaps:
    """Maps that are looked at after every single write; that may be full; and the agent ends before one."""

    def __init__(self) -> None:
        self.entries: dict[MapKey, bytes] = {}
        self.allowed: dict[bytes, set[bytes]] = {}
        """Of each frontend, its key without the slot: the backends it may have now."""
        self.clients: dict[bytes, set[bytes]] = {}
        """Of each, the networks of its clients that it may have now."""
        self.room: dict[str, int] = {}
        self.tables = 1 << 20
        """How many lookup tables can be written at a time."""
        self.left = -1
        self.many = 0
        self.count = 0

    async def dump(self) -> Entries:
        found: Entries = {}
        for where, value in self.entries.items():
            found.setdefault(where.map, {})[where.key] = TABLE if where.map == MAGLEV else value
        return found

    def _write(self, where: MapKey, value: bytes | None) -> None:
        if self.left == 0:
            raise KilledError
        self.left -= 1
        self.count += 1
        if value is None:
            self.entries.pop(where, None)
        else:
            used = sum(each.map == where.map for each in self.entries)
            if where not in self.entries and used >= self.room.get(where.map, 1 << 20):
                raise MapFullError(f"{where.map} is full: raise bpf-lb-map-max")
            self.entries[where] = value
        assert list(self.faults()) == []

    def write(self, batch: Batch) -> None:
        self.many += len(batch.keys) > 1
        for where, value in batch.writes():
            self._write(where, value)

    async def write_tables(self, batch: Batch) -> None:
        """Some are written, and then one is not: another is in its place, or none."""
        for number, (where, value) in enumerate(batch.writes()):
            if value is not None and number >= self.tables:
                raise MapFullError(f"{where.map} is full: raise bpf-lb-map-max")
            self._write(where, value)

    def faults(self) -> Iterator[str]:
        """What leads nowhere, or to a wrong destination."""
        numbers = dict(self._numbers())
        for (map_name, key), value in self.entries.items():
            if map_name == SERVICES and key[6:8] == b"\0\0":
                yield from self._faults_of_frontend(key, value)
            elif map_name == AFFINITY:
                backend, number = key[:4], key[4:6]
                if not self._is_allowed(backend, numbers.get(number)):
                    yield f"affinity of {number.hex()} with backend {backend.hex()}"
            elif map_name == RANGES and key[4:6] in numbers:
                frontend = numbers[key[4:6]]
                if frontend is not None and key[8:] not in self.clients[frontend]:
                    yield f"{frontend.hex()}: clients of {key[8:].hex()} are another's"

    def _numbers(self) -> Iterator[tuple[bytes, bytes | None]]:
        """The frontend of each number, by what replies are translated to; None: it is being taken away."""
        masters = {
            key[:6]: key[:6] + key[8:]
            for name, key in self.entries
            if name == SERVICES and key[6:8] == b"\0\0"
        }
        for (map_name, key), value in self.entries.items():
            if map_name == REVERSE_NAT:
                yield key, masters.get(value)

    def _is_allowed(self, number: bytes, frontend: bytes | None) -> bool:
        """Whether there is such a backend, and the frontend may have it; one that goes serves no client."""
        backend = self.entries.get(MapKey(BACKENDS, number))
        return backend is not None and (frontend is None or backend[:7] in self.allowed[frontend])

    def _faults_of_frontend(self, key: bytes, value: bytes) -> Iterator[str]:
        frontend, number = key[:6] + key[8:], value[6:8]
        count = int.from_bytes(value[4:6], "little")
        for slot in range(1, count + 1):
            held = self.entries.get(MapKey(SERVICES, key[:6] + slot.to_bytes(2, "little") + key[8:]))
            if held is None or not self._is_allowed(held[:4], frontend):
                yield f"{key.hex()}: slot {slot} leads to {held and held.hex()}"
            elif held[6:8] != number:
                yield f"{key.hex()}: slot {slot} is of number {held[6:8].hex()}"
        if self.entries.get(MapKey(REVERSE_NAT, number)) != key[:6]:
            yield f"{key.hex()}: replies are not translated back"
        table = self.entries.get(MapKey(MAGLEV, number), b"") if count else b""
        for at in range(0, len(table), 4):
            if not self._is_allowed(table[at : at + 4], frontend):
                yield f"{key.hex()}: its lookup table leads to {table[at : at + 4].hex()}"
                return

    def stray_slots(self) -> list[bytes]:
        """Slots that no frontend counts, as its backends in use or its quarantined ones."""
        counts = {
            key[:6] + key[8:]: int.from_bytes(value[4:6], "little") + int.from_bytes(value[10:12], "little")
            for (name, key), value in self.entries.items()
            if name == SERVICES and key[6:8] == b"\0\0"
        }
        return [
            key
            for name, key in self.entries
            if name == SERVICES and int.from_bytes(key[6:8], "little") > counts.get(key[:6] + key[8:], 0)
        ]

    def served(self) -> dict[bytes, set[bytes]]:
        """Who serves each frontend now."""
        found: dict[bytes, set[bytes]] = {}
        for (name, key), value in self.entries.items():
            if name == SERVICES and key[6:8] == b"\0\0":
                slots = range(1, int.from_bytes(value[4:6], "little") + 1)
                ats = [MapKey(name, key[:6] + slot.to_bytes(2, "little") + key[8:]) for slot in slots]
                numbers = [self.entries[at][:4] for at in ats]
                found[key[:6] + key[8:]] = {self.entries[MapKey(BACKENDS, each)][:7] for each in numbers}
        return found


def name(key: FrontendKey) -> bytes:
    raw = service_key(key, 0).key
    return raw[:6] + raw[8:]


def clients(frontend: Frontend) -> set[bytes]:
    return {ip_network(each).network_address.packed for each in frontend.source_ranges}


def addresses(frontend: Frontend) -> set[bytes]:
    return {backend_value(each.address, BackendState.ACTIVE)[:7] for each in frontend.backends}


def someone(draw: random.Random, number: int) -> Frontend:
    """A frontend with backends that others have too."""
    backends = tuple(
        Backend(ServiceAddress(ip_address(f"10.0.0.{each}"), 8080, 6))
        for each in draw.sample(range(1, 9), draw.randrange(5))
    )
    key = FrontendKey(ServiceAddress(ip_address(f"10.96.0.{number}"), 80, 6))
    affinity = draw.choice((0, 0, 60))
    ranges = tuple(f"192.0.{each}.0/24" for each in draw.sample(range(4), draw.choice((0, 0, 1, 2))))
    name = ServiceName("shop", "web")
    return Frontend(
        key,
        ServiceType.LOAD_BALANCER,
        name,
        backends,
        affinity_timeout=affinity,
        source_ranges=ranges,
    )


class Agent:
    """One that keeps the maps equal to a table."""

    def __init__(self, maps: WatchedMaps, wanted: Wanted) -> None:
        self.maps = maps
        self.wanted = wanted
        self.to_drop: set[FrontendKey] = set()
        self.table = frontends()
        with self.table.txn() as rows:
            rows.replace_all(wanted.values())
        maglev = MaglevTables(251, Seed.parse(DEFAULT_SEED))
        served = served_frontends()
        self.target = ServicesTarget(self.table, LoadBalancer(OPTIONS, served, maglev), maps, served)

    async def change(self, put: Wanted, drop: set[FrontendKey]) -> None:
        """Become otherwise: what was may still be, until it is done."""
        for key, frontend in put.items():
            self.maps.allowed.setdefault(name(key), set()).update(addresses(frontend))
            self.maps.clients.setdefault(name(key), set()).update(clients(frontend))
            self.wanted[key] = frontend
        for key in drop:
            self.wanted.pop(key, None)
        self.to_drop = (self.to_drop | drop) - put.keys()
        with suppress(BatchError):
            await self.target.drop(self.to_drop)
            self.to_drop = set()
        with suppress(BatchError):
            await self.target.put(put)

    async def settled(self) -> None:
        """All is as wanted, and nothing else is there; then nothing else may be."""
        await self.target.observe()
        await self.target.drop(self.to_drop)
        await self.target.put(dict(self.wanted))
        await self.target.observe()
        wanted = {name(key): addresses(frontend) for key, frontend in self.wanted.items()}
        assert self.maps.served() == wanted
        assert self.maps.stray_slots() == []
        used = set().union(*wanted.values())
        assert {value[:7] for where, value in self.maps.entries.items() if where.map == BACKENDS} == used
        self.maps.clients = {key: set() for key in self.maps.clients} | {
            name(key): clients(frontend) for key, frontend in self.wanted.items()
        }
        self.maps.allowed = wanted | {key: set() for key in self.maps.allowed if key not in wanted}


def change(draw: random.Random, wanted: Wanted) -> tuple[Wanted, set[FrontendKey]]:
    fresh = [someone(draw, number) for number in draw.sample(range(1, 7), draw.randrange(1, 5))]
    drop = {each for each in sorted(wanted) if draw.random() < 0.2}
    return {each.key: each for each in fresh if each.key not in drop}, drop


@pytest.mark.parametrize("seed", range(20))
async def test_every_frontend_has_its_backends_with_full_and_other_maps(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    maps = WatchedMaps()
    agent = Agent(maps, {})
    await agent.target.observe()
    for _ in range(15):
        maps.room = {each: draw.randrange(12) for each in (SERVICES, BACKENDS) if draw.random() < 0.4}
        await agent.change(*change(draw, agent.wanted))
        if draw.random() < 0.3:
            maps.room = {}
            await agent.settled()
    maps.room = {}
    await agent.settled()
    assert maps.many


@pytest.mark.parametrize("seed", range(4))
async def test_after_a_kill_before_any_write_every_frontend_has_its_backends(seed: int) -> None:
    """The next one goes on from there."""
    draw = random.Random(seed)  # noqa: S311
    maps = WatchedMaps()
    agent = Agent(maps, {})
    await agent.target.observe()
    await agent.change({each.key: each for each in (someone(draw, number) for number in range(1, 5))}, set())
    await agent.settled()
    put, drop = change(draw, agent.wanted)
    before, entries, allowed = dict(agent.wanted), dict(maps.entries), dict(maps.allowed)
    may_ask = dict(maps.clients)
    await agent.change(put, drop)
    await agent.settled()
    writes = maps.count
    for number in range(writes):
        maps = WatchedMaps()
        maps.entries = dict(entries)
        maps.allowed = {key: set(value) for key, value in allowed.items()}
        maps.clients = {key: set(value) for key, value in may_ask.items()}
        agent = Agent(maps, dict(before))
        await agent.target.observe()
        maps.left = number
        try:
            await agent.change(put, drop)
        except KilledError:
            pass
        else:
            return  # there are no more
        maps.left = -1
        left, may_have, may_reach = dict(maps.entries), dict(maps.allowed), dict(maps.clients)
        await Agent(maps, dict(agent.wanted)).settled()
        # All services may be deleted before the next agent starts.
        maps.entries, maps.allowed, maps.clients = left, may_have, may_reach
        await Agent(maps, {}).settled()
        assert maps.entries == {}
    raise AssertionError(f"not done after {writes} writes")


@pytest.mark.parametrize("seed", range(10))
async def test_maglev_tables_have_only_known_backends_while_writes_fail(seed: int) -> None:
    """Nor after a restart: then it is unknown what the tables lead to."""
    draw = random.Random(seed)  # noqa: S311
    maps = WatchedMaps()
    agent = Agent(maps, {})
    await agent.target.observe()
    for _ in range(15):
        maps.tables = draw.choice((0, 0, 1, 2, 1 << 20))
        maps.room = {SERVICES: draw.randrange(12)} if draw.random() < 0.3 else {}
        await agent.change(*change(draw, agent.wanted))
        if draw.random() < 0.2:
            agent = Agent(maps, agent.wanted)
            await agent.target.observe()
    maps.tables, maps.room = 1 << 20, {}
    await agent.settled()


async def test_a_backend_stays_while_a_look_up_table_leads_to_it() -> None:
    """The table may be newer than the slots, which name the backend no more, or not yet."""
    maps = WatchedMaps()
    agent = Agent(maps, {})
    await agent.target.observe()
    first = someone(random.Random(1), 1)  # noqa: S311
    backends = [Backend(ServiceAddress(ip_address(f"10.0.0.{each}"), 8080, 6)) for each in (1, 2)]
    one, both = (msgspec.structs.replace(first, backends=tuple(have)) for have in (backends[:1], backends))
    await agent.change({one.key: one}, set())
    maps.room = {SERVICES: len([each for each in maps.entries if each.map == SERVICES])}
    await agent.change({both.key: both}, set())
    maps.tables = 0
    await agent.change({one.key: one}, set())
    assert len([each for each in maps.entries if each.map == BACKENDS]) == 2
    maps.tables, maps.room = 1, {}
    await agent.settled()


async def test_only_services_of_a_backend_that_does_not_fit_fail() -> None:
    maps = WatchedMaps()
    agent = Agent(maps, {})
    await agent.target.observe()
    draw = random.Random(1)  # noqa: S311
    known = {each: someone(draw, each) for each in (1, 2, 3)}
    backends = [Backend(ServiceAddress(ip_address(f"10.0.0.{each}"), 8080, 6)) for each in (1, 2)]
    first, second, third = (
        Frontend(known[number].key, ServiceType.CLUSTER_IP, ServiceName("shop", "web"), tuple(have))
        for number, have in ((1, backends[:1]), (2, backends[1:]), (3, backends[1:]))
    )
    await agent.change({first.key: first}, set())
    maps.room = {BACKENDS: 1}
    for each in (second, third):
        maps.allowed[name(each.key)] = addresses(each)
        maps.clients[name(each.key)] = clients(each)
    with pytest.raises(BatchError) as raised:
        await agent.target.put({first.key: first, second.key: second, third.key: third})
    assert set(raised.value.failures) == {second.key, third.key}
    assert set(maps.served()) == {name(first.key)}
    await agent.target.drop([first.key])  # there is room now
    await agent.target.put({second.key: second, third.key: third})
    assert set(maps.served()) == {name(second.key), name(third.key)}


async def test_weights_of_slices_share_new_connections() -> None:
    maps = WatchedMaps()
    agent = Agent(maps, {})
    await agent.target.observe()
    service = msgspec.convert(
        {
            "metadata": {"name": "web", "namespace": "shop"},
            "spec": {
                "type": "NodePort",
                "clusterIP": "10.96.0.1",
                "ports": [{"port": 80, "nodePort": 30080}],
            },
        },
        Service,
    )
    node = ServingNode("here", node_port_addresses=(ip_address("192.0.2.7"),))

    async def shares(weight: str) -> list[int]:
        slices = [
            msgspec.convert(
                {
                    "metadata": {"name": f"web-{each}", "namespace": "shop", "annotations": annotations},
                    "addressType": "IPv4",
                    "endpoints": [{"addresses": [f"10.0.0.{each}"]}],
                    "ports": [{"port": 8080}],
                },
                EndpointSlice,
            )
            for each, annotations in ((1, {}), (2, {WEIGHT: weight}))
        ]
        found = frontends_of(service, backends_of(slices, OPTIONS), node, OPTIONS)
        (one,) = (each for each in found if each.routable)
        await agent.change({one.key: one}, set())
        (table,) = (value for where, value in maps.entries.items() if where.map == MAGLEV)
        return sorted(Counter(struct.unpack(f"<{len(table) // 4}I", table)).values())

    assert await shares("100") == [125, 126]
    heavy = await shares("300")
    assert 2.5 < heavy[1] / heavy[0] < 3.5
    for nonsense in ("0", "000", "-1", "65536", "0000019999999999", "many", "", "1.5", "²"):
        assert await shares(nonsense) == [125, 126]
