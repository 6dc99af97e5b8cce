"""CiliumEgressGatewayPolicies: what they say, which node is the gateway, and the entries that follow.

Source: Cilium 1.17, egress gateways. Every node works out the same by itself: the gateway is the first node
        by name that a policy selects. No node is asked whether it is well.
Why:    an entry is by the pod's address and the destination, on every node: the pod's sends to the gateway,
        which translates. What cannot be served is dropped, and never leaves from another address.
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
"""As a gateway: none, packets are dropped. As an egress address: this node is not the gateway, or has
no such address."""
EXCLUDED: Final = IPv4Address(1)
"""As a gateway: packets to there leave as without the policy."""
NAMESPACE: Final = "io.kubernetes.pod.namespace"
NAMESPACE_LABEL: Final = "io.cilium.k8s.namespace.labels."
_KUBERNETES: Final = "k8s:"


# Policies.


class EgressPolicy(msgspec.Struct, frozen=True):
    """A policy in force."""

    name: str
    destinations: tuple[IPv4Interface, ...]
    """Networks as they are written, host bits included."""
    excluded: tuple[IPv4Interface, ...]
    pods: tuple[tuple[LabelSelector, ...], ...]
    """Rules, each with the selectors that a pod's labels must all fulfil."""
    nodes: tuple[LabelSelector, ...]
    """Of the pods' nodes: one of them must match, whichever rule it was in; none: any node."""
    gateway: LabelSelector
    interface: str
    egress_ip: IPv4Address | None
    unusable: bool = False
    """Whether it asks for an egress address of IPv6, which no packet here can have."""

    def selects(self, labels: dict[str, str]) -> bool:
        """Whether a pod with these labels is meant, on one of its nodes."""
        return any(all(each.matches(labels) for each in rule) for rule in self.pods)

    def selects_on(self, node: Mapping[str, str]) -> bool:
        """Whether pods of a node with these labels are meant."""
        return not self.nodes or any(each.matches(dict(node)) for each in self.nodes)


def read_policy(policy: CiliumEgressGatewayPolicy) -> EgressPolicy:
    """The object as a policy. Raises ValueError with one line for what cannot be followed."""
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
    """Those of IPv4; of IPv6 nothing is sent to a gateway."""
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
    """The same of pods' labels, which have those of their namespace with a prefix."""
    labels = {f"{NAMESPACE_LABEL}{key}": value for key, value in (selector.match_labels or {}).items()}
    expressions = tuple(
        msgspec.structs.replace(each, key=f"{NAMESPACE_LABEL}{each.key}")
        for each in selector.match_expressions or ()
    )
    if not (labels or expressions):
        return LabelSelector(match_expressions=(LabelSelectorRequirement(NAMESPACE, "Exists"),))
    return LabelSelector(labels or None, expressions or None)


# Pods, nodes and devices, and the entries that follow.


class GatewayPod(msgspec.Struct, frozen=True):
    """A pod of the cluster that policies may select."""

    address: IPv4Address
    labels: tuple[str, ...]
    """Of its identity, each with its source."""
    node: IPv4Address
    """An address of its node."""


class GatewayLinks(msgspec.Struct, frozen=True):
    """The devices of this node, which may be a gateway."""

    devices: Sequence[Device]
    default: int
    """Index of the device of the IPv4 default route; 0: there is none, or two are as good."""

    def named(self, name: str) -> Device | None:
        """The device of that name."""
        return next((each for each in self.devices if each.name == name), None)

    def holding(self, ip: IPv4Address) -> Device | None:
        """The device with that address."""
        return next((each for each in self.devices if ip in (own.ip for own in each.addresses)), None)

    def by_default(self) -> Device | None:
        """The device of the default route."""
        return next((each for each in self.devices if each.ifindex == self.default), None)


class Gateway(msgspec.Struct, frozen=True):
    """A row of the table ``egress-gateways``: who is a policy's gateway, as this node sees it."""

    policy: str
    node: str = ""
    """Its name; empty where no node is selected."""
    gateway_ip: IPv4Address = NO_ADDRESS
    egress_ip: IPv4Address = NO_ADDRESS
    interface: str = ""
    """On the gateway itself, if it is fit to be one: the device that packets leave by."""
    wrong: str = ""
    """Why this node, which is the gateway, cannot be."""


class EgressEntry(msgspec.Struct, frozen=True):
    """A row of the table ``egress-entries``: what becomes of packets of a pod to a network outside."""

    source: IPv4Address
    destination: IPv4Interface
    egress_ip: IPv4Address
    gateway_ip: IPv4Address
    policy: str

    @property
    def key(self) -> EgressKey:
        """Of its row, and in the map."""
        return EgressKey(self.source, self.destination)

    @property
    def value(self) -> EgressValue:
        """What the map has of it."""
        return EgressValue(self.egress_ip, self.gateway_ip)


def gateways(
    policies: Iterable[EgressPolicy], nodes: Iterable[ClusterNode], links: GatewayLinks
) -> dict[str, Gateway]:
    """The gateway of each policy, by its name. ``nodes``: those of this cluster."""
    ordered = sorted(nodes, key=lambda node: node.name.encode())
    return {policy.name: _gateway(policy, ordered, links) for policy in policies}


def gateway_address(node: ClusterNode) -> IPv4Address | None:
    """The address that other nodes reach it by: its first IPv4 InternalIP, else its first ExternalIP."""
    for kind in (INTERNAL_IP, EXTERNAL_IP):
        for each in node.addresses:
            if each.type == kind and isinstance(each.ip, IPv4Address):
                return each.ip
    return None


def _gateway(policy: EgressPolicy, nodes: Iterable[ClusterNode], links: GatewayLinks) -> Gateway:
    for node in nodes:
        if policy.gateway.matches(dict(node.labels)) and (ip := gateway_address(node)) is not None:
            found = Gateway(policy.name, node.name, ip)
            return _here(policy, found, links) if node.local else found
    return Gateway(policy.name)


def _here(policy: EgressPolicy, found: Gateway, links: GatewayLinks) -> Gateway:
    """This node is the gateway: from which address, and by which device, packets leave."""

    def bad(wrong: str, egress_ip: IPv4Address = NO_ADDRESS) -> Gateway:
        return msgspec.structs.replace(found, egress_ip=egress_ip, wrong=wrong)

    if policy.unusable:
        return bad("egressGateway.egressIP is an address of IPv6: expected one of IPv4")
    if policy.egress_ip is not None:
        device = links.holding(policy.egress_ip)
        if device is None:
            return bad(f"no device has the egressIP {policy.egress_ip}", policy.egress_ip)
        return msgspec.structs.replace(found, egress_ip=policy.egress_ip, interface=device.name)
    device = links.named(policy.interface) if policy.interface else links.by_default()
    if device is None:
        return bad(
            f"there is no device {policy.interface}"
            if policy.interface
            else "there is no IPv4 default route, or two of them are as good"
        )
    own = next((each.ip for each in device.addresses if isinstance(each.ip, IPv4Address)), None)
    if own is None:
        return bad(f"device {device.name} has no IPv4 address")
    return msgspec.structs.replace(found, egress_ip=own, interface=device.name)


def entries(
    policies: Iterable[EgressPolicy],
    gateways: Mapping[str, Gateway],
    pods: Iterable[GatewayPod],
    nodes: Mapping[IPv4Address, Mapping[str, str]],
) -> dict[EgressKey, EgressEntry]:
    """All entries of this node, by key. ``nodes``: their labels, by each of their addresses.

    Of two policies with one key the first by name counts; in one policy what is excluded does.
    """
    several = list(pods)
    found: dict[EgressKey, EgressEntry] = {}
    for policy in sorted(policies, key=lambda one: one.name):
        gateway = gateways[policy.name]
        ways = {each.network: (each, gateway.gateway_ip) for each in policy.destinations}
        ways |= {each.network: (each, EXCLUDED) for each in policy.excluded}
        for source in _selected(policy, several, nodes) if ways else ():
            for network, way in ways.values():
                entry = EgressEntry(source, network, gateway.egress_ip, way, policy.name)
                found.setdefault(entry.key, entry)
    return found


def _selected(
    policy: EgressPolicy, pods: Iterable[GatewayPod], nodes: Mapping[IPv4Address, Mapping[str, str]]
) -> Iterator[IPv4Address]:
    """The addresses of the pods that it selects. Labels are looked at once for all pods of an identity."""
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
    """Labels of Kubernetes among those of an identity, without their source."""
    pairs = (each.removeprefix(_KUBERNETES).partition("=") for each in labels if each.startswith(_KUBERNETES))
    return {key: value for key, _, value in pairs}
