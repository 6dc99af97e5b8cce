"""Cilium's options that the agent does not support: rejected, without effect, or of other programs.

A key of Cilium's ConfigMap is either supported, or rejected if its value would change results, or ignored
with a reason. Any other key is a mistake, and the agent warns of it.
"""

from cells.base.metrics import Collector, MetricFamily, features, ingested
from cells.unsupported.refused import OTHERS, REFUSED, UnsupportedSettings, WithoutEffect
from cells.unsupported.without_effect import UNUSED, log_unused
from lifecycle import Member, config, invoke, module, provide

__all__ = ["OTHERS", "REFUSED", "UNUSED", "UnsupportedSettings", "WithoutEffect", "cell", "log_unused"]


_ABSENT = (
    "adv_connect_and_lb_bandwidth_manager_enabled",
    "adv_connect_and_lb_cilium_envoy_config_enabled",
    "adv_connect_and_lb_l2_pod_announcement_enabled",
    "adv_connect_and_lb_vtep_enabled",
    "network_policies_mutual_auth_enabled",
)


def absent_features() -> Member[Collector]:
    """Contribute Cilium's features that this agent does not have, as never in use."""
    return features("absent-features", lambda: dict.fromkeys(_ABSENT, False))


def absent_objects() -> Member[Collector]:
    """Contribute Cilium's objects that this agent does not read, as never received."""
    families = [ingested(name, {}) for name in ("cilium_clusterwide_envoy_config", "cilium_envoy_config")]

    async def collect() -> list[MetricFamily]:
        return families

    return Collector("absent-objects", collect)


cell = module(
    "unsupported",
    "Cilium's options that are not served",
    config(*REFUSED, *UNUSED),
    provide(absent_features, absent_objects),
    invoke(log_unused),
)
