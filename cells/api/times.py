"""How long the API took for what it was asked, and when it was asked last.

For:    the API's handler counts, its metrics tell. Needs: nothing. Gives: ApiTimes.
Source: Cilium 1.17, cilium_agent_api_process_time_seconds: the path without what in it stands for one object.
"""

from __future__ import annotations

import time
from typing import Final

from cells.observe.metrics import Histogram

ELSEWHERE: Final = "unknown"
"""The label for unknown paths, so that clients cannot create series."""
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class ApiTimes:
    """Answers by path, method and status; requests by path and method."""

    def __init__(self) -> None:
        self.took: dict[tuple[str, str, str], Histogram] = {}
        """Seconds."""
        self.last: dict[tuple[str, str], float] = {}
        """When it was asked last, in seconds since the epoch."""

    def count(self, path: str | None, method: str, status: int, seconds: float) -> None:
        """Count an answer; ``path`` is the route's, None where there is none."""
        known = ELSEWHERE if path is None else "/".join(path.split("/")[:3])
        method = method if method in _METHODS else "OTHER"
        if (spread := self.took.get((known, method, str(status)))) is None:
            spread = self.took[known, method, str(status)] = Histogram()
        spread.observe(seconds)
        self.last[known, method] = time.time()
