"""One query on its way: who asked whom for what, and what it took.

Gives:  Asking, Awaited, Counts, Exchange.
Source: Cilium 1.17, cilium_proxy_upstream_reply_seconds and its scopes; cilium_policy_l7_total.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import NamedTuple, Protocol

from cells.endpoint import Endpoint
from cells.observe.metrics import Histogram
from cells.proxy.dns.sockets import Address
from cells.proxy.dns.wire import Query

TCP, UDP = 6, 17


class Asking(NamedTuple):
    """A query as it came from a pod."""

    data: bytes
    client: Address
    server: Address
    protocol: int


class Awaited(Protocol):
    """A query by UDP that waits for its answer."""

    def give_up(self) -> None:
        """Nobody waits for the answer any more."""
        ...


class Counts:
    """What the proxy counts; metrics show it."""

    def __init__(self) -> None:
        self.l7 = Counter({"received": 0, "forwarded": 0, "denied": 0, "parse_errors": 0})
        self.requests = Counter({"received": 0, "forwarded": 0, "denied": 0, "parse_errors": 0})
        """The same of HTTP: Envoy tells of those."""
        self.seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)
        """By error and scope."""
        self.update_timeouts = 0
        """Answers that were released before their addresses were allowed."""
        self.rejected = 0
        """Queries refused because too many were being served."""


class Exchange:
    """A query that was let through to its server."""

    __slots__ = ("asking", "awaited", "began", "checked", "endpoint", "query", "replied")

    def __init__(self, asking: Asking, query: Query, endpoint: Endpoint, began: float) -> None:
        self.asking = asking
        self.query = query
        self.endpoint = endpoint
        self.began = began
        self.checked = time.perf_counter()
        self.replied = 0.0
        self.awaited: Awaited | None = None
        """The question to the server, by UDP."""

    def count(self, counts: Counts, error: str = "") -> None:
        """The answer is on its way: note the times."""
        now = time.perf_counter()
        replied = self.replied or now
        for scope, seconds in (
            ("totalTime", now - self.began),
            ("upstreamTime", replied - self.checked),
            ("processingTime", now - replied + self.checked - self.began),
            ("policyCheckTime", self.checked - self.began),
            ("dataplaneTime", now - replied),
        ):
            counts.seconds[error, scope].observe(seconds)
