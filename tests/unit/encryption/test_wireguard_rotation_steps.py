"""A key rotation with many nodes, in virtual time: it waits for each node, but not forever."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, ip_network
from typing import Any, Self

import anyio
import pytest

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.cluster.encryption import ROTATION_READY
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import INTERNAL_IP, WIREGUARD_ROTATION, ClusterNode, NodeIP
from cells.datapath.datapath import Datapath
from cells.encryption.wireguard import peer_of
from cells.encryption.wireguard.device import Slot, WireguardDevice
from cells.encryption.wireguard.messages import MessageKind, RotationMessage, rotation_token
from cells.encryption.wireguard.peers import PeerCall, WireguardPeers
from cells.encryption.wireguard.rotation import RotationRefusedError, WireguardRotation
from cells.encryption.wireguard.settings import EncryptionSettings, WireguardKey
from cells.maps.node_maps import Maps
from cells.node.sysctl import Sysctls
from lifecycle import HealthTree, Hive, invoke, module, provide, supply
from lifecycle.testing import VirtualClock

pytestmark = pytest.mark.anyio

FIRST = IPv4Address("192.168.0.0")
PODS = int(IPv4Address("10.0.0.0"))


def key(number: int) -> str:
    return base64.b64encode(bytes([9]) + number.to_bytes(31)).decode()


def node(number: int, rotation: str = ROTATION_READY, *, local: bool = False) -> ClusterNode:
    return ClusterNode(
        cluster="default",
        name="own" if local else f"node-{number}",
        source=Source.LOCAL if local else Source.CUSTOM_RESOURCE,
        addresses=(NodeIP(INTERNAL_IP, FIRST + number),),
        ipv4_alloc_cidrs=(ip_network((PODS + 256 * number, 24)),),
        wireguard_key=key(number),
        annotations={WIREGUARD_ROTATION: rotation},
    )


class FakeLink:
    """A WireGuard device."""

    def __init__(self, ifindex: int) -> None:
        self.ifindex = ifindex
        self.table: dict[bytes, frozenset[IPNetwork]] = {}

    def configure(self, call: PeerCall) -> None:
        if call.remove:
            self.table.pop(call.key, None)
        else:
            self.table[call.key] = self.table.get(call.key, frozenset()) | call.allowed

    def peers(self) -> dict[bytes, frozenset[IPNetwork]]:
        return dict(self.table)


class FakeDevice(WireguardDevice):
    """All WireGuard devices; a second device exists while it is needed."""

    def __init__(self) -> None:
        self.links: Any = {slot: FakeLink(11 + slot) for slot in Slot}
        self.lock = anyio.Lock()
        self.present = {Slot.MAIN}

    def ensure(self, slot: Slot = Slot.MAIN) -> bool:
        made = slot not in self.present
        self.present.add(slot)
        return made

    def remove_rotating(self, slot: Slot) -> None:
        self.present.discard(slot)


class Network:
    """The other nodes. They send ASK every second over the new device until a message arrives, and answer."""

    def __init__(self) -> None:
        self.others: set[IPAddress] = set()
        self.silent: set[IPAddress] = set()
        self.waiting: set[IPAddress] = set()
        """Nodes that answer, but do not send ASK."""
        self.asked: list[IPAddress] = []
        """Nodes to which the node under test has sent ASK."""
        self._asking: dict[IPAddress, tuple[str, bytes]] = {}
        self._messages: list[tuple[str, RotationMessage]] = []
        self._some = anyio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def announced(self, public: str, next_key: str) -> None:
        slot = Slot.MAIN if public == next_key else Slot.NEXT
        asking = self.others - self.waiting if next_key else ()
        self._asking = dict.fromkeys(asking, (slot.link, rotation_token(next_key)))
        self._ask()

    def _ask(self) -> None:
        for address, (device, token) in self._asking.items():
            if address not in self.silent:
                self._deliver(device, RotationMessage(address, FIRST, MessageKind.ASK, token))

    def _deliver(self, device: str, message: RotationMessage) -> None:
        self._messages.append((device, message))
        self._some.set()

    def listen(self, ifindexes: Collection[int]) -> None: ...

    def send(self, device: str, message: RotationMessage) -> None:
        there = message.destination
        if message.kind is MessageKind.ASK:
            self.asked.append(there)
        if there not in self.silent:
            self._asking.pop(there, None)
            if message.kind is MessageKind.ASK:
                self._deliver(device, RotationMessage(there, FIRST, MessageKind.IN_USE, message.token))

    async def wait(self) -> Iterator[tuple[str, RotationMessage]]:
        while not self._messages:
            with anyio.move_on_after(1):
                await self._some.wait()
            self._some = anyio.Event()
            if not self._messages:
                self._ask()
        messages, self._messages = self._messages, []
        self._some = anyio.Event()
        return iter(messages)


class FakeKey(WireguardKey):
    """The node's keys without files; other nodes see them at once."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.settings = EncryptionSettings(enable_wireguard=True)
        self.private, self.public = b"1", key(0)
        self.next_private, self.next_public = b"", ""
        self.published: list[tuple[str, str]] = []

    def make_next(self) -> None:
        self.next_private, self.next_public = b"2", key(1 << 20)

    def end_rotation(self) -> None:
        self.next_private, self.next_public = b"", ""

    def adopt_next(self) -> None:
        self.private, self.public = self.next_private, self.next_public

    def publish(self) -> None:
        self.published.append((self.public, self.next_public))
        self._network.announced(self.public, self.next_public)


class FakeRows:
    """The map hive_encryption_paths."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.update = self.rows.__setitem__

    def items(self) -> list[tuple[bytes, bytes]]:
        return list(self.rows.items())

    def delete(self, at: bytes) -> None:
        self.rows.pop(at, None)


class FakeMaps(Maps):
    """Maps with hive_encryption_paths only."""

    def __init__(self, rows: FakeRows) -> None:
        self.encryption_paths: Any = rows


class FakeDatapath(Datapath):
    """A datapath with programs on all devices."""

    def __init__(self) -> None: ...

    def serves_device(self, ifindex: int, *, l3: bool = False, accelerated: bool) -> bool:
        return True


class FakeSysctls(Sysctls):
    """Sysctls that are not written."""

    def __init__(self) -> None: ...

    def write(self, settings: Mapping[str, str]) -> None: ...


def needed(_: WireguardRotation) -> None:
    """Invoke the rotation, so that it is constructed."""


class World:
    """The node under test and the other nodes of its cluster."""

    def __init__(self, others: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.network, self.device, self.paths = Network(), FakeDevice(), FakeRows()
        self.key = FakeKey(self.network)
        monkeypatch.setattr("cells.encryption.wireguard.rotation.MessageSocket", lambda: self.network)
        main: Any = self.device.links[Slot.MAIN]
        self.peers = WireguardPeers(main, frozenset(Family))
        self.others = [node(number) for number in range(1, others + 1)]
        self.network.others = {FIRST + number for number in range(1, others + 1)}

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[WireguardRotation]:
        """Start an agent that knows all nodes."""
        cell = module(
            "wireguard",
            "the rotation of a node",
            supply(self.key, type=WireguardKey),
            supply(self.device, type=WireguardDevice),
            supply(self.peers),
            supply(FakeMaps(self.paths), type=Maps),
            supply(FakeDatapath(), type=Datapath),
            supply(FakeSysctls(), type=Sysctls),
            provide(WireguardRotation),
            invoke(needed),
        )
        async with Hive(cell).started() as hive:
            rotation = hive.get(WireguardRotation)
            rotation.note(node(0, local=True))
            for other in self.others:
                rotation.note(other)
                self.peers.upsert(peer_of(other))
            rotation.start()
            self.health = hive.get(HealthTree)
            yield rotation

    def reported(self) -> str:
        """The health of the rotation."""
        (part,) = self.health.snapshot("wireguard.rotation")
        return f"{part.level}: {part.error or part.message}"


async def test_a_node_that_does_not_answer_is_waited_for_five_minutes_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(3, monkeypatch)
    world.network.silent = {FIRST + 2}
    with VirtualClock() as clock:
        async with world.agent() as rotation:
            await clock.advance(1)
            assert (await rotation.begin()).step == "announced"
            await clock.advance(299)
            assert (rotation.state().step, rotation.state().waits_for) == ("announced", ["default/node-2"])
            assert world.reported() == "ok: step announced, waits for default/node-2"
            assert len(world.paths.rows) == 4, "both others are sent to by the second device"
            await clock.advance(5)
            assert (rotation.state().step, rotation.state().missed) == ("in force", ["default/node-2"])
            assert world.reported() == "degraded: step in force; not changed in time: default/node-2"
            await clock.advance(290)
            assert rotation.state().step == "in force"
            await clock.advance(15)
            assert (rotation.state().step, rotation.state().missed) == ("none", ["default/node-2"])
            assert world.reported() == "degraded: step none; not changed in time: default/node-2"
            assert (world.paths.rows, world.device.present) == ({}, {Slot.MAIN})
            assert world.key.published == [
                (key(0), key(1 << 20)),
                (key(1 << 20), key(1 << 20)),
                (key(1 << 20), ""),
            ]
            world.network.silent = set()
            await rotation.begin()
            await clock.advance(10)
            assert (rotation.state().step, rotation.state().missed) == ("none", [])
            assert world.reported() == "ok: step none"


async def test_each_answer_begins_the_five_minutes_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, monkeypatch)
    world.network.silent = {FIRST + 1, FIRST + 2}
    with VirtualClock() as clock:
        async with world.agent() as rotation:
            await clock.advance(1)
            await rotation.begin()
            await clock.advance(290)
            world.network.silent = {FIRST + 2}
            await clock.advance(290)
            assert (rotation.state().step, rotation.state().waits_for) == ("announced", ["default/node-2"])
            with pytest.raises(RotationRefusedError, match="runs already, step: announced"):
                await rotation.begin()
            await clock.advance(15)
            assert rotation.state().step == "in force"


async def test_five_thousand_nodes_change_in_one_round_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(5000, monkeypatch)
    with VirtualClock() as clock:
        async with world.agent() as rotation:
            await clock.advance(1)
            await rotation.begin()
            await clock.advance(0.9)
            assert rotation.state().waits_for == []
            assert len(world.paths.rows) == 2 * 5000
            assert len(world.device.links[Slot.NEXT].table) == 5000
            await clock.advance(6)
            assert (rotation.state().step, rotation.state().missed) == ("none", [])
    assert len(world.network.asked) < 3 * 2 * 5000, "an answer ends the asking"


async def test_other_nodes_ask_first_and_one_that_does_not_is_asked_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(2, monkeypatch)
    world.network.waiting = {FIRST + 2}
    with VirtualClock() as clock:
        async with world.agent() as rotation:
            await clock.advance(1)
            await rotation.begin()
            await clock.advance(2.9)
            assert world.network.asked == [FIRST + 1], "in answer to its question"
            await clock.advance(2)
            assert FIRST + 2 in world.network.asked
            await clock.advance(8)
            assert (rotation.state().step, rotation.state().missed) == ("none", [])
