"""Recordings of Cilium's programs: an archive for each area, unpacked once into build/recordings.

    python -m tests.support.recordings list policy
    python -m tests.support.recordings show policy/cidr_except
    python -m tests.support.recordings pack policy FOLDER

``pack`` makes the archive of an area from all files of a folder, such as the unpacked one with one more.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHIVES = ROOT / "tests" / "recordings"
INDEX = ARCHIVES / "index.json"
"""All recordings of Cilium's clients, also those in no archive."""
UNPACKED = ROOT / "build" / "recordings"


@cache
def recordings(area: str) -> Path:
    """Return the folder with the files of an area. Several processes may call it at once."""
    data = (ARCHIVES / f"{area}.tar.xz").read_bytes()
    folder = UNPACKED / f"{area}-{hashlib.sha256(data).hexdigest()[:12]}"
    if not folder.is_dir():
        UNPACKED.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{area}-", dir=UNPACKED))
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                path = fresh / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.extractfile(member).read())  # type: ignore[union-attr]  # files alone
        try:
            fresh.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(fresh)
    return folder


def recorded(name: str) -> Path:
    """Return a recording's file by area and name: ``cni/add``."""
    area, _, rest = name.partition("/")
    return recordings(area) / f"{rest}.json"


def pack(area: str, folder: Path) -> None:
    """Write the archive of an area from a folder's files, reproducible byte by byte."""
    target = ARCHIVES / f"{area}.tar.xz"
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            member = tarfile.TarInfo(str(path.relative_to(folder)))
            member.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(member, file)


def main(arguments: list[str]) -> int:
    """Execute the commands of the module's docstring."""
    match arguments:
        case ["list"]:
            print(*sorted(path.name.removesuffix(".tar.xz") for path in ARCHIVES.glob("*.tar.xz")), sep="\n")
        case ["list", area]:
            folder = recordings(area)
            print(*sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*")), sep="\n")
        case ["show", name]:
            print(recorded(name.removesuffix(".json")).read_text(encoding="utf-8"))
        case ["pack", area, folder] if Path(folder).is_dir():
            pack(area, Path(folder))
        case _:
            print(__doc__, file=sys.stderr)
            return os.EX_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
