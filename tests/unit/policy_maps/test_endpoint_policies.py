"""An endpoint's policy is computed, stored and written to its map; its status shows the map."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from anyio import to_thread

from cells.maps.policy_map import PolicyEntryMap
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.policy import Enforcement, Localhost, PolicyMapSettings, PolicySettings
from cells.policy.maps import (
    ALLOW_ALL,
    ALLOW_LOCALHOST,
    EndpointPolicies,
    NodePolicy,
    OutdatedPolicy,
    PolicyComputer,
    PolicyEntries,
    PolicyMapPool,
    RealizedPolicy,
    cell,
    families,
    policies,
)
from lifecycle import HealthTree, Hive, HiveError, invoke, replace
from tests.support.waiting import eventually
from tests.unit.policy_maps.fakes import FakeMaps, FakeRules, wanted

pytestmark = pytest.mark.anyio
WEB = PolicyKey(identity=300, egress=False, protocol=6, port=80, port_bits=16)
TLS = PolicyKey(identity=300, egress=False, protocol=6, port=443, port_bits=16)
ALLOW_WEB: PolicyEntries = {WEB: PolicyEntry()}


@dataclass
class Room:
    """The cell, running over fakes."""

    policies: EndpointPolicies
    maps: FakeMaps
    rules: FakeRules
    hive: Hive

    def made(self) -> int:
        """A new endpoint's number."""
        number = self.policies.acquire()
        self.policies.realize(number, 300, ("k8s:app=web",))
        return number

    def level(self, job: str) -> str:
        return {each.module: each.level for each in self.hive.get(HealthTree).snapshot()}[f"policy.{job}"]


@pytest.fixture
async def room() -> AsyncIterator[Room]:
    async with running({}) as room:
        yield room


@asynccontextmanager
async def running(settings: dict[str, object]) -> AsyncIterator[Room]:
    maps, rules = FakeMaps(), FakeRules(entries=ALLOW_WEB)

    def needed(_: EndpointPolicies, __: HealthTree) -> None: ...

    fakes = (replace(PolicyMapPool, maps), replace(PolicyComputer, rules))
    async with Hive(cell, *fakes, invoke(needed), settings=settings).started() as hive:
        yield Room(hive.get(EndpointPolicies), maps, rules, hive)


async def test_a_new_endpoint_has_its_policy_in_its_map_at_once(room: Room) -> None:
    number = room.made()
    assert room.maps.maps == {number: ALLOW_WEB}
    assert room.policies.table.get(number) == wanted(number, 1, ALLOW_WEB)
    assert room.policies.status(number) == RealizedPolicy(
        endpoint_id=number, revision=1, written=1, ingress_enforced=True, entries=1
    )


async def test_an_endpoint_that_goes_leaves_nothing(room: Room) -> None:
    number = room.made()
    room.policies.release(number)
    assert (room.maps.maps, room.policies.table.all(), room.policies.realized.all()) == ({}, [], [])
    assert room.rules.living == set()


async def test_a_failed_map_write_is_reported_and_keeps_the_revision(room: Room) -> None:
    number = room.made()
    room.maps.broken.add(number)
    room.rules.revision, room.rules.entries = 2, {}
    with pytest.raises(OSError, match="No space left"):
        room.policies.realize(number, 300, ())
    status = room.policies.status(number)
    assert (status.revision, status.entries) == (1, 1)
    assert "No space left" in status.error
    room.maps.broken.clear()
    room.policies.realize(number, 300, ())
    assert room.policies.status(number) == RealizedPolicy(
        endpoint_id=number, revision=2, written=2, ingress_enforced=True
    )


async def test_a_revision_is_there_when_proxies_have_acknowledged_it(room: Room) -> None:
    number = room.made()
    room.rules.behind.add(number)
    room.rules.revision = 2
    room.policies.realize(number, 300, ())
    status = room.policies.status(number)
    assert (status.revision, status.written, room.maps.maps[number]) == (1, 2, ALLOW_WEB)
    room.policies.follow_proxies()
    assert room.policies.status(number).revision == 1, "of other endpoints, that was"
    room.rules.behind.clear()
    room.policies.follow_proxies()
    assert room.policies.status(number).revision == 2


@pytest.mark.parametrize("holds", [2, 1], ids=["with room", "without"])
async def test_while_addresses_change_identities_maps_get_what_is_new_and_lose_nothing(
    room: Room, holds: int
) -> None:
    earlier, latter = PolicyEntryMap(ALLOW_WEB), PolicyEntryMap(dict(ALLOW_LOCALHOST))
    room.rules.entries = earlier
    number = room.made()
    room.maps.room = holds
    with room.policies.deferring_deletes():
        room.rules.revision, room.rules.entries = 2, latter
        room.policies.realize(number, 300, ())
        both = {**ALLOW_WEB, **ALLOW_LOCALHOST}
        assert room.maps.maps[number] == (both if holds == 2 else latter)
        assert room.policies.status(number).written == 2
        assert room.policies.status(number).revision == (1 if holds == 2 else 2)
        await room.policies.reconcile()
        assert len(room.maps.maps[number]) == holds, "nor does the comparison take anything away"
    await room.policies.apply()
    assert room.maps.maps[number] == latter
    assert room.policies.status(number).revision == 2


async def test_with_lockdown_on_overflow_a_full_policy_map_denies_all_until_entries_fit() -> None:
    async with running({"enable-endpoint-lockdown-on-policy-overflow": "true"}) as room:
        number = room.made()
        room.maps.room = 1
        room.rules.revision, room.rules.entries = 2, {**ALLOW_LOCALHOST, **ALLOW_WEB}
        with pytest.raises(OSError, match="locked down"):
            room.policies.realize(number, 300, ())
        assert room.maps.maps == {number: {}}
        assert "2 entries do not fit" in room.policies.status(number).error
        assert room.policies.status(number).entries == 0
        room.maps.room = 2  # it would fit now, but as many are not tried again
        with pytest.raises(OSError, match="locked down"):
            room.policies.realize(number, 300, ())
        assert room.maps.maps == {number: {}}
        room.rules.entries = ALLOW_WEB
        room.policies.realize(number, 300, ())
        assert room.maps.maps == {number: ALLOW_WEB}
        assert room.policies.status(number).error == ""


async def test_of_a_full_map_the_status_has_what_is_in_it_and_its_revision_stays(room: Room) -> None:
    room.rules.entries = {**ALLOW_ALL, **ALLOW_WEB}
    number = room.made()
    assert room.policies.status(number).entries == 3
    part = {**ALLOW_LOCALHOST, **ALLOW_WEB}
    room.maps.maps[number] = part  # what the kernel had room for
    room.maps.room = 2
    room.rules.revision, room.rules.entries = 2, {**part, TLS: PolicyEntry()}
    with pytest.raises(OSError, match="No space left"):
        room.policies.realize(number, 300, ())
    status, held = room.policies.status(number), room.policies.written(number)
    assert (status.revision, status.entries, status.ingress_enforced) == (1, 2, True)
    assert held is not None
    assert dict(held.entries) == part
    room.maps.room = 3
    room.policies.realize(number, 300, ())
    status = room.policies.status(number)
    assert (status.revision, status.entries, status.error) == (2, 3, "")


async def test_rules_that_contradict_each_other_leave_the_policy_there_is(room: Room) -> None:
    number = room.made()
    room.rules.conflict = "two listeners on one port"
    with pytest.raises(HiveError, match="two listeners"):
        room.policies.realize(number, 300, ())
    assert room.maps.maps == {number: ALLOW_WEB}
    assert room.policies.status(number).error == "two listeners on one port"
    assert room.policies.table.get(number) == wanted(number, 1, ALLOW_WEB)


async def test_peers_know_an_identity_before_its_endpoint_is_realized(room: Room) -> None:
    peer = room.made()
    room.rules.following = [wanted(peer, 1, {}), wanted(99, 1, {})]
    other = room.policies.acquire()
    room.policies.realize(other, 301, ("k8s:app=new",))
    assert room.rules.known == [300, 301]
    assert room.maps.maps == {peer: {}, other: ALLOW_WEB}
    assert room.maps.writes[-2:] == [peer, other]


async def test_endpoints_of_another_revision_are_regenerated_and_not_written_behind_their_backs(
    room: Room,
) -> None:
    number = room.made()
    room.maps.writes.clear()
    room.policies.change([wanted(number, 2, {})], "policy rules added")
    assert room.policies.outdated.all() == [OutdatedPolicy(number, 2, "policy rules added")]
    assert room.maps.writes == []
    assert room.policies.table.get(number) == wanted(number, 2, {})


async def test_peers_that_come_are_written_soon_and_tried_again_until_they_are(room: Room) -> None:
    first, second = room.made(), room.made()
    room.maps.broken.add(first)
    both = [wanted(each, 1, ALLOW_ALL) for each in (first, second)]
    room.policies.change(both, "identities changed")
    await to_thread.run_sync(eventually, lambda: room.maps.maps[second] == ALLOW_ALL)
    await to_thread.run_sync(eventually, lambda: room.level("policy-map-sync") == "degraded")
    assert "No space left" in room.policies.status(first).error
    room.maps.broken.clear()
    await to_thread.run_sync(eventually, lambda: room.maps.maps[first] == ALLOW_ALL)
    assert room.policies.status(first).error == ""
    await to_thread.run_sync(eventually, lambda: room.level("policy-map-sync") == "ok")


async def test_unchanged_policies_and_deleted_endpoints_are_not_written(room: Room) -> None:
    number = room.made()
    room.maps.writes.clear()
    room.policies.change([wanted(number, 1, ALLOW_WEB), wanted(99, 1, ALLOW_ALL)], "nothing")
    await room.policies.apply()
    assert room.maps.writes == []
    assert room.policies.table.get(99) is None


async def test_whole_maps_are_compared_and_put_right(room: Room) -> None:
    number = room.made()
    room.maps.maps[number] = {**ALLOW_WEB, PolicyKey(identity=256, egress=True): PolicyEntry()}
    await room.policies.reconcile()
    assert room.maps.maps == {number: ALLOW_WEB}


async def test_maps_are_compared_at_the_interval_that_is_set() -> None:
    async with running({"policy-map-full-reconciliation-interval": "10ms"}) as room:
        number = room.made()
        room.maps.maps[number] = {}
        await to_thread.run_sync(eventually, lambda: room.maps.maps[number] == ALLOW_WEB)
    assert PolicyMapSettings(policy_map_full_reconciliation_interval=0).reconciliation_seconds == float("inf")  # type: ignore[arg-type]


async def test_metrics_count_endpoints_by_enforcement(room: Room) -> None:
    room.made()
    enforced, revision = families(room.policies, audited=False)
    assert enforced.series[("ingress",)] == 1
    assert sum(value for value in enforced.series.values() if isinstance(value, int)) == 1
    assert revision.series == {(): 1}


@pytest.mark.parametrize(
    ("mode", "localhost", "entries"),
    [
        (Enforcement.ALWAYS, Localhost.ALWAYS, ALLOW_LOCALHOST),
        (Enforcement.ALWAYS, Localhost.AUTO, {}),
        (Enforcement.ALWAYS, Localhost.POLICY, {}),
        (Enforcement.DEFAULT, Localhost.POLICY, ALLOW_ALL),
        (Enforcement.NEVER, Localhost.ALWAYS, ALLOW_ALL),
    ],
)
async def test_enforcement_modes_without_rules_allow_or_deny(
    mode: Enforcement, localhost: Localhost, entries: PolicyEntries
) -> None:
    policy = NodePolicy(PolicySettings(enable_policy=mode, allow_localhost=localhost)).compute(1, 300, ())
    assert policy.entries == entries
    assert policy.ingress_enforced == policy.egress_enforced == (mode is Enforcement.ALWAYS)


@pytest.mark.parametrize(("seconds", "most"), [(0.1, 1), (0.0, 50)], ids=["much changes", "little changes"])
async def test_maps_follow_in_turns_by_how_long_they_take(
    room: Room, monkeypatch: pytest.MonkeyPatch, seconds: float, most: int
) -> None:
    """Others have the event loop in between."""
    room.maps.ids = 200
    numbers = [room.made() for _ in range(room.maps.ids)]
    clock = 0.0
    write = room.maps.write

    def takes_time(endpoint_id: int, entries: PolicyEntries) -> None:
        nonlocal clock
        clock += seconds
        write(endpoint_id, entries)

    monkeypatch.setattr(room.maps, "write", takes_time)
    monkeypatch.setattr(policies, "time", SimpleNamespace(monotonic=lambda: clock))
    room.maps.batches.clear()
    room.policies.change([wanted(number, 1, {}) for number in numbers], "less is allowed")
    await room.policies.apply()
    assert all(room.maps.maps[number] == {} for number in numbers)
    assert max(room.maps.batches) == most
