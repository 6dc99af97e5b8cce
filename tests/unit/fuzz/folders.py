"""Folders with arbitrary contents."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st

from lifecycle.settings.regular import LARGEST


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_directory(path: Path) -> None:
    path.mkdir()


def a_loop(path: Path) -> None:
    path.symlink_to(path.name)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def too_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(LARGEST + 1)


@dataclass(frozen=True)
class Holding:
    """A file with these bytes."""

    contents: bytes = field(repr=False)

    def __call__(self, path: Path) -> None:
        path.write_bytes(self.contents)


Put = Callable[[Path], None]
instead = st.sampled_from([a_pipe, a_directory, a_loop, a_device, too_large])


def put(contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[Put]:
    return contents.map(Holding) | instead
