"""Bootstrap statistics: the phases of the agent's start and their durations, by Cilium's scopes.

Sums the hive's timings of hooks by scope; logs them once the kubelet's probes are answered, and provides them
as cilium_agent_bootstrap_seconds. Also defines the barriers that other families wait for.

Source: Cilium 1.17, bootstrapStatistics.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from cells.base.metrics import Collector, Histogram, MetricFamily, histogram
from cells.observe.health import HealthServer
from lifecycle import Hook, Lifecycle, Logger, Member, Profile, after, invoke, module, provide
from lifecycle.injection import Timing

__all__ = ["ApiServed", "Bootstrap", "HealthAddressesClaimed", "PodsExposed", "cell"]


# Barriers as types: ``@after(PodsExposed)`` orders a cell's hooks after one.
#
# Why: the cell that waits does not import the family of the cell that provides the barrier.


class HealthAddressesClaimed(msgspec.Struct, frozen=True):
    """Addresses of the node's health endpoint, if enabled, are allocated: the node may be published."""


class PodsExposed(msgspec.Struct, frozen=True):
    """Restored endpoints are listed in the table of endpoints, with their addresses allocated."""


class ApiServed(msgspec.Struct, frozen=True):
    """The REST API's socket accepts requests."""


# Bootstrap scopes and their hooks.
#
# Source: Cilium 1.17, bootstrapStatistics. A scope without time is not reported. A scope sums several
#         hooks, of which some run in parallel, so the sum of all scopes may exceed ``overall``.

OVERALL: Final = "overall"
"""From the start of the process until probes are answered."""
EARLY: Final = "earlyInit"
"""Until the first hook: interpreter, imports, settings, constructors; and the claim of the node."""
OTHER: Final = "daemonInit"
"""Hooks of other modules."""

SCOPES: Final = {
    "api": "initAPI",
    "bootstrap": "initDaemon",
    "cni-config": "initDaemon",
    "cni-server": "initAPI",
    "cni-server/drain the delete queue": "deleteQueue",
    "cni-server/lock the delete queue": "deleteQueue",
    "config": EARLY,
    "conntrack": "enableConntrack",
    "datapath": "bpfBase",
    "endpoint-restore": "restore",
    "health": "healthCheck",
    "host-ip-sync": "initDaemon",
    "ipam": "ipam",
    "maps": "mapsInit",
    "metrics": "initAPI",
    "router": "bpfBase",
}
"""Bootstrap scopes, by module or by module and hook."""


class Scopes(msgspec.Struct, frozen=True):
    """Seconds by scope, in the order of their beginnings."""

    succeeded: dict[str, float]
    failed: dict[str, float]
    """Seconds of failed start hooks."""


def scopes_of(profile: Profile, before: float, overall: float | None = None) -> Scopes:
    """Return the duration of every scope so far.

    ``before``: seconds from the start of the process to the creation of the hive.
    """
    early = before + sum(one.took for one in profile.timings if one.kind in {"construct", "invoke"})
    starts = sorted((one for one in profile.timings if one.kind == "start"), key=lambda one: one.began)
    initial = {EARLY: early} if overall is None else {OVERALL: overall, EARLY: early}
    return Scopes(_sums(starts, initial), _sums(profile.failed, {}))


def _sums(starts: Iterable[Timing], initial: dict[str, float]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float, initial)
    for one in starts:
        module = one.module.rpartition(".")[2]
        scope = SCOPES.get(f"{module}/{one.name}") or SCOPES.get(module, OTHER)
        sums[scope] += one.took
    return {scope: seconds for scope, seconds in sums.items() if seconds > 0}


# The bootstrap scopes as Cilium's metric.
#
# Source: Cilium 1.17, cilium_agent_bootstrap_seconds.


def families(scopes: Scopes) -> Iterator[MetricFamily]:
    """Yield a histogram for each scope, with one observation."""
    series: dict[tuple[str, str], Histogram] = {}
    for outcome, found in (("success", scopes.succeeded), ("fail", scopes.failed)):
        for scope, seconds in found.items():
            spread = series[scope, outcome] = Histogram()
            spread.observe(seconds)
    yield histogram(
        "cilium_agent_bootstrap_seconds", "Duration of bootstrap sequence", series, "scope outcome"
    )


# The report at the end of the start.


class Bootstrap:
    """The bootstrap statistics of this start."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._before = 0.0
        self._overall: float | None = None

    def scopes(self) -> Scopes:
        """Return all scopes so far; with ``overall`` once probes are answered."""

        return scopes_of(self._profile, self._before, self._overall)

    def complete(self) -> Scopes:
        """Finish when probes are answered; return the duration of every scope."""
        from lifecycle.process import process_age

        self._overall = process_age()
        self._before = max(self._overall - (time.perf_counter() - self._profile.origin), 0.0)
        scopes = self.scopes()
        self._profile.sums.update(scopes.succeeded)
        return scopes


@after(HealthServer)
def report_once_probed(bootstrap: Bootstrap, lifecycle: Lifecycle, log: Logger) -> None:
    """Log the scopes in one line once the health port is served."""

    async def report() -> None:
        scopes = bootstrap.complete().succeeded
        log.info(
            "Daemon initialization completed", **{scope: round(took, 4) for scope, took in scopes.items()}
        )

    lifecycle.append(Hook("report bootstrap statistics", report))


def bootstrap_metrics(bootstrap: Bootstrap) -> Member[Collector]:
    """Provide the scopes as metrics."""

    async def collect() -> Iterable[MetricFamily]:

        return families(bootstrap.scopes())

    return Collector("bootstrap", collect)


cell = module(
    "bootstrap",
    "How long the start took",
    provide(Bootstrap, bootstrap_metrics),
    invoke(report_once_probed),
)
