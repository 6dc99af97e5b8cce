"""Parses Node and CiliumNode objects to rows of the table ``nodes``.

Source: Cilium 1.17, ParseNode and ParseCiliumNode; the fault messages are Cilium's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final, Literal

import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, EXTERNAL_IP, INTERNAL_IP, ClusterNode, NodeIP
from cells.kubernetes.objects.cilium_node import CiliumNode
from cells.kubernetes.objects.core import Node
from lifecycle import Duration, Settings, seconds

__all__ = [
    "HostFirewallUse",
    "NodeFault",
    "NodeReader",
    "NodeSettings",
    "ParsedNode",
    "RulePeers",
    "parse_cilium_node",
    "parse_ip",
    "parse_node",
    "shared_node",
]


# What of a node's objects counts, and what the agent must know of its own node before it goes on.


class NodeSettings(Settings, frozen=True):
    """Settings of the cluster's nodes."""

    k8s_require_ipv4_pod_cidr: bool = False
    """Wait at start until Kubernetes has assigned this node an IPv4 pod range. With an API server, or
    ipam=kubernetes, the start always waits."""

    k8s_require_ipv6_pod_cidr: bool = False
    """Wait at start until Kubernetes has assigned this node an IPv6 pod range; see the IPv4 option."""

    annotate_k8s_node: bool = False
    """Annotate this node's Node object with its ranges and addresses, and read other nodes' annotations."""

    exclude_node_label_patterns: tuple[str, ...] = ()
    """Regular expressions; node labels with a matching key are left out."""

    def faults(self) -> Iterator[str]:
        for pattern in self.exclude_node_label_patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"exclude-node-label-patterns={pattern}: expected a regular expression: {error}"

    def chosen_labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Return the labels without those that a pattern excludes."""
        patterns = [re.compile(pattern) for pattern in self.exclude_node_label_patterns]
        return {
            key: value
            for key, value in labels.items()
            if not any(pattern.search(key) for pattern in patterns)
        }


class CiliumNodeSettings(Settings, frozen=True):
    """Settings for writing this node's CiliumNode."""

    auto_create_cilium_node_resource: bool = True
    """Write this node's CiliumNode, where there is an API server."""

    ipam_cilium_node_update_rate: Duration = seconds(15)
    """Least time between two requests for pool addresses, in ipam=multi-pool."""


class RulePeerSettings(Settings, frozen=True):
    """Settings for what policy rules select besides pods by their labels."""

    enable_node_selector_labels: bool = False
    """Give other nodes identities by their labels, so that fromNodes and toNodes can select them."""

    policy_cidr_match_mode: tuple[str, ...] = ()
    """What networks in policies select besides addresses outside the cluster: nodes, addresses of nodes;
    pods, addresses of pods, beside what rules by labels say of them."""

    def faults(self) -> Iterable[str]:
        return (
            f"policy-cidr-match-mode={mode}: expected nodes, pods, both, or nothing"
            for mode in self.policy_cidr_match_mode
            if mode not in ("nodes", "pods")
        )


class RulePeers(msgspec.Struct, frozen=True):
    """Peers that policy rules can select, besides pods by their labels."""

    nodes_by_labels: bool
    nodes_by_cidr: bool
    pods_by_cidr: bool


def rule_peers(settings: RulePeerSettings) -> RulePeers:
    """Return the peers that the settings enable."""
    modes = settings.policy_cidr_match_mode
    return RulePeers(settings.enable_node_selector_labels, "nodes" in modes, "pods" in modes)


class HostFirewallUse(msgspec.Struct, frozen=True):
    """Whether policies are enforced on nodes. They need senders' identities, which the tunnel carries."""

    enabled: bool


CILIUM_ANNOTATION: Final = re.compile(r"^([A-Za-z0-9]+\.)*cilium.io/")
"""Annotations of a Node that count (the dot of ``cilium.io`` matches any character, as in Cilium)."""

_KEY: Final = re.compile(r"[0-9]+")
_CIDR: Final = re.compile(r"[0-9A-Fa-f:.]+/[0-9]{1,3}")

IPV4_CIDR, IPV6_CIDR = "ipv4-pod-cidr", "ipv6-pod-cidr"
IPV4_HEALTH, IPV6_HEALTH = "ipv4-health-ip", "ipv6-health-ip"
IPV4_INGRESS, IPV6_INGRESS = "ipv4-Ingress-ip", "ipv6-Ingress-ip"
IPV4_ROUTER, IPV6_ROUTER = "ipv4-cilium-host", "ipv6-cilium-host"
ENCRYPTION_KEY: Final = "encryption-key"
WIREGUARD_KEY: Final = "wg-pub-key"


class NodeFault(msgspec.Struct, frozen=True):
    """A logged fault of an object; its other fields are used."""

    level: Literal["warning", "error"]
    text: str
    value: str


class ParsedNode(msgspec.Struct, kw_only=True):
    """The fields of a parsed object; empty where it has none."""

    addresses: list[NodeIP] = msgspec.field(default_factory=list)
    cidrs: dict[Family, list[IPNetwork]] = msgspec.field(
        default_factory=lambda: {Family.IPV4: [], Family.IPV6: []}
    )
    """Pod CIDRs, the primary one first."""
    health: list[IPAddress] = msgspec.field(default_factory=list)
    ingress: list[IPAddress] = msgspec.field(default_factory=list)
    encryption_key: int = 0
    faults: list[NodeFault] = msgspec.field(default_factory=list)


def annotation(annotations: Mapping[str, str], name: str) -> str:
    """Return the value of the current annotation key, otherwise of the deprecated one; empty without both.

    The first key that exists has precedence, even with an empty value.
    """
    for prefix in ("network.cilium.io/", "io.cilium.network."):
        if (value := annotations.get(prefix + name)) is not None:
            return value
    return ""


def parse_node(node: Node, *, annotations: bool = False) -> ParsedNode:
    """Parse a Node: its addresses, and the pod CIDRs of its spec.

    ``annotations`` (the option annotate-k8s-node): a pod CIDR that the spec lacks is read from the
    annotations, as are the encryption key and the addresses of health, ingress and router.
    """
    found = ParsedNode()
    for address in node.status.addresses or ():
        if address.type in (INTERNAL_IP, EXTERNAL_IP) and address.address:
            if (ip := parse_ip(address.address)) is not None:
                found.addresses.append(NodeIP(address.type, ip))
            else:
                found.faults.append(NodeFault("warning", "Ignoring invalid node IP", address.address))
    for text in _spec_cidrs(node, found.faults):
        if (cidr := parse_cidr(text)) is not None:
            found.cidrs[Family.of(cidr)] = [cidr]
        else:
            found.faults.append(NodeFault("warning", "Invalid PodCIDR value for node", text))
    if annotations:
        _annotated(node.annotations, found)
    return found


def _spec_cidrs(node: Node, faults: list[NodeFault]) -> Iterable[str]:
    several = node.spec.pod_cidrs or ()
    if len(several) > 2:
        text = f"Invalid PodCIDRs expected 1 or 2 PodCIDRs, received {len(several)}"
        faults.append(NodeFault("error", text, ",".join(several)))
        return ()
    return several or ((node.spec.pod_cidr,) if node.spec.pod_cidr else ())


def _annotated(given: Mapping[str, str], found: ParsedNode) -> None:
    """Fill fields that the spec lacks from annotations."""
    for family, name in ((Family.IPV4, IPV4_CIDR), (Family.IPV6, IPV6_CIDR)):
        text = annotation(given, name)
        if found.cidrs[family] or not text:
            continue
        cidr = parse_cidr(text)
        if cidr is not None and Family.of(cidr) is family:
            found.cidrs[family] = [cidr]
        else:
            fault = NodeFault("error", f"BUG, invalid {family.text} annotation CIDR in node", text)
            found.faults.append(fault)
    for family, health, ingress, router in (
        (Family.IPV4, IPV4_HEALTH, IPV4_INGRESS, IPV4_ROUTER),
        (Family.IPV6, IPV6_HEALTH, IPV6_INGRESS, IPV6_ROUTER),
    ):
        found.health += _of(family, annotation(given, health), found.faults)
        found.ingress += _of(family, annotation(given, ingress), found.faults)
        found.addresses += [
            NodeIP(CILIUM_INTERNAL_IP, ip) for ip in _of(family, annotation(given, router), found.faults)
        ]
    key = annotation(given, ENCRYPTION_KEY)
    if _KEY.fullmatch(key) and int(key) <= 255:
        found.encryption_key = int(key)


def _of(family: Family, text: str, faults: list[NodeFault]) -> list[IPAddress]:
    """Return the address, or None if the text is not an address of the family."""
    if not text:
        return []
    ip = parse_ip(text)
    if ip is None or Family.of(ip) is not family:
        faults.append(NodeFault("error", f"BUG, invalid {family.text} annotation address in node", text))
        return []
    return [ip]


def parse_cilium_node(node: CiliumNode) -> ParsedNode:
    """Parse a CiliumNode: addresses, pod CIDRs (podCIDRs, then pools), health and ingress.

    Invalid addresses and CIDRs are skipped silently, as in Cilium: agents and the operator write the object.
    """
    found = ParsedNode(encryption_key=node.spec.encryption.key & 0xFF)
    for address in node.spec.addresses or ():
        if (ip := parse_ip(address.ip)) is not None:
            found.addresses.append(NodeIP(address.type, ip))
    ipam = node.spec.ipam
    texts = [*(ipam.pod_cidrs or ()), *(c for pool in ipam.pools.allocated or () for c in pool.cidrs or ())]
    for text in texts:
        cidr = parse_cidr(text)
        if cidr is not None and cidr not in found.cidrs[Family.of(cidr)]:
            found.cidrs[Family.of(cidr)].append(cidr)
    for pair, into in ((node.spec.health, found.health), (node.spec.ingress, found.ingress)):
        into += [ip for text in (pair.ipv4, pair.ipv6) if (ip := parse_ip(text)) is not None]
    return found


def parse_cidr(text: str) -> IPNetwork | None:
    """Parse ``address/bits`` and clear the host bits; None if invalid (Go's net.ParseCIDR)."""
    if not _CIDR.fullmatch(text):
        return None
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None


def parse_ip(text: str) -> IPAddress | None:
    """Parse an address without a zone; None if invalid (Go's net.ParseIP)."""
    try:
        return None if "%" in text else ip_address(text)
    except ValueError:
        return None


# Nodes from objects: their CiliumNode, and their Node for what that leaves out.
#
# Controller: Nodes and CiliumNodes in, rows of the table ``nodes`` out.

DECIDED_IN_CILIUM_NODES: Final = frozenset({"cluster-pool", "multi-pool"})
"""IPAM modes in which a node's pod CIDRs are those of its CiliumNode.

Kubernetes may have assigned the node another one, which the operator assigns to other nodes.
"""


class NodeReader:
    """Parses Nodes and CiliumNodes as the settings require."""

    def __init__(self, cluster: str, ipam_mode: str, settings: NodeSettings) -> None:
        self._cluster = cluster
        self._cidrs_of_nodes = ipam_mode not in DECIDED_IN_CILIUM_NODES
        self._settings = settings
        self.annotates = settings.annotate_k8s_node
        """Whether annotations of Nodes are read, and this node's Node is annotated."""

    def parse(self, node: Node) -> ParsedNode:
        """Parse a Node; return its fields and faults."""
        parsed = parse_node(node, annotations=self.annotates)
        if not self._cidrs_of_nodes:
            parsed.cidrs = {Family.IPV4: [], Family.IPV6: []}
        return parsed

    def labels(self, node: Node) -> dict[str, str]:
        """Return the node's labels without excluded ones."""
        return self._settings.chosen_labels(node.labels)

    def read(self, node: Node | None, cilium: CiliumNode | None) -> ClusterNode:
        """Return the row of a node from its Node, its CiliumNode, or both."""
        parsed = parse_cilium_node(cilium) if cilium is not None else ParsedNode()
        refused: tuple[str, ...] = ()
        if node is not None:
            of_node = self.parse(node)
            parsed.addresses, refused = _confirmed(parsed.addresses, of_node.addresses, "its Node")
            if self._cidrs_of_nodes:
                assigned = parse_node(node).cidrs  # what annotations say, agents write
                parsed.cidrs, unconfirmed = _confirmed_ranges(parsed.cidrs, assigned, "its Node")
                refused += unconfirmed
            parsed = filled(parsed, of_node)
        known = node or cilium
        labels = self._settings.chosen_labels(cilium.labels) if cilium is not None else {}
        return ClusterNode(
            cluster=self._cluster,
            name=known.name if known is not None else "",
            source=Source.KUBERNETES if cilium is None else Source.CUSTOM_RESOURCE,
            addresses=tuple(parsed.addresses),
            refused=refused,
            ipv4_alloc_cidrs=tuple(parsed.cidrs[Family.IPV4]),
            ipv6_alloc_cidrs=tuple(parsed.cidrs[Family.IPV6]),
            health=tuple(parsed.health),
            ingress=tuple(parsed.ingress),
            encryption_key=parsed.encryption_key,
            wireguard_key=annotation(cilium.annotations, WIREGUARD_KEY) if cilium is not None else "",
            labels=labels or (self.labels(node) if node is not None else {}),
            annotations=annotations_of(cilium) or annotations_of(node),
            boot_id=(cilium.spec.boot_id if cilium is not None else "")
            or (node.status.node_info.boot_id if node is not None else ""),
            node_identity=cilium.spec.node_identity if cilium is not None else 0,
            created=known.metadata.creation_timestamp if known is not None else "",
        )


def shared_node(shared: ClusterNode, known: ClusterNode | None) -> ClusterNode:
    """Return a node of the kvstore without addresses and CIDRs that its objects do not confirm.

    Every agent may write every key of the store; CiliumNodes and Nodes are written by their own agent, the
    operator and the kubelet.
    """
    if known is None:
        return shared
    objects = "its CiliumNode or Node"
    addresses, refused = _confirmed(shared.addresses, known.addresses, objects)
    cidrs = {family: shared.alloc_cidrs(family) for family in Family}
    ranges, unconfirmed = _confirmed_ranges(
        cidrs, {family: known.alloc_cidrs(family) for family in Family}, objects
    )
    return msgspec.structs.replace(
        shared,
        addresses=tuple(addresses),
        ipv4_alloc_cidrs=tuple(ranges[Family.IPV4]),
        ipv6_alloc_cidrs=tuple(ranges[Family.IPV6]),
        created=known.created,
        refused=(*known.refused, *refused, *unconfirmed),
    )


def _confirmed_ranges(
    claimed: Mapping[Family, Iterable[IPNetwork]], known: Mapping[Family, Sequence[IPNetwork]], where: str
) -> tuple[dict[Family, list[IPNetwork]], tuple[str, ...]]:
    """Return the CIDRs inside ``known`` ones of their family, if there are any, and the refused ones.

    If none remains, the known ones are used.
    """
    confirmed: dict[Family, list[IPNetwork]] = {}
    refused: list[IPNetwork] = []
    for family, cidrs in claimed.items():
        outer, claims = known[family], list(cidrs)
        found = [cidr for cidr in claims if not outer or any(_contains(each, cidr) for each in outer)]
        refused += [cidr for cidr in claims if cidr not in found]
        confirmed[family] = found or list(outer if claims else ())
    return confirmed, tuple(f"range {cidr} is in none of {where}" for cidr in refused)


def _contains(outer: IPNetwork, inner: IPNetwork) -> bool:
    """Return whether a network contains another one."""
    if isinstance(outer, IPv4Network) and isinstance(inner, IPv4Network):
        return inner.subnet_of(outer)
    return isinstance(outer, IPv6Network) and isinstance(inner, IPv6Network) and inner.subnet_of(outer)


def _confirmed(
    claimed: Iterable[NodeIP], known: Iterable[NodeIP], where: str
) -> tuple[list[NodeIP], tuple[str, ...]]:
    """Return the addresses that the source of ``known`` also has, and the refused ones.

    A node's agent writes its CiliumNode. The kubelet writes its Node, which has all addresses of a family or
    none: then the agent's are used. If none of a family remains, those of ``known`` are used.
    """
    own = [each for each in known if each.type != CILIUM_INTERNAL_IP]
    families = {each.ip.version for each in own}
    addresses = {each.ip for each in own}
    confirmed: list[NodeIP] = []
    refused: dict[IPAddress, None] = {}
    for each in claimed:
        if each.type == CILIUM_INTERNAL_IP or each.ip in addresses or each.ip.version not in families:
            confirmed.append(each)
        else:
            refused[each.ip] = None
    left = {each.ip.version for each in confirmed if each.type != CILIUM_INTERNAL_IP}
    without = {ip.version for ip in refused} - left
    confirmed += [each for each in own if each.ip.version in without]
    return confirmed, tuple(f"address {ip} is not in {where}" for ip in refused)


def annotations_of(found: Node | CiliumNode | None) -> dict[str, str]:
    """Return Cilium's annotations of a Node."""
    if found is None:
        return {}
    return {key: value for key, value in found.annotations.items() if CILIUM_ANNOTATION.match(key)}


def filled(first: ParsedNode, second: ParsedNode) -> ParsedNode:
    """Return the fields of the first node, with empty ones filled from the second."""
    return ParsedNode(
        addresses=first.addresses or second.addresses,
        cidrs={family: first.cidrs[family] or second.cidrs[family] for family in Family},
        health=first.health or second.health,
        ingress=first.ingress or second.ingress,
        encryption_key=first.encryption_key or second.encryption_key,
        faults=second.faults,
    )
