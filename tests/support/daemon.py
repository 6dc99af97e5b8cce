"""Runs a small daemon: the shop of the script tests, with an admin socket, in a folder of its own."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """\
import sys
sys.path[:0] = [{root!r}]
from lifecycle import Hive, invoke, main, module
from lifecycle.admin import admin
from tests.unit.lifecycle.testing.script import shop
def spare() -> None: ...
main(Hive(shop.cell, admin(), module("spare", "May be stopped", invoke(spare)), name="store"))
"""
DEADLINE = 60.0


@contextmanager
def running(folder: Path) -> Iterator[None]:
    """Run ``shop.py`` in the folder, where it serves admin.sock. AssertionError if it does not."""
    command = folder / "shop.py"
    command.write_text(PROGRAM.format(root=str(ROOT)))
    log = folder / "log"
    with log.open("w") as out, subprocess.Popen([sys.executable, command], cwd=folder, stderr=out) as process:
        try:
            until = time.monotonic() + DEADLINE
            while "msg=started" not in log.read_text():
                assert time.monotonic() < until, log.read_text()
                assert process.poll() is None, log.read_text()
                time.sleep(0.01)
            yield
        finally:
            process.terminate()
        assert process.wait(DEADLINE) == 0, log.read_text()
