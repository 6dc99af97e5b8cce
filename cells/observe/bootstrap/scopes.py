"""Which hook belongs to which bootstrap scope, and what each scope took.

For:    Bootstrap. Needs: a Profile. Gives: scopes_of(), Scopes, SCOPES.
Source: Cilium 1.17, bootstrapStatistics. A scope without time is not told; one may add up several hooks, of
which some run beside each other, so that all scopes together may be more than ``overall``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import msgspec

from lifecycle import Profile, Timing

OVERALL: Final = "overall"
"""From the process's start until probes are answered."""
EARLY: Final = "earlyInit"
"""Until the first hook: interpreter, imports, settings, constructors; and the claim on the node."""
OTHER: Final = "daemonInit"
"""What has no scope of its own."""

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
"""Scope by module, or by module and hook."""


class Scopes(msgspec.Struct, frozen=True):
    """Seconds by scope, in the order in which the scopes began."""

    succeeded: dict[str, float]
    failed: dict[str, float]
    """What was spent on starts of hooks that came to nothing."""


def scopes_of(profile: Profile, before: float, overall: float | None = None) -> Scopes:
    """What every scope has taken so far; ``before``: seconds until there was a hive."""
    early = before + sum(one.took for one in profile.timings if one.kind in {"construct", "invoke"})
    starts = sorted((one for one in profile.timings if one.kind == "start"), key=lambda one: one.began)
    begun = {EARLY: early} if overall is None else {OVERALL: overall, EARLY: early}
    return Scopes(_sums(starts, begun), _sums(profile.failed, {}))


def _sums(starts: Iterable[Timing], begun: dict[str, float]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float, begun)
    for one in starts:
        module = one.module.rpartition(".")[2]
        scope = SCOPES.get(f"{module}/{one.name}") or SCOPES.get(module, OTHER)
        sums[scope] += one.took
    return {scope: seconds for scope, seconds in sums.items() if seconds > 0}
