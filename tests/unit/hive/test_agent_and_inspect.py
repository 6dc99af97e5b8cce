"""``hive agent`` and ``hive inspect`` on a small hive: settings, formats, faults, exit codes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hive.agent import preload
from lifecycle import (
    Cell,
    HiveError,
    Hook,
    Lifecycle,
    Settings,
    Shutdown,
    UsageError,
    config,
    invoke,
    module,
    provide,
)
from tests.support.command_line import hive

started: list[str] = []


class KeeperSettings(Settings, frozen=True):
    """Settings of the keeper."""

    bee_count: int = 3
    """How many bees there are."""

    smoke: bool = False
    """Whether there is smoke."""

    def validate(self) -> None:
        """Refuse too many."""
        if self.bee_count > 9000:
            raise ValueError(f"bee-count={self.bee_count}: expected at most 9000; use a second hive")


class Keeper:
    """Counts its bees, and ends the hive."""

    def __init__(self, settings: KeeperSettings, lifecycle: Lifecycle, shutdown: Shutdown) -> None:
        self._settings, self._shutdown = settings, shutdown
        lifecycle.append(Hook("count", self._start))

    async def _start(self) -> None:
        started.append(f"{self._settings.bee_count} bees")
        if self._settings.smoke:
            raise HiveError("there is smoke: open the lid")
        if self._settings.bee_count == 0:
            raise UsageError("bee-count=0: a hive needs bees")
        self._shutdown.request()


class Missing:
    """It is not provided."""


class Broken:
    """Needs what is not provided, twice."""

    def __init__(self, first: Missing, second: "frozenset[Missing]") -> None:
        self.first, self.second = first, second


GOOD = module(
    "apiary",
    "Where the hives stand",
    module("keeper", "Keeps bees", config(KeeperSettings), provide(Keeper), invoke(Keeper)),
)
FAULTY = module("apiary", "Where the hives stand", provide(Broken))


@pytest.fixture(autouse=True)
def apiary(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, GOOD)
    started.clear()


def stand_in(monkeypatch: pytest.MonkeyPatch, cell: Cell) -> None:
    """Let `cell` be what the command takes for the agent, of which nothing is loaded into the kernel."""
    monkeypatch.setattr(preload, "preload", lambda _: None)
    monkeypatch.setitem(sys.modules, "cells.agent", SimpleNamespace(agent=cell))


def test_the_agent_runs_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    result = hive(capsys, "agent")
    assert result.code == 0, result.err
    assert started == ["3 bees"]


def test_settings_come_from_flags_variables_and_the_config_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bee-count").write_text("5\n")
    hive(capsys, "agent", f"--config-dir={tmp_path}")
    monkeypatch.setenv("CILIUM_BEE_COUNT", "6")
    hive(capsys, "agent", "--config-dir", tmp_path)
    hive(capsys, "agent", "--config-dir", tmp_path, "--bee-count=7")
    assert started == ["5 bees", "6 bees", "7 bees"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--bee-cuont=3"], "hive: --bee-cuont: no such setting; did you mean --bee-count?"),
        (["--bee-count=9001"], "hive: --bee-count=9001: expected at most 9000; use a second hive"),
        (["--bee-count=0"], "hive: bee-count=0: a hive needs bees"),
        (["stray"], "hive: stray: not expected here; settings are --name=value"),
        (
            ["--config-dir=/nowhere"],
            "hive: config-dir /nowhere: no such file or directory; expected a directory",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = hive(capsys, "agent", *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines()[-1] == line
    assert "Traceback" not in result.err


def test_every_wrong_setting_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    result = hive(capsys, "agent", "--bee-count=many", "--smok=true")
    assert result.code == 2
    assert len(result.err.splitlines()) == 2


def test_a_fault_of_the_node_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    result = hive(capsys, "agent", "--smoke")
    assert result.code == 1
    assert result.err.splitlines()[-1] == "hive: there is smoke: open the lid"
    assert "Traceback" not in result.err


def test_help_lists_every_setting_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["--bee-count=5", "-h"]):
        result = hive(capsys, "agent", *arguments)
        assert (result.code, started) == (0, [])
        assert "--bee-count int" in result.out
        assert "How many bees there are. [3]" in result.out
        assert "Whether there is smoke. [false]" in result.out


def test_a_tree_shows_modules_settings_and_hooks(capsys: pytest.CaptureFixture[str]) -> None:
    result = hive(capsys, "inspect", "--bee-count=5")
    assert (result.code, result.err, started) == (0, "", [])
    for part in ("keeper", "Keeps bees", "2 settings, 1 given", "Keeper", "count"):
        assert part in result.out
    settings = hive(capsys, "inspect", "--settings", "--bee-count=5").out
    assert "bee-count" in settings
    assert "flag --bee-count" in settings


def test_dot_is_a_graph_for_graphviz(capsys: pytest.CaptureFixture[str]) -> None:
    result = hive(capsys, "inspect", "--format", "dot")
    assert (result.code, started) == (0, [])
    assert result.out.startswith("digraph")
    assert "Keeper" in result.out
    assert result.out.rstrip().endswith("}")


def test_json_is_one_object_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    result = hive(capsys, "inspect", "--format=json")
    assert (result.code, started) == (0, [])
    graph = json.loads(result.out)
    assert "Keeps bees" in {one["title"] for one in graph["modules"]}
    assert [one["name"] for one in graph["settings"]] == ["bee-count", "smoke"]


def test_a_broken_graph_shows_all_its_faults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, FAULTY)
    result = hive(capsys, "inspect")
    assert result.code == 1
    assert "(missing)" in result.out
    assert "2 faults" in result.err
    assert result.err.count("Missing") >= 2
    assert hive(capsys, "agent").code == 2


def test_inspect_refuses_wrong_settings_and_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert hive(capsys, "inspect", "--bee-count=9001").code == 2
    assert hive(capsys, "inspect", "--format", "svg").code == 2


ENDING = """
import sys
import anyio
from lifecycle import Hive, configure_logging

configure_logging("info", "logfmt")
code = anyio.run(Hive(name="daemon").run_to_the_end)
print("left", flush=True)
sys.stdin.readline()
sys.exit(code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_when_the_agent_has_stopped_changes_nothing(number: signal.Signals) -> None:
    command = [sys.executable, "-c", ENDING]
    pipe, paths = subprocess.PIPE, os.pathsep.join(sys.path)
    with subprocess.Popen(
        command, text=True, env={**os.environ, "PYTHONPATH": paths}, stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "msg=started" not in (line := process.stderr.readline()):
            assert line
        process.terminate()
        assert process.stdout.readline() == "left\n"
        process.send_signal(number)
        out, err = process.communicate("\n", timeout=60)
    assert (process.returncode, out) == (0, "")
    assert err.splitlines()[-1].endswith("msg=stopped module=daemon")
