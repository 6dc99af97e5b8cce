"""What passes over identities found, wherever those are kept.

Needs: nothing.   Gives: IdentityPasses.
Source: Cilium 1.17, the operator's metrics identity_gc_*.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class IdentityPasses:
    """Counts of the last pass, and of passes, by where identities are kept: ``crd`` or ``kvstore``."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], int] = {}
        """Status, ``alive`` or ``deleted``, and where -> how many."""
        self.runs: dict[tuple[str, str], int] = {}
        """Outcome, ``success`` or ``fail``, and where -> how many."""
        self.latency: dict[tuple[str, str], float] = {}
        """Outcome and where -> seconds that the last such pass took."""

    def expect(self, where: str) -> None:
        """There will be passes: all counts are 0 until then."""
        for status in ("alive", "deleted"):
            self.entries.setdefault((status, where), 0)
        for outcome in ("success", "fail"):
            self.runs.setdefault((outcome, where), 0)
        self.latency.setdefault(("success", where), 0.0)

    def found(self, where: str, *, alive: int, deleted: int) -> None:
        """What a pass leaves, and what it deleted."""
        self.entries["alive", where] = alive
        self.entries["deleted", where] = deleted

    @contextmanager
    def counted(self, where: str) -> Iterator[None]:
        """Count the pass that the block is; one that raises has failed."""
        began = time.monotonic()
        try:
            yield
        except BaseException:
            self.runs["fail", where] += 1
            raise
        self.runs["success", where] += 1
        self.latency["success", where] = time.monotonic() - began
