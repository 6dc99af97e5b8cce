"""Cilium's options of unsupported features; only the values with this agent's behaviour are accepted.

Source: Cilium 1.17, option names. The defaults are the accepted values, not always Cilium's defaults.

Any other value is rejected, all at once, so that no user relies on encryption or policies that are not in
force. Remove an option here when its feature is implemented.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from lifecycle import Duration, Settings, seconds

# Bases of unsupported options: those that reject other values, and those without effect.


class WithoutEffect(Settings, frozen=True):
    """Options that are accepted with any value of their type and have no effect."""


class UnsupportedSettings(Settings, frozen=True):
    """Options that are accepted only with their default value."""

    def faults(self) -> Iterable[str]:
        return (
            f"{field.replace('_', '-')}={_text(value)}: not supported yet, {_expected(default)}"
            for field, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True)
            if (value := getattr(self, field)) != default
        )


def _expected(accepted: object) -> str:
    text = _text(accepted)
    return f"expected {text}, or leave it unset" if text else "leave it unset"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# Keys of Cilium's ConfigMap, and variables of its pods, that only other programs read.
#
# Source: Cilium 1.17, options of its operators, its chart's init containers and hooks.

OPERATOR: Final = """
agent-not-ready-taint-key auto-create-cilium-pod-ip-pools ces-max-ciliumendpoints-per-ces ces-rate-limits
ces-slice-mode cilium-endpoint-gc-interval cilium-pod-labels cilium-pod-namespace
cluster-pool-ipv4-mask-size cluster-pool-ipv6-mask-size
clustermesh-concurrent-service-endpoint-syncs clustermesh-enable-endpoint-sync clustermesh-enable-mcs-api
clustermesh-endpoint-updates-batch-period clustermesh-endpoints-per-slice default-lb-service-ipam
enable-cilium-operator-server-access enable-gateway-api-alpn enable-gateway-api-app-protocol
enable-gateway-api-proxy-protocol enable-gateway-api-secrets-sync enable-ingress-proxy-protocol
enable-ingress-secrets-sync enable-lb-ipam enable-metrics enable-node-ipam enable-policy-secrets-sync
enforce-ingress-https gateway-api-hostnetwork-enabled gateway-api-hostnetwork-nodelabelselector
gateway-api-secrets-namespace gateway-api-service-externaltrafficpolicy gateway-api-xff-num-trusted-hops
identity-gc-interval identity-gc-rate-interval identity-gc-rate-limit identity-heartbeat-timeout
identity-management-mode ingress-default-lb-mode ingress-default-request-timeout ingress-default-secret-name
ingress-default-secret-namespace ingress-default-xff-num-trusted-hops ingress-hostnetwork-enabled
ingress-hostnetwork-nodelabelselector ingress-hostnetwork-shared-listener-port
ingress-lb-annotation-prefixes ingress-secrets-namespace ingress-shared-lb-service-name instance-tags-filter
lbipam-require-lb-class leader-election-lease-duration leader-election-renew-deadline
leader-election-retry-period limit-ipam-api-burst limit-ipam-api-qps loadbalancer-l7
loadbalancer-l7-algorithm loadbalancer-l7-ports mesh-auth-spire-agent-socket mesh-auth-spire-server-address
mesh-auth-spire-server-connection-timeout nodes-gc-interval operator-api-serve-addr
operator-k8s-client-burst operator-k8s-client-qps operator-manages-identities operator-pprof
operator-pprof-address operator-pprof-port operator-prometheus-serve-addr parallel-alloc-workers
pod-restart-selector policy-secrets-namespace remove-cilium-node-taints set-cilium-is-up-condition
set-cilium-node-taints skip-crd-creation subnet-ids-filter subnet-tags-filter synchronize-k8s-nodes
synchronize-k8s-services taint-sync-workers unmanaged-pod-watcher-interval validate-network-policy
"""
"""Options of our operator, which rejects those of unsupported features."""

CLOUDS: Final = """
aws-enable-prefix-delegation aws-release-excess-ips azure-use-primary-address azure-user-assigned-identity-id
ec2-api-endpoint eni-gc-interval eni-gc-tags eni-tags update-ec2-adapter-limit-via-api
"""
"""Options of Cilium's operators of cloud providers; their IPAM modes are rejected."""

PODS: Final = """
all-state bpf-state clean-cilium-bpf-state clean-cilium-state cni-uninstall config-sources
config-sources-overrides custom-cni-conf etcd-config health-sock sock state wait-bpf-mount
"""
"""Keys of init containers, hooks, clients and `hive build-config`."""

OTHERS: Final = frozenset(f"{OPERATOR} {CLOUDS} {PODS}".split())
"""All of these keys."""


class UnsupportedAgent(UnsupportedSettings, frozen=True):
    """Behaviour of the agent, and container runtimes."""

    cni_external_routing: bool = False
    """Routing of pods is never left to other plugins; see cni-chaining-mode for chaining."""

    restore: bool = True
    """Endpoints are always restored after a restart of the agent."""

    keep_config: bool = False
    """Each start reads its settings anew."""

    debug_verbose: str = ""
    """There is one debug level, for all parts."""

    pprof: bool = False
    """Profiles are not served; see `hive inspect --timeline` for the start."""

    dry_mode: bool = False
    """There is no dry mode; `hive inspect` shows an agent without starting it."""

    enable_k8s: bool = True
    """Without an API server or manifests-dir the agent runs without Kubernetes."""

    enable_mke: bool = False
    """Chaining on Mirantis Kubernetes Engine is not supported."""

    enable_dynamic_lifecycle_manager: bool = False
    """Parts of the agent cannot be started and stopped by a setting."""

    static_cnp_path: str = ""
    """Put policies into manifests-dir instead."""


class UnsupportedAnnouncements(UnsupportedSettings, frozen=True):
    """L2 announcements."""

    enable_l2_pod_announcements: bool = False
    """L2 announcements of pods' addresses are not supported yet."""


class UnsupportedBandwidth(UnsupportedSettings, frozen=True):
    """Bandwidth management."""

    enable_bandwidth_manager: bool = False
    """The bandwidth manager is not supported yet."""

    enable_bbr: bool = False
    """BBR congestion control for pods is not supported yet."""


class UnsupportedCluster(UnsupportedSettings, frozen=True):
    """Identities and the ipcache."""

    node_labels: str = ""
    """Labels of nodes in identities are not supported yet."""

    fixed_identity_mapping: str = ""
    """Fixed numbers for user-defined identities are not supported yet."""

    enable_high_scale_ipcache: bool = False
    """The ipcache map always has the identities of all addresses."""


class UnsupportedDatapath(UnsupportedSettings, frozen=True):
    """Links, maps and events of the datapath."""

    datapath_mode: str = "veth"
    """Kind of the pods' links; netkit is not supported yet."""

    enable_ipv4_fragment_tracking: bool = True
    """IPv4 fragments are always tracked."""

    bpf_conntrack_accounting: bool = False
    """Packet and byte counters of conntrack entries are not supported yet."""

    monitor_aggregation_interval: Duration = seconds(5)
    """Interval at which an active connection is reported again; it is not configurable yet."""

    enable_bpf_clock_probe: bool = False
    """Times in conntrack maps are always seconds since boot."""

    enable_ipv6_fragment_tracking: bool = True
    """IPv6 fragments are always tracked."""

    enable_custom_calls: bool = False
    """Tail calls to user-defined programs are not supported."""

    enable_recorder: bool = False
    """Packet capture is not supported."""

    enable_identity_mark: bool = True
    """Packet marks always carry the identity to the host's stack."""

    allow_icmp_frag_needed: bool = True
    """ICMP "packet too big" messages for a pod's packets are always allowed."""

    bpf_filter_priority: int = 1
    """Programs are always attached with priority 1."""

    vlan_bpf_bypass: str = ""
    """VLAN packets are processed by the programs of their device like others."""


class UnsupportedGateways(UnsupportedSettings, frozen=True):
    """Gateways and multicast."""

    multicast_enabled: bool = False
    """Multicast is not supported yet."""

    enable_srv6: bool = False
    """SRv6 is not supported yet."""

    enable_vtep: bool = False
    """VXLAN tunnel endpoints outside the cluster are not supported yet."""

    enable_egress_gateway: bool = False
    """A name of later versions; use enable-ipv4-egress-gateway."""

    enable_ipip_termination: bool = False
    """Termination of IPIP tunnels is not supported."""


class UnsupportedMasquerade(UnsupportedSettings, frozen=True):
    """Masquerading."""

    install_no_conntrack_iptables_rules: bool = False
    """The agent installs no iptables rules."""

    enable_masquerade_to_route_source: bool = False
    """Masqueraded packets have the address of the egress device, not the source of the route."""


class UnsupportedNode(UnsupportedSettings, frozen=True):
    """Addresses, devices and routes of the node."""

    enable_unreachable_routes: bool = False
    """Unreachable routes for addresses of deleted pods are not supported yet."""

    route_metric: int = 0
    """Routes to pods always have the kernel's default metric."""

    enable_runtime_device_detection: bool = True
    """Changes of devices are always detected at run time."""

    enable_pmtu_discovery: bool = False
    """Path MTU discovery for pods is not supported yet."""

    install_uplink_routes_for_delegated_ipam: bool = False
    """Routes for addresses of delegated IPAM plugins are not supported."""

    egress_multi_home_ip_rule_compat: bool = False
    """Routing rules for several interfaces in clouds are not supported."""

    force_device_detection: bool = False
    """Uplinks are those that devices names; they are detected only if it is unset."""

    local_max_addr_scope: int = 252
    """Addresses with a larger scope never count as the node's."""

    enable_ipv6_ndp: bool = False
    """Neighbour solicitations for pods are not answered on the node's devices."""


class UnsupportedPolicy(UnsupportedSettings, frozen=True):
    """Network policies."""

    enable_xdp_prefilter: bool = False
    """The XDP prefilter is not supported yet."""

    enable_tracing: bool = False
    """Policy decisions are not logged; `hive monitor` shows verdicts."""

    policy_default_local_cluster: bool = False
    """Selectors of policies match endpoints of all clusters unless they name one."""

    lrp_address_matcher_cidrs: str = ""
    """CiliumLocalRedirectPolicies may match any address."""


class UnsupportedProxy(UnsupportedSettings, frozen=True):
    """L7 proxies."""

    enable_envoy_config: bool = False
    """CiliumEnvoyConfigs are not supported yet."""

    enable_bpf_tproxy: bool = False
    """Packets to proxies are always redirected by bpf_sk_assign."""

    enable_ingress_controller: bool = False
    """Ingress is not supported yet."""

    enable_gateway_api: bool = False
    """The Gateway API is not supported yet."""

    dns_policy_unload_on_shutdown: bool = False
    """Policies for names stay in force while no agent runs."""

    enable_standalone_dns_proxy: bool = False
    """The DNS proxy is part of the agent."""


class UnsupportedServices(UnsupportedSettings, frozen=True):
    """Services and load balancing."""

    enable_nat46x64_gateway: bool = False
    """Translation between IPv4 and IPv6 is not supported."""

    bpf_lb_nat46x64: bool = False
    """Translation between IPv4 and IPv6 is not supported."""

    enable_health_check_loadbalancer_ip: bool = False
    """Health checks of services are served on the node's addresses, not on load balancer addresses."""

    enable_active_connection_tracking: bool = False
    """Connections are not counted by service and zone."""

    fixed_zone_mapping: str = ""
    """Backends have no zone numbers, since connections are not counted by zone."""

    lb_state_file: str = ""
    """Put services into manifests-dir instead."""


REFUSED: Final[tuple[type[UnsupportedSettings], ...]] = (
    UnsupportedAgent,
    UnsupportedAnnouncements,
    UnsupportedBandwidth,
    UnsupportedCluster,
    UnsupportedDatapath,
    UnsupportedGateways,
    UnsupportedMasquerade,
    UnsupportedNode,
    UnsupportedPolicy,
    UnsupportedProxy,
    UnsupportedServices,
)
