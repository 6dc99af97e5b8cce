"""Memory of a process, and how much it may grow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

GROWTH = 4 << 20
"""Octets of resident memory that are not taken for a leak. Of 100000 pods each would leave less than one of
Python's smallest objects (48 octets); what comes and goes by itself, as fragments, was seen to be 1 MiB."""


@dataclass(frozen=True)
class Size:
    """An agent's, at rest."""

    resident: int
    """Octets."""
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
