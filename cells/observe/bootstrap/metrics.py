"""The bootstrap scopes as Cilium's metric.

For:    Metrics. Needs: Scopes. Gives: families().
Source: Cilium 1.17, cilium_agent_bootstrap_seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

from cells.observe.bootstrap.scopes import Scopes
from cells.observe.metrics import Family, Histogram, histogram


def families(scopes: Scopes) -> Iterator[Family]:
    """One histogram for each scope, with the one value there is of a start."""
    series: dict[tuple[str, str], Histogram] = {}
    for outcome, found in (("success", scopes.succeeded), ("fail", scopes.failed)):
        for scope, seconds in found.items():
            spread = series[scope, outcome] = Histogram()
            spread.observe(seconds)
    yield histogram(
        "cilium_agent_bootstrap_seconds", "Duration of bootstrap sequence", series, "scope outcome"
    )
