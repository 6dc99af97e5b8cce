"""Cilium's options of what is not built: accepted where they ask for what this agent does anyway.

Source: Cilium 1.17, option names. Unset, each takes the value shown as its default here, which is not always
        Cilium's: an agent without Kubernetes, tunnels and services.
Why:    traffic must not pass for encrypted, or policies for enforced, when it is not so: any other value is
        refused, all at once. Who builds a part takes its options away from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from lifecycle import Duration, Settings, seconds

# Bases of options that are not served: those that refuse other values, and those that change nothing.


class WithoutEffect(Settings, frozen=True):
    """Options that are accepted with any value of their type, and change nothing."""


class UnservedSettings(Settings, frozen=True):
    """Options that may only ask for what the agent does anyway: their defaults."""

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


# Keys of Cilium's ConfigMap, and variables of its pods, that other programs read: no settings of the agent.
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
"""Options of our operator, which refuses those of parts that are not built."""

CLOUDS: Final = """
aws-enable-prefix-delegation aws-release-excess-ips azure-use-primary-address azure-user-assigned-identity-id
ec2-api-endpoint eni-gc-interval eni-gc-tags eni-tags update-ec2-adapter-limit-via-api
"""
"""Options of Cilium's operators of clouds; their modes of IPAM are refused."""

PODS: Final = """
all-state bpf-state clean-cilium-bpf-state clean-cilium-state cni-uninstall config-sources
config-sources-overrides custom-cni-conf etcd-config health-sock sock state wait-bpf-mount
"""
"""What init containers, hooks, clients and `hive build-config` read and write."""

OTHERS: Final = frozenset(f"{OPERATOR} {CLOUDS} {PODS}".split())
"""All of them."""


class UnservedAgent(UnservedSettings, frozen=True):
    """The agent's own behaviour, and the runtime's."""

    cni_external_routing: bool = False
    """Routing of pods is never left to other plugins; see cni-chaining-mode for chains."""

    restore: bool = True
    """Pods live on through a restart of the agent."""

    keep_config: bool = False
    """Each start reads its settings anew."""

    debug_verbose: str = ""
    """There is one level of debug, for everything."""

    pprof: bool = False
    """Profiles are not served; see `hive inspect --timeline` for the start."""

    dry_mode: bool = False
    """There is no agent that does nothing; `hive inspect` shows one without starting it."""

    enable_k8s: bool = True
    """Objects come from an API server or a folder where a setting names one, and from nowhere otherwise."""

    enable_mke: bool = False
    """Mirantis' chains of plugins are not built."""

    enable_dynamic_lifecycle_manager: bool = False
    """Parts of the agent are not started and stopped by a setting."""

    static_cnp_path: str = ""
    """Policies of a folder come with its other objects: see manifests-dir."""


class UnservedAnnouncements(UnservedSettings, frozen=True):
    """Addresses announced to others."""

    enable_l2_pod_announcements: bool = False
    """Addresses of pods are not announced yet."""


class UnservedBandwidth(UnservedSettings, frozen=True):
    """Bandwidth of pods."""

    enable_bandwidth_manager: bool = False
    """Pods' bandwidth is not limited yet."""

    enable_bbr: bool = False
    """Pods' congestion control is not chosen yet."""


class UnservedCluster(UnservedSettings, frozen=True):
    """Identities and addresses that nodes share."""

    node_labels: str = ""
    """The node's labels are not part of identities yet."""

    fixed_identity_mapping: str = ""
    """Identities of one's own cannot have fixed numbers yet."""

    enable_high_scale_ipcache: bool = False
    """All identities of addresses are in the ipcache map."""


class UnservedDatapath(UnservedSettings, frozen=True):
    """Kinds of links, and what the programs store and report."""

    datapath_mode: str = "veth"
    """Kind of the pods' links; netkit is not built yet."""

    enable_ipv4_fragment_tracking: bool = True
    """Fragments follow their first one, of both families."""

    bpf_conntrack_accounting: bool = False
    """Packets and bytes of each connection are not counted yet."""

    monitor_aggregation_interval: Duration = seconds(5)
    """How often a connection that goes on is reported again; it cannot be chosen yet."""

    enable_bpf_clock_probe: bool = False
    """Times in the conntrack maps are seconds since boot."""

    enable_ipv6_fragment_tracking: bool = True
    """Fragments follow their first one, of both families."""

    enable_custom_calls: bool = False
    """Programs of others are not called for packets."""

    enable_recorder: bool = False
    """Packets are not recorded."""

    enable_identity_mark: bool = True
    """The mark of a packet carries its identity to the node's stack."""

    allow_icmp_frag_needed: bool = True
    """Let ICMP "packet too big" messages about a pod's packets reach it whatever its policy."""

    bpf_filter_priority: int = 1
    """Programs are attached with the first priority."""

    vlan_bpf_bypass: str = ""
    """Packets of VLANs pass the programs of their device as others do."""


class UnservedGateways(UnservedSettings, frozen=True):
    """Ways out of the cluster, and groups."""

    multicast_enabled: bool = False
    """Groups of pods are not built yet."""

    enable_srv6: bool = False
    """Segment routing is not built yet."""

    enable_vtep: bool = False
    """Foreign tunnel endpoints are not known yet."""

    enable_egress_gateway: bool = False
    """A later name: ask for gateways with enable-ipv4-egress-gateway."""

    enable_ipip_termination: bool = False
    """Tunnels of other load balancers do not end here."""


class UnservedMasquerade(UnservedSettings, frozen=True):
    """Translation of pods' addresses on the way out."""

    install_no_conntrack_iptables_rules: bool = False
    """No rules of iptables are made."""

    enable_masquerade_to_route_source: bool = False
    """Masqueraded packets have the address of the device they leave through, not that of their route."""


class UnservedNode(UnservedSettings, frozen=True):
    """The node's own addresses, devices and routes."""

    enable_unreachable_routes: bool = False
    """Addresses that pods have left are not made unreachable yet."""

    route_metric: int = 0
    """The routes to pods have the kernel's usual metric."""

    enable_runtime_device_detection: bool = True
    """Devices that come or change while the agent runs are always noticed."""

    enable_pmtu_discovery: bool = False
    """Pods get no message yet about packets that are too large for the path."""

    install_uplink_routes_for_delegated_ipam: bool = False
    """Addresses of other IPAM plugins get no routes of ours."""

    egress_multi_home_ip_rule_compat: bool = False
    """No rules for several interfaces of a cloud are made."""

    force_device_detection: bool = False
    """Uplinks are those that devices names, or, where it names none, those that are detected."""

    local_max_addr_scope: int = 252
    """Addresses of a larger scope never count as the node's."""

    enable_ipv6_ndp: bool = False
    """Neighbour solicitations for pods are not answered at the node's devices."""


class UnservedPolicy(UnservedSettings, frozen=True):
    """Policies, of pods and of the node."""

    enable_xdp_prefilter: bool = False
    """Packets are not dropped by the driver yet."""

    enable_tracing: bool = False
    """Policy decisions are not logged; `hive monitor` shows verdicts."""

    lrp_address_matcher_cidrs: str = ""
    """CiliumLocalRedirectPolicies may name any address."""


class UnservedProxy(UnservedSettings, frozen=True):
    """Proxies of layer 7."""

    enable_envoy_config: bool = False
    """No Envoy is configured yet."""

    enable_bpf_tproxy: bool = False
    """No proxy is started yet."""

    enable_ingress_controller: bool = False
    """No proxy is started yet."""

    enable_gateway_api: bool = False
    """No proxy is started yet."""

    dns_policy_unload_on_shutdown: bool = False
    """Rules for names stay in force while no agent runs."""

    enable_standalone_dns_proxy: bool = False
    """The DNS proxy is part of the agent."""


class UnservedServices(UnservedSettings, frozen=True):
    """Services and their load balancing."""

    enable_nat46x64_gateway: bool = False
    """Translation between IPv4 and IPv6."""

    bpf_lb_nat46x64: bool = False
    """Translation between IPv4 and IPv6."""

    enable_health_check_loadbalancer_ip: bool = False
    """A service's health is served at the node's addresses, not at those of its load balancer."""

    enable_active_connection_tracking: bool = False
    """Connections are not counted by service and zone."""

    fixed_zone_mapping: str = ""
    """Backends carry no number of a zone, as connections are not counted by it."""

    lb_state_file: str = ""
    """Services of a folder come with its other objects: see manifests-dir."""


REFUSED: Final[tuple[type[UnservedSettings], ...]] = (
    UnservedAgent,
    UnservedAnnouncements,
    UnservedBandwidth,
    UnservedCluster,
    UnservedDatapath,
    UnservedGateways,
    UnservedMasquerade,
    UnservedNode,
    UnservedPolicy,
    UnservedProxy,
    UnservedServices,
)
