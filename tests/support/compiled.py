"""Compiles objects from the datapath's sources for tests, each once for all processes and runs.

A compilation takes up to eight seconds of processor time. Its result is cached in ``.make/objects`` under the
digest of all inputs, so that a change of any source creates another one.
"""

from __future__ import annotations

import fcntl
import hashlib
from functools import cache
from pathlib import Path
from typing import Final

from cells.datapath.build import FLAGS, SOURCES, compile_one, find_clang, major_version, tagged
from cells.datapath.settings import PACKAGED_OBJECTS

HELD: Final = Path(__file__).resolve().parents[2] / ".make" / "objects"


@cache
def compiled(source: Path, *headers: Path) -> Path:
    """Return the object of a source that may include the datapath's. Raises ObjectBuildError."""
    folders = [SOURCES, *headers, source.parent]
    files = sorted({file for folder in folders for file in folder.rglob("*.[ch]")})
    digest = hashlib.sha256(repr((FLAGS, major_version(find_clang()))).encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    HELD.mkdir(parents=True, exist_ok=True)
    with (HELD / f"{source.stem}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = HELD / f"{source.stem}-{digest.hexdigest()[:16]}.o"
        if not found.exists():
            for previous in HELD.glob(f"{source.stem}-*.o"):
                previous.unlink()
            compile_one(find_clang(), source, found, *headers)
    return found


def another_build(folder: Path) -> Path:
    """Return the packaged datapath with a tag, which an agent takes for another build of the same source."""
    return tagged(PACKAGED_OBJECTS / "datapath.o", folder / "datapath.o", "other")
