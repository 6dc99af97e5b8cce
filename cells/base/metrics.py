"""The agent's metrics: Families that the setting ``metrics`` may leave out, as Cilium's may.

A cell shows what it counts by contributing a Collector of them.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Final

from lifecycle.process import BUCKETS, Collector, Histogram, Kind, Series, Value, keyed
from lifecycle.process import Family as PlainFamily

__all__ = [
    "BUCKETS",
    "Collector",
    "FeatureValue",
    "Histogram",
    "Kind",
    "MetricChoice",
    "MetricFamily",
    "Series",
    "Value",
    "counter",
    "features",
    "gauge",
    "histogram",
    "ingested",
]


class MetricFamily(PlainFamily, frozen=True):
    """One metric: a value for each combination of labels."""

    on: bool = True
    """Whether it is served if the setting ``metrics`` does not name it."""
    fixed: bool = False
    """Served whatever the setting names: Cilium's own collectors of these ask no one either."""

    @classmethod
    def of(cls, family: PlainFamily) -> "MetricFamily":
        """A family of the framework as one of the agent: served unless the setting leaves it out."""
        if isinstance(family, cls):
            return family
        return cls(family.name, family.kind, family.help, family.labels, family.series)


def counter(
    name: str,
    help: str,  # noqa: A002  # Prometheus's word
    value: float | Series,
    labels: str = "",
    *,
    on: bool = True,
    fixed: bool = False,
) -> MetricFamily:
    """What only grows. ``labels`` are names with blanks between; without any, ``value`` is a number."""
    return MetricFamily(name, "counter", help, *keyed(value, labels), on, fixed)


def gauge(
    name: str,
    help: str,  # noqa: A002
    value: float | Series,
    labels: str = "",
    *,
    on: bool = True,
    fixed: bool = False,
) -> MetricFamily:
    """What goes up and down; as counter()."""
    return MetricFamily(name, "gauge", help, *keyed(value, labels), on, fixed)


def histogram(
    name: str,
    help: str,  # noqa: A002
    value: Histogram | Series,
    labels: str = "",
    *,
    on: bool = True,
) -> MetricFamily:
    """How values are spread; as counter(), of Histograms."""
    return MetricFamily(name, "histogram", help, *keyed(value, labels), on)


# Which metrics are served, by the setting ``metrics``.
#
# Source: Cilium 1.17, the option metrics: a name that is not known, or without a sign, changes nothing.

_ALSO_CALLED: Final = {
    "hive_health_status_levels": "cilium_hive_status",
    "ciliumcidrgroups_referenced": "cilium_cidrgroups_referenced",
    "-cilium_bpf_map_pressure": "cilium_bpf_map_pressure",  # after its sign: two of them, as upstream wants
}
"""Additional names under which Cilium's option knows a metric."""

_CAN_BE_LEFT_OUT: Final = {"cilium_bpf_map_pressure"}
"""Fixed families that can be disabled nevertheless."""


class MetricChoice:
    """The selection of metric families."""

    def __init__(self, words: Iterable[str] = ()) -> None:
        self._chosen: dict[str, bool] = {}
        self.unsigned: list[str] = []
        """Words without + or -, which have no effect."""
        for word in words:
            sign, name = word[:1], word[1:]
            if sign not in {"+", "-"}:
                self.unsigned.append(word)
                continue
            self._chosen[_ALSO_CALLED.get(name, name)] = sign == "+"

    def serves(self, family: MetricFamily) -> bool:
        """Whether this family is served."""
        if family.fixed and family.name not in _CAN_BE_LEFT_OUT:
            return True
        return self._chosen.get(family.name, family.on)

    def adds(self, name: str) -> bool:
        """Whether the setting adds this family, which is off otherwise: its cell need not measure if not."""
        return self._chosen.get(name, False)


# Features in use.
#
# Source: Cilium 1.17, cilium_feature_*, pkg/metrics/features: names, help, labels and their values. Cilium
#         shows values with 0 only with CILIUM_FEATURE_METRICS_WITH_DEFAULTS; here they always exist.

_IP_MODES: Final = ("ipv4-only", "ipv6-only", "ipv4-ipv6-dual-stack")
_FEATURES: Final[Mapping[str, tuple[str, Mapping[str, tuple[str, ...]]]]] = {
    "controlplane_cilium_endpoint_slices_enabled": ("Cilium Endpoint Slices enabled on the agent", {}),
    "controlplane_identity_allocation": (
        "Identity Allocation mode enabled on the agent",
        {"mode": ("kvstore", "crd", "doublewrite-readkvstore", "doublewrite-readcrd")},
    ),
    "controlplane_ipam": (
        "IPAM mode enabled on the agent",
        {
            "mode": (
                *("kubernetes", "crd", "eni", "azure", "cluster-pool", "multi-pool", "alibabacloud"),
                "delegated-plugin",
            )
        },
    ),
    "datapath_chaining_enabled": (
        "Chaining mode enabled on the agent",
        {"mode": ("none", "aws-cni", "aws-vpc-cni", "calico", "flannel", "generic-veth")},
    ),
    "datapath_config": (
        "Datapath config mode enabled on the agent",
        {"mode": ("veth", "netkit", "netkit-l2", "lb-only")},
    ),
    "datapath_internet_protocol": ("IP mode enabled on the agent", {"address_family": _IP_MODES}),
    "datapath_network": (
        "Network mode enabled on the agent",
        {"mode": ("overlay-vxlan", "overlay-geneve", "direct-routing")},
    ),
    "adv_connect_and_lb_bandwidth_manager_enabled": ("Bandwidth Manager enabled on the agent", {}),
    "adv_connect_and_lb_bgp_enabled": ("BGP enabled on the agent", {}),
    "adv_connect_and_lb_big_tcp_enabled": ("Big TCP enabled on the agent", {"address_family": _IP_MODES}),
    "adv_connect_and_lb_cilium_envoy_config_enabled": ("Cilium Envoy Config enabled on the agent", {}),
    "adv_connect_and_lb_cilium_node_config_enabled": ("Cilium Node Config enabled on the agent", {}),
    "adv_connect_and_lb_clustermesh_enabled": (
        "Mode of the active Cluster Mesh connections/peers",
        {
            "mode": ("clustermesh-apiserver", "etcd", "kvstoremesh", "clustermesh-apiserver_or_etcd"),
            "max_connected_clusters": ("255", "511"),
        },
    ),
    "adv_connect_and_lb_egress_gateway_enabled": ("Egress Gateway enabled on the agent", {}),
    "adv_connect_and_lb_envoy_proxy_enabled": (
        "Envoy Proxy mode enabled on the agent",
        {"mode": ("standalone", "embedded")},
    ),
    "adv_connect_and_lb_k8s_internal_traffic_policy_enabled": (
        "K8s Internal Traffic Policy enabled on the agent",
        {},
    ),
    "adv_connect_and_lb_kube_proxy_replacement_enabled": ("KubeProxyReplacement enabled on the agent", {}),
    "adv_connect_and_lb_l2_lb_enabled": ("L2 LB announcement enabled on the agent", {}),
    "adv_connect_and_lb_l2_pod_announcement_enabled": ("L2 pod announcement enabled on the agent", {}),
    "adv_connect_and_lb_node_port_configuration": (
        "Node Port configuration enabled on the agent",
        {
            "mode": ("snat", "dsr", "hybrid"),
            "algorithm": ("maglev", "random"),
            "acceleration": ("disabled", "generic", "best-effort", "native"),
        },
    ),
    "adv_connect_and_lb_sctp_enabled": ("SCTP enabled on the agent", {}),
    "adv_connect_and_lb_transparent_encryption": (
        "Encryption mode enabled on the agent",
        {"mode": ("ipsec", "wireguard"), "node2node_enabled": ("true", "false")},
    ),
    "adv_connect_and_lb_vtep_enabled": ("VTEP enabled on the agent", {}),
    "network_policies_cidr_policies": (
        "Mode to apply CIDR Policies to Nodes",
        {"mode": ("world", "remote-node")},
    ),
    "network_policies_host_firewall_enabled": ("Host firewall enabled on the agent", {}),
    "network_policies_local_redirect_policy_enabled": ("Local Redirect Policy enabled on the agent", {}),
    "network_policies_mutual_auth_enabled": ("Mutual Auth enabled on the agent", {}),
    "network_policies_non_defaultdeny_policies_enabled": (
        "Non DefaultDeny Policies is enabled in the agent",
        {},
    ),
}
"""Help, and the known values of each label, of families below ``cilium_feature_``."""

_INGESTED: Final = {
    "cilium_clusterwide_envoy_config": "Cilium Clusterwide Envoy Config",
    "cilium_clusterwide_network_policies": "Cilium Clusterwide Network Policies",
    "cilium_envoy_config": "Cilium Envoy Config",
    "cilium_network_policies": "Cilium Network Policies",
    "deny_policies": "Deny Policies",
    "dns_policies": "DNS Policies",
    "fqdn_policies": "ToFQDNs Policies",
    "host_network_policies": "Host Network Policies",
    "http_header_matches_policies": "HTTP HeaderMatches Policies",
    "http_policies": "HTTP/GRPC Policies",
    "ingress_cidr_group_policies": "Ingress CIDR Group Policies",
    "internal_traffic_policy_services": "K8s Services with Internal Traffic Policy",
    "l3_policies": "Layer 3 and Layer 4 policies",
    "local_redirect_policies": "Local Redirect Policies",
    "mutual_auth_policies": "Mutual Auth Policies",
    "non_defaultdeny_policies": "Non DefaultDeny Policies",
    "other_l7_policies": "Other L7 Policies",
    "sni_allow_list_policies": "SNI Allow List Policies",
    "tls_inspection_policies": "TLS Inspection Policies",
}
"""Counted objects, of families ``cilium_feature_network_policies_*_total`` with the label ``action``."""
ACTIONS: Final = ("add", "delete")

FeatureValue = bool | str | tuple[str, ...] | Mapping[tuple[str, ...], int]
"""Whether the feature is on; the values of its labels, empty if it is off; or a number for several values."""


def features(of: str, read: Callable[[], Mapping[str, FeatureValue]]) -> Collector:
    """A collector of features in use; ``read`` returns their values by name without ``cilium_feature_``."""

    async def collect() -> Iterable[MetricFamily]:
        return [_feature(name, value) for name, value in read().items()]

    return Collector(of, collect)


def ingested(name: str, counts: Mapping[tuple[str, str], int]) -> MetricFamily:
    """Objects that came and went; ``counts`` is by name and action, add or delete."""
    return counter(
        f"cilium_feature_network_policies_{name}_total",
        f"{_INGESTED[name]} have been ingested since the agent started",
        {action: counts.get((name, action), 0) for action in ACTIONS},
        "action",
    )


def _feature(name: str, value: FeatureValue) -> MetricFamily:
    help_, labels = _FEATURES[name]
    if not labels:
        return gauge(f"cilium_feature_{name}", help_, int(bool(value)))
    series: dict[tuple[str, ...], float] = dict.fromkeys(product(*labels.values()), 0)
    if isinstance(value, Mapping):
        series |= value
    elif isinstance(value, tuple):
        series[value] = 1
    elif isinstance(value, str) and value:
        series[value,] = 1
    return gauge(f"cilium_feature_{name}", help_, series, " ".join(labels))
