"""The API, the agent's version and what it was set up for, as Cilium's metrics.

For:    Metrics. Needs: ApiTimes, AgentConfig. Gives: families().
Source: Cilium 1.17, cilium_agent_api_process_time_seconds, cilium_event_ts, cilium_version, cilium_feature_*.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from cells.api.times import ApiTimes
from cells.config import AgentConfig
from cells.observe.health import agent_version
from cells.observe.metrics import Family, gauge, histogram, one_of

_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_DATAPATHS: Final = ("veth", "netkit", "netkit-l2", "lb-only")
_IPAMS: Final = (
    *("kubernetes", "crd", "eni", "azure", "cluster-pool", "multi-pool", "alibabacloud"),
    "delegated-plugin",
)
_NETWORKS: Final = ("overlay-vxlan", "overlay-geneve", "direct-routing")
_PROTOCOLS: Final = ("ipv4-only", "ipv6-only", "ipv4-ipv6-dual-stack")


def families(times: ApiTimes, config: AgentConfig, build: str) -> Iterator[Family]:
    """Requests so far, and what does not change while the agent runs; ``build`` is the datapath's."""
    yield histogram(
        "cilium_agent_api_process_time_seconds",
        "Duration of processed API calls labeled by path, method and return code.",
        times.took,
        "path method return_code",
    )
    yield gauge(
        "cilium_event_ts",
        "Last timestamp when an event was received from a source, per resource and per action",
        {("api", path, method): when for (path, method), when in times.last.items()},
        "source scope action",
    )
    arch = os.uname().machine
    version = (agent_version(), build, _ARCHITECTURES.get(arch, arch))
    yield gauge(
        "cilium_version",
        "Version of the agent; the revision is the datapath's build",
        {version: 1},
        "version revision arch",
    )
    protocol = ("", "ipv4-only", "ipv6-only", "ipv4-ipv6-dual-stack")[config.ipv4 + 2 * config.ipv6]
    for name, what, label, known, chosen in (
        ("controlplane_ipam", "IPAM mode", "mode", _IPAMS, "cluster-pool"),
        ("datapath_config", "Datapath config mode", "mode", _DATAPATHS, "veth"),
        ("datapath_internet_protocol", "IP mode", "address_family", _PROTOCOLS, protocol),
        ("datapath_network", "Network mode", "mode", _NETWORKS, "direct-routing"),
    ):
        yield one_of(f"cilium_feature_{name}", f"{what} enabled on the agent", label, known, chosen)
