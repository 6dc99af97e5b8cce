"""What is counted of requests: how many, how long, with which end.

Needs: nothing.   Gives: Calls, Call.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Call:
    """One request under way."""

    def __init__(self, calls: Calls, method: str) -> None:
        self._calls = calls
        self._method = method
        self._started = time.monotonic()
        self.status = "<error>"

    def answered(self, status: int) -> None:
        """Its answer came."""
        self.status = str(status)
        now = self._calls.last_answer = time.monotonic()
        self._calls.seconds[self._method] = self._calls.seconds.get(self._method, 0.0) + now - self._started


class Calls:
    """Counts requests; knows when a server last answered."""

    def __init__(self) -> None:
        self.returned: Counter[tuple[str, str]] = Counter()
        """(method, status), ``<error>`` for none -> how many."""
        self.seconds: dict[str, float] = {}
        """Method -> how long they took, watches until their first byte."""
        self.waited = 0.0
        """Seconds that requests were held back here."""
        self.last_answer = 0.0
        """When a server last answered, in seconds of the monotonic clock."""

    @contextmanager
    def timed(self, method: str, waited: float) -> Iterator[Call]:
        """Around one request."""
        self.waited += waited
        call = Call(self, method)
        try:
            yield call
        finally:
            self.returned[method, call.status] += 1
