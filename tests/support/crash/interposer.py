"""The agent's calls that change something outside it: counted, named, and the agent killed at any of them.

Needs: gcc, an agent that a test starts.   Gives: Interposer.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name("interpose.c")
_PAIR = struct.Struct("=II")


class Interposer:
    """Counts the calls of the agents started in its block; files are kept below one directory."""

    def __init__(self, directory: Path) -> None:
        self._library = directory / "interpose.so"
        self._control = directory / "control"
        self._log = directory / "calls"
        command = ["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC"]
        subprocess.run([*command, "-o", self._library, SOURCE, "-ldl"], check=True)

    @contextmanager
    def watching(self, kill_at: int = 0) -> Iterator[None]:
        """Count anew in the agent started in this block; kill it before its call ``kill_at``, if not 0."""
        self._log.write_text("")
        self._control.write_bytes(_PAIR.pack(0, kill_at))
        ours = {
            "LD_PRELOAD": str(self._library),
            "CRASH_CONTROL": str(self._control),
            "CRASH_LOG": str(self._log),
        }
        os.environ.update(ours)
        try:
            yield
        finally:
            for name in ours:
                del os.environ[name]

    def kill_after(self, calls: int) -> None:
        """Kill the running agent before the call that follows so many more; 1 is its next call."""
        with self._control.open("r+b") as control:
            counted, _ = _PAIR.unpack(control.read(_PAIR.size))
            control.seek(4)
            control.write(struct.pack("=I", counted + calls))

    @property
    def counted(self) -> int:
        """How many calls were made so far."""
        return int(_PAIR.unpack(self._control.read_bytes())[0])

    def names(self, first: int = 0) -> list[str]:
        """The calls after the first so many: number, function, path or bpf command."""
        return self._log.read_text().splitlines()[first:]
