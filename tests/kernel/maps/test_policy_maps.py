"""The pool of endpoint ids and their policy maps."""

import errno
import os
import struct
from pathlib import Path
from unittest import mock

import anyio
import pytest

from cells.maps.bpf import BpfError, pin
from cells.maps.map import NO_PREALLOC, MapSpec, MapType, create_map, open_map
from cells.maps.node_maps import Maps
from cells.maps.policy_map import PolicyMap
from cells.maps.policy_maps import PolicyIdsExhausted, PolicyMaps, PoolEmpty
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from lifecycle import HiveError, StartError
from lifecycle.testing import eventually
from tests.kernel.maps.nodes import GLOBALS, SMALL, agent, pins, policy_pins
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

ANYONE_IN, ANYONE_OUT = PolicyKey(0, egress=False), PolicyKey(0, egress=True)
ALLOW_ALL = {ANYONE_IN: PolicyEntry(), ANYONE_OUT: PolicyEntry()}
WEB = PolicyKey(24583, egress=False, protocol=6, port=80, port_bits=16)


def index(endpoint_id: int) -> bytes:
    return struct.pack("<I", endpoint_id)


def active_map(maps: Maps, policy: PolicyMap) -> int:
    """Id of the map the datapath uses for the endpoint."""
    value = maps.policies.lookup(index(policy.endpoint_id))
    assert value is not None
    return int.from_bytes(value, "little")


async def test_an_acquired_map_is_pinned_empty_and_known_to_the_datapath(in_node: None) -> None:
    async with agent() as node:
        assert policy_pins() == set()
        one, two = node.policies.acquire(), node.policies.acquire()
        assert (one.endpoint_id, two.endpoint_id) == (1, 2)
        assert policy_pins() == {"cilium_policy_00001", "cilium_policy_00002"}
        assert active_map(node.maps, one) == one.map.id != two.map.id
        assert one.dump() == {}
        with open_map(GLOBALS / "cilium_policy_00002") as pinned:
            assert pinned.id == two.map.id


async def test_released_ids_come_back_empty_and_last(in_node: None) -> None:
    async with agent() as node:
        policy = node.policies.acquire()
        policy.replace(ALLOW_ALL)
        node.policies.release(policy)
        node.policies.release(policy)
        assert policy_pins() == set()
        later = [node.policies.acquire() for _ in range(4)]
        assert [each.endpoint_id for each in later] == [2, 3, 4, 1]
        assert later[-1].map.id == policy.map.id
        assert later[-1].dump() == {}


async def test_a_burst_beyond_the_pool_waits_only_for_the_top_up(in_node: None) -> None:
    async with agent() as node:
        ids: list[int] = []

        async def add() -> None:
            while True:
                try:
                    ids.append(node.policies.acquire().endpoint_id)
                except PoolEmpty:
                    await node.policies.ready()
                else:
                    return

        async with anyio.create_task_group() as group:
            for _ in range(100):
                group.start_soon(add)
        assert sorted(ids) == list(range(1, 101))
        assert len(policy_pins()) == 100


async def test_a_low_pool_is_topped_up_before_anyone_waits(in_node: None) -> None:
    async with agent() as node:
        taken = [node.policies.acquire() for _ in range(3)]
        await eventually(lambda: len(list(node.maps.policies.items())) == 4 + len(taken))


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_pods_that_come_and_go_leave_no_more_maps_than_were_once_in_use(in_node: None) -> None:
    """As many stay as were in use at once, and the pool of spare ones."""
    sizes: list[tuple[int, int]] = []
    async with agent() as node:
        for _ in range(10):
            taken = await _acquire(node.policies, 20)
            for _ in range(3):  # one after the other: no more than these at once
                node.policies.release(taken.pop())
                taken += await _acquire(node.policies, 1)
            for each in taken:
                node.policies.release(each)
            sizes.append((len(list(node.maps.policies.items())), descriptors()))
    most = 20 + int(str(SMALL["policy-map-pool"]))
    assert all(maps <= most for maps, _ in sizes), sizes
    assert len(set(sizes[5:])) == 1, f"maps and descriptors grow: {sizes}"


async def test_without_free_policy_map_ids_creation_raises_an_error(in_node: None) -> None:
    with mock.patch("cells.maps.policy_maps.ENDPOINT_IDS", 5):
        async with agent() as node:
            await _acquire(node.policies, 5)
            with pytest.raises(PolicyIdsExhausted, match="all 5 endpoint ids of this node are in use"):
                node.policies.acquire()
            with pytest.raises(PolicyIdsExhausted):
                await node.policies.ready()


async def _acquire(policies: PolicyMaps, count: int) -> list[PolicyMap]:
    got: list[PolicyMap] = []
    while len(got) < count:
        await policies.ready()
        got.append(policies.acquire())
    return got


async def test_a_restart_keeps_maps_entries_and_counters(in_node: None) -> None:
    async with agent() as node:
        policy = node.policies.acquire()
        node.policies.acquire()
        policy.replace(ALLOW_ALL)
        policy.map.update(
            ANYONE_IN.pack(), PolicyEntry(packets=7, octets=700).pack(ANYONE_IN)
        )  # as traffic does
        before = active_map(node.maps, policy)
    async with agent() as node:
        restored = node.policies.adopt(1)
        restored.replace(ALLOW_ALL)
        assert restored.map.id == active_map(node.maps, restored) == before
        assert restored.dump()[ANYONE_IN].packets == 7
        assert node.policies.acquire().endpoint_id == 3

        await node.policies.sweep()
        assert policy_pins() == {"cilium_policy_00001", "cilium_policy_00003"}
        assert 2 in [policy.endpoint_id for policy in await _acquire(node.policies, 8)]


async def test_spare_maps_are_taken_over_and_emptied(in_node: None) -> None:
    async with agent() as node:
        policy = node.policies.acquire()
        policy.replace(ALLOW_ALL)
        (GLOBALS / "cilium_policy_00001").unlink()  # as an agent killed in the middle of a release leaves it
        before = dict(node.maps.policies.items())
    async with agent() as node:
        assert dict(node.maps.policies.items()) == before
        assert node.policies.acquire().dump() == {}


async def test_an_endpoint_without_its_policy_map_gets_a_new_one(in_node: None) -> None:
    async with agent() as node:
        await node.policies.prepare([200, 201])
        lost = node.policies.adopt(200)
        assert (lost.dump(), active_map(node.maps, lost)) == ({}, lost.map.id)
        assert node.policies.adopt(300).endpoint_id == 300
        assert node.policies.adopt(2).endpoint_id == 2
        assert policy_pins() == {f"cilium_policy_{each:05d}" for each in (2, 200, 300)}
        with pytest.raises(HiveError, match="endpoint id 200 cannot be restored: another endpoint has it"):
            node.policies.adopt(200)
        with pytest.raises(HiveError, match="endpoint id 5000 cannot be restored: ids are 1 to 4095"):
            node.policies.adopt(5000)


async def test_a_map_of_another_size_is_exchanged_with_its_entries(in_node: None) -> None:
    async with agent() as node:
        policy = node.policies.acquire()
        policy.replace({**ALLOW_ALL, WEB: PolicyEntry(deny=True)})
        old = policy.map.id
    async with agent(bpf_policy_map_max=512) as node:
        policy = node.policies.adopt(1)
        assert policy.map.spec.max_entries == 512
        assert policy.map.id == active_map(node.maps, policy) != old
        assert policy.dump() == {**ALLOW_ALL, WEB: PolicyEntry(deny=True)}
        assert node.policies.acquire().map.spec.max_entries == 512
        with open_map(GLOBALS / "cilium_policy_00001") as pinned:
            assert pinned.id == policy.map.id


async def test_a_policy_too_large_for_the_new_size_refuses_the_start(in_node: None) -> None:
    async with agent(bpf_policy_map_max=512) as node:
        policy = node.policies.acquire()
        policy.replace({PolicyKey(identity, egress=False): PolicyEntry() for identity in range(300)})
    with pytest.raises(StartError) as refused:
        async with agent(bpf_policy_map_max=256):
            pass
    text = "bpf-policy-map-max=256: cilium_policy_00001 has 300 entries; leave it at 512"
    assert refused.group_contains(HiveError, match=text)
    async with agent(bpf_policy_map_max=512) as node:
        assert len(node.policies.adopt(1).dump()) == 300


async def test_a_pinned_map_the_datapath_does_not_know_is_entered(in_node: None) -> None:
    async with agent() as node:
        policy = node.policies.acquire()
        policy.replace(ALLOW_ALL)
    (GLOBALS / "hive_policies").unlink()
    async with agent() as node:
        restored = node.policies.adopt(1)
        assert restored.map.id == active_map(node.maps, restored) == policy.map.id
        assert restored.dump() == ALLOW_ALL


async def test_stale_pins_go(in_node: None) -> None:
    GLOBALS.mkdir(parents=True)
    stale = ["cilium_policy_7", "cilium_policy_000008", "cilium_policy_v2_00009", "cilium_policy_60000"]
    own = ["cilium_ct4_01234", "cilium_ct_any6_01234"]
    with create_map(MapSpec("cilium_policy", MapType.LPM_TRIE, 12, 8, 16, NO_PREALLOC)) as other:
        for name in (*stale, *own, "cilium_policystats"):
            pin(other.fd, GLOBALS / name)
    async with agent() as node:
        assert policy_pins() == set(stale[2:])
        policy = node.policies.acquire()
        await node.policies.sweep()
        assert policy_pins() == {f"cilium_policy_{policy.endpoint_id:05d}"}
        assert (GLOBALS / "cilium_policystats").exists()
        assert not pins() & set(own)


async def test_a_pin_in_the_way_is_replaced(in_node: None) -> None:
    async with agent() as node:
        os.link(GLOBALS / "cilium_lxc", GLOBALS / "cilium_policy_00001")
        policy = node.policies.acquire()
        with open_map(GLOBALS / "cilium_policy_00001") as pinned:
            assert pinned.id == policy.map.id


async def test_replacing_touches_only_what_differs(in_node: None) -> None:
    async with agent() as node:
        policy = node.policies.acquire()
        many = {PolicyKey(1000 + i, egress=False): PolicyEntry(deny=i % 2 == 0) for i in range(20)}
        policy.replace({**ALLOW_ALL, **many})
        assert policy.dump() == {**ALLOW_ALL, **many}
        counted = PolicyEntry(packets=1, octets=64)
        policy.map.update(ANYONE_OUT.pack(), counted.pack(ANYONE_OUT))
        policy.replace({ANYONE_OUT: PolicyEntry(), WEB: PolicyEntry(deny=True)})
        assert policy.dump() == {ANYONE_OUT: counted, WEB: PolicyEntry(deny=True)}


async def test_denies_are_written_before_allows_and_allows_before_deletions(in_node: None) -> None:
    async with agent() as node:
        policy = node.policies.acquire()
        policy.replace({ANYONE_IN: PolicyEntry()})
        order: list[str] = []
        table = mock.Mock(wraps=policy.map)
        table.update.side_effect = lambda key, value: order.append("deny" if value[2] & 1 else "allow")
        table.delete.side_effect = lambda key: order.append("delete")
        policy.map = table
        policy.replace({ANYONE_OUT: PolicyEntry(), WEB: PolicyEntry(deny=True)})
        assert order == ["deny", "allow", "delete"]


async def test_a_policy_that_does_not_fit_is_an_error_and_the_map_stays_known(in_node: None) -> None:
    async with agent() as node:
        policy = node.policies.acquire()
        too_many = {PolicyKey(identity, egress=False): PolicyEntry() for identity in range(300)}
        with pytest.raises(BpfError, match=r"map cilium_policy_00001.*ENOSPC"):
            policy.replace(too_many)
        policy.replace(ALLOW_ALL)
        assert policy.dump() == ALLOW_ALL


def anyone_at(*ports: int, deny: bool = False, proxy: int = 0) -> dict[PolicyKey, PolicyEntry]:
    entry = PolicyEntry(deny=deny, proxy_port=proxy)
    return {PolicyKey(0, egress=False, protocol=6, port=port, port_bits=16): entry for port in ports}


def denied(identities: range) -> dict[PolicyKey, PolicyEntry]:
    return {PolicyKey(identity, egress=False): PolicyEntry(deny=True) for identity in identities}


async def test_a_full_map_denies_what_is_to_be_denied_and_allows_less(in_node: None) -> None:
    """Denies are of identities that allows of everyone are for, and of a key that is allowed."""
    async with agent() as node:
        policy = node.policies.acquire()
        room = policy.map.spec.max_entries
        allows = anyone_at(*range(1, room + 1))
        policy.replace(allows)
        denies = {**denied(range(300, 310)), **anyone_at(7, deny=True)}
        with pytest.raises(BpfError, match="ENOSPC"):
            policy.replace({**allows, **denies})
        found = policy.dump()
        assert len(found) == room
        assert denies.items() <= found.items()
        assert policy.held == found
        other = denied(range(400, 410))
        with pytest.raises(BpfError, match="ENOSPC"):
            policy.replace({**allows, **other})
        assert {key for key, entry in policy.dump().items() if entry.deny} == other.keys()
        with pytest.raises(BpfError, match="ENOSPC"):
            policy.replace({**allows, **denied(range(300, 600)), **anyone_at(9, deny=True)})
        assert all(entry.deny for entry in policy.dump().values()), "the denies have no room"
        policy.replace(allows)
        assert policy.dump() == allows


async def test_in_a_full_map_nothing_passes_the_proxy_by_that_is_to_read_it(in_node: None) -> None:
    """Anyone is allowed anything, and port by port the proxy reads it: what has no room is closed."""
    async with agent() as node:
        policy = node.policies.acquire()
        room = policy.map.spec.max_entries
        everything = {PolicyKey(0, egress=False): PolicyEntry()}
        read = anyone_at(*range(1, room + 1), proxy=11000)
        for before in (
            everything,
            {**everything, **anyone_at(*range(1, room))},
            denied(range(300, 300 + room)),
        ):
            policy.replace(before)
            with pytest.raises(BpfError, match="ENOSPC"):
                policy.replace({**everything, **read})
            assert policy.dump() == read, "all that fits, but not what would let the rest through"


async def test_a_full_policy_map_delays_no_other_and_only_changed_entries_are_evaluated_again(
    in_node: None,
) -> None:
    async with agent() as node:
        one, full, same, two = (node.policies.acquire() for _ in range(4))
        same.replace(ALLOW_ALL)
        before = {key: value for key, value in node.maps.epoch.items() if any(value)}
        too_many = {PolicyKey(identity, egress=False): PolicyEntry() for identity in range(300)}
        failed = node.policies.replace_all(
            [(one, ALLOW_ALL), (full, too_many), (same, ALLOW_ALL), (two, {WEB: PolicyEntry()})]
        )
        assert {number: error.errno for number, error in failed.items()} == {full.endpoint_id: errno.ENOSPC}
        assert one.dump() == same.dump() == ALLOW_ALL
        assert two.dump() == {WEB: PolicyEntry()}
        after = {key: value for key, value in node.maps.epoch.items() if any(value)}
        changed = {key for key, value in after.items() if before.get(key) != value}
        assert changed == {index(each.endpoint_id) for each in (one, full, two)}


async def test_an_id_that_cannot_be_adopted_is_not_allocated(in_node: None) -> None:
    async with agent() as node:
        refusal = BpfError(errno.ENOMEM, "pin", "a policy map")
        with mock.patch("cells.maps.policy_maps.pin", side_effect=refusal), pytest.raises(BpfError):
            node.policies.adopt(2)  # a prepared one
        with (
            mock.patch("cells.maps.policy_maps.PolicyMapPins.create", side_effect=refusal),
            pytest.raises(BpfError),
        ):
            node.policies.adopt(1000)  # one that is yet to be made
        for number in (2, 1000):
            with pytest.raises(HiveError, match=f"endpoint id {number} cannot be restored"):
                node.policies.adopt(number)
        await node.policies.sweep()
        assert [node.policies.acquire().endpoint_id for _ in range(2)] == [1, 3]
        assert node.maps.policies.lookup(index(2)) is not None  # its pod's packets still find it
