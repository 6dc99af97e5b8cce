"""A hostile BGP peer ends only its own session, and affects no other session, route or process."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from cells.bgp.speaker import BGPSpeakers
from cells.bgp.speaker_processes import end_speakers
from cells.bgp.speaker_state import IPV4_UNICAST, ObservedPeer, PeerRestart, PeerState, RouteTable
from lifecycle import Secret
from lifecycle.testing import eventually
from tests.support.bgp import (
    BIRD,
    FRR,
    INSTANCE,
    PASSWORD,
    Wanted,
    agent,
    gobgpd_pids,
    peer,
    policy,
    routers,
)
from tests.support.namespaces import Namespaces, in_node, inside

__all__ = ["in_node"]

PODS, WEB = "10.244.1.0/24", "10.96.0.10/32"
OPEN, UPDATE, NOTIFICATION, KEEPALIVE = 1, 2, 3, 4
ALIVE = b"\xff" * 16 + struct.pack(">HB", 19, KEEPALIVE)
ROUTES = 20_000
"""Of one flood: as many networks of 24 bits."""

Behaviour = Callable[["Peer", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """One end of sessions that behaves as it likes, and notes how they are ended."""

    def __init__(self, number: int, behaviour: Behaviour) -> None:
        self.address, self.asn = IPv4Address(f"10.99.0.{110 + number}"), 65110 + number
        self.calls = 0
        self.notified: set[tuple[int, int]] = set()
        """Error codes and subcodes of NOTIFICATIONs (RFC 4271, section 4.5)."""
        self._behaviour = behaviour
        self._open: dict[asyncio.StreamWriter, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def listening(self, far: Namespaces) -> AsyncIterator[None]:
        """Answer on port 179 at an address of its own in the namespace."""
        try:
            async with await asyncio.start_server(self._called, sock=self._listener(far)):
                yield
        finally:
            ends = list(self._open.values())
            for writer in self._open:
                writer.transport.abort()
            await asyncio.gather(*ends)

    def _listener(self, far: Namespaces) -> socket.socket:
        with inside(far):
            subprocess.run(["ip", "address", "add", f"{self.address}/24", "dev", "cable"], check=True)
            return socket.create_server((str(self.address), 179))

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.calls += 1
        self._open[writer] = ended = asyncio.get_running_loop().create_future()
        try:
            await self._behaviour(self, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other end closes it
        finally:
            writer.transport.abort()
            del self._open[writer]
            ended.set_result(None)

    async def read(self, reader: asyncio.StreamReader) -> int:
        """The type of the next message."""
        header = await reader.readexactly(19)
        length, kind = struct.unpack_from(">HB", header, 16)
        body = await reader.readexactly(length - 19)
        if kind == NOTIFICATION:
            self.notified.add((body[0], body[1]))
        return int(kind)

    async def stay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer each KEEPALIVE until the other end closes."""
        while True:
            if await self.read(reader) == KEEPALIVE:
                writer.write(ALIVE)

    async def establish(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Do as a router does until the session is established."""
        writer.write(opening(self.asn, self.address) + ALIVE)
        while await self.read(reader) != KEEPALIVE:
            pass


def message(kind: int, body: bytes) -> bytes:
    return b"\xff" * 16 + struct.pack(">HB", 19 + len(body), kind) + body


def opening(asn: int, router: IPv4Address, more: bytes = b"") -> bytes:
    """``more``: further capabilities."""
    able = struct.pack(">BBHBBBBI", 1, 4, 1, 0, 1, 65, 4, asn) + more  # IPv4 unicast, ASNs of four octets
    parameters = struct.pack(">BB", 2, len(able)) + able
    return message(OPEN, struct.pack(">BHH4sB", 4, asn, 90, router.packed, len(parameters)) + parameters)


def update(asn: int, hop: IPv4Address, networks: bytes) -> bytes:
    path = struct.pack(">BBBBBI", 0x40, 2, 6, 2, 1, asn)
    attributes = b"\x40\x01\x01\x00" + path + b"\x40\x03\x04" + hop.packed
    return message(UPDATE, struct.pack(">HH", 0, len(attributes)) + attributes + networks)


async def unknown_type(one: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A message of a type that BGP does not have, at which gobgpd 3.10 panics."""
    await one.establish(reader, writer)
    writer.write(message(77, b"any"))
    await one.stay(reader, writer)


async def unknown_first(one: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The same in place of its OPEN."""
    writer.write(message(77, b"any"))
    await one.stay(reader, writer)


async def garbage(one: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """No BGP at all."""
    writer.write(bytes(4096))
    await one.stay(reader, writer)


async def another_asn(one: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An ASN that the resources do not have."""
    writer.write(opening(one.asn + 100, one.address))
    await one.stay(reader, writer)


async def reset(one: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """RST in the middle of an UPDATE."""
    await one.establish(reader, writer)
    writer.write(update(one.asn, one.address, b"\x18\xc6\x33\x64")[:-2])
    await writer.drain()
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


async def malformed(one: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Attributes longer than the message that has them."""
    await one.establish(reader, writer)
    writer.write(message(UPDATE, struct.pack(">HH", 0, 1000) + b"\x40\x01\x01\x00"))
    await one.stay(reader, writer)


async def too_short(one: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A message shorter than its header."""
    await one.establish(reader, writer)
    writer.write(b"\xff" * 16 + struct.pack(">HB", 3, UPDATE))
    await one.stay(reader, writer)


async def flood(one: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Many routes, our own among them, and many of them again and again."""
    await one.establish(reader, writer)
    networks = [struct.pack(">I", (24 << 24) | (11 << 16) + number) for number in range(ROUTES)]
    messages = [
        update(one.asn, one.address, b"".join(networks[first : first + 900]))
        for first in range(0, ROUTES, 900)
    ]
    writer.write(update(one.asn, one.address, b"\x18\x0a\xf4\x01" + b"\x20\x0a\x60\x00\x0a"))
    for each in (*messages, *messages[:1] * 20):
        writer.write(each)
        await writer.drain()
    await one.stay(reader, writer)


async def silent(one: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """It establishes a session, and sends nothing more."""
    await one.establish(reader, writer)
    while True:
        await one.read(reader)


ENDED: dict[Behaviour, tuple[int, int]] = {
    another_asn: (2, 2),
    malformed: (3, 1),
    too_short: (1, 2),
    silent: (4, 0),
}
"""NOTIFICATION of each (RFC 4271, section 6): bad peer AS, malformed attributes, bad length, hold timer."""
REASONS: dict[Behaviour, str] = {
    another_asn: "sent NOTIFICATION: as number mismatch expected 65113, received 65213",
    malformed: "sent NOTIFICATION 3/1 (UPDATE message error: malformed attribute list)",
    silent: "sent NOTIFICATION 4/0 (hold timer expired): the peer was silent",
    reset: "the peer ended the connection",
}
"""Why sessions are down, as users are shown it."""


async def test_a_hostile_peer_costs_its_own_session_alone(in_node: None, tmp_path: Path) -> None:
    behaviours: tuple[Behaviour, ...] = garbage, reset, flood, *ENDED
    hostile = {behaviour: Peer(number, behaviour) for number, behaviour in enumerate(behaviours)}
    wanted = Wanted()
    secret, families = Secret(PASSWORD), (IPV4_UNICAST,)
    wanted.put(
        peer(
            "tor", FRR, 65101, password=secret, families=families, graceful_restart=PeerRestart(enabled=True)
        ),
        policy("tor", FRR, PODS, WEB),
        *(peer(name.__name__, str(one.address), one.asn, families=families) for name, one in hostile.items()),
    )
    wanted.announce(PODS)
    with routers(tmp_path) as far:
        async with AsyncExitStack() as stack:
            for one in hostile.values():
                await stack.enter_async_context(one.listening(far.far))
            stack.callback(end_speakers, tmp_path)
            speakers = await stack.enter_async_context(agent(wanted, tmp_path))
            await eventually(lambda: set(far.frr_routes()) == {PODS})
            pids = gobgpd_pids(tmp_path)

            def flooded() -> bool:
                found = speakers.observed.get((INSTANCE, hostile[flood].address))
                assert found is not None
                assert (found.state, found.families[0].received) == (PeerState.ESTABLISHED, ROUTES + 2)
                return True

            await eventually(flooded)
            wanted.announce(WEB)
            await eventually(lambda: set(far.frr_routes()) == {PODS, WEB})
            for behaviour, codes in ENDED.items():
                await eventually(partial(lambda one, codes: codes in one.notified, hostile[behaviour], codes))

            def error(behaviour: Behaviour) -> str:
                found = speakers.observed.get((INSTANCE, hostile[behaviour].address))
                return found.error if found is not None else ""

            for behaviour, reason in REASONS.items():
                await eventually(partial(lambda one, text: error(one) == text, behaviour, reason))
            for behaviour in behaviours:
                if behaviour is not flood:
                    await eventually(partial(lambda one: one.calls > 1, hostile[behaviour]))
            wanted.withdraw(WEB)
            await eventually(lambda: set(far.frr_routes()) == {PODS})
            assert far.frr_sessions() == ("Established", 1)
            assert hostile[flood].calls == 1
            rib = await speakers.listed_routes(INSTANCE, RouteTable.LOC_RIB, IPV4_UNICAST)
            assert [str(route.prefix) for route in rib] == [PODS], "what peers send is in no RIB"
            assert gobgpd_pids(tmp_path) == pids


async def no_end_of_rib(one: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Graceful restart is offered, and End-of-RIB is not sent (RFC 4724, section 2)."""
    writer.write(opening(one.asn, one.address, b"\x40\x06\x00\x78\x00\x01\x01\x80") + ALIVE)
    await one.stay(reader, writer)


async def test_a_peer_that_sends_no_end_of_rib_holds_no_routes_back(in_node: None, tmp_path: Path) -> None:
    """A gobgpd that has just started waits for it: for 360 s, if not configured otherwise."""
    hostile, wanted = Peer(0, no_end_of_rib), Wanted()
    options = {"families": (IPV4_UNICAST,), "graceful_restart": PeerRestart(enabled=True)}
    wanted.put(
        peer("hostile", str(hostile.address), hostile.asn, **options),
        policy("tor", FRR, PODS),
    )
    wanted.announce(PODS)
    with routers(tmp_path) as far:
        async with hostile.listening(far.far):
            try:
                async with agent(wanted, tmp_path) as speakers:

                    def established() -> bool:
                        found = speakers.observed.get((INSTANCE, hostile.address))
                        return found is not None and found.established

                    await eventually(established)
                    wanted.put(peer("tor", FRR, 65101, password=Secret(PASSWORD), **options))
                    await eventually(lambda: set(far.frr_routes()) == {PODS})
            finally:
                end_speakers(tmp_path)


CRASHES = 3
"""After the first; the last two 5 and 10 seconds later than the session could come up."""


@pytest.mark.parametrize("behaviour", [unknown_type, unknown_first])
async def test_a_peer_that_crashes_gobgpd_ends_the_other_sessions_once(
    in_node: None, tmp_path: Path, behaviour: Behaviour
) -> None:
    """Whatever it does then, also while agents come and go."""
    hostile, wanted = Peer(0, behaviour), Wanted()
    options = {"families": (IPV4_UNICAST,), "graceful_restart": PeerRestart(enabled=True)}
    wanted.put(
        peer("tor", FRR, 65101, password=Secret(PASSWORD), **options),
        peer("inner", BIRD, 65001, **options),
        policy("tor", FRR, PODS),
        policy("inner", BIRD, PODS),
        peer("hostile", str(hostile.address), hostile.asn, families=(IPV4_UNICAST,)),
    )
    wanted.announce(PODS)

    def found(speakers: BGPSpeakers) -> ObservedPeer:
        row = speakers.observed.get((INSTANCE, hostile.address))
        assert row is not None
        return row

    with routers(tmp_path) as far:
        async with hostile.listening(far.far):
            try:
                async with agent(wanted, tmp_path) as speakers:
                    await eventually(lambda: found(speakers).isolated_at)
                    await eventually(
                        lambda: far.frr_sessions()[0] == "Established" and far.bird_session("inner")
                    )
                    before = far.frr_sessions(), far.bird_session("inner"), hostile.calls
                    await eventually(lambda: found(speakers).error.startswith("held down until "))
                    wanted.put(policy("tor-web", FRR, WEB), policy("inner-web", BIRD, WEB))
                    wanted.announce(WEB)
                    await eventually(lambda: set(far.frr_routes()) == {PODS, WEB})
                    await eventually(lambda: WEB in far.bird_routes())
                async with agent(wanted, tmp_path) as speakers:
                    await eventually(lambda: found(speakers).crashes >= CRASHES, within=90)
                    assert found(speakers).isolated_at is not None
                    assert hostile.calls > before[2]
                    wanted.withdraw(WEB)
                    await eventually(lambda: set(far.frr_routes()) == {PODS})
                    await eventually(lambda: WEB not in far.bird_routes())
                assert (far.frr_sessions(), far.bird_session("inner")) == before[:2]
            finally:
                end_speakers(tmp_path)
