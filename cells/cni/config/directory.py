"""The container runtime's directory of configurations: our file in it, and the others out of its way.

Needs: nothing.   Gives: write_file, put_aside, BACKUP.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from lifecycle.settings import read_regular

MODE: Final = 0o600
BACKUP: Final = ".cilium_bak"
OLD_NAME: Final = "05-cilium.conf"
"""What our file was called before it was a list."""
_CONFIGURATIONS: Final = (".conf", ".conflist", ".json")


def write_file(path: Path, wanted: bytes) -> bool:
    """Make the file hold ``wanted``, at once or not at all; False when it did already and was not touched.

    Makes missing directories. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if read_regular(path) == wanted:
            return False
    except FileNotFoundError:
        pass
    fresh = path.with_name(f".{path.name}.new")  # no name a runtime would read
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, MODE)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123  # an open descriptor, with its mode
            os.fchmod(descriptor, MODE)
            file.write(wanted)
            file.flush()
            os.fsync(descriptor)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return True


def put_aside(own: Path, *, exclusive: bool) -> list[str]:
    """Rename configurations that would be read instead of ours; their names.

    Our own of an earlier make always, those of others when we are to be alone. Raises OSError.
    """
    aside = []
    for path in sorted(own.parent.iterdir()):
        foreign = exclusive and path.suffix in _CONFIGURATIONS and not path.name.startswith(".")
        if path.name == own.name or path.is_dir() or not (foreign or path.name == OLD_NAME):
            continue
        path.replace(path.with_name(path.name + BACKUP))
        aside.append(path.name)
    return aside
