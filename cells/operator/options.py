"""Settings of the whole operator: cluster name, address families and modes; and Cilium's other options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from cells.config import cluster_faults
from cells.unsupported import UnsupportedSettings, WithoutEffect, log_unused
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

__all__ = ["UNUSED_BY_OPERATOR", "OperatorOptions", "ServedCluster", "UnsupportedOperator", "cell"]


# Options of Cilium's operator for features that are not supported; accepted with their default value.
#
# Source: Cilium 1.17, options of cilium-operator-generic.


class UnsupportedOperator(UnsupportedSettings, frozen=True):
    """Features of Cilium's operator that are not supported."""

    enable_k8s: bool = True
    """The operator requires an API server."""

    enable_envoy_config: bool = False
    """CiliumEnvoyConfigs are not supported yet."""

    enable_ingress_controller: bool = False
    """Ingress is not supported yet."""

    enable_gateway_api: bool = False
    """The Gateway API is not supported yet."""

    loadbalancer_l7: str = ""
    """L7 load balancing of services is not supported yet."""

    enable_policy_secrets_sync: bool = False
    """Secrets of policies are not copied."""

    mesh_auth_mutual_enabled: bool = False
    """Mutual authentication of pods is not supported."""

    clustermesh_config: str = ""
    """The operator does not connect to other clusters; agents do."""

    clustermesh_enable_endpoint_sync: bool = False
    """EndpointSlices of other clusters are not synchronized yet."""

    clustermesh_enable_mcs_api: bool = False
    """The MCS-API is not supported yet."""

    operator_manages_identities: bool = False
    """Agents create identities, the operator deletes them."""

    identity_management_mode: str = "agent"
    """Agents create identities, the operator deletes them."""

    operator_pprof: bool = False
    """Profiles are not served; `hive inspect --hive operator --timeline` shows the start."""


# Options of Cilium's operator that are accepted and have no effect here; each class gives the reason.
#
# Source: Cilium 1.17, options of cilium-operator-generic, with its defaults.
#
# A command line or unit written for Cilium's operator thus starts this one, too. Options that would change
# results are among the unsupported ones and are rejected.


class UnusedByTheOperator(WithoutEffect, frozen=True):
    """The operator has no use for these options."""

    gops_port: int = 9891
    """There is no gops for Python; `hive inspect` shows a running operator."""
    operator_pprof_address: str = "localhost"
    """Profiles are not served, see operator-pprof."""
    operator_pprof_port: int = 6061
    """Profiles are not served, see operator-pprof."""
    log_driver: list[str] = msgspec.field(default_factory=list)
    """The log goes to standard error, in lines of key=value."""
    log_opt: dict[str, str] = msgspec.field(default_factory=dict)
    """The log goes to standard error, in lines of key=value."""
    controller_group_metrics: list[str] = msgspec.field(default_factory=list)
    """Every job has metrics, cilium_hive_*."""
    k8s_client_qps: float = 0.0
    """This is the agents' rate; the operator's is operator-k8s-client-qps."""
    k8s_client_burst: int = 0
    """This is the agents' burst; the operator's is operator-k8s-client-burst."""
    enable_k8s_api_discovery: bool = False
    """Resources are requested by name, and again while the API server does not serve them."""
    enable_k8s_endpoint_slice: bool = True
    """Endpoints of services are always read as EndpointSlices."""
    enable_cilium_network_policy: bool = True
    """CiliumNetworkPolicies are always registered, as by Cilium 1.17."""
    enable_cilium_clusterwide_network_policy: bool = True
    """CiliumClusterwideNetworkPolicies are always registered, as by Cilium 1.17."""
    parallel_alloc_workers: int = 50
    """One job allocates pod CIDRs in order, and writes them at the rate of operator-k8s-client-qps."""
    taint_sync_workers: int = 10
    """Nodes are written at the rate of operator-k8s-client-qps."""
    synchronize_k8s_nodes: bool = True
    """Every agent writes its own node to the kvstore, under its own lease."""
    lbipam_require_lb_class: bool = False
    """It has no effect in Cilium 1.17 either; use default-lb-service-ipam=none."""
    enable_node_port: bool = False
    """Agents serve node ports; Cilium's operator reads this only for its Ingress."""
    kube_proxy_replacement: str = "false"
    """Agents replace kube-proxy; Cilium's operator reads this only for its Ingress."""


class UnusedWithoutACloud(WithoutEffect, frozen=True):
    """IPAM of cloud providers is not supported."""

    limit_ipam_api_qps: float = 4.0
    limit_ipam_api_burst: int = 20
    instance_tags_filter: dict[str, str] = msgspec.field(default_factory=dict)
    subnet_ids_filter: list[str] = msgspec.field(default_factory=list)
    subnet_tags_filter: dict[str, str] = msgspec.field(default_factory=dict)


class UnusedWithoutAMesh(WithoutEffect, frozen=True):
    """The operator does not connect to other clusters, see clustermesh-config."""

    clustermesh_concurrent_service_endpoint_syncs: int = 5
    clustermesh_endpoint_updates_batch_period: Duration = milliseconds(500)
    clustermesh_endpoints_per_slice: int = 100


class UnusedWithoutIngresses(WithoutEffect, frozen=True):
    """Ingress is not supported, see enable-ingress-controller."""

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
    """The Gateway API is not supported, see enable-gateway-api."""

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
    """L7 load balancing, policy secrets and mutual authentication are not supported."""

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
"""The supported IPAM modes."""
MODES: Final = ("crd", "kvstore", "doublewrite-readkvstore", "doublewrite-readcrd")
"""Modes of identity allocation."""


class OperatorOptions(Settings, frozen=True):
    """Options of the whole operator."""

    debug: bool = False
    """Log debug messages."""

    enable_ipv4: bool = True
    """Pods have IPv4 addresses."""

    enable_ipv6: bool = False
    """Pods have IPv6 addresses."""

    ipam: str = "cluster-pool"
    """Who allocates pod CIDRs: this operator (cluster-pool, multi-pool), kubernetes, or a delegated-plugin.
    """

    identity_allocation_mode: str = "crd"
    """Store of identities: crd, or kvstore, which is read as crd if no kvstore is set.
    doublewrite-readkvstore and doublewrite-readcrd maintain both, and compare them in metrics.
    """

    cluster_name: str = "default"
    """Name of the cluster."""

    cluster_id: int = 0
    """Id of the cluster in a mesh, 0 to max-connected-clusters; an id other than 0 requires a cluster-name.
    """

    max_connected_clusters: int = 255
    """Maximum number of clusters in the mesh, 255 or 511; the same in all clusters."""

    k8s_namespace: str = ""
    """Namespace of the operator and of its lease; empty: default."""

    def faults(self) -> Iterator[str]:
        if self.ipam not in SERVED:
            yield f"ipam={self.ipam}: expected cluster-pool, multi-pool, kubernetes or delegated-plugin"
        if self.identity_allocation_mode not in MODES:
            mode = self.identity_allocation_mode
            yield f"identity-allocation-mode={mode}: expected one of {', '.join(MODES)}"
        yield from cluster_faults(self.cluster_name, self.cluster_id, self.max_connected_clusters)


class ServedCluster(msgspec.Struct, frozen=True):
    """The operator's cluster, for all its cells."""

    name: str = "default"
    number: int = 0
    """The cluster id; 0 outside a mesh."""
    most_clusters: int = 255
    """Maximum number of clusters in the mesh."""
    namespace: str = "default"
    """Namespace of the operator."""
    ipv4: bool = True
    ipv6: bool = False
    ipam: str = "cluster-pool"
    """Who allocates pod CIDRs."""
    identity_mode: str = "crd"
    """Store of identities, one of MODES."""

    @property
    def compares_identities(self) -> bool:
        """Whether both stores have the identities."""
        return self.identity_mode.startswith("doublewrite")


def served_cluster(options: OperatorOptions) -> ServedCluster:
    """Return the cluster that the options describe."""
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
    config(OperatorOptions, UnsupportedOperator, *UNUSED_BY_OPERATOR),
    provide(served_cluster),
    invoke(log_unused),
)
