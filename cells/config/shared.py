"""Settings that cells of several families read: of services, L2 announcements, endpoints and chaining.

Masquerading reads those of services, for example: native devices need programs if external clients are
served, even without masquerading.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from cells.base.metrics import Collector, features
from lifecycle import Duration, Member, Settings, config, module, provide, seconds

__all__ = [
    "AgentLiveness",
    "AnnouncementSettings",
    "ChainingSettings",
    "EndpointSettings",
    "PodRouting",
    "ServiceProxyName",
    "ServiceReach",
    "ServiceSettings",
    "cell",
]


# Settings of L2 announcements, with Cilium's names.

MAX_LEASE = 1 << 22
"""Longest duration of a lease in seconds: programs compare milliseconds as 32 bits."""
JITTER = 1.2
"""Maximum retry interval, as a multiple of the period."""


class LeaseTimes(NamedTuple):
    """Times of an election by a Lease, in seconds."""

    duration: float
    """How long other nodes wait for a node that does not renew its lease."""
    deadline: float
    """How long a node holds its lease without renewing it."""
    retry: float
    """Interval of attempts to acquire or renew a lease."""
    heartbeat: float
    """Interval at which an agent shows its programs that it is alive; less than the duration."""


class AnnouncementSettings(Settings, frozen=True):
    """Settings of L2 announcements."""

    enable_l2_announcements: bool = False
    """Answer ARP for addresses of services that CiliumL2AnnouncementPolicies select; one node answers for
    each service.
    """

    l2_announcements_lease_duration: Duration = seconds(15)
    """How long other nodes wait for a node that does not renew its lease, and how long it answers without its
    agent.
    """

    l2_announcements_renew_deadline: Duration = seconds(5)
    """How long a node continues to answer for a service without renewing its lease."""

    l2_announcements_retry_period: Duration = seconds(2)
    """Interval of attempts to acquire or renew a lease."""

    agent_liveness_update_interval: Duration = seconds(1)
    """Interval at which the agent renews the timestamp by which programs detect that it is alive."""

    @property
    def lease_times(self) -> LeaseTimes:
        """The times of leases; those that an election cannot have are replaced, as in Cilium."""
        lease, renew, retry, heartbeat = self.given_times
        lease = max(lease, seconds(1))
        renew = renew if renew > 0 else seconds(1)
        retry = retry if retry > 0 else Duration(0.2)
        if lease <= renew:
            renew = Duration(lease / 2)
        if renew <= JITTER * retry:
            retry = Duration(renew / 2)
        if not 0 < heartbeat < lease:  # otherwise programs would stop answering between two heartbeats
            heartbeat = min(seconds(1), Duration(lease / 2))
        return LeaseTimes(lease, renew, retry, heartbeat)

    @property
    def given_times(self) -> LeaseTimes:
        """The times of leases in the settings."""
        return LeaseTimes(
            self.l2_announcements_lease_duration,
            self.l2_announcements_renew_deadline,
            self.l2_announcements_retry_period,
            self.agent_liveness_update_interval,
        )

    def faults(self) -> Iterator[str]:
        lease = self.l2_announcements_lease_duration
        if self.enable_l2_announcements and lease > MAX_LEASE:
            yield f"l2-announcements-lease-duration={lease}: expected at most 48 days"


class AgentLiveness(msgspec.Struct, frozen=True):
    """How long programs answer for services' addresses after the agent's last timestamp."""

    milliseconds: int
    """0: they never answer."""


# Settings of services, with Cilium's names.


class ServiceSettings(Settings, frozen=True):
    """Settings of services."""

    kube_proxy_replacement: bool = False
    """Serve everything that kube-proxy serves: enables enable-node-port, enable-external-ips,
    enable-host-port, enable-session-affinity and bpf-lb-sock.
    """

    enable_node_port: bool = False
    """Serve node ports and load balancer addresses to external clients."""

    enable_external_ips: bool = False
    """Serve the externalIPs of services."""

    enable_host_port: bool = False
    """Serve host ports of pods; conflicts with the portmap plugin, which does the same."""

    bpf_lb_external_clusterip: bool = False
    """Serve cluster addresses to external clients, too."""

    k8s_service_proxy_name: str = ""
    """Serve only services with this value of the label service.kubernetes.io/service-proxy-name; unset: only
    those without the label."""


# Settings of endpoints, and of chaining with other CNI plugins, with Cilium's names.


class EndpointSettings(Settings, frozen=True):
    """Source address checks and routes of endpoints."""

    enable_source_ip_verification: bool = True
    """Drop packets of a pod with a source address that is not its own."""

    enable_endpoint_routes: bool = False
    """Create a route for each pod over its link, so that packets pass the host's stack, also between pods of
    this node. Running pods get theirs at the next start.
    """


class PodRouting(msgspec.Struct, frozen=True):
    """How packets between the node and its pods are routed."""

    endpoint_routes: bool
    """Whether each pod has a route over its link."""


class ChainingSettings(Settings, frozen=True):
    """Settings of chaining with other CNI plugins."""

    enable_route_mtu_for_cni_chaining: bool = False
    """Set this node's MTU on routes of pods with links of other plugins."""


class ServiceProxyName(msgspec.Struct, frozen=True):
    """The services that are served here: see served_by()."""

    name: str
    """Value of their label service.kubernetes.io/service-proxy-name; empty: those without it."""


class ServiceReach(msgspec.Struct, frozen=True):
    """The frontends that are served to external clients."""

    replaces_kube_proxy: bool
    """Whether all frontends are served that kube-proxy serves."""
    node_ports: bool
    """Whether node ports and load balancer addresses are served."""
    external_ips: bool
    """Whether externalIPs are served."""
    host_ports: bool
    """Whether host ports of pods are served."""
    cluster_ips: bool
    """Whether cluster addresses are served."""

    @property
    def outside(self) -> bool:
        """Whether any frontend is served to external clients."""
        return self.node_ports or self.external_ips or self.host_ports or self.cluster_ips


def service_reach(settings: ServiceSettings) -> ServiceReach:
    """Return the frontends to serve, by the settings."""
    every = settings.kube_proxy_replacement
    return ServiceReach(
        replaces_kube_proxy=every,
        node_ports=every or settings.enable_node_port,
        external_ips=every or settings.enable_external_ips,
        host_ports=every or settings.enable_host_port,
        cluster_ips=settings.bpf_lb_external_clusterip,
    )


def service_proxy_name(settings: ServiceSettings) -> ServiceProxyName:
    """Return the services to serve, by the settings."""
    return ServiceProxyName(settings.k8s_service_proxy_name)


def reach_features(reach: ServiceReach) -> Member[Collector]:
    """Contribute whether kube-proxy is replaced, as a feature in use."""
    return features(
        "service-features",
        lambda: {"adv_connect_and_lb_kube_proxy_replacement_enabled": reach.replaces_kube_proxy},
    )


cell = module(
    "service-settings",
    "Which services are served to which clients",
    config(ServiceSettings),
    provide(service_proxy_name, service_reach, reach_features),
)
