"""Each map has one writer, which also invalidates dependent state."""

from __future__ import annotations

import ast

import pytest

from cells.cluster.identity.identities import Identities, NodeAllocator, identity_table
from cells.cluster.identity.numbers import CLUSTER
from cells.cluster.ipcache.rows import IpcacheEntry, Source
from tests.support.fake_map import SPECS, FakeMap
from tests.support.house import CELL_FILES, ROOT, facts
from tests.unit.ipcache.fakes import FakeIpcacheMap, IpcacheOver


def test_verdicts_are_invalidated_by_the_maps_alone() -> None:
    """Who changes a map need not remember it: docs/design/0005-one-way-to-write-a-map.md."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in CELL_FILES.values()
        for line, call in facts(path).writes
        if call.attr == "advance" and "epochs" in ast.unparse(call) and path.parts[-2] != "maps"
    ]
    assert found == []


def test_a_caller_that_forgets_to_invalidate_verdicts_does_not_exist() -> None:
    """Each map that verdicts follow from, written in each way there is: the epoch goes on."""
    for name, spec in SPECS.items():
        if spec.invalidates is None:
            continue
        for how in ("update", "update_changed", "delete", "update_batch", "delete_batch", "clear"):
            table: FakeMap[bytes, bytes] = FakeMap(spec)
            key, value = bytes(spec.key_size), bytes(spec.value_size)
            table.raw[key] = value
            other = b"\xff" * spec.value_size
            rows = {
                "update": (key, value),
                "update_changed": (key, other),
                "delete": (key,),
                "update_batch": ([(key, value)],),
            }
            getattr(table, how)(*rows.get(how, ([key],) if how == "delete_batch" else ()))
            assert table.invalidated, f"{name}: {how}"
        unwired: FakeMap[bytes, bytes] = FakeMap(spec)
        unwired.epochs = None
        with pytest.raises(RuntimeError, match="open for reading only"):
            unwired.update(bytes(spec.key_size), bytes(spec.value_size))


def test_a_caller_that_forgets_to_introduce_an_identity_does_not_exist() -> None:
    """A claim reaches cilium_ipcache only after every follower knows its identity, from any caller."""
    seen: list[tuple[int, bool]] = []
    kernel = FakeIpcacheMap()

    class Follower:
        def ensure_identity(self, identity: int, labels: object) -> None:
            del labels
            seen.append((identity, identity in kernel.identities.values()))

    identities = Identities(identity_table(), NodeAllocator(CLUSTER))
    identity = identities.acquire_now(("k8s:app=web",))
    assert identity is not None
    forgetful = IpcacheOver(kernel, identities, [Follower()])
    claim = IpcacheEntry(prefix="10.0.1.7/32", identity=identity.id, source=Source.LOCAL, resource="ep//7")
    forgetful.upsert(claim)
    assert seen == [(identity.id, False)]
    assert kernel.identities == {"10.0.1.7/32": identity.id}


WRITTEN_BY_TARGETS = {"ipcache", "lxc", "tunnels", "nodes", "ipmasq4", "ipmasq6"}
WRITTEN_TWICE = {"endpoints"}
"""hive_endpoints: rows of endpoints that an earlier agent left are removed by their restore."""


def test_each_map_has_one_writer() -> None:
    """The attribute of Maps is named where its target is made, and nowhere else is it written."""
    found: dict[str, set[str]] = {}
    for path in CELL_FILES.values():
        for _, call in facts(path).writes:
            owner = call.value
            if (
                call.attr != "advance"
                and isinstance(owner, ast.Attribute)
                and "maps" in ast.unparse(owner.value)
            ):
                found.setdefault(owner.attr, set()).add(str(path.relative_to(ROOT)))
    assert {name for name, paths in found.items() if len(paths) > 1} <= WRITTEN_TWICE
    assert not found.keys() & WRITTEN_BY_TARGETS, "by their MapTarget alone"
