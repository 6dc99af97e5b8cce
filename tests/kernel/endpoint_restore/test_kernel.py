"""Agents that die and restart with the same pins, links and state."""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
import pytest

from cells import netlink
from cells.endpoint import Endpoint, Endpoints, State
from cells.endpoint.restore import RestoredEndpoints
from cells.maps.map import open_map
from cells.maps.policy_maps import PolicyMaps
from cells.maps.records.endpoints import LxcKey, LxcValue, PolicyEntry, PolicyKey
from cells.netlink.links import HostLinks
from cells.netlink.messages import VethPair
from cells.netlink.rows import random_mac
from cells.node.ipam import Ipam
from lifecycle import Hive, invoke
from tests.kernel.endpoint.nodes import GLOBALS, STATE, add_pod, address_of, agent, pods
from tests.support.namespaces import ChildDiedError, Namespaces, node_namespace

pytestmark = pytest.mark.kernel


def snapshot() -> dict[str, Any]:
    """Map ids, policies' and rows' contents, links and state: what a restart must not change."""
    with open_map(GLOBALS / "cilium_lxc") as lxc, open_map(GLOBALS / "cilium_ipcache") as ipcache:
        rows = {"lxc": sorted(lxc.items()), "ipcache": sorted(ipcache.items())}
    policies = {}
    ids = {}
    for path in sorted(GLOBALS.iterdir()):
        if path.name.startswith(("cilium_", "hive_endpoints", "hive_policies", "hive_node")):
            with open_map(path) as table:
                ids[path.name] = table.id
                if path.name.startswith("cilium_policy_"):
                    policies[path.name] = sorted(table.items())
    state = {path.name: (path / "ep_config.json").stat().st_mtime_ns for path in STATE.iterdir()}
    links = sorted((i, name) for i, name in socket.if_nameindex() if name.startswith("lxc"))
    return {"rows": rows, "ids": ids, "policies": policies, "state": state, "links": links}


async def make_pods(namespaces: list[Namespaces], *, die: bool = False) -> list[Endpoint]:
    """An agent that adds the pods and ends, or is killed."""
    async with agent() as hive:
        made = [add_pod(hive, number, pod) for number, pod in enumerate(namespaces, 1)]
        if die:
            os._exit(9)
    return made


async def come_back() -> tuple[list[Endpoint], dict[int, str], dict[str, str]]:
    """A new agent: its endpoints, what failed, who has which address."""
    async with agent() as hive:
        restored = hive.get(RestoredEndpoints)
        return hive.get(Endpoints).all(), restored.failed, hive.get(Ipam).dump()


@contextmanager
def node_with_pods(count: int, *, die: bool = False) -> Iterator[tuple[Namespaces, list[Endpoint]]]:
    """A node with pods, after the end of its agent."""
    with node_namespace() as node, pods(count) as namespaces:
        made: list[Endpoint] = []
        try:
            made = node.run(partial(anyio.run, partial(make_pods, namespaces, die=die)))
        except ChildDiedError:
            assert die
        yield node, made


@pytest.mark.parametrize("die", [False, True])
def test_a_new_agent_finds_everything_and_changes_nothing(die: bool) -> None:
    with node_with_pods(3, die=die) as (node, _):
        before = node.run(snapshot)
        found, failed, owners = node.run(partial(anyio.run, come_back))
        assert node.run(snapshot) == before
        assert failed == {}
        assert [(each.id, each.state) for each in found] == [(each.id, State.READY) for each in found]
        assert sorted(each.pod_name for each in found) == ["web-1", "web-2", "web-3"]
        assert {owners[str(each.ipv4)] for each in found} == {
            f"default/web-{number} [restored]" for number in (1, 2, 3)
        }


async def counted_restart(endpoint: Endpoint) -> tuple[int, int]:
    """Counters of the endpoint's policy after a restart, and a number for a new pod that is not in use."""
    async with agent() as hive:
        found = hive.get(Endpoints).get(endpoint.id)
        assert found is not None
        with open_map(GLOBALS / f"cilium_policy_{endpoint.id:05d}") as table:
            entries = [PolicyEntry.unpack(value) for _, value in table.items()]
        policy = hive.get(PolicyMaps).acquire()
        return max(entry.packets for entry in entries), policy.endpoint_id


def count_packets(endpoint: Endpoint) -> None:
    """As if the datapath had counted."""
    key = PolicyKey(identity=0, egress=True)
    with open_map(GLOBALS / f"cilium_policy_{endpoint.id:05d}") as table:
        table.update(key.pack(), PolicyEntry(packets=42).pack(key))


def test_policy_counters_go_on_and_numbers_are_not_given_twice() -> None:
    with node_with_pods(1) as (node, [made]):
        node.run(count_packets, made)
        packets, number = node.run(partial(anyio.run, counted_restart, made))
        assert packets == 42
        assert number != made.id


def spoil(endpoints: list[Endpoint]) -> None:
    """What accidents do: a lost row, a wrong row, a stranger's row."""
    one, two, _ = endpoints
    with open_map(GLOBALS / "cilium_lxc") as lxc:
        lxc.delete(LxcKey(address_of(one)).pack())
        lxc.update(LxcKey(address_of(two)).pack(), LxcValue(ifindex=1, endpoint_id=two.id).pack())
    with open_map(GLOBALS / "hive_endpoints") as configs:
        configs.update(struct.pack("<I", 4711), bytes(64))


def test_wrong_map_rows_are_corrected_at_restore() -> None:
    with node_with_pods(3) as (node, made):
        before = node.run(snapshot)
        node.run(spoil, made)
        assert node.run(snapshot) != before
        node.run(partial(anyio.run, come_back))
        assert node.run(snapshot) == before
        assert 4711 not in node.run(config_keys)


def config_keys() -> list[int]:
    """Link indexes in hive_endpoints."""
    with open_map(GLOBALS / "hive_endpoints") as table:
        return [struct.unpack("<I", key)[0] for key, _ in table.items()]


async def delete_links(ifindexes: list[int]) -> None:
    """As the runtime does when it removes a pod while there is no agent."""
    async with Hive(netlink.cell, invoke(_links)).started() as hive:
        await hive.get(HostLinks).reap(ifindexes)


def _links(_: HostLinks) -> None:
    """Ask for them."""


async def orphan_links(namespace: Namespaces) -> None:
    """Links as ADDs leave them that were killed before and after the link was brought up."""
    async with Hive(netlink.cell, invoke(_links)).started() as hive:
        links = hive.get(HostLinks)
        for number, alias in ((0xAA, ""), (0xBB, "hive endpoint 3999")):
            name = f"lxc{number:012x}"
            made = links.create_veth(
                VethPair(name, random_mac(), f"e{number}", random_mac(), 1500, namespace.net)
            )
            if alias:
                links.activate(made.host_ifindex, alias)


def epochs(endpoints: list[Endpoint]) -> list[int]:
    """Policy epochs: a row of an endpoint may only go along with its epoch, or the datapath remembers it."""
    with open_map(GLOBALS / "hive_epoch") as table:
        found = [table.lookup(struct.pack("<I", each.id)) for each in endpoints]
    return [struct.unpack("<Q", value)[0] for value in found if value is not None]


def test_map_entries_of_deleted_pods_are_removed_at_restore() -> None:
    with node_with_pods(2) as (node, made):
        before = node.run(epochs, made)
        node.run(partial(anyio.run, delete_links, [each.ifindex for each in made]))
        node.run(partial(anyio.run, come_back))
        assert all(after > was for after, was in zip(node.run(epochs, made), before, strict=True))


def test_pods_removed_while_no_agent_ran_leave_nothing() -> None:
    with node_with_pods(3) as (node, made):
        vanished, *others = made
        node.run(partial(anyio.run, delete_links, [vanished.ifindex]))
        found, failed, owners = node.run(partial(anyio.run, come_back))
        assert [each.id for each in found] == [each.id for each in others]
        assert failed == {vanished.id: f"interface {vanished.ifname} could not be found"}
        assert str(vanished.ipv4) not in owners
        after = node.run(snapshot)
        assert sorted(after["state"]) == sorted(str(each.id) for each in others)
        assert sorted(after["policies"]) == sorted(f"cilium_policy_{each.id:05d}" for each in others)
        assert len(after["rows"]["lxc"]) == len(after["rows"]["ipcache"]) == 2
        assert len(node.run(config_keys)) == 2


def test_links_of_interrupted_adds_are_removed() -> None:
    with node_with_pods(1) as (node, _), pods(1) as [stranger]:
        before = node.run(snapshot)
        node.run(partial(anyio.run, orphan_links, stranger))
        assert node.run(snapshot) != before
        node.run(partial(anyio.run, come_back))
        assert node.run(snapshot) == before


def test_an_unreadable_endpoint_keeps_everything_its_pod_uses() -> None:
    with node_with_pods(2) as (node, made):
        broken = made[0]
        node.run(truncate, broken.id)
        before = node.run(snapshot)
        found, failed, owners = node.run(partial(anyio.run, come_back))
        assert node.run(snapshot) == before
        assert [each.id for each in found] == [made[1].id]
        assert failed == {}
        assert owners[str(broken.ipv4)] == f"endpoint {broken.id} [quarantined]"


def truncate(number: int) -> None:
    """As a full disk leaves it."""
    path = STATE / str(number) / "ep_config.json"
    path.write_bytes(path.read_bytes()[:100])
