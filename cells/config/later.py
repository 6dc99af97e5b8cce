"""Cilium's options of what is not built yet: accepted where they ask for what this agent does anyway.

Needs: nothing.   Gives: LaterSettings.
Source: Cilium 1.17, option names. Unset, each takes the value shown as its default here, which is not always
Cilium's: an agent without Kubernetes, tunnels and services. Set to anything else it is refused, all at once:
no operator must believe that traffic is encrypted, or policies are enforced, when it is not so.
"""

from __future__ import annotations

from typing import Final

from lifecycle import Settings


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

    enable_host_legacy_routing: bool = False
    """Packets to pods never take the host's stack."""

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

    enable_ipv4_egress_gateway: bool = False
    """There are no gateways for traffic to the outside yet."""

    enable_srv6: bool = False
    """Segment routing is not built yet."""

    enable_vtep: bool = False
    """Foreign tunnel endpoints are not known yet."""

    enable_sctp: bool = False
    """SCTP is not tracked yet: its packets are dropped."""

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

    dry_mode: bool = False
    """There is no agent that does nothing; `hive inspect` shows one without starting it."""

    def validate(self) -> None:
        """Refuse every value that is not there, all at once; raises a group of ValueErrors, a line each."""
        refused = []
        for field in type(self).__struct_fields__:
            value, have = getattr(self, field), getattr(_HERE, field)
            if value != have:
                name, text, only = field.replace("_", "-"), _text(value), _text(have) or "nothing"
                refused.append(
                    ValueError(f"{name}={text}: not supported yet, expected {only}, or leave it unset")
                )
        if refused:
            raise ExceptionGroup("options of what is not built yet", refused)


_HERE: Final = LaterSettings()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
