"""Pinned maps of other sizes and layouts: migration of their entries."""

import struct
import time
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network, IPv6Address

import pytest
from msgspec.structs import replace

from cells import config, maps
from cells.maps.bpf import pin, replace_pin
from cells.maps.map import MapSpec, MapType, create_map, map_by_id, open_map, possible_cpus
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.endpoints import EndpointConfig, NodeConfig
from cells.maps.records.flows import CtEntry, CtKey
from lifecycle import Hive, explain, invoke
from tests.kernel.maps.nodes import GLOBALS, SMALL, agent, pins, use
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

FOREVER = 1 << 31


def flow(number: int) -> bytes:
    """The key of a TCP connection."""
    return CtKey(IPv4Address("10.1.0.1"), IPv4Address("10.1.0.2"), 80, number, 6).pack()


def entry(second: int = 0) -> bytes:
    """As the datapath leaves it after a packet in that second: it renews the lifetime, and counts nothing."""
    return CtEntry(lifetime=FOREVER + second).pack()


def earlier_pins() -> set[str]:
    return {name.partition("_former_")[0] for name in pins() if "_former_" in name}


FLOWS = {
    *("cilium_ct4_global", "cilium_ct6_global", "cilium_snat_v4_external", "cilium_snat_v6_external"),
    *("cilium_nodeport_neigh4", "cilium_nodeport_neigh6"),
}
"""Translations, and neighbours of clients, have two thirds of the room of all connections."""


def put(spec: MapSpec, *entries: tuple[bytes, bytes]) -> int:
    """Pin a map with these entries in the place of the agent's; its id."""
    with create_map(spec) as table:
        for key, value in entries:
            table.update(key, value)
        replace_pin(table.fd, GLOBALS / spec.name)
        return table.id


async def test_a_map_of_another_size_keeps_its_entries(in_node: None) -> None:
    async with agent() as node:
        old = node.maps.ct4_tcp.id, node.maps.lxc.id
        for number in range(500):
            node.maps.ct4_tcp.update(flow(number), entry(number))
    async with agent(bpf_ct_global_tcp_max=2048) as node:
        assert node.maps.created == FLOWS
        assert node.maps.ct4_tcp.id != old[0]
        assert node.maps.ct4_tcp.spec.max_entries == 2048
        assert node.maps.lxc.id == old[1]
        assert dict(node.maps.ct4_tcp.items()) == {flow(n): entry(n) for n in range(500)}
        warning = next(line for line in node.logged if line["log_level"] == "warning")
        assert (warning["map"], "max 1024" in warning["old"]) == ("cilium_ct4_global", True)
        assert ("max 2048" in warning["new"], warning["entries"]) == (True, 500)


async def test_entries_written_during_a_migration_are_copied(in_node: None) -> None:
    async with agent() as node:
        for number in range(4):
            node.maps.ct4_tcp.update(flow(number), entry(10))
    with open_map(GLOBALS / "cilium_ct4_global") as old:  # as a program in force has it
        async with agent(bpf_ct_global_tcp_max=2048) as node:
            assert earlier_pins() == FLOWS
            old.update(flow(1), entry(12))  # went on in the old map
            node.maps.ct4_tcp.update(flow(2), entry(13))  # in the new one
            old.update(flow(7), entry(1))  # began in the old one
            old.update(flow(8), CtEntry(lifetime=int(time.monotonic()) - 5).pack())  # and has ended
            await node.maps.remove_retired()
            assert dict(node.maps.ct4_tcp.items()) == {
                flow(0): entry(10),
                flow(1): entry(12),
                flow(2): entry(13),
                flow(3): entry(10),
                flow(7): entry(1),
            }
            assert earlier_pins() == set()


async def test_an_interrupted_start_is_completed_by_the_next(in_node: None) -> None:
    async with agent() as node:
        node.maps.ct4_tcp.update(flow(0), entry())
    with open_map(GLOBALS / "cilium_ct4_global") as old:
        for size in (2048, 4096):  # two in a row that did not get to the end, of different sizes
            async with agent(bpf_ct_global_tcp_max=size):
                old.update(flow(size), entry())
        async with agent(bpf_ct_global_tcp_max=4096) as node:
            assert node.maps.created == frozenset()
            await node.maps.remove_retired()
            assert {key for key, _ in node.maps.ct4_tcp.items()} == {flow(0), flow(2048), flow(4096)}
            assert earlier_pins() == set()


async def test_an_interrupted_map_migration_is_completed_by_the_next_start(in_node: None) -> None:
    async with agent() as node:
        number = node.maps.ct4_tcp.id
        node.maps.ct4_tcp.update(flow(0), entry())
    with open_map(GLOBALS / "cilium_ct4_global") as table:
        pin(table.fd, GLOBALS / f"cilium_ct4_global_former_{number}")
    async with agent(bpf_ct_global_tcp_max=2048) as node:
        assert node.maps.ct4_tcp.lookup(flow(0)) == entry()
        await node.maps.remove_retired()
        assert earlier_pins() == set()


async def test_a_pin_that_did_not_get_to_its_place_goes_whatever_the_next_start_wants(in_node: None) -> None:
    async with agent() as node:
        number = node.maps.ct4_tcp.id
        there = pins()
        pin(node.maps.ct4_tcp.fd, GLOBALS / "cilium_ct4_global_new")
        pin(node.maps.ct4_tcp.fd, GLOBALS / "stranger_new")
    async with agent() as node:
        assert node.maps.ct4_tcp.id == number
        assert set(pins()) == {*there, "stranger_new"}


async def test_rows_of_before_ipv6_become_rows_of_both_families(in_node: None) -> None:
    row = EndpointConfig(IPv4Address("10.1.0.7"), 7, 1007, b"\2\0\0\0\0\1", b"\2\0\0\0\0\2", flags=1)
    node_config = NodeConfig(
        IPv4Address("10.1.0.1"), 4, b"\2\0\0\0\0\3", 5, b"\2\0\0\0\0\4", IPv4Network("10.1.0.0/16"), flags=1
    )
    async with agent() as node:
        endpoints, facts = node.maps.endpoints.spec, node.maps.node.spec
    put(replace(endpoints, value_size=32), (struct.pack("<I", 12), row.pack()[:32]))
    put(replace(facts, value_size=48), (bytes(4), node_config.pack()[:40] + bytes(8)))
    async with agent() as node:
        assert node.maps.created == {"hive_endpoints", "hive_node"}
        assert node.maps.endpoints.spec.value_size == 64
        assert {k: EndpointConfig.unpack(v) for k, v in node.maps.endpoints.items()} == {
            struct.pack("<I", 12): row
        }
        assert NodeConfig.unpack(node.maps.node.lookup(bytes(4)) or b"") == node_config


async def test_a_flag_or_a_kind_of_hash_makes_no_difference(in_node: None) -> None:
    async with agent() as node:
        wanted = node.maps.ipcache.spec, node.maps.ct6_any.spec, node.maps.metrics.spec
    host = IpcacheKey.host(IPv6Address("fd00::1")).pack(), IpcacheValue(7).pack()
    put(replace(wanted[0], max_entries=1000), host)
    put(replace(wanted[1], type=MapType.HASH), (bytes(38), entry()))
    counts = b"".join(struct.pack("<QQ", 3, 200) for _ in range(possible_cpus()))
    put(replace(wanted[2], flags=0), (bytes(8), counts))
    async with agent(preallocate_bpf_maps=True) as node:
        assert (node.maps.ipcache.spec, node.maps.ct6_any.spec, node.maps.metrics.spec) == wanted
        assert dict(node.maps.ipcache.items()) == dict([host])
        assert node.maps.ct6_any.lookup(bytes(38)) == entry()
        assert node.maps.metrics.lookup(bytes(8)) == counts


async def test_references_to_maps_are_taken_over(in_node: None) -> None:
    async with agent() as node:
        inner = node.maps.policies.spec.inner
        assert inner is not None
        wanted = node.maps.policies.spec
        active = {k: v for k, v in node.maps.policies.items() if any(v)}
        larger = create_map(replace(wanted, max_entries=8192))
        for key, value in active.items():
            with map_by_id(*struct.unpack("<I", value)) as policy:
                larger.update(key, struct.pack("<I", policy.fd))
        replace_pin(larger.fd, GLOBALS / wanted.name)
        larger.close()
    assert active
    async with agent() as node:
        assert "hive_policies" in node.maps.created
        assert {k: v for k, v in node.maps.policies.items() if any(v)} == active


async def test_an_unknown_layout_of_counts_is_given_up(in_node: None) -> None:
    async with agent() as node:
        wanted = node.maps.metrics.spec
    put(replace(wanted, value_size=24))
    async with agent() as node:
        assert node.maps.metrics.spec == wanted
        assert [line["map"] for line in node.logged if line["log_level"] == "warning"] == ["cilium_metrics"]


async def refused() -> str:
    made = Hive(config.cell, maps.cell, invoke(use), settings=dict(SMALL))
    with pytest.raises(Exception) as failed:  # noqa: PT011  (start errors are groups)
        async with made.started():
            pass
    text = explain(failed.value)
    assert text is not None
    assert "\n" not in text
    return text


OTHERS: list[Callable[[MapSpec], MapSpec]] = [
    lambda spec: replace(spec, value_size=24),
    lambda spec: replace(spec, key_size=16),
    lambda spec: replace(spec, type=MapType.PERCPU_HASH),
]


@pytest.mark.parametrize("other", OTHERS, ids=["value", "key", "type"])
async def test_any_other_layout_is_refused_and_left_alone(
    in_node: None, other: Callable[[MapSpec], MapSpec]
) -> None:
    async with agent() as node:
        spec = node.maps.lxc.spec
    number = put(other(spec))
    before = pins()
    text = await refused()
    path = GLOBALS / "cilium_lxc"
    assert text.startswith(f"map cilium_lxc: {path} is ")
    assert str(spec) in text
    assert text.endswith("start the version that made it, or remove the file once the node has no pods")
    assert pins() == before
    with open_map(path) as left:
        assert left.id == number


@pytest.mark.parametrize(
    ("attribute", "row"),
    [
        ("endpoints", lambda number: (struct.pack("<I", number), bytes(64))),
        ("egress_gateway4", lambda number: (struct.pack("<I4xI", 64, number), bytes(8))),
    ],
)
async def test_entries_that_do_not_fit_are_refused_and_left_alone(
    in_node: None, attribute: str, row: Callable[[int], tuple[bytes, bytes]]
) -> None:
    """Of a trie the kernel has no room by another error than of a hash."""
    async with agent() as node:
        spec: MapSpec = getattr(node.maps, attribute).spec
    rows = [row(number) for number in range(spec.max_entries + 1)]
    number = put(replace(spec, max_entries=2 * spec.max_entries), *rows)
    before = pins()
    text = await refused()
    assert text.startswith(f"map {spec.name}: the entries of ")
    assert text.endswith(f"do not fit into one of {spec.max_entries}: leave its size as it was")
    assert pins() == before
    with open_map(GLOBALS / spec.name) as left:
        assert left.id == number
