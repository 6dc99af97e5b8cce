"""Cilium's options of what is not built yet: accepted where they ask for what this agent does anyway.

Needs: nothing.   Gives: LaterSettings.
Source: Cilium 1.17, option names. Unset, each takes the value shown as its default here, which is not always
Cilium's: an agent without Kubernetes, tunnels and services. Set to anything else it is refused, all at once:
no operator must believe that traffic is encrypted, or policies are enforced, when it is not so. What only
qualifies a part that is switched off here is no option at all: it may say what it likes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lifecycle import Duration, Settings, refuse, seconds


class LaterSettings(Settings, frozen=True):
    """Options of Cilium's of which only one value is there yet."""

    routing_mode: str = "native"
    """How packets reach other nodes; tunnels are not built yet."""

    datapath_mode: str = "veth"
    """Kind of the pods' links; netkit is not built yet."""

    auto_direct_node_routes: bool = False
    """Routes to the pods of other nodes are not set yet."""

    enable_endpoint_routes: bool = False
    """A route for each pod is not built yet; the node has one for all."""

    enable_host_legacy_routing: bool = True
    """What leaves the node or comes to it takes the host's stack, as always; both values are accepted."""

    enable_unreachable_routes: bool = False
    """Addresses that pods have left are not made unreachable yet."""

    route_metric: int = 0
    """The routes to pods have the kernel's usual metric."""

    enable_runtime_device_detection: bool = True
    """Devices that come or change while the agent runs are always noticed."""

    ipv4_node: str = "auto"
    """The node's IPv4 address is found among its devices' addresses."""

    ipv6_node: str = "auto"
    """The node's IPv6 address is found among its devices' addresses."""

    enable_pmtu_discovery: bool = False
    """Pods are not told yet of packets that are too large for the way."""

    install_no_conntrack_iptables_rules: bool = False
    """No rules of iptables are made."""

    container_ip_local_reserved_ports: str = "auto"
    """No ports are reserved in pods: nothing here needs any. Nothing is accepted too."""

    cni_external_routing: bool = False
    """Routing of pods is never left to other plugins; see cni-chaining-mode for chains."""

    install_uplink_routes_for_delegated_ipam: bool = False
    """Addresses of other IPAM plugins get no routes of ours."""

    egress_multi_home_ip_rule_compat: bool = False
    """No rules for several interfaces of a cloud are made."""

    enable_ipv4_masquerade: bool = False
    """Pods' addresses are not translated yet when they leave the node."""

    enable_ipv6_masquerade: bool = False
    """The same of IPv6."""

    enable_bpf_masquerade: bool = False
    """The same, by eBPF."""

    enable_ip_masq_agent: bool = False
    """The same, with exceptions."""

    kube_proxy_replacement: str = "false"
    """Services are not built yet: kube-proxy goes on."""

    bpf_lb_sock: bool = False
    """Services at the socket."""

    enable_session_affinity: bool = False
    """Clients that stay with one backend of a service."""

    enable_nat46x64_gateway: bool = False
    """Translation between IPv4 and IPv6."""

    enable_node_port: bool = False
    """Services on the node's ports."""

    enable_host_port: bool = False
    """Pods on the node's ports; chain the portmap plugin for them (cni-chaining-mode=portmap)."""

    enable_external_ips: bool = False
    """Services on addresses from outside."""

    enable_local_redirect_policy: bool = False
    """Redirection of services to pods of the node."""

    identity_allocation_mode: str = ""
    """Identities are the node's own yet: neither crd nor kvstore."""

    kvstore: str = ""
    """No kvstore is used yet."""

    cluster_id: int = 0
    """Several clusters are not connected yet."""

    k8s_api_server: str = ""
    """Nothing is asked of the Kubernetes API yet."""

    k8s_kubeconfig_path: str = ""
    """Nothing is asked of the Kubernetes API yet."""

    k8s_require_ipv4_pod_cidr: bool = False
    """The node's range is not taken from its object yet: see ipv4-range."""

    k8s_require_ipv6_pod_cidr: bool = False
    """The node's range is not taken from its object yet: see ipv6-range."""

    labels: str = ""
    """Which labels make identities cannot be chosen yet."""

    label_prefix_file: str = ""
    """The same, from a file."""

    node_labels: str = ""
    """The node's labels are not part of identities yet."""

    enable_node_selector_labels: bool = False
    """The same, of other nodes."""

    enable_well_known_identities: bool = False
    """No identity has a number of its own but the reserved ones."""

    fixed_identity_mapping: str = ""
    """No identity has a number of its own but the reserved ones."""

    enable_high_scale_ipcache: bool = False
    """All identities of addresses are in the ipcache map."""

    policy_cidr_match_mode: str = ""
    """Networks in policies never select nodes."""

    enable_endpoint_lockdown_on_policy_overflow: bool = False
    """No endpoint is cut off when its policy map is full."""

    enable_k8s_networkpolicy: bool = False
    """NetworkPolicies are not read yet; see enable-policy for what is enforced."""

    enable_cilium_network_policy: bool = False
    """CiliumNetworkPolicies are not read yet."""

    enable_cilium_clusterwide_network_policy: bool = False
    """CiliumClusterwideNetworkPolicies are not read yet."""

    policy_audit_mode: bool = False
    """Refused packets cannot be let through and only told of yet."""

    enable_l7_proxy: bool = False
    """No proxy is started yet."""

    enable_envoy_config: bool = False
    """No Envoy is configured yet."""

    enable_bpf_tproxy: bool = False
    """No proxy is started yet."""

    enable_ingress_controller: bool = False
    """No proxy is started yet."""

    enable_gateway_api: bool = False
    """No proxy is started yet."""

    enable_host_firewall: bool = False
    """The node itself is not protected yet."""

    enable_xdp_prefilter: bool = False
    """Packets are not dropped by the driver yet."""

    enable_ipsec: bool = False
    """Traffic is not encrypted yet."""

    enable_wireguard: bool = False
    """Traffic is not encrypted yet."""

    encrypt_node: bool = False
    """Traffic is not encrypted yet."""

    enable_encryption_strict_mode: bool = False
    """Traffic is not encrypted yet."""

    enable_hubble: bool = False
    """Flows are not served yet; hive monitor shows them."""

    enable_health_checking: bool = False
    """Nodes do not probe each other yet."""

    enable_endpoint_health_checking: bool = False
    """Nodes do not probe each other yet."""

    enable_bandwidth_manager: bool = False
    """Pods' bandwidth is not limited yet."""

    enable_bbr: bool = False
    """Pods' congestion control is not chosen yet."""

    enable_ipv4_big_tcp: bool = False
    """Packets beyond 64 KiB are not used yet."""

    enable_ipv6_big_tcp: bool = False
    """Packets beyond 64 KiB are not used yet."""

    enable_bgp_control_plane: bool = False
    """Routes are not announced yet."""

    enable_l2_announcements: bool = False
    """Addresses of services are not announced yet."""

    enable_l2_pod_announcements: bool = False
    """Addresses of pods are not announced yet."""

    multicast_enabled: bool = False
    """Groups of pods are not built yet."""

    enable_ipv4_egress_gateway: bool = False
    """There are no gateways for traffic to the outside yet."""

    enable_srv6: bool = False
    """Segment routing is not built yet."""

    enable_vtep: bool = False
    """Foreign tunnel endpoints are not known yet."""

    enable_sctp: bool = False
    """SCTP is not tracked yet: its packets are dropped."""

    enable_ipv4_fragment_tracking: bool = True
    """Fragments follow their first one, of both families."""

    bpf_conntrack_accounting: bool = False
    """Packets and bytes of each connection are not counted yet."""

    monitor_aggregation_interval: Duration = seconds(5)
    """How often a connection that goes on is told of again; it cannot be chosen yet."""

    enable_bpf_clock_probe: bool = False
    """Times in the conntrack maps are seconds since boot."""

    annotate_k8s_node: bool = False
    """The node's object is not written yet."""

    local_router_ipv4: str = ""
    """The router's address is one of the node's range."""

    local_router_ipv6: str = ""
    """The router's address is one of the node's range."""

    restore: bool = True
    """Pods of before a restart live on."""

    keep_config: bool = False
    """Each start reads its settings anew."""

    debug_verbose: str = ""
    """There is one level of debug, for everything."""

    pprof: bool = False
    """Profiles are not served; see `hive inspect --timeline` for the start."""

    enable_tracing: bool = False
    """Policy decisions are not logged; `hive monitor` shows verdicts."""

    dry_mode: bool = False
    """There is no agent that does nothing; `hive inspect` shows one without starting it."""

    def validate(self) -> None:
        """Refuse every value that is not there, all at once; raises ValueErrors of one line."""
        refuse(
            f"{field.replace('_', '-')}={_text(value)}: not supported yet, {_expected(field)}"
            for field in type(self).__struct_fields__
            if (value := getattr(self, field)) not in accepted(field)
        )


_HERE: Final = LaterSettings()
_ALSO: Final[Mapping[str, tuple[object, ...]]] = {
    "enable_host_legacy_routing": (False,),  # Cilium takes the stack then, too, unless it replaces kube-proxy
    "container_ip_local_reserved_ports": ("",),
}


def accepted(field: str) -> tuple[object, ...]:
    """The values of an option that ask for what this agent does, its default first."""
    return (getattr(_HERE, field), *_ALSO.get(field, ()))


def _expected(field: str) -> str:
    texts = [text for value in accepted(field) if (text := _text(value))]
    return f"expected {' or '.join(texts)}, or leave it unset" if texts else "leave it unset"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
