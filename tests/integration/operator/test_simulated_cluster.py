"""A real operator in a seeded random cluster: churn and failures in virtual time, each event checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.support.simulation import Size

pytestmark = pytest.mark.timeout(300)
SIZE = Size(nodes=20, pods=150, services=10, policies=10, workloads=20)
EVENTS = 15


def run(folder: Path, seed: int, read: str) -> subprocess.Popen[str]:
    """A run, started."""
    folder.mkdir()
    size = json.dumps(msgspec.to_builtins(SIZE))
    command = [sys.executable, "-m", "tests.support.simulated_run", str(folder), str(seed), str(EVENTS)]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, size, read], stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize(("seed", "read"), [(1, "endpoints"), (2, "slices")])
def test_an_operator_deletes_what_is_left_and_nothing_in_use_and_a_seed_replays(
    tmp_path: Path, seed: int, read: str
) -> None:
    logs = []
    with run(tmp_path / "first", seed, read) as first, run(tmp_path / "again", seed, read) as again:
        for one in (first, again):
            stdout, stderr = one.communicate()
            assert one.returncode == 0, f"seed {seed}:\n{stdout[-2000:]}\n{stderr[-4000:]}"
            logs.append(stdout.splitlines())
    assert len(logs[0]) == EVENTS + 2
    assert logs[0] == logs[1]
