"""Incremental tables at random: after any writes, read at any time, each equals a plain recomputation.

The plain one is a comprehension over the rows of the sources. Some functions fail for some rows, so that
whatever is half done at an error would show.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from lifecycle import ReadTable, Table
from tests.support.table_watcher import Watcher


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    node: str | None
    cpu: int
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    zone: int


Plain = Mapping[Any, object]


class BrokenError(Exception):
    """What functions of the test raise."""


def checked(pod: Pod) -> Pod:
    if pod.broken:
        raise BrokenError(pod.name)
    return pod


def make(pods: ReadTable[str, Pod], nodes: ReadTable[str, Node]) -> dict[str, ReadTable[Any, Any]]:
    """One of each kind, and some of others."""
    placed = pods.filter(lambda pod: checked(pod).node is not None, name="placed")
    by_node = placed.group(
        lambda pod: pod.node or "", lambda _, found: tuple(sorted(pod.name for pod in found))
    )
    zones = placed.join(nodes, lambda pod, node: (checked(pod).name, node.zone), on=lambda pod: pod.node)
    return {
        "map": pods.map(lambda pod: checked(pod).cpu * 2, indexes={"double": lambda double: [double]}),
        "filter": placed,
        "flat_map": pods.flat_map(
            lambda pod: [(pod.name, core) for core in range(checked(pod).cpu)], key=lambda one: one
        ),
        "group": pods.group(lambda pod: checked(pod).node, lambda _, found: tuple(pod.name for pod in found)),
        "group of a filter": by_node,
        "aggregate": pods.aggregate(
            lambda pod: checked(pod).node,
            zero=lambda _: 0,
            add=lambda total, pod: total + pod.cpu,
            subtract=lambda total, pod: total - pod.cpu,
        ),
        "join": zones,
        "join by key": nodes.join(by_node, lambda node, found: (node.zone, found)),
        "left join": pods.left_join(
            nodes, lambda pod, node: (checked(pod).name, node and node.zone), on=lambda pod: pod.node
        ),
        "left join by key": nodes.left_join(by_node, lambda node, found: (node.zone, found)),
        "outer join": nodes.outer_join(by_node, lambda node, found: (node, found)),
        "self join": pods.left_join(pods, lambda pod, other: (pod, other), on=lambda pod: pod.node),
        "diamond": placed.join(pods.map(lambda pod: pod.cpu), lambda pod, cpu: (pod.name, cpu)),
        "zones": zones.aggregate(
            lambda one: one[1],
            zero=lambda zone: (zone, 0),
            add=lambda total, _: (total[0], total[1] + 1),
            subtract=lambda total, _: (total[0], total[1] - 1),
        ),
    }


def plain(
    pods: Mapping[str, Pod], nodes: Mapping[str | None, Node], in_order: list[Pod]
) -> dict[str, Callable[[], Plain]]:
    """What each of them is, from scratch; `in_order` are the pods as their table has them."""

    def placed() -> dict[str, Pod]:
        return {name: pod for name, pod in pods.items() if checked(pod).node is not None}

    def grouped(found: list[Pod]) -> dict[Hashable, tuple[str, ...]]:
        groups = defaultdict(list)
        for pod in found:
            groups[checked(pod).node].append(pod.name)
        return {node: tuple(names) for node, names in groups.items()}

    def cpus() -> dict[Hashable, int]:
        totals: Counter[Hashable] = Counter()
        for pod in pods.values():
            totals[checked(pod).node] += pod.cpu
        return dict(totals)

    def zones() -> dict[str, tuple[str, int]]:
        return {name: (name, nodes[pod.node].zone) for name, pod in placed().items() if pod.node in nodes}

    def by_node() -> dict[Hashable, tuple[str, ...]]:
        return grouped(sorted(placed().values(), key=lambda pod: pod.name))

    def left_joined() -> Plain:
        groups = by_node()
        return {name: (node.zone, groups.get(name)) for name, node in nodes.items()}

    def outer_joined() -> Plain:
        groups = by_node()
        return {name: (nodes.get(str(name)), groups.get(name)) for name in {*nodes, *groups}}

    return {
        "map": lambda: {name: checked(pod).cpu * 2 for name, pod in pods.items()},
        "filter": placed,
        "flat_map": lambda: {
            (name, core): (name, core) for name, pod in pods.items() for core in range(checked(pod).cpu)
        },
        "group": lambda: grouped(in_order),
        "group of a filter": by_node,
        "aggregate": cpus,
        "join": zones,
        "join by key": lambda: {
            name: (nodes[str(name)].zone, found) for name, found in by_node().items() if name in nodes
        },
        "left join": lambda: {
            name: (name, nodes[pod.node].zone if pod.node in nodes else None)
            for name, pod in pods.items()
            if checked(pod) is pod
        },
        "left join by key": left_joined,
        "outer join": outer_joined,
        "self join": lambda: {name: (pod, pods.get(str(pod.node))) for name, pod in pods.items()},
        "diamond": lambda: {name: (name, pod.cpu) for name, pod in placed().items()},
        "zones": lambda: {
            zone: (zone, count) for zone, count in Counter(zone for _, zone in zones().values()).items()
        },
    }


KINDS = sorted(make(Table("pods", key=str), Table("nodes", key=str)))


class Incremental(RuleBasedStateMachine):
    """Two tables that are written, what is made of them, and those who read and watch it now and then."""

    pods = st.builds(
        Pod,
        name=st.sampled_from("abcd"),
        node=st.sampled_from(("a", "x", "y", None)),
        cpu=st.integers(0, 2),
        broken=st.sampled_from((False,) * 7 + (True,)),
    )
    nodes = st.builds(Node, name=st.sampled_from("xyz"), zone=st.integers(0, 1))

    def __init__(self) -> None:
        super().__init__()
        self.pod_table: Table[str, Pod] = Table("pods", key=lambda pod: pod.name)
        self.node_table: Table[str, Node] = Table("nodes", key=lambda node: node.name)
        self.tables = make(self.pod_table, self.node_table)
        self.watchers: list[tuple[str, Watcher[Any]]] = []

    @rule(put=st.lists(pods, max_size=3), delete=st.lists(st.sampled_from("abcd"), max_size=2))
    def write_pods(self, put: list[Pod], delete: list[str]) -> None:
        with self.pod_table.txn() as txn:
            for name in delete:
                txn.delete(name)
            for pod in put:
                txn.put(pod)

    @rule(rows=st.lists(pods, max_size=4))
    def replace_pods(self, rows: list[Pod]) -> None:
        with self.pod_table.txn() as txn:
            txn.replace_all(rows)

    @rule(put=st.lists(nodes, max_size=2), delete=st.lists(st.sampled_from("xyz"), max_size=2))
    def write_nodes(self, put: list[Node], delete: list[str]) -> None:
        with self.node_table.txn() as txn:
            for name in delete:
                txn.delete(name)
            for node in put:
                txn.put(node)

    @initialize(kinds=st.lists(st.sampled_from(KINDS), max_size=3, unique=True))
    def watch_from_the_start(self, kinds: list[str]) -> None:
        for kind in kinds:
            self.watch(kind)

    @rule(kind=st.sampled_from(KINDS))
    def watch(self, kind: str) -> None:
        if self.equals(kind):
            table = self.tables[kind]
            self.watchers.append((kind, Watcher(table, table.changes())))

    @rule()
    def watchers_look(self) -> None:
        for kind, watcher in self.watchers:
            if self.equals(kind):
                watcher.look()

    @rule(kinds=st.lists(st.sampled_from(KINDS), max_size=4))
    def read(self, kinds: list[str]) -> None:
        for kind in kinds:
            self.equals(kind)

    def equals(self, kind: str) -> bool:
        """That it equals the plain one; whether that can be worked out."""
        pods = {pod.name: pod for pod in self.pod_table.all()}
        nodes: dict[str | None, Node] = {node.name: node for node in self.node_table.all()}
        work_out = plain(pods, nodes, self.pod_table.all())[kind]
        table = self.tables[kind]
        try:
            wanted = work_out()
        except BrokenError:
            try:
                table.all()
            except BrokenError:
                return False
            raise AssertionError(f"{kind} is read although its function fails") from None
        assert {key: row for key, row, _ in table.items()} == wanted
        assert len(table) == len(wanted)
        if kind == "map":
            doubles = table.by("double")
            assert {double: len(doubles.get(double)) for double in doubles.values()} == Counter(
                wanted.values()
            )
        return True

    @rule()
    def read_all(self) -> None:
        self.read(KINDS)


TestIncremental = Incremental.TestCase
