"""The cluster as the operator serves it: its name, families and modes; and options without effect.

Source: reads the settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from cells.config import cluster_faults
from cells.unsupported import UnservedSettings, WithoutEffect, log_unused
from lifecycle import (
    Duration,
    Settings,
    config,
    invoke,
    milliseconds,
    module,
    provide,
    seconds,
)

__all__ = ["UNUSED_BY_OPERATOR", "OperatorOptions", "ServedCluster", "UnservedOperator", "cell"]


# Options of Cilium's operator for what is not built: accepted where they ask for what this one does anyway.
#
# Source: Cilium 1.17, options of cilium-operator-generic.


class UnservedOperator(UnservedSettings, frozen=True):
    """Parts of Cilium's operator that are not built."""

    enable_k8s: bool = True
    """The operator works for a cluster: it has nothing to do without an API server."""

    enable_envoy_config: bool = False
    """CiliumEnvoyConfigs are not served yet."""

    enable_ingress_controller: bool = False
    """Ingresses are not served yet."""

    enable_gateway_api: bool = False
    """The Gateway API is not served yet."""

    loadbalancer_l7: str = ""
    """Services are not balanced by HTTP requests yet."""

    enable_policy_secrets_sync: bool = False
    """Secrets of policies are not copied."""

    mesh_auth_mutual_enabled: bool = False
    """Pods do not authenticate each other."""

    clustermesh_config: str = ""
    """Several clusters are not connected yet."""

    clustermesh_enable_endpoint_sync: bool = False
    """Several clusters are not connected yet."""

    clustermesh_enable_mcs_api: bool = False
    """Several clusters are not connected yet."""

    operator_manages_identities: bool = False
    """Agents make identities, the operator deletes them."""

    identity_management_mode: str = "agent"
    """Agents make identities, the operator deletes them."""

    operator_pprof: bool = False
    """Profiles are not served; `hive inspect --hive operator --timeline` shows the start."""


# Options of Cilium's operator that this one takes, and that change nothing here: each class has the reason.
#
# Source: Cilium 1.17, options of cilium-operator-generic, with its defaults.
# Why:    a command line, or a unit, that was written for Cilium's operator starts this one, too. An option
#         that would change what a user gets stands with what is not served, and is refused.


class UnusedByTheOperator(WithoutEffect, frozen=True):
    """The operator does without what these adjust."""

    gops_port: int = 9891
    """There is no gops in Python; `hive inspect` shows a running operator."""
    operator_pprof_address: str = "localhost"
    """Profiles are not served, see operator-pprof."""
    operator_pprof_port: int = 6061
    """Profiles are not served, see operator-pprof."""
    log_driver: list[str] = msgspec.field(default_factory=list)
    """The log goes to standard error, a line of key=value each."""
    log_opt: dict[str, str] = msgspec.field(default_factory=dict)
    """The log goes to standard error, a line of key=value each."""
    controller_group_metrics: list[str] = msgspec.field(default_factory=list)
    """Every job has its metrics, cilium_hive_*."""
    k8s_client_qps: float = 0.0
    """The agents' rate; operator-k8s-client-qps is the operator's."""
    k8s_client_burst: int = 0
    """The agents' burst; operator-k8s-client-burst is the operator's."""
    enable_k8s_api_discovery: bool = False
    """What an API server has is asked for by name, and looked for again while it is not there."""
    enable_k8s_endpoint_slice: bool = True
    """Endpoints of services are always read as EndpointSlices."""
    enable_cilium_network_policy: bool = True
    """CiliumNetworkPolicies are always registered, as by Cilium 1.17."""
    enable_cilium_clusterwide_network_policy: bool = True
    """CiliumClusterwideNetworkPolicies are always registered, as by Cilium 1.17."""
    parallel_alloc_workers: int = 50
    """Ranges are given by one job, in order, and written at the rate of operator-k8s-client-qps."""
    taint_sync_workers: int = 10
    """Nodes are written at the rate of operator-k8s-client-qps."""
    synchronize_k8s_nodes: bool = True
    """Every agent writes its own node to the kvstore, under a lease that ends with it."""
    lbipam_require_lb_class: bool = False
    """As with Cilium 1.17; default-lb-service-ipam=none does what its name promises."""
    enable_node_port: bool = False
    """Agents serve node ports; Cilium's operator asks for its Ingress only."""
    kube_proxy_replacement: str = "false"
    """Agents replace kube-proxy; Cilium's operator asks for its Ingress only."""


class UnusedWithoutACloud(WithoutEffect, frozen=True):
    """No cloud is asked for addresses."""

    limit_ipam_api_qps: float = 4.0
    limit_ipam_api_burst: int = 20
    instance_tags_filter: dict[str, str] = msgspec.field(default_factory=dict)
    subnet_ids_filter: list[str] = msgspec.field(default_factory=list)
    subnet_tags_filter: dict[str, str] = msgspec.field(default_factory=dict)


class UnusedWithoutAMesh(WithoutEffect, frozen=True):
    """Several clusters are not connected, see clustermesh-config."""

    clustermesh_concurrent_service_endpoint_syncs: int = 5
    clustermesh_endpoint_updates_batch_period: Duration = milliseconds(500)
    clustermesh_endpoints_per_slice: int = 100


class UnusedWithoutIngresses(WithoutEffect, frozen=True):
    """Ingresses are not served, see enable-ingress-controller."""

    enable_ingress_proxy_protocol: bool = False
    enable_ingress_secrets_sync: bool = True
    enforce_ingress_https: bool = True
    ingress_default_lb_mode: str = "dedicated"
    ingress_default_secret_name: str = ""
    ingress_default_secret_namespace: str = ""
    ingress_default_request_timeout: Duration = seconds(0)
    ingress_default_xff_num_trusted_hops: int = 0
    ingress_hostnetwork_enabled: bool = False
    ingress_hostnetwork_nodelabelselector: str = ""
    ingress_hostnetwork_shared_listener_port: int = 0
    ingress_lb_annotation_prefixes: list[str] = msgspec.field(default_factory=list)
    ingress_secrets_namespace: str = "cilium-secrets"
    ingress_shared_lb_service_name: str = "cilium-ingress"


class UnusedWithoutTheGatewayAPI(WithoutEffect, frozen=True):
    """The Gateway API is not served, see enable-gateway-api."""

    enable_gateway_api_alpn: bool = False
    enable_gateway_api_app_protocol: bool = False
    enable_gateway_api_proxy_protocol: bool = False
    enable_gateway_api_secrets_sync: bool = True
    gateway_api_hostnetwork_enabled: bool = False
    gateway_api_hostnetwork_nodelabelselector: str = ""
    gateway_api_secrets_namespace: str = "cilium-secrets"
    gateway_api_service_externaltrafficpolicy: str = "Cluster"
    gateway_api_xff_num_trusted_hops: int = 0


class UnusedByL7Policies(WithoutEffect, frozen=True):
    """Requests are not balanced, secrets of policies not copied, and pods do not authenticate each other."""

    loadbalancer_l7_algorithm: str = "round_robin"
    loadbalancer_l7_ports: list[str] = msgspec.field(default_factory=list)
    policy_secrets_namespace: str = "cilium-secrets"
    mesh_auth_spiffe_trust_domain: str = "spiffe.cilium"
    mesh_auth_spire_agent_socket: str = "/run/spire/sockets/agent/agent.sock"
    mesh_auth_spire_server_address: str = "spire-server.spire.svc:8081"
    mesh_auth_spire_server_connection_timeout: Duration = seconds(10)


UNUSED_BY_OPERATOR: Final = (
    UnusedByTheOperator,
    UnusedWithoutACloud,
    UnusedWithoutAMesh,
    UnusedWithoutIngresses,
    UnusedWithoutTheGatewayAPI,
    UnusedByL7Policies,
)


SERVED: Final = {"cluster-pool", "multi-pool", "kubernetes", "delegated-plugin"}
"""Modes of IPAM in which this operator has something to do, or rightly nothing."""
MODES: Final = ("crd", "kvstore", "doublewrite-readkvstore", "doublewrite-readcrd")
"""Of agreeing upon identities."""


class OperatorOptions(Settings, frozen=True):
    """Options of the whole operator."""

    debug: bool = False
    """Log what is done in detail."""

    enable_ipv4: bool = True
    """Pods have IPv4 addresses."""

    enable_ipv6: bool = False
    """Pods have IPv6 addresses."""

    ipam: str = "cluster-pool"
    """Who gives nodes their ranges: this operator (cluster-pool, multi-pool), or kubernetes, or a
    delegated-plugin."""

    identity_allocation_mode: str = "crd"
    """Where identities are stored: kvstore, where one is set, or crd; without one it is read as crd. With
    doublewrite-readkvstore or doublewrite-readcrd both are looked after, and compared in metrics."""

    cluster_name: str = "default"
    """Name of the cluster."""

    cluster_id: int = 0
    """Number of the cluster in a mesh, 0 to max-connected-clusters; with a number it needs a name."""

    max_connected_clusters: int = 255
    """How many clusters the mesh may have, 255 or 511: the same in all of them."""

    k8s_namespace: str = ""
    """Namespace the operator runs in, and where its lease is; default when empty."""

    def faults(self) -> Iterator[str]:
        if self.ipam not in SERVED:
            yield f"ipam={self.ipam}: expected cluster-pool, multi-pool, kubernetes or delegated-plugin"
        if self.identity_allocation_mode not in MODES:
            mode = self.identity_allocation_mode
            yield f"identity-allocation-mode={mode}: expected one of {', '.join(MODES)}"
        yield from cluster_faults(self.cluster_name, self.cluster_id, self.max_connected_clusters)


class ServedCluster(msgspec.Struct, frozen=True):
    """The one cluster of this operator, for every part of it."""

    name: str = "default"
    number: int = 0
    """In a mesh; 0 for none."""
    most_clusters: int = 255
    """Of the mesh."""
    namespace: str = "default"
    """Where the operator is."""
    ipv4: bool = True
    ipv6: bool = False
    ipam: str = "cluster-pool"
    """Who gives nodes their ranges."""
    identity_mode: str = "crd"
    """Where identities are stored, one of MODES."""

    @property
    def compares_identities(self) -> bool:
        """Whether identities stand in both stores."""
        return self.identity_mode.startswith("doublewrite")


def served_cluster(options: OperatorOptions) -> ServedCluster:
    """The cluster by the options."""
    return ServedCluster(
        options.cluster_name,
        options.cluster_id,
        options.max_connected_clusters,
        options.k8s_namespace or "default",
        options.enable_ipv4,
        options.enable_ipv6,
        options.ipam,
        options.identity_allocation_mode,
    )


cell = module(
    "options",
    "Options of the whole operator",
    config(OperatorOptions, UnservedOperator, *UNUSED_BY_OPERATOR),
    provide(served_cluster),
    invoke(log_unused),
)
