"""Loads Cilium's recorded operator scenarios and lists how to replay each on our operator."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

from tests.support.recordings import recordings

DATA: Final = recordings("operator")
Json = dict[str, Any]

AWAY: Final = "compared in test_api_away"
EXCLUDED: Final = {
    "api_away_long": AWAY,
    "api_away_short": AWAY,
    "api_away_survived": AWAY,
    "api_endpoints": "compared in test_server",
    "crd_empty_cluster_default": "compared in test_leading",
    "crd_options_per_crd": "compared in test_leading",
    "crd_update_older_newer_garbage": "compared in test_leading",
    "cp_write_conflict": "the recording lacks some of the test's writes; test_pod_cidrs has write conflicts",
    "lb_restart_steal": "a fault of Cilium; test_lb_ipam checks that no address moves",
    "leader_lost": "compared in test_leading",
    "leader_single": "test_leading compares its lease, tests/unit/kubernetes its renewals",
    "option_errors": "compared in test_options",
    "unmanaged_pods": "waits 30 s until a pod is old enough; compared in test_unmanaged_pods",
    "endpoint_gc_interval_zero": "the setting is refused; see test_options",
    "identity_gc_ratelimit": "compared in test_gc",
}

OPTIONS: Final[dict[str, dict[str, Json]]] = {
    "cp_resize_at_restart": {
        "start, node-a": {"cluster-pool-ipv4-cidr": "10.0.0.0/8"},
        "restart with mask 26": {"cluster-pool-ipv4-cidr": "10.0.0.0/8", "cluster-pool-ipv4-mask-size": 26},
    },
    "cp_dual_stack_upgrade": {
        "start dual stack": {
            "enable-ipv6": "true",
            "cluster-pool-ipv6-cidr": "fd00::/104",
            "cluster-pool-ipv6-mask-size": 120,
        },
    },
    "mp_auto_create": {
        "start": {
            "auto-create-cilium-pod-ip-pools": "default=ipv4-cidrs:10.10.0.0/16;ipv4-mask-size:24;"
            "ipv6-cidrs:fd00:10::/104;ipv6-mask-size:120,"
            "other=ipv4-cidrs:10.20.0.0/16,10.30.0.0/16;ipv4-mask-size:27"
        },
    },
    "bgp_cluster_config": {"start": {"enable-bgp-control-plane-status-report": "false"}},
    "cnp_validation": {"start": {"enable-l7-proxy": "false", "enable-icmp-rules": "false"}},
    "node_options_off": {"start, pod ready": {"set-cilium-is-up-condition": "true"}},
}
"""File -> step -> options that the recording states only in prose, or that Cilium implies."""

RETAINED: Final = (
    "a node keeps a CIDR that was removed from its pool, and gets a status error; see test_multi_pool"
)
DIFFERENT: Final[dict[tuple[str, int], str]] = {
    ("cp_exhausted_then_free", 3): "a node with 'allocator full' gets a CIDR as soon as one is free",
    ("cp_exhausted_then_free", 4): "a node with 'allocator full' gets a CIDR as soon as one is free",
    ("cp_exhausted_then_free", 6): "follows from step 3: the next node gets another CIDR or 'allocator full'",
    ("cp_exhausted_then_free", 7): "follows from step 3",
    ("cp_exhausted_then_free", 8): "follows from step 3",
    ("lb_first_last", 4): "the reserved first and last address count neither as used nor as available",
    ("mp_auto_create", 3): RETAINED,
    ("mp_pool_changes", 7): "overlapping pools never allocate a CIDR twice",
    ("mp_pool_changes", 8): "overlapping pools never allocate a CIDR twice",
    ("mp_restart_occupied", 3): RETAINED,
    (
        "cnp_validation",
        10,
    ): "agents refuse a nodeSelector in a CiliumNetworkPolicy, so its condition is Valid=False",
    ("cp_delete_reuse", 6): "a node with 'allocator full' gets a CIDR as soon as one is free",
    ("cp_delete_reuse", 7): "a node with 'allocator full' gets a CIDR as soon as one is free",
}
"""File and step of objects that are not compared, and our behaviour in place of Cilium's fault."""

FASTER: Final = {
    "nodes-gc-interval": 20,
    "identity-gc-interval": 20,
    "identity-heartbeat-timeout": 20,
    "cilium-endpoint-gc-interval": 20,
}
"""Divisors of intervals, so that a test need not wait for them."""

CLEARED: Final = frozenset({"lb_first_last"})
"""Scenarios with steps that begin without pools and services: the deletions are not recorded."""

SLOWLY: Final = frozenset({"lb_restart_repeat"})
"""Scenarios that create each service after the one before has its address."""

WHOLE: Final = frozenset({"crd_partly_there"})
"""Scenarios in which every operator registers the custom resources."""

NOISE: Final = frozenset({"uid", "resourceVersion", "generation", "creationTimestamp", "managedFields"})
TIMES: Final = frozenset({"lastTransitionTime", "lastHeartbeatTime", "io.cilium.heartbeat"})
NOT_OURS: Final = frozenset({"ipMode", "nodeInfo", "daemonEndpoints"})
"""Values that the recorded API server sets."""
COUNTS: Final = frozenset({"ipv4-addrs", "ipv6-addrs"})
"""Numbers that are omitted when they are 0."""


@cache
def load(name: str) -> Json:
    """Load a scenario."""
    found: Json = json.loads((DATA / f"{name}.json").read_text())
    return found


SCENARIOS: Final = sorted(
    path.stem for path in DATA.glob("*.json") if path.stem not in EXCLUDED and path.stem != "index"
)
ALL: Final = sorted(path.stem for path in DATA.glob("*.json") if path.stem != "index")


def plain(value: Any) -> Any:
    """Return the object without empty values and without those that differ from run to run."""
    if isinstance(value, dict):
        found = {
            key: "a time" if key in TIMES else plain(each)
            for key, each in value.items()
            if key not in NOISE | NOT_OURS
        }
        return {
            key: each
            for key, each in found.items()
            if each not in ({}, [], None, "") and not (key in COUNTS and each == 0)
        }
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value


def options(name: str, step: str) -> Json:
    """Return the settings of the operator that a step starts."""
    given = {key: value for key, value in load(name)["options"].items() if value is not None}
    given |= OPTIONS.get(name, {}).get(step, {})
    for key, times in FASTER.items():
        if key in given and str(given[key])[-1] == "s":
            given[key] = f"{float(str(given[key])[:-1]) / times:g}s"
    return given
