"""Maglev: every node selects the same backend for a client's connection."""

from __future__ import annotations

import struct
from ipaddress import ip_address

import pytest

from cells.maps.map import create_map
from cells.maps.records.flows import NODEPORT_MAGLEV, NODEPORT_ON, NodePortConfig
from cells.services import DEFAULT_SEED, Seed, ServiceFlag
from cells.services.maglev import MaglevBackend, fill
from cells.services.map_entries import maglev_key
from tests.kernel.datapath.world import REDIRECT
from tests.kernel.datapath_nodeport.world import ELSEWHERE, NODE_PORT, SERVICE, NodePortWorld, segment
from tests.kernel.datapath_services.packets import ends
from tests.kernel.datapath_services.services import Backend

pytestmark = pytest.mark.kernel

SEED = Seed.parse(DEFAULT_SEED)
SIZE = 16381
CLIENTS = {4: "198.51.100.{}", 6: "2001:db8::{}"}
WORD = 0xFFFFFFFF
TCP = 6


def rotated(word: int, bits: int) -> int:
    return (word << bits | word >> (32 - bits)) & WORD


def final(a: int, b: int, c: int) -> int:
    """The last step of lookup3 (Bob Jenkins, public domain)."""
    for to, by, bits in ("cb", "b", 14), ("ac", "c", 11), ("ba", "a", 25), *_LAST:
        words = {"a": a, "b": b, "c": c}
        words[to[0]] = (words[to[0]] ^ words[to[1]]) - rotated(words[by], bits) & WORD
        a, b, c = words["a"], words["b"], words["c"]
    return c


_LAST = (("cb", "b", 16), ("ac", "c", 4), ("ba", "a", 14), ("cb", "b", 24))


def mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    """Its inner step."""
    for bits in 4, 6, 8, 16, 19, 4:
        a = (a - c & WORD) ^ rotated(c, bits)
        c = c + b & WORD
        a, b, c = b, c, a
    return a, b, c


def hashed(client: str, sport: int) -> int:
    """What Cilium 1.17 hashes, in the order of its words."""
    raw = ip_address(client).packed
    words = struct.unpack(f"<{len(raw) // 4}I", raw)
    (source,), (service,) = (struct.unpack("<H", struct.pack(">H", port)) for port in (sport, NODE_PORT))
    ports = source << 16 | service
    if len(words) == 1:
        start = SEED.ipv4 + 0xDEADBEEF + (3 << 2)
        return final(words[0] + start & WORD, ports + start & WORD, TCP + start & WORD)
    a, b, c = mix(*words[:3])
    a, b, c = mix(a + words[3] & WORD, b + ports & WORD, c + TCP & WORD)
    return final(a + SEED.ipv6 & WORD, b, c)


def serve(world: NodePortWorld, version: int, table: bytes, flags: int = NODEPORT_MAGLEV) -> None:
    facts = NodePortConfig(NODEPORT_ON | flags, seeds=SEED[1:])
    world.maps["hive_nodeport"].update(bytes(4), facts.pack())
    backends = [Backend(number, ELSEWHERE[version].format(number)) for number in (1, 2, 3)]
    world.services.serve(SERVICE[version], backends, port=NODE_PORT, flags=ServiceFlag.ROUTABLE)
    where = maglev_key(1, version)
    outer = world.maps[where.map]
    assert outer.spec.inner is not None
    with create_map(outer.spec.inner) as inner:
        inner.update(bytes(4), table)
        outer.update(where.key, struct.pack("<I", inner.fd))


@pytest.mark.parametrize("version", [4, 6])
def test_maglev_selects_the_backend_by_the_hash_of_the_client(world: NodePortWorld, version: int) -> None:
    table = fill([MaglevBackend(f"backend-{number}", number, 100) for number in (1, 2, 3)], SIZE, SEED.names)
    numbers = struct.unpack(f"<{SIZE}I", table)
    serve(world, version, table)
    seen = set()
    for last in range(1, 30):
        client, sport = CLIENTS[version].format(last), 20000 + last
        outcome = world.client_sends(segment("tcp", client, SERVICE[version], sport, NODE_PORT))
        assert outcome.action == REDIRECT
        wanted = numbers[hashed(client, sport) % SIZE]
        assert ends(outcome.packet)[2] == ELSEWHERE[version].format(wanted)
        seen.add(wanted)
    assert seen == {1, 2, 3}


def test_without_its_table_a_service_is_served_by_any_backend(world: NodePortWorld) -> None:
    serve(world, 4, bytes(4 * SIZE))
    for last in range(1, 10):
        sent = segment("tcp", CLIENTS[4].format(last), SERVICE[4], 20000, NODE_PORT)
        assert world.client_sends(sent).action == REDIRECT
