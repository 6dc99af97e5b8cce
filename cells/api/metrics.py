"""Cilium's metrics of API requests, rate limits, and the agent's version.

Source: Cilium 1.17, cilium_agent_api_process_time_seconds, cilium_event_ts, cilium_version.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Final

from cells.api.limiter import Limiter
from cells.api.server import ApiTimes
from cells.base.metrics import MetricFamily, counter, gauge, histogram
from cells.observe.health import agent_version

_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


def families(times: ApiTimes, build: str) -> Iterator[MetricFamily]:
    """Return the metrics of API requests and of the version; ``build`` is the datapath's digest."""
    yield histogram(
        "cilium_agent_api_process_time_seconds",
        "Duration of processed API calls labeled by path, method and return code.",
        times.took,
        "path method return_code",
    )
    yield gauge(
        "cilium_event_ts",
        "Last timestamp when an event was received from a source, per resource and per action",
        {("api", path, method): when for (path, method), when in times.last.items()},
        "source scope action",
    )
    arch = os.uname().machine
    version = (agent_version(), build, _ARCHITECTURES.get(arch, arch))
    yield gauge(
        "cilium_version",
        "Version of the agent; the revision is the datapath's build",
        {version: 1},
        "version revision arch",
    )


# Metrics of the rate limiters.
#
# Source: Cilium 1.17, cilium_api_limiter_*; a limiter's series appear after its first request.


def limiter_families(limiters: Iterable[Limiter]) -> Iterator[MetricFamily]:
    """Return the metrics of the rate limiters."""
    known = [limiter for limiter in limiters if limiter.processed]
    yield gauge(
        "cilium_api_limiter_processing_duration_seconds",
        "Current processing time of api call",
        {
            (one.name, value): seconds
            for one in known
            for value, seconds in (
                ("mean", one.processing.value),
                ("estimated", one.parameters.estimated_processing_duration),
            )
        },
        "api_call value",
    )
    yield gauge(
        "cilium_api_limiter_wait_duration_seconds",
        "Current wait time for api calls",
        {
            (one.name, value): seconds
            for one in known
            for value, seconds in (
                ("mean", one.wait.value),
                ("min", one.parameters.min_wait_duration),
                ("max", one.parameters.max_wait_duration),
            )
        },
        "api_call value",
    )
    yield gauge(
        "cilium_api_limiter_requests_in_flight",
        "Current requests in flight",
        {
            (one.name, value): requests
            for one in known
            for value, requests in (("in-flight", one.in_flight), ("limit", one.parallel))
        },
        "api_call value",
    )
    yield gauge(
        "cilium_api_limiter_rate_limit",
        "Current rate limiting configuration",
        {
            (one.name, value): number
            for one in known
            for value, number in (
                ("limit", one.bucket.rate),
                ("burst", one.bucket.burst if one.bucket.rate else 0),
            )
        },
        "api_call value",
    )
    yield gauge(
        "cilium_api_limiter_adjustment_factor",
        "Current adjustment factor while auto adjusting",
        {one.name: one.factor for one in known},
        "api_call",
    )
    yield counter(
        "cilium_api_limiter_processed_requests_total",
        "Total number of API requests processed",
        {
            (one.name, outcome, str(status)): count
            for one in known
            for (outcome, status), count in one.processed.items()
        },
        "api_call outcome return_code",
    )
    yield histogram(
        "cilium_api_limiter_wait_history_duration_seconds",
        "Histogram over duration of waiting period for API calls subjects to rate limiting",
        {one.name: one.waits for one in known if one.waits.count},
        "api_call",
        on=False,
    )
