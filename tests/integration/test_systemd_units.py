"""The units of configs/systemd, as systemd itself reads them."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

UNITS = Path(__file__).resolve().parents[2] / "configs" / "systemd"
API_FILESYSTEM = re.compile(r"Cannot create mount unit for API file system '?/sys/fs/bpf'?\. Refusing\.")
"""Newer versions of systemd quote the path."""


RUN = Path("/run/systemd")


@pytest.fixture(autouse=True)
def run_directory() -> Iterator[None]:
    """systemd-analyze makes it where systemd does not run."""
    there = RUN.exists()
    yield
    if not there:
        shutil.rmtree(RUN, ignore_errors=True)


def verify(unit: Path) -> str:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    return done.stderr


def test_the_bpffs_mount_is_a_unit_systemd_takes(tmp_path: Path) -> None:
    """Newer systemd mounts bpffs itself and refuses any unit for it: its text is tried elsewhere too."""
    unit = UNITS / "sys-fs-bpf.mount"
    reported = [line for line in verify(unit).splitlines() if not API_FILESYSTEM.search(line)]
    assert [line for line in reported if "bad unit file setting" not in line] == []

    elsewhere = tmp_path / "run-other-bpf.mount"
    elsewhere.write_text(unit.read_text().replace("Where=/sys/fs/bpf", "Where=/run/other/bpf"))
    assert verify(elsewhere) == ""


def test_a_misspelt_key_would_be_found(tmp_path: Path) -> None:
    unit = tmp_path / "run-other-bpf.mount"
    text = (UNITS / "sys-fs-bpf.mount").read_text().replace("Where=/sys/fs/bpf", "Where=/run/other/bpf")
    unit.write_text(text.replace("What=", "what="))
    assert "'what'" in verify(unit)
