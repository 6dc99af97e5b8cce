"""Writes the configuration directory atomically, as Kubernetes writes a mounted ConfigMap."""

import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hive.config.build_config.sources import Report

DATA = "..data"
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")


def write_directory(directory: Path, values: Mapping[str, str], report: Report) -> None:
    """Replace the directory's files by these values; readers see either the old or the new ones.

    Files are links through ``..data`` to the newest of ``..data_*``; unused links and data of earlier runs
    are removed. Raises OSError; then the previous values stay.
    """
    wrong = sorted(key for key in values if not _is_key(key))
    for key in wrong:
        report(f"error: {key!r} is not a key of a ConfigMap: left out")
    keys = [key for key in values if key not in wrong]
    directory.mkdir(parents=True, exist_ok=True)
    fresh = _new_data(directory)
    try:
        for key in keys:
            path = fresh / key
            path.write_text(values[key], encoding="utf-8")
            path.chmod(0o644)
        # Links first: each dangles, or shows the previous value, until ..data is replaced.
        for key in keys:
            if not (directory / key).is_symlink():
                _replace_link(directory / key, f"{DATA}/{key}")
        _replace_link(directory / DATA, fresh.name)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    _sweep(directory, fresh)


def _is_key(key: str) -> bool:
    """Whether a ConfigMap may have the key (IsConfigMapKey of Kubernetes)."""
    return _KEY.fullmatch(key) is not None and key != "." and not key.startswith("..")


def _new_data(directory: Path) -> Path:
    second = int(time.time())
    while True:
        fresh = directory / f"{DATA}_{second}"
        with suppress(FileExistsError):
            fresh.mkdir(mode=0o755)
            return fresh
        second += 1


def _replace_link(path: Path, target: str) -> None:
    temporary = path.with_name(f"..{path.name.lstrip('.')}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)


def _sweep(directory: Path, allowed: Path) -> None:
    for path in directory.iterdir():
        if path.is_symlink() and path.readlink().parts[0] == DATA and not path.exists():
            path.unlink()
        elif path.name.startswith(f"{DATA}_") and path != allowed and not path.is_symlink():
            shutil.rmtree(path)
