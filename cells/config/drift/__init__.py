"""Whether what is configured is still what runs, and copies of what ran.

Source: watches the config-dir; an event is only a hint, and everything is read and compared again.
Needs:  HiveView, AgentConfig.   Gives: ConfigDrift, Change.
Why:    an operator who edits a ConfigMap must see that a restart is due, and what it would change.
"""

from collections.abc import Iterable

from cells.config.drift.drift import Change, ConfigDrift
from cells.observe.metrics import Collector, Family
from lifecycle import Member, invoke, module, provide

__all__ = ["Change", "ConfigDrift", "cell"]


def drift_metrics(drift: ConfigDrift) -> Member[Collector]:
    """How many settings differ."""

    async def collect() -> Iterable[Family]:
        from cells.config.drift.metrics import families

        return families(drift)

    return Collector("config-drift", collect)


cell = module(
    "config-drift",
    "Configuration that no longer is what runs",
    provide(ConfigDrift, drift_metrics),
    invoke(ConfigDrift),
)
