"""How many settings a restart would change, as Cilium's metric.

For:    Metrics. Needs: ConfigDrift. Gives: families().
Source: Cilium 1.17, cilium_drift_checker_config_delta.
"""

from collections.abc import Iterator

from cells.config.drift.drift import ConfigDrift
from cells.observe.metrics import Family, gauge


def families(drift: ConfigDrift) -> Iterator[Family]:
    """One number."""
    yield gauge(
        "cilium_drift_checker_config_delta",
        "The number of settings that differ from what runs, and take effect at the next restart",
        len(drift.changes),
    )
