"""How Envoy is run."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest
import structlog

from cells.proxy.envoy import EnvoyProgramSettings, EnvoySettings
from cells.proxy.envoy.ports import EnvoyProgram
from cells.proxy.envoy.process import EnvoyError, Process
from cells.proxy.envoy.resources import EnvoyFiles

pytestmark = pytest.mark.anyio


def program(folder: Path) -> Process:
    """In Envoy's place, what writes which files it has."""
    place = EnvoyFiles(folder / "envoy")
    place.folder.mkdir()
    script = folder / "envoy.sh"
    script.write_text(f"#!/bin/sh\nls -l /proc/$$/fd > {folder}/files\nexit 3\n", encoding="utf-8")
    script.chmod(0o755)
    run = EnvoyProgram(EnvoyProgramSettings(envoy_path=script))
    return Process(EnvoySettings(envoy_log=folder / "log"), run, place, structlog.get_logger())


async def test_it_is_started_when_it_is_wanted_and_gets_no_file_of_others(tmp_path: Path) -> None:
    process, wanted = program(tmp_path), anyio.Event()
    with anyio.move_on_after(0.05):
        await process.run(wanted)
    assert not (tmp_path / "files").exists(), "nobody needs it yet"
    wanted.set()
    with (tmp_path / "lock").open("wb") as lock:
        os.set_inheritable(lock.fileno(), True)
        with pytest.raises(EnvoyError, match=r"status 3: see .*/log"):
            await process.run(wanted)
    files = (tmp_path / "files").read_text(encoding="utf-8")
    assert "/dev/null" in files
    assert "lock" not in files
