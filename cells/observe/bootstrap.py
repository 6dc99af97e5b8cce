"""Phases of the agent's start and their durations, under Cilium's names: bootstrap scopes.

Source: sums up the hive's timings of hooks; logs one line once probes are answered.
Why:    dashboards that compare agents or upgrades use cilium_agent_bootstrap_seconds; hooks need no timers
        of their own for it.
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


# Moments as types: ``@after(PodsExposed)`` waits for one.
#
# Why: a cell that waits imports no family above its own, and does not know which cell brings the moment.


class HealthAddressesClaimed(msgspec.Struct, frozen=True):
    """The addresses of this node's health endpoint, if any, are claimed: the node may be published."""


class PodsExposed(msgspec.Struct, frozen=True):
    """Restored endpoints are in the table of endpoints, and have their addresses."""


class ApiServed(msgspec.Struct, frozen=True):
    """The socket of the node's API accepts requests."""


# Which hook belongs to which bootstrap scope, and what each scope took.
#
# Source: Cilium 1.17, bootstrapStatistics. One without time is not reported; one may add up several hooks, of
#         which some run beside each other, so that all scopes together may be more than ``overall``.

OVERALL: Final = "overall"
"""From the start of the process until probes are answered."""
EARLY: Final = "earlyInit"
"""Until the first hook: interpreter, imports, settings, constructors; and the claim of the node."""
OTHER: Final = "daemonInit"
"""Hooks without a scope of their own."""

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
"""Scopes by module, or by module and hook."""


class Scopes(msgspec.Struct, frozen=True):
    """Seconds by scope, in the order in which the scopes began."""

    succeeded: dict[str, float]
    failed: dict[str, float]
    """Seconds for failed starts of hooks."""


def scopes_of(profile: Profile, before: float, overall: float | None = None) -> Scopes:
    """The duration of every scope so far; ``before``: seconds before the creation of the hive."""
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
    """A histogram for each scope, with the one value of this start."""
    series: dict[tuple[str, str], Histogram] = {}
    for outcome, found in (("success", scopes.succeeded), ("fail", scopes.failed)):
        for scope, seconds in found.items():
            spread = series[scope, outcome] = Histogram()
            spread.observe(seconds)
    yield histogram(
        "cilium_agent_bootstrap_seconds", "Duration of bootstrap sequence", series, "scope outcome"
    )


# Reports how long the start took, once everything that pods and probes wait for has started.


class Bootstrap:
    """The bootstrap statistics of this start. Its users wait for nothing."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._before = 0.0
        self._overall: float | None = None

    def scopes(self) -> Scopes:
        """All scopes so far; ``overall`` once probes are answered."""

        return scopes_of(self._profile, self._before, self._overall)

    def complete(self) -> Scopes:
        """Probes are answered from now on. Returns the duration of every scope."""
        from lifecycle.process import process_age

        self._overall = process_age()
        self._before = max(self._overall - (time.perf_counter() - self._profile.origin), 0.0)
        scopes = self.scopes()
        self._profile.sums.update(scopes.succeeded)
        return scopes


@after(HealthServer)
def report_once_probed(bootstrap: Bootstrap, lifecycle: Lifecycle, log: Logger) -> None:
    """Log the scopes in one line when the port of the probes is served."""

    async def report() -> None:
        scopes = bootstrap.complete().succeeded
        log.info(
            "Daemon initialization completed", **{scope: round(took, 4) for scope, took in scopes.items()}
        )

    lifecycle.append(Hook("report how the start went", report))


def bootstrap_metrics(bootstrap: Bootstrap) -> Member[Collector]:
    """The scopes as metrics."""

    async def collect() -> Iterable[MetricFamily]:

        return families(bootstrap.scopes())

    return Collector("bootstrap", collect)


cell = module(
    "bootstrap",
    "How long the start took",
    provide(Bootstrap, bootstrap_metrics),
    invoke(report_once_probed),
)
