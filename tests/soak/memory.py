"""The memory of a process, and a limit of its growth."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

GROWTH = 4 << 20
"""Bytes of resident memory that do not count as a leak. If 100000 pods leaked this much, each would leave
less than Python's smallest object (48 bytes); fragmentation alone was measured to vary by 1 MiB.
"""


@dataclass(frozen=True)
class Size:
    """The size of an idle agent."""

    resident: int
    """Bytes."""
    descriptors: int
    threads: int


def size(pid: int) -> Size:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return Size(
        resident=int(status["VmRSS"].split()[0]) << 10,
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),  # noqa: PTH208 (names only)
        threads=int(status["Threads"]),
    )
