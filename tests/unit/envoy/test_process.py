"""How Envoy is run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import msgspec
import pytest
import structlog

from cells.base.processes import exit_code
from cells.proxy.envoy import EnvoyProgramSettings, EnvoySettings, end_envoy
from cells.proxy.envoy.ports import EnvoyProgram
from cells.proxy.envoy.process import EnvoyError, Process
from cells.proxy.envoy.resources import EnvoyFiles
from lifecycle.testing import eventually

pytestmark = pytest.mark.anyio


def program(folder: Path) -> Process:
    """In Envoy's place, what writes which files it has."""
    place = EnvoyFiles(folder / "envoy")
    place.folder.mkdir()
    script = folder / "envoy.sh"
    script.write_text(f"#!/bin/sh\nls -l /proc/$$/fd > {folder}/files\nexit 3\n", encoding="utf-8")
    script.chmod(0o755)
    return process(folder)


def process(folder: Path) -> Process:
    """Another agent's."""
    run = EnvoyProgram(EnvoyProgramSettings(envoy_path=folder / "envoy.sh"))
    settings, place = EnvoySettings(envoy_log=folder / "log"), EnvoyFiles(folder / "envoy")
    return Process(settings, run, place, structlog.get_logger())


async def test_it_is_started_when_it_is_wanted_and_gets_no_file_of_others(tmp_path: Path) -> None:
    envoy, wanted = program(tmp_path), anyio.Event()
    with anyio.move_on_after(0.05):
        await envoy.run(wanted)
    assert not (tmp_path / "files").exists(), "nobody needs it yet"
    wanted.set()
    with (tmp_path / "lock").open("wb") as lock:
        os.set_inheritable(lock.fileno(), True)
        with pytest.raises(EnvoyError, match=r"status 3: see .*/log"):
            await envoy.run(wanted)
    files = (tmp_path / "files").read_text(encoding="utf-8")
    assert "/dev/null" in files
    assert "lock" not in files


LISTENING = """#!{python}
import pathlib, socket, time
path = pathlib.Path({admin!r})
path.unlink(missing_ok=True)
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(str(path))
    listener.listen()
    time.sleep(60)
"""
"""In Envoy's place, what has a socket for its administration."""


@pytest.mark.parametrize("record", [None, b'{"pid":'])
async def test_an_envoy_without_a_record_of_its_pid_is_ended_before_another_starts(
    record: bytes | None,
) -> None:
    with TemporaryDirectory() as short:  # a path that leaves room for a socket
        await restarts(Path(short), record)


async def restarts(folder: Path, record: bytes | None) -> None:
    place = EnvoyFiles(folder / "envoy")
    path = place.folder / "envoy.pid"
    first, wanted = program(folder), anyio.Event()
    script = LISTENING.format(python=sys.executable, admin=str(place.admin))
    (folder / "envoy.sh").write_text(script, encoding="utf-8")
    wanted.set()

    def pid() -> int:
        return int(msgspec.json.decode(path.read_bytes())["pid"])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.run, wanted)
        await eventually(place.admin.exists)
        tasks.cancel_scope.cancel()
    before = pid()
    path.unlink()
    if record is not None:
        path.write_bytes(record)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(process(folder).run, wanted)
        await eventually(lambda: pid() != before)
        tasks.cancel_scope.cancel()
    await eventually(lambda: exit_code(before) is not None)
    await eventually(lambda: end_envoy(folder) == [f"Envoy, pid {pid()}"])
    await eventually(lambda: exit_code(pid()) is not None)
