"""The messages that systemd gets from a hive: stages, progress, time-outs, the watchdog."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from lifecycle import Cell, Hive, Hook, Lifecycle, Logger, StartError, invoke, module
from lifecycle.production import Phase, systemd
from lifecycle.testing import eventually, started

pytestmark = pytest.mark.anyio


class Manager:
    """systemd's end of the socket."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)
        self.heard: list[dict[str, str]] = []

    def listen(self) -> list[dict[str, str]]:
        """All messages so far, by field."""
        try:
            while True:
                lines = self.socket.recv(4096).decode().split("\n")
                self.heard.append(dict(line.split("=", 1) for line in lines))
        except BlockingIOError:
            return self.heard

    def has(self, field: str) -> bool:
        return any(field in one for one in self.listen())


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    found = Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    yield found
    found.socket.close()


def slow(name: str, go: anyio.Event, *, stop: anyio.Event | None = None) -> Cell:
    def slow_cell(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook(name, go.wait, stop.wait if stop else None, start_timeout=40, stop_timeout=7))

    return invoke(slow_cell)


async def test_a_start_and_a_stop_are_shown_with_what_they_wait_for(manager: Manager) -> None:
    go, end = anyio.Event(), anyio.Event()
    hive = Hive(systemd(), slow("open the shop", go, stop=end))
    async with anyio.create_task_group() as group:
        group.start_soon(hive.start)
        await eventually(lambda: any("open the shop" in one.get("STATUS", "") for one in manager.listen()))
        last = manager.heard[-1]
        assert last["STATUS"].startswith("starting: ")
        assert int(last["EXTEND_TIMEOUT_USEC"]) == 45_000_000, "what the hive allows the hook, and a little"
        assert not manager.has("READY")
        go.set()
        await eventually(lambda: manager.has("READY"))
    assert hive.get(Phase).stage == "running"
    async with anyio.create_task_group() as group:
        group.start_soon(hive.stop)
        await eventually(lambda: "open the shop" in manager.listen()[-1]["STATUS"])
        assert [one for one in manager.heard if "STOPPING" in one] == [
            {"STOPPING": "1", "STATUS": "stopping"}
        ]
        assert int(manager.heard[-1]["EXTEND_TIMEOUT_USEC"]) == 12_000_000
        assert not any(one.get("STATUS", "").endswith(("; ", "hooks left;")) for one in manager.heard)
        end.set()
    assert hive.get(Phase).stage == "stopped"


async def test_a_hive_that_does_not_start_is_never_ready(manager: Manager) -> None:
    async def fail() -> None:
        raise OSError("no")

    def failing(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("fail", fail))

    with pytest.raises(StartError):
        await Hive(systemd(), invoke(failing)).start()
    assert manager.has("STOPPING")
    assert not manager.has("READY")


async def test_the_watchdog_beats_only_while_the_loop_turns(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    async with started(systemd()):
        await eventually(lambda: len([one for one in manager.listen() if "WATCHDOG" in one]) > 3)
        manager.listen()
        before = len(manager.heard)
        time.sleep(0.1)  # noqa: ASYNC251  # what a watchdog is for
        assert len(manager.listen()) == before
    monkeypatch.setenv("WATCHDOG_PID", "1")
    manager.heard.clear()
    async with started(systemd()):
        await anyio.sleep(0.05)
    assert not manager.has("WATCHDOG"), "it is another process's"


async def test_without_systemd_nothing_is_sent_and_nothing_fails(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET")
    async with started(systemd()):
        assert manager.listen() == []
    for address in (str(tmp_path / "nowhere"), "vsock:2:1"):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        async with started(systemd()) as hive:
            assert hive.get(Phase).stage == "running"


async def test_a_name_in_the_abstract_namespace_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"lifecycle-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract:
        abstract.bind(f"\0{name}")
        abstract.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        async with started(systemd()):
            assert b"STATUS=" in abstract.recv(4096)


async def test_a_module_that_is_disabled_is_silent(manager: Manager) -> None:
    async with started(systemd(), module("rest", "The rest", invoke(rest))) as hive:
        await hive.modules.disable("systemd")
        count = len(manager.listen())
    assert len(manager.listen()) == count


def rest(log: Logger) -> None:
    """Something else."""
