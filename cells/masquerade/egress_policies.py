"""CiliumEgressGatewayPolicies: parsing, selection of gateways, and the resulting map entries; pure functions.

Each node computes the same result: the gateway is the first node by name that the policy's nodeSelector
matches, without health checks, as in Cilium 1.17. An entry is keyed by the pod's address and the destination:
the pod's node sends packets to the gateway, which does SNAT. Packets that cannot use their gateway are
dropped, so that they never leave with another source address.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Interface, ip_address, ip_interface
from typing import Final

import msgspec

from cells.cluster.nodes.node import EXTERNAL_IP, INTERNAL_IP, ClusterNode
from cells.kubernetes.objects.cilium_policy import CiliumEgressGatewayPolicy, EgressSelector
from cells.kubernetes.objects.kind import LabelSelector, LabelSelectorRequirement
from cells.maps.records.cluster import EgressKey, EgressValue
from cells.node.devices import Device

NO_ADDRESS: Final = IPv4Address(0)
"""As gateway: no gateway, packets are dropped.

As egress address: this node is not the gateway, or has no such address.
"""
EXCLUDED: Final = IPv4Address(1)
"""As gateway: an excluded CIDR, packets leave as without the policy."""
NAMESPACE: Final = "io.kubernetes.pod.namespace"
NAMESPACE_LABEL: Final = "io.cilium.k8s.namespace.labels."
_KUBERNETES: Final = "k8s:"


# Policies.


class EgressPolicy(msgspec.Struct, frozen=True):
    """A parsed policy."""

    name: str
    destinations: tuple[IPv4Interface, ...]
    """CIDRs as written, with host bits."""
    excluded: tuple[IPv4Interface, ...]
    pods: tuple[tuple[LabelSelector, ...], ...]
    """Rules, each with selectors that must all match the pod's labels."""
    nodes: tuple[LabelSelector, ...]
    """Selectors of the pods' nodes, of all rules together: one must match; none: any node."""
    gateway: LabelSelector
    interface: str
    egress_ip: IPv4Address | None
    unusable: bool = False
    """Whether egressIP is an IPv6 address, which IPv4 packets cannot have."""

    def selects(self, labels: dict[str, str]) -> bool:
        """Return whether a rule matches a pod with these labels, apart from its node."""
        return any(all(each.matches(labels) for each in rule) for rule in self.pods)

    def selects_on(self, node: Mapping[str, str]) -> bool:
        """Return whether the policy selects pods on a node with these labels."""
        return not self.nodes or any(each.matches(dict(node)) for each in self.nodes)


def read_policy(policy: CiliumEgressGatewayPolicy) -> EgressPolicy:
    """Parse the object. Raises ValueError with one line if it is invalid."""
    spec = policy.spec
    if spec is None:
        raise ValueError("spec: expected selectors, destinationCIDRs and egressGateway")
    gateway = spec.egress_gateway
    if gateway.interface and gateway.egress_ip:
        raise ValueError("egressGateway: expected an interface or an egressIP, not both")
    egress = _address(gateway.egress_ip) if gateway.egress_ip else None
    return EgressPolicy(
        policy.name,
        tuple(_networks("destinationCIDRs", spec.destination_cidrs)),
        tuple(_networks("excludedCIDRs", spec.excluded_cidrs or ())),
        tuple(_rule(each) for each in spec.selectors),
        tuple(each.node_selector for each in spec.selectors if each.node_selector is not None),
        gateway.node_selector,
        gateway.interface,
        egress if isinstance(egress, IPv4Address) else None,
        egress is not None and not isinstance(egress, IPv4Address),
    )


def _address(text: str) -> object:
    try:
        return ip_address(text)
    except ValueError as error:
        raise ValueError(f"egressGateway.egressIP: {text!r}: expected an IPv4 address") from error


def _networks(field: str, texts: Iterable[str]) -> Iterator[IPv4Interface]:
    """Yield the IPv4 CIDRs; IPv6 is not sent to gateways."""
    for text in texts:
        try:
            network = ip_interface(text)
        except ValueError as error:
            raise ValueError(f"{field}: {text!r}: expected an IPv4 network such as 192.0.2.0/24") from error
        if "/" not in text:
            raise ValueError(f"{field}: {text!r}: expected a network with its length, such as {text}/32")
        if isinstance(network, IPv4Interface):
            yield network


def _rule(rule: EgressSelector) -> tuple[LabelSelector, ...]:
    found: list[LabelSelector] = []
    if rule.namespace_selector is not None:
        found.append(_of_namespace(rule.namespace_selector))
    if rule.pod_selector is not None:
        found.append(rule.pod_selector)
    if not found:
        raise ValueError("selectors: expected a podSelector or a namespaceSelector in each")
    return tuple(found)


def _of_namespace(selector: LabelSelector) -> LabelSelector:
    """Convert a namespace selector to the prefixed namespace labels of pods."""
    labels = {f"{NAMESPACE_LABEL}{key}": value for key, value in (selector.match_labels or {}).items()}
    expressions = tuple(
        msgspec.structs.replace(each, key=f"{NAMESPACE_LABEL}{each.key}")
        for each in selector.match_expressions or ()
    )
    if not (labels or expressions):
        return LabelSelector(match_expressions=(LabelSelectorRequirement(NAMESPACE, "Exists"),))
    return LabelSelector(labels or None, expressions or None)


# Gateways and map entries, computed from policies, pods, nodes and devices.


class GatewayPod(msgspec.Struct, frozen=True):
    """A pod of the cluster that policies may select."""

    address: IPv4Address
    labels: tuple[str, ...]
    """Labels of its identity, each with its source."""
    node: IPv4Address
    """An address of its node."""


class GatewayLinks(msgspec.Struct, frozen=True):
    """The devices of this node, for the case that it is a gateway."""

    devices: Sequence[Device]
    default: int
    """Index of the device of the IPv4 default route; 0: none, or several with the same metric."""

    def named(self, name: str) -> Device | None:
        """Return the device of this name."""
        return next((each for each in self.devices if each.name == name), None)

    def holding(self, ip: IPv4Address) -> Device | None:
        """Return the device with this address."""
        return next((each for each in self.devices if ip in (own.ip for own in each.addresses)), None)

    def by_default(self) -> Device | None:
        """Return the device of the default route."""
        return next((each for each in self.devices if each.ifindex == self.default), None)


class Gateway(msgspec.Struct, frozen=True):
    """A row of the table ``egress-gateways``: a policy's gateway."""

    policy: str
    node: str = ""
    """Its name; empty if no node matches."""
    gateway_ip: IPv4Address = NO_ADDRESS
    egress_ip: IPv4Address = NO_ADDRESS
    interface: str = ""
    """On the gateway itself: the device that packets leave through."""
    wrong: str = ""
    """On the gateway itself: why it cannot be the gateway."""


class EgressEntry(msgspec.Struct, frozen=True):
    """A row of the table ``egress-entries``: the gateway for packets of a pod to an external CIDR."""

    source: IPv4Address
    destination: IPv4Interface
    egress_ip: IPv4Address
    gateway_ip: IPv4Address
    policy: str

    @property
    def key(self) -> EgressKey:
        """The key of the row and of the map entry."""
        return EgressKey(self.source, self.destination)

    @property
    def value(self) -> EgressValue:
        """The value of the map entry."""
        return EgressValue(self.egress_ip, self.gateway_ip)


def gateways(
    policies: Iterable[EgressPolicy], nodes: Iterable[ClusterNode], links: GatewayLinks
) -> dict[str, Gateway]:
    """Return the gateway of each policy, by policy name. ``nodes`` are those of this cluster."""
    ordered = sorted(nodes, key=lambda node: node.name.encode())
    return {policy.name: _gateway(policy, ordered, links) for policy in policies}


def gateway_address(node: ClusterNode) -> IPv4Address | None:
    """Return the address for the tunnel to the node: its first IPv4 InternalIP, else ExternalIP."""
    for kind in (INTERNAL_IP, EXTERNAL_IP):
        for each in node.addresses:
            if each.type == kind and isinstance(each.ip, IPv4Address):
                return each.ip
    return None


def _gateway(policy: EgressPolicy, nodes: Iterable[ClusterNode], links: GatewayLinks) -> Gateway:
    for node in nodes:
        if policy.gateway.matches(dict(node.labels)) and (ip := gateway_address(node)) is not None:
            found = Gateway(policy.name, node.name, ip)
            return _local_gateway(policy, found, links) if node.local else found
    return Gateway(policy.name)


def _local_gateway(policy: EgressPolicy, found: Gateway, links: GatewayLinks) -> Gateway:
    """Add the egress address and device, or why there are none: this node is the gateway."""

    def fault(wrong: str, egress_ip: IPv4Address = NO_ADDRESS) -> Gateway:
        return msgspec.structs.replace(found, egress_ip=egress_ip, wrong=wrong)

    if policy.unusable:
        return fault("egressGateway.egressIP is an IPv6 address: expected an IPv4 address")
    if policy.egress_ip is not None:
        device = links.holding(policy.egress_ip)
        if device is None:
            return fault(f"no device has the egressIP {policy.egress_ip}", policy.egress_ip)
        return msgspec.structs.replace(found, egress_ip=policy.egress_ip, interface=device.name)
    device = links.named(policy.interface) if policy.interface else links.by_default()
    if device is None:
        return fault(
            f"there is no device {policy.interface}"
            if policy.interface
            else "there is no IPv4 default route, or several have the same metric"
        )
    own = next((each.ip for each in device.addresses if isinstance(each.ip, IPv4Address)), None)
    if own is None:
        return fault(f"device {device.name} has no IPv4 address")
    return msgspec.structs.replace(found, egress_ip=own, interface=device.name)


def entries(
    policies: Iterable[EgressPolicy],
    gateways: Mapping[str, Gateway],
    pods: Iterable[GatewayPod],
    nodes: Mapping[IPv4Address, Mapping[str, str]],
) -> dict[EgressKey, EgressEntry]:
    """Return all entries of this node, by key; ``nodes`` has nodes' labels by address.

    If two policies have the same key, the first by name wins; within a policy an excluded CIDR wins.
    """
    all_pods = list(pods)
    found: dict[EgressKey, EgressEntry] = {}
    for policy in sorted(policies, key=lambda one: one.name):
        gateway = gateways[policy.name]
        next_hops = {each.network: (each, gateway.gateway_ip) for each in policy.destinations}
        next_hops |= {each.network: (each, EXCLUDED) for each in policy.excluded}
        for source in _selected(policy, all_pods, nodes) if next_hops else ():
            for network, gateway_ip in next_hops.values():
                entry = EgressEntry(source, network, gateway.egress_ip, gateway_ip, policy.name)
                found.setdefault(entry.key, entry)
    return found


def _selected(
    policy: EgressPolicy, pods: Iterable[GatewayPod], nodes: Mapping[IPv4Address, Mapping[str, str]]
) -> Iterator[IPv4Address]:
    """Yield the addresses of the pods that the policy selects; labels are matched once per identity."""
    by_labels: dict[tuple[str, ...], bool] = {}
    by_node: dict[IPv4Address, bool] = {}
    for pod in pods:
        if pod.labels not in by_labels:
            by_labels[pod.labels] = policy.selects(label_map(pod.labels))
        if not by_labels[pod.labels]:
            continue
        if pod.node not in by_node:
            by_node[pod.node] = policy.selects_on(nodes.get(pod.node, {}))
        if by_node[pod.node]:
            yield pod.address


def label_map(labels: Iterable[str]) -> dict[str, str]:
    """Return the Kubernetes labels of an identity, without their source prefix."""
    pairs = (each.removeprefix(_KUBERNETES).partition("=") for each in labels if each.startswith(_KUBERNETES))
    return {key: value for key, _, value in pairs}
