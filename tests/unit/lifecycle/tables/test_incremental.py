"""Incremental tables: what each operator gives, and that it works through what changed and no more."""

from dataclasses import dataclass, replace
from typing import Any, assert_type

import anyio
import pytest

from lifecycle import Change, ReadTable, Table, Tables
from lifecycle.tables import Lookup, Snapshot, Sorted


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    node: str
    cpu: int = 1


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    zone: str


def pods(*rows: Pod) -> Table[str, Pod]:
    table: Table[str, Pod] = Table("pods", key=lambda pod: pod.name)
    put(table, *rows)
    return table


def put(table: Table[str, Pod], *rows: Pod) -> None:
    with table.txn() as txn:
        for row in rows:
            txn.put(row)


def nodes(*rows: Node) -> Table[str, Node]:
    table: Table[str, Node] = Table("nodes", key=lambda node: node.name)
    with table.txn() as txn:
        for row in rows:
            txn.put(row)
    return table


WEB, DB, CACHE = Pod("web", "one", 2), Pod("db", "two", 4), Pod("cache", "one")


def test_only_changed_rows_are_worked_through() -> None:
    table, seen = pods(WEB, DB, CACHE), list[str]()

    def cpu(pod: Pod) -> int:
        seen.append(pod.name)
        return pod.cpu

    cpus = table.map(cpu)
    assert seen == []
    assert (cpus.get("web"), len(cpus), seen) == (2, 3, ["web", "db", "cache"])
    put(table, replace(DB, cpu=8))
    assert (cpus.get("db"), seen[3:]) == (8, ["db"])
    with table.txn() as txn:
        txn.delete("db")
    assert ("db" in cpus, seen[4:]) == (False, [])


def test_a_burst_is_worked_through_once_by_key() -> None:
    table, seen = pods(), list[int]()

    def cpu(pod: Pod) -> int:
        seen.append(pod.cpu)
        return pod.cpu

    cpus = table.map(cpu)
    watcher = cpus.changes()
    for number in range(5):
        put(table, replace(WEB, cpu=number))
    put(table, CACHE)
    with table.txn() as txn:
        txn.delete("cache")
    assert watcher.take() == [Change("web", None, 4, 1)]
    assert seen == [4]


def test_an_equal_result_of_a_derived_table_emits_no_change() -> None:
    table = pods(WEB)
    names = table.map(lambda pod: pod.name.upper())
    shouts = names.map(lambda name: name + "!")
    watcher = shouts.changes()
    watcher.take()
    put(table, replace(WEB, cpu=9))
    assert watcher.take() == []
    assert (names.revision, shouts.revision) == (1, 1)


def test_a_filter_lets_rows_come_and_go() -> None:
    table = pods(WEB, DB)
    big = table.filter(lambda pod: pod.cpu >= 4)
    watcher = big.changes()
    assert [change.row for change in watcher.take()] == [DB]
    put(table, replace(WEB, cpu=4), replace(DB, cpu=1))
    assert {change.key: change.deleted for change in watcher.take()} == {"web": False, "db": True}


def test_flat_map_gives_none_one_or_many() -> None:
    table = pods(WEB, DB)
    cores = table.flat_map(lambda pod: [(pod.name, core) for core in range(pod.cpu)], key=lambda core: core)
    assert len(cores) == 6
    watcher = cores.changes()
    watcher.take()
    put(table, replace(WEB, cpu=0), replace(DB, cpu=5))
    assert {change.key: change.deleted for change in watcher.take()} == {
        ("web", 0): True,
        ("web", 1): True,
        ("db", 4): False,
    }


def test_flat_map_refuses_two_results_with_one_key_until_that_is_mended() -> None:
    table = pods(WEB, DB)
    on = table.flat_map(lambda pod: [pod.node], key=lambda node: node, name="in-use")
    assert sorted(on.all()) == ["one", "two"]
    put(table, CACHE)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"table in-use: 'one' is the key of results of 'web' and 'cache'; make"
        ):
            on.all()
    put(table, replace(WEB, node="three"))
    assert sorted(on.all()) == ["one", "three", "two"]
    twice = table.flat_map(lambda pod: [pod.node, pod.node], key=lambda node: node, name="twice")
    with pytest.raises(ValueError, match="of 'db' twice"):
        twice.all()


def test_a_key_may_move_from_one_row_to_another_at_once() -> None:
    table = pods(WEB, DB)
    on = table.flat_map(lambda pod: [pod], key=lambda pod: pod.node)
    assert on.get("one") == WEB
    put(table, replace(WEB, node="two"), replace(DB, node="one"))
    assert (on.get("one"), on.get("two")) == (replace(DB, node="one"), replace(WEB, node="two"))


def test_groups_come_change_and_go() -> None:
    table, runs = pods(WEB, DB, CACHE), list[str]()

    def load(node: str, found: list[Pod]) -> int:
        runs.append(node)
        return sum(pod.cpu for pod in found)

    loads = table.group(lambda pod: pod.node, load)
    assert loads.name == "pods-load"
    assert (loads.get("one"), loads.get("two")) == (3, 4)
    runs.clear()
    put(table, replace(DB, node="one"))
    assert (loads.get("one"), "two" in loads, runs) == (7, False, ["one"])


def test_rows_of_a_group_come_least_recently_changed_first() -> None:
    table = pods(WEB, CACHE)
    names = table.group(lambda pod: pod.node, lambda _, found: tuple(pod.name for pod in found))
    assert names.get("one") == ("web", "cache")
    put(table, replace(WEB, cpu=7))
    assert names.get("one") == ("cache", "web")


def test_an_aggregate_adds_and_subtracts_what_changed() -> None:
    table, calls = pods(WEB, DB, CACHE), list[str]()

    def add(total: int, pod: Pod) -> int:
        calls.append(f"+{pod.cpu}")
        return total + pod.cpu

    def subtract(total: int, pod: Pod) -> int:
        calls.append(f"-{pod.cpu}")
        return total - pod.cpu

    cpus = table.aggregate(lambda pod: pod.node, zero=lambda _: 0, add=add, subtract=subtract)
    assert (cpus.get("one"), cpus.get("two")) == (3, 4)
    calls.clear()
    put(table, replace(WEB, cpu=5))
    assert (cpus.get("one"), calls) == (6, ["-2", "+5"])
    with table.txn() as txn:
        txn.delete("db")
    assert "two" not in cpus


def test_a_join_follows_both_sides_by_foreign_key() -> None:
    table, others = pods(WEB, DB, CACHE), nodes(Node("one", "a"))
    zones = table.join(others, lambda pod, node: f"{pod.name} in {node.zone}", on=lambda pod: pod.node)
    assert sorted(zones.all()) == ["cache in a", "web in a"]
    watcher = zones.changes()
    watcher.take()
    with others.txn() as txn:
        txn.put(Node("one", "b"))
        txn.put(Node("two", "b"))
    assert sorted(str(change.row) for change in watcher.take()) == ["cache in b", "db in b", "web in b"]
    put(table, replace(WEB, node="three"))
    assert [change.key for change in watcher.take() if change.deleted] == ["web"]
    with others.txn() as txn:
        txn.delete("one")
    assert zones.all() == ["db in b"]


def test_left_and_outer_joins_keep_rows_without_a_counterpart() -> None:
    table, others = pods(WEB, DB), nodes(Node("one", "a"), Node("web", "b"))
    left = table.left_join(others, lambda pod, node: node.zone if node else "?", on=lambda pod: pod.node)
    assert {key: zone for key, zone, _ in left.items()} == {"web": "a", "db": "?"}
    outer = table.outer_join(others, lambda pod, node: (pod is not None, node is not None))
    assert {key: found for key, found, _ in outer.items()} == {
        "web": (True, True),
        "db": (True, False),
        "one": (False, True),
    }


def test_indexes_follow_what_is_derived() -> None:
    table = pods(WEB, DB, CACHE)
    cpus = table.map(lambda pod: (pod.cpu, pod.name), indexes={"cpu": Sorted(lambda row: [row[0]])})
    assert [name for _, name in cpus.sorted_by("cpu").range(2)] == ["web", "db"]
    put(table, replace(CACHE, cpu=3))
    assert [name for _, name in cpus.sorted_by("cpu").range(2)] == ["web", "cache", "db"]


def test_what_a_function_raises_reaches_who_reads_and_nothing_is_half_done() -> None:
    table = pods(WEB, DB)
    shares = table.map(lambda pod: 8 // pod.cpu)
    totals = shares.group(lambda _: "all", lambda _, found: sum(found))
    assert totals.get("all") == 6
    put(table, replace(WEB, cpu=8), replace(DB, cpu=0))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            totals.get("all")
    put(table, replace(DB, cpu=2))
    assert totals.get("all") == 5


@pytest.mark.parametrize("operator", ["map", "group", "join", "flat_map", "aggregate"])
def test_rows_are_never_none(operator: str) -> None:
    table = pods(WEB)
    made: dict[str, ReadTable[Any, None]] = {
        "map": table.map(lambda _: None, name="made"),
        "group": table.group(lambda pod: pod.node, lambda _, __: None, name="made"),
        "join": table.join(table, lambda _, __: None, name="made"),
        "flat_map": table.flat_map(lambda _: [None], key=lambda _: 1, name="made"),
        "aggregate": table.aggregate(
            lambda pod: pod.node,
            zero=lambda _: None,
            add=lambda _, __: None,
            subtract=lambda _, __: None,
            name="made",
        ),
    }
    with pytest.raises(TypeError, match=r"^table made: .*None"):
        made[operator].all()


@pytest.mark.anyio
async def test_a_derived_table_is_initialized_with_all_its_sources() -> None:
    table, others = pods(WEB), nodes()
    source, other = table.initializer("kubernetes"), others.initializer("files")
    zones = table.filter(lambda pod: pod.cpu > 0).join(
        others, lambda pod, node: node, on=lambda pod: pod.node
    )
    both = zones.outer_join(table, lambda node, pod: node or pod)
    assert (both.initialized, both.uninitialized_by) == (False, ["kubernetes", "files"])
    source.done()
    other.done()
    with anyio.fail_after(30):
        await both.wait_initialized()
    assert both.initialized


@pytest.mark.anyio
async def test_a_watcher_far_down_is_woken() -> None:
    table, others = pods(), nodes(Node("one", "a"))
    zones = table.join(others, lambda _, node: node.zone, on=lambda pod: pod.node)
    counts = zones.group(lambda zone: zone, lambda _, found: len(found))
    seen = list[object]()

    async def watch() -> None:
        async for batch in counts.changes():
            seen.extend(change.row for change in batch)

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        for row in (WEB, CACHE):
            await anyio.wait_all_tasks_blocked()
            put(table, row)
        await anyio.wait_all_tasks_blocked()
        assert seen == [1, 2]
        group.cancel_scope.cancel()


def test_an_unreferenced_chain_of_derived_tables_stops_listening() -> None:
    table = pods(WEB)
    chain = (
        table.filter(lambda pod: pod.cpu > 0)
        .map(lambda pod: pod.cpu)
        .group(lambda cpu: cpu, lambda cpu, _: cpu)
    )
    assert (chain.all(), len(table._listeners)) == ([2], 1)
    del chain
    assert len(table._listeners) == 0


def test_a_named_derived_table_is_listed() -> None:
    table, known = pods(WEB), Tables()
    cpus = table.map(lambda pod: pod.cpu)
    known.add(table, cpus)
    assert known.get("pods-mapped") is cpus
    assert not hasattr(cpus, "txn")


# What type checkers know: assert_type, and ignores, which mypy refuses where they are not needed.


def test_keys_and_rows_have_types() -> None:
    table = pods(WEB, DB)
    assert_type(table, Table[str, Pod])
    assert_type(table.get("web"), Pod | None)
    assert_type([*table.keys()], list[str])
    assert_type(table.changes().take(), list[Change[str, Pod]])
    assert_type(table.changes().take()[0].key, str)
    assert_type(table.snapshot(), Snapshot[str, Pod])
    assert table.get(1) is None  # type: ignore[arg-type]  # its keys are names
    with table.txn() as txn:
        txn.delete(1)  # type: ignore[arg-type]


def test_derived_tables_and_indexes_know_theirs() -> None:
    table = pods(WEB, DB)
    assert_type(table.map(lambda pod: pod.cpu), ReadTable[str, int])
    assert_type(table.rekey(lambda pod: (pod.node, pod.name)), ReadTable[tuple[str, str], Pod])
    by_cpu = table.group(lambda pod: pod.cpu, lambda _, found: len(found))
    assert_type(by_cpu, ReadTable[int, int])
    joined = table.join(nodes(), lambda pod, node: (pod.name, node), on=lambda pod: pod.node)
    assert_type(joined, ReadTable[str, tuple[str, Node]])
    found = table.lookup("cpu", lambda pod: [pod.cpu])
    assert_type(found, Lookup[int, str, Pod])
    assert found.get("one") == []  # type: ignore[arg-type]  # it is found by numbers
    table.join(nodes(), lambda pod, _: pod, on=lambda pod: pod.cpu)  # type: ignore[arg-type,return-value]
