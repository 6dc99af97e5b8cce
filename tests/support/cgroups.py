"""A control group for one test: programs attached to it see the test's processes only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import eventually


def unified() -> Path:
    """Return where cgroup v2 is mounted, also on a machine that has version 1 as well."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        place, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            return Path(place.split(" ")[4])
    pytest.fail("no cgroup v2 is mounted: mount -t cgroup2 none /sys/fs/cgroup/unified")


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Create an empty control group; it is removed once its processes have ended."""
    group = unified() / f"hive-test-{os.getpid()}-{os.urandom(4).hex()}"
    group.mkdir()
    yield group

    def removed() -> bool:
        for each in sorted(group.rglob("*"), reverse=True):
            if each.is_dir():
                each.rmdir()
        group.rmdir()
        return True

    eventually(removed)


def join(group: Path) -> None:
    """Move this process into the control group; sockets created from now on belong to it."""
    (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
