"""Rate limit and statistics of requests: counts, latencies, results.

Source: Cilium 1.17, cilium_k8s_client*.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

import anyio

from cells.base.metrics import Histogram, MetricFamily, counter, histogram

__all__ = ["Bucket"]


# The rate limit of requests.


class Bucket:
    """A token bucket: bursts of ``burst`` requests, on average ``qps`` per second.

    With ``qps`` 0 it never waits.
    """

    def __init__(self, qps: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._qps = qps
        self._burst = max(1, burst)
        self._clock = clock
        self._tokens = float(self._burst)
        self._at = clock()

    async def take(self) -> float:
        """Wait for a token; return the seconds waited."""
        if not self._qps:
            return 0.0
        now = self._clock()
        self._tokens = min(float(self._burst), self._tokens + (now - self._at) * self._qps)
        self._at = now
        self._tokens -= 1
        if self._tokens >= 0:
            return 0.0
        wait = -self._tokens / self._qps
        await anyio.sleep(wait)
        return wait


RATE_BOUNDS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)


class ClientCall:
    """One request in progress."""

    def __init__(self, calls: Calls, path: str, method: str) -> None:
        self._calls = calls
        self._series = (path, method)
        self._started = time.monotonic()
        self.status = "<error>"

    def answered(self, status: int) -> None:
        """Record the status and the latency of the answer."""
        self.status = str(status)
        now = self._calls.last_answer = time.monotonic()
        self._calls.latency[self._series].observe(now - self._started)


class Calls:
    """Counts requests, and records when a server last answered."""

    def __init__(self) -> None:
        self.returned: Counter[tuple[str, str, str]] = Counter()
        """(host, method, status) -> number of requests; the status is ``<error>`` without an answer."""
        self.latency: dict[tuple[str, str], Histogram] = defaultdict(Histogram)
        """(path, method) -> seconds until the head of the answer."""
        self.waited: dict[tuple[str, str], Histogram] = defaultdict(lambda: Histogram(RATE_BOUNDS))
        """(path, method) -> seconds that the rate limiter delayed requests."""
        self.last_answer = 0.0
        """Time of the last answer, in seconds of the monotonic clock."""

    @contextmanager
    def timed(self, method: str, target: str, server: str, waited: float) -> Iterator[ClientCall]:
        """Measure one request; ``waited``: seconds that the rate limiter delayed it."""
        path, host = normalised(target), urlsplit(server).netloc
        self.waited[path, method].observe(waited)
        call = ClientCall(self, path, method)
        try:
            yield call
        finally:
            self.returned[host, method, call.status] += 1

    def note(
        self, method: str, path: str, server: str, waited: float, status: int | None, took: float
    ) -> None:
        """Record one request of a pipeline: normalised path, status (None without an answer), seconds."""
        self.waited[path, method].observe(waited)
        if status is not None:
            self.last_answer = time.monotonic()
            self.latency[path, method].observe(took)
        shown = "<error>" if status is None else str(status)
        self.returned[urlsplit(server).netloc, method, shown] += 1


def normalised(target: str) -> str:
    """Return the path of a request with placeholders for names, so that metrics have few label values."""
    path = target.partition("?")[0]
    head, *parts = path.strip("/").split("/")
    count = {"api": 1, "apis": 2}.get(head)
    if count is None or len(parts) <= count:
        return path
    shown, rest = parts[:count], parts[count:]
    if rest[0] == "namespaces" and len(rest) > 2:
        shown += ["namespaces", "{namespace}"]
        rest = rest[2:]
    shown.append(rest[0])
    if len(rest) > 1:
        shown += ["{name}", *rest[2:]]
    return "/" + "/".join([head, *shown])


def families(calls: Calls) -> Iterator[MetricFamily]:
    """Yield the metrics of requests."""
    yield counter(
        "cilium_k8s_client_api_calls_total",
        "Number of API calls made to kube-apiserver labeled by host, method and return code.",
        dict(calls.returned),
        "host method return_code",
    )
    yield histogram(
        "cilium_k8s_client_api_latency_time_seconds",
        "Duration of processed API calls labeled by path and method.",
        dict(calls.latency),
        "path method",
    )
    yield histogram(
        "cilium_k8s_client_rate_limiter_duration_seconds",
        "Kubernetes client rate limiter latency in seconds. Broken down by path and method.",
        dict(calls.waited),
        "path method",
    )
