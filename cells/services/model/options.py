"""The agent's options that change what services become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from cells.services.model.types import IPAddress


class LoadBalancerOptions(msgspec.Struct, frozen=True, gc=False):
    """Cilium's options of the same names, and ours; the defaults are the chart's with kube-proxy replaced."""

    enable_ipv4: bool = True
    enable_ipv6: bool = True
    enable_node_port: bool = True
    enable_external_ips: bool = True
    enable_external_ips_of_nodes: bool = False
    enable_host_port: bool = True
    enable_session_affinity: bool = True
    enable_svc_source_range_check: bool = True
    bpf_lb_source_range_all_types: bool = False
    enable_internal_traffic_policy: bool = True
    enable_health_check_nodeport: bool = True
    enable_k8s_terminating_endpoint: bool = True
    enable_service_topology: bool = False
    enable_local_redirect_policy: bool = False
    bpf_lb_external_clusterip: bool = False
    bpf_lb_algorithm_annotation: bool = False
    bpf_lb_algorithm: Literal["random", "maglev"] = "random"
    bpf_lb_mode_annotation: bool = False
    bpf_lb_mode: Literal["snat", "dsr", "hybrid"] = "snat"
    bpf_lb_maglev_table_size: int = 16381
    bpf_lb_proto_diff: bool = True
    enable_sctp: bool = False
    k8s_service_proxy_name: str = ""
    """Whose services are served: by the label ``service.kubernetes.io/service-proxy-name``."""
    cluster_name: str = "default"
    node_port_min: int = 30000
    node_port_max: int = 32767

    def serves(self, address: IPAddress) -> bool:
        """Whether the address's family is switched on."""
        return self.enable_ipv4 if address.version == 4 else self.enable_ipv6


class Node(msgspec.Struct, frozen=True, gc=False):
    """The node that this agent runs on."""

    name: str
    zone: str = ""
    exposure: str = ""
    """The value of its label ``service.cilium.io/node``."""
    node_port_addresses: tuple[IPAddress, ...] = ()
    labels: Mapping[str, str] | None = None


ZONE_LABEL = "topology.kubernetes.io/zone"
EXPOSURE_LABEL = "service.cilium.io/node"
MAGLEV_SIZES: Sequence[int] = (251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521, 131071)
