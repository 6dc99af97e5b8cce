"""Options of Cilium's operator that this one takes, and that change nothing here: each says why.

Needs: nothing.   Gives: WithoutEffect, tell().
Source: Cilium 1.17, options of cilium-operator-generic, with its defaults.
Why:    a command line, or a unit, that was written for Cilium's operator starts this one, too. An option that
        would change what a user gets stands with what is not served, and is refused.
"""

from __future__ import annotations

import msgspec

from lifecycle import Duration, Logger, Settings, milliseconds, seconds


class WithoutEffect(Settings, frozen=True):
    """Options that are taken and change nothing."""

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

    limit_ipam_api_qps: float = 4.0
    """No cloud is asked for addresses."""

    limit_ipam_api_burst: int = 20
    """No cloud is asked for addresses."""

    instance_tags_filter: dict[str, str] = msgspec.field(default_factory=dict)
    """No cloud is asked for addresses."""

    subnet_ids_filter: list[str] = msgspec.field(default_factory=list)
    """No cloud is asked for addresses."""

    subnet_tags_filter: dict[str, str] = msgspec.field(default_factory=dict)
    """No cloud is asked for addresses."""

    synchronize_k8s_nodes: bool = True
    """Every agent writes its own node to the kvstore, under a lease that ends with it."""

    synchronize_k8s_services: bool = True
    """Only other clusters of a mesh would read services in the kvstore."""

    lbipam_require_lb_class: bool = False
    """As with Cilium 1.17; default-lb-service-ipam=none asks for what its name says."""

    enable_node_port: bool = False
    """Agents serve node ports; Cilium's operator asks for its Ingress only."""

    kube_proxy_replacement: str = "false"
    """Agents replace kube-proxy; Cilium's operator asks for its Ingress only."""

    clustermesh_concurrent_service_endpoint_syncs: int = 5
    """Several clusters are not connected, see clustermesh-config."""

    clustermesh_endpoint_updates_batch_period: Duration = milliseconds(500)
    """Several clusters are not connected, see clustermesh-config."""

    clustermesh_endpoints_per_slice: int = 100
    """Several clusters are not connected, see clustermesh-config."""

    enable_ingress_proxy_protocol: bool = False
    """Ingresses are not served, see enable-ingress-controller."""

    enable_ingress_secrets_sync: bool = True
    """Ingresses are not served, see enable-ingress-controller."""

    enforce_ingress_https: bool = True
    """Ingresses are not served, see enable-ingress-controller."""

    ingress_default_lb_mode: str = "dedicated"
    """Ingresses are not served, see enable-ingress-controller."""

    ingress_default_secret_name: str = ""
    """Ingresses are not served, see enable-ingress-controller."""

    ingress_default_secret_namespace: str = ""
    """Ingresses are not served, see enable-ingress-controller."""

    ingress_default_request_timeout: Duration = seconds(0)
    """Ingresses are not served, see enable-ingress-controller."""

    ingress_default_xff_num_trusted_hops: int = 0
    """Ingresses are not served, see enable-ingress-controller."""

    ingress_hostnetwork_enabled: bool = False
    """Ingresses are not served, see enable-ingress-controller."""

    ingress_hostnetwork_nodelabelselector: str = ""
    """Ingresses are not served, see enable-ingress-controller."""

    ingress_hostnetwork_shared_listener_port: int = 0
    """Ingresses are not served, see enable-ingress-controller."""

    ingress_lb_annotation_prefixes: list[str] = msgspec.field(default_factory=list)
    """Ingresses are not served, see enable-ingress-controller."""

    ingress_secrets_namespace: str = "cilium-secrets"
    """Ingresses are not served, see enable-ingress-controller."""

    ingress_shared_lb_service_name: str = "cilium-ingress"
    """Ingresses are not served, see enable-ingress-controller."""

    enable_gateway_api_alpn: bool = False
    """The Gateway API is not served, see enable-gateway-api."""

    enable_gateway_api_app_protocol: bool = False
    """The Gateway API is not served, see enable-gateway-api."""

    enable_gateway_api_proxy_protocol: bool = False
    """The Gateway API is not served, see enable-gateway-api."""

    enable_gateway_api_secrets_sync: bool = True
    """The Gateway API is not served, see enable-gateway-api."""

    gateway_api_hostnetwork_enabled: bool = False
    """The Gateway API is not served, see enable-gateway-api."""

    gateway_api_hostnetwork_nodelabelselector: str = ""
    """The Gateway API is not served, see enable-gateway-api."""

    gateway_api_secrets_namespace: str = "cilium-secrets"
    """The Gateway API is not served, see enable-gateway-api."""

    gateway_api_service_externaltrafficpolicy: str = "Cluster"
    """The Gateway API is not served, see enable-gateway-api."""

    gateway_api_xff_num_trusted_hops: int = 0
    """The Gateway API is not served, see enable-gateway-api."""

    loadbalancer_l7_algorithm: str = "round_robin"
    """Services are not balanced by HTTP requests, see loadbalancer-l7."""

    loadbalancer_l7_ports: list[str] = msgspec.field(default_factory=list)
    """Services are not balanced by HTTP requests, see loadbalancer-l7."""

    policy_secrets_namespace: str = "cilium-secrets"
    """Secrets of policies are not copied, see enable-policy-secrets-sync."""

    mesh_auth_spiffe_trust_domain: str = "spiffe.cilium"
    """Pods do not authenticate each other, see mesh-auth-mutual-enabled."""

    mesh_auth_spire_agent_socket: str = "/run/spire/sockets/agent/agent.sock"
    """Pods do not authenticate each other, see mesh-auth-mutual-enabled."""

    mesh_auth_spire_server_address: str = "spire-server.spire.svc:8081"
    """Pods do not authenticate each other, see mesh-auth-mutual-enabled."""

    mesh_auth_spire_server_connection_timeout: Duration = seconds(10)
    """Pods do not authenticate each other, see mesh-auth-mutual-enabled."""


def tell(settings: WithoutEffect, log: Logger) -> None:
    """Name in the log what was asked for and changes nothing."""
    usual = WithoutEffect()
    fields = zip(settings.__struct_fields__, settings.__struct_encode_fields__, strict=True)
    names = [name for field, name in fields if getattr(settings, field) != getattr(usual, field)]
    if names:
        log.info("settings without effect here", settings=names, why="docs/reference/operator-settings.md")
