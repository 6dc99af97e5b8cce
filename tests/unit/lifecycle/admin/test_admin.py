"""The admin cell: commands over a unix socket of a hive that runs."""

import contextlib
import gc
import os
import resource
import socket
import stat
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec
import pytest
from structlog.testing import capture_logs

from lifecycle import HealthStatus, Hive, SettingsError, StartError, Table, invoke, module, provide
from lifecycle.admin import AdminSocket, admin
from lifecycle.admin.server import AdminServer
from lifecycle.process import log_level, set_log_level
from lifecycle.testing import eventually, started
from tests.unit.lifecycle.testing.script import shop
from tests.unit.lifecycle.testing.script.shop import Order

pytestmark = pytest.mark.anyio


class Client:
    """A client of the shell, which may be Cilium's: a line out, lines in, up to the end mark."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self._stream = stream
        self._text = ""

    async def send(self, line: str) -> None:
        await self._stream.send(f"{line}\n".encode())

    async def read_line(self) -> str:
        while "\n" not in self._text:
            self._text += (await self._stream.receive()).decode()
        line, _, self._text = self._text.partition("\n")
        return line

    async def ask(self, line: str) -> list[str]:
        await self.send(line)
        lines = [await self.read_line()]
        while lines[-1] not in {"<<end>>", "<<failed>>", "<<confirm>>"}:
            lines.append(await self.read_line())
        return lines

    async def close(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def shell(tmp_path: Path, *cells: Any, history: int = 0) -> AsyncIterator[tuple[Client, Hive]]:
    path = tmp_path / "admin.sock"
    hive = started(shop.cell, admin(), *cells, settings={"admin-socket": path, "admin-history": history})
    async with hive as running, await anyio.connect_unix(path) as stream:
        yield Client(stream), running


async def test_a_command_gets_its_output_and_an_end_mark(tmp_path: Path) -> None:
    async with shell(tmp_path) as (client, hive):
        with hive.get(Table[int, Order]).txn() as txn:
            txn.put(Order(1, "ann", "192.0.2.1"))  # type: ignore[arg-type]  # any row will do
        assert await client.ask("db/show --columns=number,customer orders") == [
            "NUMBER   CUSTOMER",
            "1        ann",
            "<<end>>",
        ]
        assert [line.split()[0] for line in await client.ask("db")] == [
            "NAME",
            "customers",
            "orders",
            "<<end>>",
        ]
        assert (await client.ask("shop/deliver")) == ["delivered", "<<end>>"]
        assert await client.ask("") == ["<<end>>"]
        assert (await client.ask("help"))[0].startswith("db ")


async def test_tables_are_shown_as_they_were_at_past_moments(tmp_path: Path) -> None:
    async with shell(tmp_path, history=3) as (client, hive):
        orders = hive.get(Table[int, Order])

        async def remembered(number: int) -> str:
            """The line of a moment, once it is there."""
            with anyio.fail_after(30):
                while not (lines := (await client.ask("db/moments"))[1:-1]) or int(lines[-1][:2]) < number:
                    await anyio.lowlevel.checkpoint()
            return lines[-1]

        await remembered(1)
        orders.put(Order(1, "ann", "192.0.2.1"))  # type: ignore[arg-type]  # any row will do
        assert "orders" in await remembered(2)
        with orders.txn() as txn:
            txn.put(Order(1, "bob", "192.0.2.1"))  # type: ignore[arg-type]
            txn.put(Order(2, "bob", "192.0.2.2"))  # type: ignore[arg-type]
        await remembered(3)
        columns = "--columns=number,customer"
        header = "NUMBER   CUSTOMER"
        assert await client.ask(f"db/show orders {columns} --at=1") == [header, "<<end>>"]
        assert await client.ask(f"db/show orders {columns} --at=2") == [header, "1        ann", "<<end>>"]
        assert await client.ask(f"db/get orders 1 {columns} --at=2") == [header, "1        ann", "<<end>>"]
        assert await client.ask(f"db/get orders 1 {columns} --at=0s") == [header, "1        bob", "<<end>>"]
        assert "no row with the key 2" in (await client.ask("db/get orders 2 --at=2"))[0]
        assert "no table named meals" in (await client.ask("db/show meals --at=2"))[0]
        with orders.txn() as txn:
            txn.delete(1)
        await remembered(4)
        assert (await client.ask("db/show orders --at=1"))[
            0
        ] == "--at=1: expected 2 to 4; db/moments lists them"
        assert (await client.ask("db/show orders --at=1h"))[0].startswith("--at=1h: the oldest moment is ")
        assert "neither the number of a moment nor an age" in (await client.ask("db/show orders --at=x"))[0]


async def test_without_a_history_there_is_no_past_moment(tmp_path: Path) -> None:
    async with shell(tmp_path) as (client, _hive):
        assert (await client.ask("db/show orders --at=1"))[0] == (
            "--at=1: no moments are remembered; expected a setting such as admin-history=60"
        )
    with pytest.raises(SettingsError, match="admin-history=-1: expected at least 0"):
        async with shell(tmp_path, history=-1):
            pass


async def test_every_look_at_a_hive_works_over_the_socket(tmp_path: Path) -> None:
    async with shell(tmp_path) as (client, _hive):
        assert "  shop  Delivers orders" in await client.ask("hive")
        assert "shop" in await client.ask("hive settings")
        assert any("serve the admin socket" in line for line in await client.ask("hive hooks"))
        assert "  1. invoked Delivery (shop)" in await client.ask("hive why Delivery")
        assert (await client.ask("hive/timeline"))[0].split() == ["STEP", "TOOK", "BEGAN", "WHAT"]
        assert any("deliver" in line for line in await client.ask("hive/jobs"))
        assert any(line.startswith("shop.deliver") for line in await client.ask("health"))
        assert (await client.ask("health shop"))[0].startswith("MODULE")
        lines = await client.ask("status")
        assert any(line.startswith("tables:") and "2, 0 not complete" in line for line in lines)


async def test_tables_fit_the_width_that_a_client_has(tmp_path: Path) -> None:
    text = "the warehouse does not answer, and orders wait for it"
    async with shell(tmp_path) as (client, hive):
        hive.health.reporter("shop").degraded(text)
        assert any(line.endswith(text) for line in await client.ask("health shop"))
        assert await client.ask("#width 40") == ["<<end>>"]
        narrow = await client.ask("health shop")
        assert max(map(len, narrow)) <= 40
        assert text in " ".join(line.strip() for line in narrow)
        with hive.get(Table[int, Order]).txn() as txn:
            txn.put(Order(1, "a customer with a long name", "192.0.2.1"))  # type: ignore[arg-type]  # any row
        shown = await client.ask("db/show orders")
        assert max(map(len, shown)) <= 40
        assert "not shown: customer" in " ".join(shown)
        asked = await client.ask("db/show --columns=number,customer orders")
        assert asked[0].split() == ["NUMBER", "CUSTOMER"]


async def test_the_log_level_is_shown_and_set(tmp_path: Path) -> None:
    before = log_level()
    try:
        async with shell(tmp_path) as (client, _hive):
            assert await client.ask("log/level warning") == ["warning", "<<end>>"]
            assert log_level() == "warning"
            assert await client.ask("log/level loud") == [
                "log level 'loud': expected one of debug, info, warning, warn, error, critical",
                "<<end>>",
            ]
    finally:
        set_log_level(before)


async def test_a_failed_command_prints_its_error_and_a_mark_on_request(tmp_path: Path) -> None:
    async with shell(tmp_path) as (client, _hive):
        line = "no table is named order; did you mean orders?"
        assert await client.ask("db/show order") == [line, "<<end>>"]
        assert await client.ask("#marks") == ["<<end>>"]
        assert await client.ask("db/show order") == [line, "<<failed>>"]
        assert await client.ask("db") != ["<<failed>>"]
        assert await client.ask("cat /etc/passwd") == ["cat: no such command", "<<failed>>"]


class Thing(msgspec.Struct, frozen=True):
    number: int
    kind: str
    parts: tuple[str, ...] = ("a", "b")


def things() -> Table[int, Thing]:
    return Table("things", key=lambda one: one.number, indexes={"kind": lambda one: [one.kind]})


@pytest.mark.parametrize(
    ("line", "last"),
    [
        ("db/show things", "<<end>>"),
        ("db/show things --format=json", "<<end>>"),
        ("db/list --index=kind things odd", "<<end>>"),
        ("db/prefix things 1", "<<end>>"),
        ("db/get things 19999", "<<end>>"),
        ("db/watch things", "+ 19999"),
    ],
)
async def test_a_large_table_is_shown_without_holding_the_loop(tmp_path: Path, line: str, last: str) -> None:
    """No stretch takes long; and what it takes in all grows with the rows, not with their square."""
    longest = 0.0
    done = threading.Event()

    def ask(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.settimeout(60)
            client.sendall(f"{line}\n".encode())
            seen = b""
            while f"\n{last}".encode() not in seen:
                more = client.recv(1 << 16)
                assert more
                seen = seen[-100:] + more
        done.set()

    async with shell(tmp_path, provide(things), invoke(Table[int, Thing])) as (_, hive):
        with hive.get(Table[int, Thing]).txn() as txn:
            for number in range(20_000):
                txn.put(Thing(number, "odd" if number % 2 else "even"))
        gc.collect()
        gc.disable()  # its pauses are not what is measured
        try:
            asking = threading.Thread(target=ask, args=[tmp_path / "admin.sock"])
            asking.start()
            before = time.thread_time()
            while asking.is_alive():
                await anyio.lowlevel.checkpoint()
                longest = max(longest, (now := time.thread_time()) - before)
                before = now
        finally:
            gc.enable()
    assert done.is_set()
    assert longest < 0.1


async def test_without_file_descriptors_the_shell_waits_and_is_degraded(tmp_path: Path) -> None:
    async with shell(tmp_path) as (_, hive):
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket(socket.AF_UNIX) as late:  # made in time
            late.setblocking(False)
            resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 1, before[1]))
            fillers = list(until_none_is_left())
            try:
                late.connect(str(tmp_path / "admin.sock"))
                await eventually(lambda: health(hive, "admin").level == "degraded")
                cpu = time.thread_time()
                await anyio.sleep(0.5)
                assert time.thread_time() - cpu < 0.1, "it turns in circles"
            finally:
                for filler in fillers:
                    os.close(filler)
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            assert "Too many open files" in health(hive, "admin").message
            await eventually(lambda: health(hive, "admin").level == "ok")


def until_none_is_left() -> Iterator[int]:
    with contextlib.suppress(OSError):
        while True:
            yield os.dup(0)


def health(hive: Hive, module: str) -> HealthStatus:
    return next(one for one in hive.health.snapshot() if one.module == module)


async def test_words_are_completed(tmp_path: Path) -> None:
    async with shell(tmp_path) as (client, _hive):
        assert await client.ask("#complete db/sho") == ["db/show", "<<end>>"]
        assert await client.ask("#complete db/show ") == ["customers", "orders", "<<end>>"]
        assert await client.ask("#complete db/show --format=j") == ["--format=json", "<<end>>"]
        assert await client.ask("#complete log/level d") == ["debug", "<<end>>"]
        assert await client.ask("#complete hive/disable s") == ["shop", "<<end>>"]


async def test_a_table_is_watched_until_the_client_has_enough(tmp_path: Path) -> None:
    async with shell(tmp_path) as (client, hive):
        orders = hive.get(Table[int, Order])
        await client.send("db/watch customers")
        with orders.txn() as txn:
            txn.put(Order(1, "ann", "192.0.2.1"))  # type: ignore[arg-type]
        assert await client.read_line() == "+ ann  name=ann  orders=1"
        with orders.txn() as txn:
            txn.delete(1)
        assert await client.read_line() == "- ann"
        await client.close()  # the hive stops without waiting for anybody, and nothing is left: see started()


async def test_a_client_that_closes_its_side_at_once_gets_its_answers(tmp_path: Path) -> None:
    async with shell(tmp_path):
        async with await anyio.connect_unix(tmp_path / "admin.sock") as stream:
            await stream.send(b"shop/deliver\nlog/level\n")
            await stream.send_eof()
            text = b"".join([part async for part in stream])
        assert text.decode().splitlines() == ["delivered", "<<end>>", log_level(), "<<end>>"]


async def test_exit_closes_the_connection(tmp_path: Path) -> None:
    async with shell(tmp_path) as (client, _hive):
        await client.send("exit")
        with pytest.raises(anyio.EndOfStream):
            await client.read_line()


async def test_clients_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async with shell(tmp_path) as (client, _hive):
        await client.send("db/watch orders")
        async with await anyio.connect_unix(tmp_path / "admin.sock") as stream:
            assert await Client(stream).ask("echo hi") == ["hi", "<<end>>"]


async def test_only_the_owner_may_connect_and_the_file_goes_with_the_hive(tmp_path: Path) -> None:
    async with shell(tmp_path):
        assert stat.S_IMODE((tmp_path / "admin.sock").stat().st_mode) == 0o600
    assert not (tmp_path / "admin.sock").exists()


async def test_a_socket_that_is_served_is_not_taken(tmp_path: Path) -> None:
    async with shell(tmp_path):
        with pytest.raises(StartError, match="another process serves"):
            await Hive(admin(), settings={"admin-socket": tmp_path / "admin.sock"}).start()


async def test_without_a_path_nothing_is_served() -> None:
    async with started(admin(), settings={"admin-socket": None}) as hive:
        assert [hook.name for hook in hive.graph().hooks] == []


async def test_the_socket_may_be_anybodys_setting(tmp_path: Path) -> None:
    class Place:
        path = tmp_path / "mine.sock"

    def mine(place: Place) -> AdminSocket:
        return AdminSocket(place.path)

    async with started(admin(mine), provide(Place)) as hive:
        assert (tmp_path / "mine.sock").is_socket()
        assert not [option.name for option in hive.options()]


async def test_a_module_is_stopped_when_that_was_confirmed_and_comes_back(tmp_path: Path) -> None:
    def count(things: Table[int, Thing]) -> None: ...

    path = tmp_path / "admin.sock"
    cells = (module("things", "Things", provide(things)), module("count", "Counts", invoke(count)))
    hive = started(*cells, admin(), settings={"admin-socket": path})
    async with hive as running, await anyio.connect_unix(path) as stream:
        client = Client(stream)
        asked = [
            "this stops 2 modules: things, count",
            "hive/enable things starts them again; to stop them, add --yes",
        ]
        assert await client.ask("hive/disable things") == [*asked, "<<end>>"]
        await client.ask("#marks")
        assert await client.ask("hive/disable things") == [*asked, "<<confirm>>"]
        assert running.modules.disabled == []
        assert await client.ask("hive/disable things --yes") == ["stopped: things, count", "<<end>>"]
        assert await client.ask("hive/enable things") == ["started: things, count", "<<end>>"]


async def test_every_change_through_the_shell_has_one_line_in_the_log(tmp_path: Path) -> None:
    path, before = tmp_path / "admin.sock", log_level()
    hive = started(module("things", "Things", provide(things)), admin(), settings={"admin-socket": path})
    looks = ["hive/disable things", "log/level", "log/level loud", "hive/disable nothing", "status", "help"]
    changes = [
        ("hive/disable things --yes", "disabled: nothing", "disabled: things"),
        ("hive/enable things", "disabled: things", "disabled: nothing"),
        ("log/level error", "log level debug", "log level error"),
    ]
    try:
        async with hive as running, await anyio.connect_unix(path) as stream:
            changing = {one.name for one in running.get(AdminServer).engine.commands.values() if one.changes}
            assert changing == {line.split()[0] for line, *_ in changes}
            set_log_level("debug")
            client = Client(stream)
            with capture_logs() as logged:
                for line in (*looks, *(line for line, *_ in changes)):
                    await client.ask(line)
    finally:
        set_log_level(before)
    assert [one for one in logged if one["event"] == "changed through the shell"] == [
        {
            "event": "changed through the shell",
            "log_level": "info",
            "module": "admin",
            "command": line,
            "old": old,
            "new": new,
            "uid": os.geteuid(),
            "pid": os.getpid(),
        }
        for line, old, new in changes
    ]


@pytest.mark.parametrize("name", ["admin", "shop"])
async def test_what_runs_the_shell_is_not_stopped_by_it(tmp_path: Path, name: str) -> None:
    """Nothing could bring it back. The commands that a shop contributes make the shell need it."""
    async with shell(tmp_path) as (client, hive):
        why = "admin, which runs this shell, would stop with it, and nothing could start them again"
        for flag in ("", " --yes"):
            assert await client.ask(f"hive/disable {name}{flag}") == [
                f"{name} is not stopped: {why}",
                "<<end>>",
            ]
        assert hive.modules.disabled == []


async def test_what_is_to_run_on_is_not_stopped_with_what_it_needs(tmp_path: Path) -> None:
    def count(things: Table[int, Thing]) -> None: ...

    path = tmp_path / "kept.sock"
    place = AdminSocket(path, keeps={"count": "nobody would count"})
    cells = (
        module("things", "Things", provide(things)),
        module("count", "Counts", invoke(count)),
    )

    def socket_place() -> AdminSocket:
        return place

    async with started(*cells, admin(socket_place)) as hive, await anyio.connect_unix(path) as stream:
        for module_name in ("count", "things"):
            assert await Client(stream).ask(f"hive/disable {module_name} --yes") == [
                f"{module_name} is not stopped: count would stop with it, and nobody would count",
                "<<end>>",
            ]
        assert hive.modules.disabled == []


async def test_a_server_that_stops_ends_its_connections(tmp_path: Path) -> None:
    async with shell(tmp_path) as (_, hive):
        await hive.modules.disable("admin")
        assert not (tmp_path / "admin.sock").exists()
