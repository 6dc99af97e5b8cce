"""Prefixes with several claims: the map has the one with precedence, and no early removal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from ipaddress import IPv4Address

import anyio
import pytest
from anyio import from_thread, to_thread
from hypothesis import given
from hypothesis import strategies as st

from cells.cluster.identity.identities import Identities, NodeAllocator, identity_table
from cells.cluster.identity.numbers import CLUSTER
from cells.cluster.ipcache import Ipcache, ipcache, ipcache_table
from cells.cluster.ipcache.rows import IpcacheEntry, IpcacheTarget, Source, prefix_of
from cells.maps.records.cluster import IpcacheValue
from lifecycle import HealthTree, Hive, Tables, invoke, module, provide, supply
from tests.support.waiting import eventually
from tests.unit.ipcache.fakes import FakeIpcacheMap, IpcacheOver

POD = "10.0.1.7/32"


def claim(prefix: str, identity: int, source: Source = Source.LOCAL, resource: str = "") -> IpcacheEntry:
    return IpcacheEntry(
        prefix=prefix, identity=identity, source=source, resource=resource or f"test//{identity}"
    )


def test_a_claim_is_in_the_map_at_once_and_goes_with_its_withdrawal() -> None:
    kernel = FakeIpcacheMap()
    known = IpcacheOver(kernel)
    known.upsert(claim(POD, 300, resource="ep//7"), claim("fd00::7/128", 300, resource="ep//7"))
    assert kernel.identities == {POD: 300, "fd00::7/128": 300}
    assert kernel.invalidated == 1
    known.withdraw("ep//7", [POD, "fd00::7/128"])
    assert kernel.identities == {}
    assert kernel.invalidated == 2
    assert known.table.all() == []


class Follower:
    """IdentityFollower."""

    def __init__(self, kernel: FakeIpcacheMap) -> None:
        self._kernel = kernel
        self.known: dict[int, tuple[str, ...]] = {}

    def ensure_identity(self, identity: int, labels: Collection[str]) -> None:
        assert identity in self.known or identity not in self._kernel.identities.values()
        self.known[identity] = tuple(labels)


@given(st.lists(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), max_size=4), max_size=6))
def test_no_caller_can_give_packets_an_identity_that_policies_do_not_know(
    batches: list[list[tuple[int, int]]],
) -> None:
    """A caller only claims: it has no way to forget the policies."""
    kernel = FakeIpcacheMap()
    follower = Follower(kernel)
    identities = Identities(identity_table(), NodeAllocator(CLUSTER))
    numbers = [identities.acquire_now((f"k8s:app=a{one}",)) for one in range(5)]
    known = IpcacheOver(kernel, identities, [follower])
    for batch in batches:
        claims = [
            claim(f"10.0.0.{host}/32", found.id, resource=f"test//{host}")
            for host, which in batch
            if (found := numbers[which]) is not None
        ]
        known.upsert(*claims)
        assert set(kernel.identities.values()) <= follower.known.keys()
    for number, labels in follower.known.items():
        found = identities.get(number)
        assert found is not None
        assert found.labels == labels


def test_the_node_beats_an_endpoint_of_its_address_and_gives_it_back() -> None:
    kernel = FakeIpcacheMap()
    known = IpcacheOver(kernel)
    known.upsert(claim(POD, 1, resource="daemon//reserved"))
    known.upsert(claim(POD, 300, resource="ep//7"))
    assert kernel.identities == {POD: 1}
    row = known.table.get(POD)
    assert row is not None
    assert [(each.resource, each.identity) for each in row.shadowed] == [("ep//7", 300)]
    known.withdraw("daemon//reserved", [POD])
    assert kernel.identities == {POD: 300}


def test_withdrawing_what_is_shadowed_or_was_never_claimed_changes_nothing() -> None:
    kernel = FakeIpcacheMap()
    known = IpcacheOver(kernel)
    known.upsert(claim(POD, 1, resource="daemon//reserved"))
    known.upsert(claim(POD, 300, resource="ep//7"))
    kernel.writes.clear()
    known.withdraw("ep//7", [POD])
    known.withdraw("ep//8", [POD, "10.0.1.8/32"])
    assert (kernel.writes, kernel.invalidated) == ([], 1)


def test_claims_that_change_no_row_are_counted_by_reason() -> None:
    known = IpcacheOver(FakeIpcacheMap())
    upsert, delete = ("upsert", "cannot_overwrite_by_source"), ("delete", "cannot_overwrite_by_source")
    unknown = "delete", "no_such_prefix"
    assert known.errors == {upsert: 0, delete: 0, unknown: 0}
    known.upsert(claim(POD, 300, Source.KVSTORE))
    known.upsert(claim(POD, 301, Source.KVSTORE), claim("10.0.1.8/32", 302, Source.KUBERNETES))
    assert not known.errors.total(), "of equal ones the later counts"
    known.upsert(claim(POD, 302, Source.KUBERNETES))
    known.upsert(claim(POD, 1, Source.LOCAL))
    assert known.errors == {upsert: 1, delete: 0, unknown: 0}
    known.withdraw("test//302", [POD, "10.0.1.8/32"])
    known.withdraw("test//302", [POD, "10.0.1.8/32"])
    known.withdraw("test//1", [POD])
    assert known.errors == {upsert: 1, delete: 1, unknown: 2}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c"]),
            st.none() | st.tuples(st.sampled_from(Source), st.integers(1, 3)),
        ),
        max_size=12,
    )
)
def test_the_strongest_claim_counts_whatever_came_before(
    steps: list[tuple[str, tuple[Source, int] | None]],
) -> None:
    """Against a model: a list of claims, the newest first, of which the first of the strongest counts."""
    kernel = FakeIpcacheMap()
    known, model = IpcacheOver(kernel), list[tuple[str, Source, int]]()
    for resource, made in steps:
        model = [each for each in model if each[0] != resource]
        if made is None:
            known.withdraw(resource, [POD])
        else:
            model.insert(0, (resource, *made))
            known.upsert(claim(POD, made[1], made[0], resource))
        order = list(Source)
        best = min(model, key=lambda each: (order.index(each[1]), each[2] != 1), default=None)
        # of claims that tie, any may count: the model's order is that of their making, as is the table's
        row = known.table.get(POD)
        assert (row is None) == (best is None)
        if row is not None and best is not None:
            assert (order.index(row.source), row.identity != 1) == (order.index(best[1]), best[2] != 1)
            assert kernel.identities == {POD: row.identity}
            assert {each.resource for each in row.claims} == {each[0] for each in model}
        else:
            assert kernel.identities == {}


def test_the_later_of_two_equal_claims_counts() -> None:
    kernel = FakeIpcacheMap()
    known = IpcacheOver(kernel)
    known.upsert(claim(POD, 300, Source.KVSTORE))
    known.upsert(claim(POD, 301, Source.KVSTORE))
    assert kernel.identities == {POD: 301}


def test_correct_rows_of_a_previous_agent_are_not_written_again() -> None:
    kernel = FakeIpcacheMap()
    kernel.put({POD: 300, "10.0.1.8/32": 301})
    known = IpcacheOver(kernel)
    known.upsert(claim(POD, 300))
    assert (kernel.writes, kernel.invalidated) == ([], 0)
    known.upsert(claim("10.0.1.8/32", 302))
    assert kernel.writes == [("update", "10.0.1.8/32")]
    assert known.leftovers == {}


def test_a_repeated_claim_writes_a_row_that_was_deleted() -> None:
    kernel = FakeIpcacheMap()
    known = IpcacheOver(kernel)
    known.upsert(claim(POD, 300))
    kernel.rows.clear()
    known.upsert(claim(POD, 300))
    assert kernel.identities == {POD: 300}


def test_a_row_is_written_although_a_shorter_prefix_has_the_same_identity() -> None:
    kernel = FakeIpcacheMap()
    known = IpcacheOver(kernel)
    known.upsert(claim("0.0.0.0/0", 2, resource="daemon//reserved"))
    known.upsert(claim("192.0.2.0/24", 2, Source.GENERATED))
    assert kernel.identities == {"0.0.0.0/0": 2, "192.0.2.0/24": 2}


def test_tunnels_and_flags_are_in_the_row() -> None:
    kernel = FakeIpcacheMap()
    away = IpcacheEntry(
        prefix=prefix_of(IPv4Address("10.0.2.7")),
        identity=400,
        source=Source.CUSTOM_RESOURCE,
        resource="cep/default/web-0",
        tunnel_endpoint=IPv4Address("192.0.2.2"),
        encrypt_key=3,
        skip_tunnel=True,
    )
    IpcacheOver(kernel).upsert(away)
    assert list(kernel.rows.values()) == [IpcacheValue(400, IPv4Address("192.0.2.2"), 3, 1)]


def test_a_claim_the_kernel_refuses_is_not_made() -> None:
    kernel = FakeIpcacheMap()
    kernel.broken = True
    known = IpcacheOver(kernel)
    with pytest.raises(OSError, match="Cannot allocate"):
        known.upsert(claim(POD, 300))
    assert known.table.all() == []


def test_leftovers_may_be_discarded_but_never_what_is_claimed() -> None:
    kernel = FakeIpcacheMap()
    kernel.put({POD: 300, "10.0.1.8/32": 301})
    known = IpcacheOver(kernel)
    known.upsert(claim(POD, 300))
    known.discard([POD, "10.0.1.8/32", "10.0.1.9/32"])
    assert kernel.identities == {POD: 300}
    assert kernel.invalidated == 1


class Known:
    """A source that knows its claims later than at the start."""

    def __init__(self, known: Ipcache) -> None:
        self.done = known.table.initializer("test").done


def running(kernel: FakeIpcacheMap) -> Hive:
    def needed(_: Ipcache, __: Known, ___: HealthTree, ____: Tables) -> None: ...

    parts = (provide(ipcache_table, ipcache, Known), supply(kernel.target, IpcacheTarget), invoke(needed))
    return Hive(module("ipcache", "the ipcache over a dict", *parts))


async def until(holds: Callable[[], bool]) -> None:
    await to_thread.run_sync(eventually, holds)


@pytest.mark.anyio
async def test_no_row_is_deleted_before_every_source_is_initialized() -> None:
    kernel = FakeIpcacheMap()
    kernel.put({POD: 300, "10.0.1.8/32": 301})
    async with running(kernel).started() as hive:
        await anyio.wait_all_tasks_blocked()
        assert kernel.writes == []
        hive.get(Ipcache).upsert(claim(POD, 300))
        hive.get(Known).done()
        await until(lambda: kernel.identities == {POD: 300})
        assert kernel.writes == [("delete", "10.0.1.8/32")]


@pytest.mark.anyio
async def test_a_refused_withdrawal_is_made_up_for() -> None:
    kernel = FakeIpcacheMap()
    async with running(kernel).started() as hive:
        known = hive.get(Ipcache)
        hive.get(Known).done()
        known.upsert(claim(POD, 300))
        refused = hive.get(Tables).get("ipcache-status")

        def level() -> str:
            return {each.module: each.level for each in hive.get(HealthTree).snapshot()}["ipcache.sweep"]

        await until(lambda: level() == "ok")

        kernel.broken = True
        with pytest.raises(OSError, match="Cannot allocate"):
            known.withdraw("test//300", [POD])
        await until(lambda: level() == "degraded")
        assert [status.key for status in refused.all()] == [POD]
        kernel.broken = False
        await until(lambda: kernel.identities == {} and level() == "ok" and not refused.all())


@pytest.mark.anyio
async def test_a_sweep_puts_right_what_others_did_to_the_map_and_leaves_the_rest_alone() -> None:
    kernel = FakeIpcacheMap()
    known = IpcacheOver(kernel)
    known.upsert(*(claim(f"10.0.{number >> 8}.{number & 255}/32", 300) for number in range(600)))
    right = dict(kernel.rows)
    kernel.put({"10.0.0.1/32": 7, "192.0.2.1/32": 8})
    del kernel.rows["10.0.0.2/32"]
    kernel.writes.clear()
    await known.sweep()
    assert kernel.rows == right
    assert sorted(kernel.writes) == [
        ("delete", "192.0.2.1/32"),
        ("update", "10.0.0.1/32"),
        ("update", "10.0.0.2/32"),
    ]


@pytest.mark.anyio
async def test_a_claim_made_while_the_map_is_swept_stays_though_the_map_was_read_without_it() -> None:
    class Slow(FakeIpcacheMap):
        def items(self) -> Iterator[tuple[bytes, bytes]]:
            found = list(super().items())
            from_thread.run_sync(known.upsert, claim("10.0.1.8/32", 301))
            from_thread.run_sync(known.withdraw, "test//300", [POD])
            return iter(found)

    kernel = Slow()
    known = IpcacheOver(kernel)
    known.upsert(claim(POD, 300))
    kernel.put({"10.0.1.9/32": 302})
    await known.sweep()
    assert kernel.identities == {"10.0.1.8/32": 301}
