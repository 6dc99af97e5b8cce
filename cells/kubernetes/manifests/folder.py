"""The files of a folder and what is in them: each as it was last good.

Needs: nothing.   Gives: Folder.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from cells.kubernetes.manifests.file import ManifestFile
from cells.kubernetes.manifests.others import mistake
from cells.kubernetes.manifests.parse import Other, Parsed, Problem, parse
from cells.kubernetes.objects import KINDS, Key, Kind, Object

SUFFIXES: Final = (".yaml", ".yml", ".json")
LARGEST: Final = 64 * 1024 * 1024
"""Bytes of one file."""


class _Read(msgspec.Struct, frozen=True):
    stamp: tuple[int, int, int]
    objects: tuple[Parsed, ...]
    error: str = ""
    ever_good: bool = True
    left_out: str = ""
    others: tuple[str, ...] = ()


class Folder:
    """Reads a folder; what cannot be read keeps its last good objects."""

    def __init__(self, path: Path, kinds: tuple[Kind[Any], ...] = KINDS) -> None:
        self._path = path
        self._kinds = kinds
        self._files: dict[str, _Read] = {}

    @property
    def complete(self) -> bool:
        """Whether every file there is has been good once: only then does absence mean anything."""
        return all(one.ever_good for one in self._files.values())

    @property
    def empty(self) -> bool:
        """Whether there is no manifest at all."""
        return not self._files

    def read(self, names: Iterable[str] | None = None) -> bool:
        """Look at the files of those names, or at all; whether anything has changed. Raises OSError."""
        if names is None:
            there = {one.name for one in os.scandir(self._path)}
            names = there | set(self._files)
        before = dict(self._files)
        for name in sorted(names):
            if is_manifest(name):
                self._look(name)
        return before != self._files

    def files(self) -> list[ManifestFile]:
        """Every file, by name."""
        clashes = self._merged()[1]
        return [
            ManifestFile(name, len(one.objects), one.error or clashes.get(name, ""), one.left_out, one.others)
            for name, one in sorted(self._files.items())
        ]

    def objects(self) -> dict[str, dict[Key, Object]]:
        """What is in force: kind (``pods``), key, object. Of one in two files the first counts."""
        return self._merged()[0]

    def _merged(self) -> tuple[dict[str, dict[Key, Object]], dict[str, str]]:
        merged: dict[str, dict[Key, Object]] = defaultdict(dict)
        owners: dict[tuple[str, Key], str] = {}
        clashes: dict[str, str] = {}
        for name, read in sorted(self._files.items()):
            for one in read.objects:
                owner = owners.setdefault((one.kind.qualified, one.key), name)
                if owner == name:
                    merged[one.kind.qualified][one.key] = one.kind.kept(one.row)
                    continue
                shown = "/".join(part for part in one.key if part)
                place = f"{self._path / name}:{one.place.line}:{one.place.column}"
                clashes.setdefault(
                    name, f"{place}: {one.kind.kind} {shown} stands in {owner} already, which counts"
                )
        return merged, clashes

    def _look(self, name: str) -> None:
        path = self._path / name
        known = self._files.get(name)
        try:
            found = path.stat()
        except FileNotFoundError:
            self._files.pop(name, None)
            return
        except OSError as error:
            self._files[name] = self._broken(known, (0, 0, 0), f"{path}: {error.strerror}")
            return
        stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
        if not path.is_file() or (known is not None and known.stamp == stamp):
            return
        if found.st_size > LARGEST:
            told = f"{path}: {found.st_size} bytes; expected at most {LARGEST}"
            self._files[name] = self._broken(known, stamp, told)
            return
        try:
            objects, others = parse(path.read_bytes(), self._kinds)
        except Problem as error:
            self._files[name] = self._broken(known, stamp, f"{path}:{error}")
        except OSError as error:
            self._files[name] = self._broken(known, stamp, f"{path}: {error.strerror}")
        else:
            left_out, rest = self._sorted(path, others)
            self._files[name] = _Read(stamp, tuple(objects), left_out=left_out, others=rest)

    def _broken(self, known: _Read | None, stamp: tuple[int, int, int], error: str) -> _Read:
        if known is None:
            return _Read(stamp, (), error, ever_good=False)
        return msgspec.structs.replace(known, stamp=stamp, error=error)

    def _sorted(self, path: Path, others: list[Other]) -> tuple[str, tuple[str, ...]]:
        """Of objects that are not read: what may be a mistake, in one line, and the kinds of the rest."""
        told = [(one, mistake(one.api_version, one.kind, self._kinds)) for one in others]
        doubtful = [(one.place, what) for one, what in told if what]
        rest = tuple(sorted({one.kind for one, what in told if not what}))
        if not doubtful:
            return "", rest
        place, what = doubtful[0]
        more = f" (and {len(doubtful) - 1} more)" if len(doubtful) > 1 else ""
        return f"{path}:{place.line}:{place.column}: {what}{more}", rest


def is_manifest(name: str) -> bool:
    """Whether a file of this name is read: no hidden ones, nothing an editor keeps beside them."""
    return name.endswith(SUFFIXES) and not name.startswith(".")
