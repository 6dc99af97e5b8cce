"""Settings that cells of several families follow: of services, announcements, endpoints and chaining.

Why: native devices have programs if clients outside are served, though nothing be masqueraded there.
"""

from __future__ import annotations

from collections.abc import Iterator

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


# Settings of the announcement of services' addresses on the local network, under Cilium's names.

JITTER = 1.2
"""How much longer than the period a retry may take."""


class AnnouncementSettings(Settings, frozen=True):
    """Which node answers for addresses of services, and for how long it may be silent."""

    enable_l2_announcements: bool = False
    """Answer ARP for addresses of services that CiliumL2AnnouncementPolicies select; one node answers for
    each service."""

    l2_announcements_lease_duration: Duration = seconds(15)
    """How long others wait for a node that does not renew its lease; as long it answers without its agent."""

    l2_announcements_renew_deadline: Duration = seconds(5)
    """How long a node keeps answering for a service after it fails to renew its lease."""

    l2_announcements_retry_period: Duration = seconds(2)
    """How often each lease is renewed, or tried for."""

    agent_liveness_update_interval: Duration = seconds(1)
    """How often the agent renews the time stamp by which programs know that it is alive."""

    def faults(self) -> Iterator[str]:
        lease, renew, retry, alive = (
            self.l2_announcements_lease_duration,
            self.l2_announcements_renew_deadline,
            self.l2_announcements_retry_period,
            self.agent_liveness_update_interval,
        )
        if retry <= 0:
            yield f"l2-announcements-retry-period={retry}: expected more than 0"
        if not 1 <= lease <= 1 << 22:
            yield f"l2-announcements-lease-duration={lease}: expected at least 1s, at most 48 days"
        if lease <= renew:
            yield (
                f"l2-announcements-lease-duration={lease}: expected more than"
                f" l2-announcements-renew-deadline={renew}"
            )
        if renew <= JITTER * retry:
            yield (
                f"l2-announcements-renew-deadline={renew}: expected more than {JITTER} times"
                f" l2-announcements-retry-period={retry}"
            )
        if not 0 < alive < lease:
            yield (
                f"agent-liveness-update-interval={alive}: expected more than 0, and less than"
                f" l2-announcements-lease-duration={lease}"
            )


class AgentLiveness(msgspec.Struct, frozen=True):
    """For how long programs answer for services' addresses without a living agent."""

    milliseconds: int
    """0: they never answer."""


# Settings of services, under Cilium's names.


class ServiceSettings(Settings, frozen=True):
    """Which services are served to which clients."""

    kube_proxy_replacement: bool = False
    """Serve all that kube-proxy does: as enable-node-port, enable-external-ips, enable-host-port,
    enable-session-affinity and bpf-lb-sock at once."""

    enable_node_port: bool = False
    """Serve node ports and addresses of load balancers to clients outside."""

    enable_external_ips: bool = False
    """Serve the externalIPs of services."""

    enable_host_port: bool = False
    """Serve pods' host ports; in the way of the portmap plugin, which does the same."""

    bpf_lb_external_clusterip: bool = False
    """Serve cluster addresses to clients outside too."""

    k8s_service_proxy_name: str = ""
    """Serve only services with this value of the label service.kubernetes.io/service-proxy-name; unset: only
    those without the label."""


# Settings of endpoints, and of attachments on links of other plugins', under Cilium's names.


class EndpointSettings(Settings, frozen=True):
    """Source addresses and routes of endpoints."""

    enable_source_ip_verification: bool = True
    """Drop what a pod sends from an address that is not its own."""

    enable_endpoint_routes: bool = False
    """Give each pod a route of its own over its link, so that packets pass the host's stack, also between
    pods of this node. Running pods get theirs at the next start."""


class PodRouting(msgspec.Struct, frozen=True):
    """How packets between the node and its pods find their way."""

    own_routes: bool
    """Whether each pod has a route of its own over its link."""


class ChainingSettings(Settings, frozen=True):
    """What our plugin does when it is chained after another."""

    enable_route_mtu_for_cni_chaining: bool = False
    """Give the routes of pods on other plugins' links this node's MTU."""


class ServiceProxyName(msgspec.Struct, frozen=True):
    """Which services are served here: see served_by()."""

    name: str
    """The value of their label service.kubernetes.io/service-proxy-name; empty: those without it."""


class ServiceReach(msgspec.Struct, frozen=True):
    """Which clients outside the cluster's pods are served."""

    replaces_kube_proxy: bool
    """Whether all are served that kube-proxy serves."""
    node_ports: bool
    """Whether node ports and load balancers' addresses are served."""
    external_ips: bool
    """Whether externalIPs are."""
    host_ports: bool
    """Whether host ports of pods are."""
    cluster_ips: bool
    """Whether cluster addresses are."""

    @property
    def outside(self) -> bool:
        """Whether anything is served to clients outside."""
        return self.node_ports or self.external_ips or self.host_ports or self.cluster_ips


def service_reach(settings: ServiceSettings) -> ServiceReach:
    """As the settings have it."""
    every = settings.kube_proxy_replacement
    return ServiceReach(
        replaces_kube_proxy=every,
        node_ports=every or settings.enable_node_port,
        external_ips=every or settings.enable_external_ips,
        host_ports=every or settings.enable_host_port,
        cluster_ips=settings.bpf_lb_external_clusterip,
    )


def service_proxy_name(settings: ServiceSettings) -> ServiceProxyName:
    """As the settings have it."""
    return ServiceProxyName(settings.k8s_service_proxy_name)


def reach_features(reach: ServiceReach) -> Member[Collector]:
    """Whether kube-proxy is replaced, as a feature in use."""
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
