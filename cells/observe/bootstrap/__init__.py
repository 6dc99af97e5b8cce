"""How long each part of the agent's start took, in the words of Cilium: its bootstrap scopes.

Source: sums up what the hive measured of every hook; one log line once probes are answered.
Needs:  Profile, HealthServer (whose hook is the last that pods and probes wait for).   Gives: Bootstrap.
Why:    dashboards that compare agents or upgrades use cilium_agent_bootstrap_seconds, and no hook
        needs a timer of its own for it.
"""

from collections.abc import Iterable

from cells.observe.bootstrap.bootstrap import Bootstrap, tell_once_probed
from cells.observe.metrics import Collector, Family
from lifecycle import Member, invoke, module, provide

__all__ = ["Bootstrap", "cell"]


def bootstrap_metrics(bootstrap: Bootstrap) -> Member[Collector]:
    """The scopes as metrics."""

    async def collect() -> Iterable[Family]:
        from cells.observe.bootstrap.metrics import families

        return families(bootstrap.scopes())

    return Collector("bootstrap", collect)


cell = module(
    "bootstrap",
    "How long the start took",
    provide(Bootstrap, bootstrap_metrics),
    invoke(tell_once_probed),
)
