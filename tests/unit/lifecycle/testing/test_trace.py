"""Traces of tables: what a shell has printed in production is replayed in a test."""

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from lifecycle import Hive, Jobs, ReadTable, Table, invoke, module, provide
from lifecycle.admin import admin
from lifecycle.command import shell
from lifecycle.testing import Simulation, Trace, explore, simulate, started


@dataclass(frozen=True)
class Pod:
    name: str
    address: IPv4Address
    token: bytes = b""


def pods() -> Table[str, Pod]:
    return Table("pods", key=lambda pod: pod.name)


class Counter:
    """Notes which pods there are, at each change."""

    def __init__(self, pods: Table[str, Pod], jobs: Jobs) -> None:
        self.seen: list[tuple[float, list[str]]] = []
        self._pods = pods
        jobs.one_shot("count", self._count)

    async def _count(self) -> None:
        async for _ in self._pods.changes():
            self.seen.append((anyio.current_time(), sorted(self._pods.keys())))


cell = module("pods", "Pods", provide(pods, Counter), invoke(Counter))


def write(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def row(name: str, last: int) -> dict[str, object]:
    return {"name": name, "address": f"192.0.2.{last}", "token": "AAEC"}


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    path = write(
        tmp_path / "trace.jsonl",
        {"at": 1000.0, "table": "nodes", "put": [{"name": "n"}]},
        {"at": 1000.0, "table": "pods", "put": [row("a", 1)]},
        {"at": 1000.0, "table": "pods", "put": [row("b", 2)]},
        {"at": 1090.5, "table": "pods", "put": [row("b", 3)], "delete": ["a"]},
        {"at": 4600.0, "table": "pods", "delete": ["b", "long ago"]},
    )
    return Trace.read(path)


def replayed(trace: Trace, then: Callable[[Hive], object]) -> Callable[[Simulation], object]:
    def scenario(world: Simulation) -> None:
        async def main() -> None:
            hive = Hive(cell)
            trace.fill(hive)
            async with hive.started():
                await trace.replay(hive)
                await anyio.sleep(1)
                then(hive)

        world.run(main)

    return scenario


def test_tables_change_as_in_the_trace_at_the_same_pace_in_any_order_of_tasks(trace: Trace) -> None:
    def check(hive: Hive) -> None:
        seen = hive.get(Counter).seen
        assert [keys for _, keys in seen] == [["a", "b"], ["b"], []]
        assert [round(at - seen[0][0], 3) for at, _ in seen] == pytest.approx([0, 90.5, 3600], abs=0.1)

    assert (trace.tables, trace.seconds) == (["nodes", "pods"], 3600.0)
    assert explore(replayed(trace, check), range(30)) == 30


def test_rows_are_what_they_were(trace: Trace) -> None:
    hive = Hive(cell)
    trace.fill(hive)
    assert hive.get(Table[str, Pod]).get("b") == Pod("b", IPv4Address("192.0.2.2"), b"\0\1\2")


@pytest.mark.anyio
async def test_what_a_shell_prints_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"

    async def ask(*words: str) -> str:
        """What the command prints, as in another process."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            await anyio.to_thread.run_sync(shell, path, words, "test")
        return out.getvalue()

    async def write_moment(number: int, *rows: Pod, delete: Sequence[str] = ()) -> None:
        """Change the table, and wait until that is remembered."""
        with hive.get(Table[str, Pod]).txn() as txn:
            for pod in rows:
                txn.put(pod)
            for key in delete:
                txn.delete(key)
        with anyio.fail_after(30):
            while not (await ask("db/moments")).splitlines()[-1].startswith(f"{number} "):
                await anyio.lowlevel.checkpoint()

    settings = {"admin-socket": path, "admin-history": 10}
    async with started(cell, admin(), settings=settings) as hive:
        await write_moment(2, Pod("a", IPv4Address("192.0.2.1"), b"\xff"))
        await write_moment(3, Pod("a", IPv4Address("192.0.2.9")), Pod("b", IPv4Address("192.0.2.2")))
        await ask("db/show", "pods", "--at=2")  # a moment that was shown is as good as others
        await write_moment(4, delete=["a"])
        (tmp_path / "trace").write_text(await ask("db/trace"))
        (tmp_path / "same").write_text(await ask("db/trace", "pods"))
    trace = Trace.read(tmp_path / "trace")
    assert trace.tables == ["pods"]
    assert (tmp_path / "trace").read_text() == (tmp_path / "same").read_text()
    found: list[tuple[float, list[str]]] = []
    scenario = replayed(trace, lambda hive: found.extend(hive.get(Counter).seen))
    await anyio.to_thread.run_sync(simulate, scenario, 1)  # where no loop runs
    assert [keys for _, keys in found] == [["a"], ["a", "b"], ["b"]]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("words", "history", "why"),
    [
        ("db/trace", 0, "db/trace: no moments are remembered; expected a setting such as admin-history=60"),
        ("db/trace podz", 5, "no table is named podz; did you mean pods?"),
        ("db/trace names", 5, "table names follows from others: trace those"),
    ],
)
async def test_what_cannot_be_traced_is_refused_with_one_line(
    tmp_path: Path, words: str, history: int, why: str
) -> None:
    path, out = tmp_path / "admin.sock", io.StringIO()

    def names(pods: Table[str, Pod]) -> ReadTable[str, str]:
        return pods.map(lambda pod: pod.name, name="names")

    derived = module("names", "Names", provide(names), invoke(ReadTable[str, str]))
    async with started(cell, admin(), derived, settings={"admin-socket": path, "admin-history": history}):
        with contextlib.redirect_stdout(out):
            assert await anyio.to_thread.run_sync(shell, path, words.split(), "test") == 1
    assert out.getvalue() == f"{why}\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "trace.jsonl: empty: expected the lines of db/trace"),
        ("pods\n", r"trace.jsonl:1: JSON is malformed: .*: expected a line of db/trace"),
        ('{"at": 1.0}\n', r"trace.jsonl:1: .*missing required field `table`.*: expected a line of db/trace"),
        (
            '{"at": 2.0, "table": "pods"}\n{"at": 1.0, "table": "pods"}\n',
            "trace.jsonl:2: earlier than the line before: expected the lines in order",
        ),
    ],
)
def test_another_file_is_refused_with_the_line_at_fault(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(ValueError, match=why):
        Trace.read(tmp_path / "trace.jsonl")


def test_a_trace_of_other_tables_or_other_rows_is_refused(tmp_path: Path) -> None:
    other = write(tmp_path / "other", {"at": 1.0, "table": "nodes", "put": [{"name": "n"}]})
    with pytest.raises(LookupError, match="hive has none of the tables of the trace: nodes"):
        Trace.read(other).fill(Hive(cell))
    wrong = write(tmp_path / "wrong", {"at": 1.0, "table": "pods", "put": [{"name": "a"}]})
    with pytest.raises(
        ValueError, match=r"table pods: a row of the trace: .*missing required field `address`"
    ):
        Trace.read(wrong).fill(Hive(cell))
