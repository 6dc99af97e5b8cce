"""Cilium's options that this agent does not serve: refused, without effect, or of other programs.

Why:    a key of Cilium's ConfigMap is served, refused where it asks for what is not done, or known to change
        nothing. What remains is a mistake, and the agent warns of it.
"""

from cells.base.metrics import Collector, MetricFamily, features, ingested
from cells.unsupported.refused import OTHERS, REFUSED, UnservedSettings, WithoutEffect
from cells.unsupported.without_effect import UNUSED, log_unused
from lifecycle import Member, config, invoke, module, provide

__all__ = ["OTHERS", "REFUSED", "UNUSED", "UnservedSettings", "WithoutEffect", "cell", "log_unused"]


_ABSENT = (
    "adv_connect_and_lb_bandwidth_manager_enabled",
    "adv_connect_and_lb_cilium_envoy_config_enabled",
    "adv_connect_and_lb_l2_pod_announcement_enabled",
    "adv_connect_and_lb_vtep_enabled",
    "network_policies_mutual_auth_enabled",
)


def absent_features() -> Member[Collector]:
    """Features of Cilium that this agent does not have: never in use."""
    return features("absent-features", lambda: dict.fromkeys(_ABSENT, False))


def absent_objects() -> Member[Collector]:
    """Objects that this agent does not read: none has come."""
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
