"""Settings that cells of several families follow: of services, announcements, endpoints and chaining.

Why: native devices have programs if clients outside are served, though nothing be masqueraded there.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from lifecycle import Duration, Settings, config, module, provide, refuse, seconds
from lifecycle.settings import RenamedFrom

__all__ = [
    "DEFAULT_SEED",
    "AgentLiveness",
    "AnnouncementSettings",
    "ChainingSettings",
    "EndpointSettings",
    "PodRouting",
    "Seed",
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

    def validate(self) -> None:
        """Refuse durations that do not fit; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
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


class AgentLiveness(NamedTuple):
    """For how long programs answer for services' addresses without a living agent."""

    milliseconds: int
    """0: they never answer."""


# The seeds of a cluster's Maglev tables and hashes.

DEFAULT_SEED = "JLfvgnHc2kaSUFaI"


class Seed(NamedTuple):
    """The seeds of a cluster: of names, and of packets of each family."""

    names: int
    ipv4: int
    ipv6: int

    @classmethod
    def parse(cls, text: str) -> Seed:
        """From base64 of exactly 12 bytes (``bpf-lb-maglev-hash-seed``). Raises ValueError."""
        try:
            raw = base64.b64decode(text, validate=True)
        except ValueError:  # of characters that are none of ASCII, too
            raise ValueError("expected base64 of 12 bytes, as of: head -c12 /dev/urandom | base64") from None
        if len(raw) != 12:
            raise ValueError(f"expected base64 of 12 bytes, this is of {len(raw)}")
        return cls(*struct.unpack(">III", raw))


# Settings of services, under Cilium's names.


class ServiceSettings(Settings, frozen=True):
    """Which services are served, and how."""

    kube_proxy_replacement: bool = False
    """Serve all that kube-proxy does: as enable-node-port, enable-external-ips, enable-host-port,
    enable-session-affinity and bpf-lb-sock at once."""

    enable_node_port: bool = False
    """Serve node ports and addresses of load balancers to clients outside."""

    enable_external_ips: bool = False
    """Serve the externalIPs of services."""

    enable_external_ips_of_nodes: bool = False
    """Serve externalIPs that are a node's address: who may create services can take the node's own ports."""

    enable_host_port: bool = False
    """Serve pods' host ports; in the way of the portmap plugin, which does the same."""

    enable_session_affinity: bool = False
    """Whether clients of a service with sessionAffinity ClientIP stay with one backend."""

    enable_svc_source_range_check: bool = True
    """Serve load balancers' addresses only to loadBalancerSourceRanges, where a service has some."""

    bpf_lb_source_range_all_types: bool = False
    """Serve node ports, external addresses and cluster addresses only to loadBalancerSourceRanges too, to
    clients outside."""

    enable_internal_traffic_policy: bool = True
    """Follow internalTrafficPolicy Local of services: without it, clients inside reach all backends."""

    bpf_lb_external_clusterip: bool = False
    """Serve cluster addresses to clients outside too."""

    enable_k8s_terminating_endpoint: bool = True
    """Let connections to terminating pods go on, and serve by them while no other backend is active."""

    enable_service_topology: bool = False
    """Prefer backends that are hinted for the node's zone."""

    enable_local_redirect_policy: bool = False
    """Follow CiliumLocalRedirectPolicies: services and addresses that go to pods of this node instead."""

    bpf_lb_mode: Annotated[Literal["snat", "dsr", "hybrid"], RenamedFrom("node-port-mode")] = "snat"
    """How a backend on another node is reached: with this node's address, or so that it answers the client
    itself (dsr), in TCP only (hybrid)."""

    bpf_lb_dsr_dispatch: Literal["opt", "ipip", "geneve"] = "opt"
    """How that backend's node learns which service was asked: in an option of the IP header; no other way is
    served yet."""

    bpf_lb_algorithm: Annotated[Literal["random", "maglev"], RenamedFrom("node-port-algorithm")] = "random"
    """How a backend is chosen for clients outside: any, or by maglev the same at every node."""

    bpf_lb_maglev_hash_seed: str = DEFAULT_SEED
    """Base64 of 12 bytes, the same on every node of a cluster: where tables and hashes of maglev begin."""

    bpf_lb_algorithm_annotation: bool = False
    """Let services choose their algorithm by the annotation service.cilium.io/lb-algorithm."""

    bpf_lb_mode_annotation: bool = False
    """Let services choose by the annotation service.cilium.io/forwarding-mode, dsr or snat, how backends on
    other nodes are reached. bpf-lb-algorithm-annotation does so too, but for nodes with a tunnel."""

    k8s_service_proxy_name: str = ""
    """Serve only services with this value of the label service.kubernetes.io/service-proxy-name; unset: only
    those without the label."""

    bpf_lb_proto_diff: bool = True
    """Distinguish protocols: two services may share a port, in TCP and in UDP; else one has it."""

    def validate(self) -> None:
        """Refuse what is not served yet; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        if self.bpf_lb_dsr_dispatch != "opt":
            asked = self.bpf_lb_dsr_dispatch
            yield f"bpf-lb-dsr-dispatch={asked}: not supported yet, expected opt, or leave it unset"
        try:
            Seed.parse(self.bpf_lb_maglev_hash_seed)
        except ValueError as error:
            yield f"bpf-lb-maglev-hash-seed: {error}"

    @property
    def node_ports(self) -> bool:
        """Whether node ports and load balancers' addresses are served."""
        return self.kube_proxy_replacement or self.enable_node_port

    @property
    def external_ips(self) -> bool:
        """Whether externalIPs are."""
        return self.kube_proxy_replacement or self.enable_external_ips

    @property
    def host_ports(self) -> bool:
        """Whether host ports of pods are."""
        return self.kube_proxy_replacement or self.enable_host_port

    @property
    def session_affinity(self) -> bool:
        """Whether clients stay with their backend."""
        return self.kube_proxy_replacement or self.enable_session_affinity

    @property
    def maglev(self) -> bool:
        """Whether any service may need lookup tables."""
        return self.outside and (self.bpf_lb_algorithm == "maglev" or self.bpf_lb_algorithm_annotation)

    def services_choose_mode(self, *, tunnelled: bool) -> bool:
        """Whether services say how backends on other nodes are reached.

        Cilium 1.17 reads that annotation by the switch of the algorithm; either is taken for it. What goes
        through a tunnel cannot be answered directly.
        """
        return self.bpf_lb_mode_annotation or (self.bpf_lb_algorithm_annotation and not tunnelled)

    @property
    def outside(self) -> bool:
        """Whether anything is served to clients outside."""
        return self.node_ports or self.external_ips or self.host_ports or self.bpf_lb_external_clusterip


# Settings of endpoints, and of attachments on links of other plugins', under Cilium's names.


class EndpointSettings(Settings, frozen=True):
    """Source addresses and routes of endpoints."""

    enable_source_ip_verification: bool = True
    """Drop what a pod sends from an address that is not its own."""

    enable_endpoint_routes: bool = False
    """Give each pod a route of its own over its link, so that packets pass the host's stack, also between
    pods of this node. Running pods get theirs at the next start."""


class PodRouting(NamedTuple):
    """How packets between the node and its pods find their way."""

    own_routes: bool
    """Whether each pod has a route of its own over its link."""


class ChainingSettings(Settings, frozen=True):
    """What our plugin does when it is chained after another."""

    enable_route_mtu_for_cni_chaining: bool = False
    """Give the routes of pods on other plugins' links this node's MTU."""


class ServiceProxyName(NamedTuple):
    """Which services are served here: see served_by()."""

    name: str
    """The value of their label service.kubernetes.io/service-proxy-name; empty: those without it."""


class ServiceReach(NamedTuple):
    """Which clients outside the cluster's pods are served."""

    replaces_kube_proxy: bool
    """Whether all are served that kube-proxy serves."""
    node_ports: bool
    """Whether node ports and load balancers' addresses are served."""
    host_ports: bool
    """Whether host ports of pods are."""
    outside: bool
    """Whether anything is served to clients outside."""


def service_reach(settings: ServiceSettings) -> ServiceReach:
    """As the settings have it."""
    return ServiceReach(
        settings.kube_proxy_replacement, settings.node_ports, settings.host_ports, settings.outside
    )


def service_proxy_name(settings: ServiceSettings) -> ServiceProxyName:
    """As the settings have it."""
    return ServiceProxyName(settings.k8s_service_proxy_name)


cell = module(
    "service-settings",
    "What is served, and how",
    config(ServiceSettings),
    provide(service_proxy_name, service_reach),
)
