"""The rate limits, as Cilium's metrics.

For:    Metrics. Needs: the limiters. Gives: families().
Source: Cilium 1.17, cilium_api_limiter_*; a limiter's series are there after its first request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cells.api.limiter.limiter import Limiter
from cells.observe.metrics import Family, counter, gauge, histogram


def families(limiters: Iterable[Limiter]) -> Iterator[Family]:
    """Each as it is now, and its requests so far."""
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
