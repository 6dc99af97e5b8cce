"""A node as its Node and CiliumNode objects describe it.

Needs: the objects.   Gives: ParsedNode, parse_node(), parse_cilium_node(), Fault.
Source: Cilium 1.17, ParseNode and ParseCiliumNode; texts of faults are Cilium's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_address, ip_network
from typing import Final, Literal

import msgspec

from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, EXTERNAL_IP, INTERNAL_IP, NodeIP
from cells.ipam import Family, IPAddress, IPNetwork
from cells.kubernetes import CiliumNode, Node

CILIUM_ANNOTATION: Final = re.compile(r"^([A-Za-z0-9]+\.)*cilium.io/")
"""Annotations of a Node that count (the dot of ``cilium.io`` is any character, as in Cilium)."""

_KEY: Final = re.compile(r"[0-9]+")
_CIDR: Final = re.compile(r"[0-9A-Fa-f:.]+/[0-9]{1,3}")

IPV4_CIDR, IPV6_CIDR = "ipv4-pod-cidr", "ipv6-pod-cidr"
IPV4_HEALTH, IPV6_HEALTH = "ipv4-health-ip", "ipv6-health-ip"
IPV4_INGRESS, IPV6_INGRESS = "ipv4-Ingress-ip", "ipv6-Ingress-ip"
IPV4_ROUTER, IPV6_ROUTER = "ipv4-cilium-host", "ipv6-cilium-host"
ENCRYPTION_KEY: Final = "encryption-key"


class Fault(msgspec.Struct, frozen=True):
    """What is wrong with an object, as it is logged; the rest of the object counts."""

    level: Literal["warning", "error"]
    text: str
    value: str


class ParsedNode(msgspec.Struct, kw_only=True):
    """What an object tells; empty where it does not."""

    addresses: list[NodeIP] = msgspec.field(default_factory=list)
    cidrs: dict[Family, list[IPNetwork]] = msgspec.field(
        default_factory=lambda: {Family.IPV4: [], Family.IPV6: []}
    )
    """Ranges of pods, the primary one first."""
    health: list[IPAddress] = msgspec.field(default_factory=list)
    ingress: list[IPAddress] = msgspec.field(default_factory=list)
    encryption_key: int = 0
    faults: list[Fault] = msgspec.field(default_factory=list)


def annotation(annotations: Mapping[str, str], name: str) -> str:
    """The value under the key of today, else under the old one; empty when neither is there.

    The first key that is present wins, even when its value is empty.
    """
    for prefix in ("network.cilium.io/", "io.cilium.network."):
        if (value := annotations.get(prefix + name)) is not None:
            return value
    return ""


def parse_node(node: Node, *, annotations: bool = False) -> ParsedNode:
    """A Node: its addresses, and the ranges that its spec tells.

    ``annotations`` (the option annotate-k8s-node): a range that the spec does not tell is taken from the
    annotations, and so are the addresses of health, ingress and router and the encryption key.
    """
    found = ParsedNode()
    for address in node.status.addresses or ():
        if address.type in (INTERNAL_IP, EXTERNAL_IP) and address.address:
            if (ip := parse_ip(address.address)) is not None:
                found.addresses.append(NodeIP(address.type, ip))
            else:
                found.faults.append(Fault("warning", "Ignoring invalid node IP", address.address))
    for text in _spec_cidrs(node, found.faults):
        if (cidr := parse_cidr(text)) is not None:
            found.cidrs[Family.of(cidr)] = [cidr]
        else:
            found.faults.append(Fault("warning", "Invalid PodCIDR value for node", text))
    if annotations:
        _annotated(node.annotations, found)
    return found


def _spec_cidrs(node: Node, faults: list[Fault]) -> Iterable[str]:
    several = node.spec.pod_cidrs or ()
    if len(several) > 2:
        text = f"Invalid PodCIDRs expected 1 or 2 PodCIDRs, received {len(several)}"
        faults.append(Fault("error", text, ",".join(several)))
        return ()
    return several or ((node.spec.pod_cidr,) if node.spec.pod_cidr else ())


def _annotated(given: Mapping[str, str], found: ParsedNode) -> None:
    """Fill in from annotations what the spec does not tell."""
    for family, name in ((Family.IPV4, IPV4_CIDR), (Family.IPV6, IPV6_CIDR)):
        text = annotation(given, name)
        if found.cidrs[family] or not text:
            continue
        cidr = parse_cidr(text)
        if cidr is not None and Family.of(cidr) is family:
            found.cidrs[family] = [cidr]
        else:
            fault = Fault("error", f"BUG, invalid {family.text} annotation CIDR in node", text)
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


def _of(family: Family, text: str, faults: list[Fault]) -> list[IPAddress]:
    """The address, if the text is one of the family."""
    if not text:
        return []
    ip = parse_ip(text)
    if ip is None or Family.of(ip) is not family:
        faults.append(Fault("error", f"BUG, invalid {family.text} annotation address in node", text))
        return []
    return [ip]


def parse_cilium_node(node: CiliumNode) -> ParsedNode:
    """A CiliumNode: addresses, ranges (those of podCIDRs, then those of pools), health, ingress.

    What is no address or range is left out without a word, as in Cilium: agents and the operator write it.
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
    """``address/bits``, without the bits of hosts; None for what is none (Go's net.ParseCIDR)."""
    if not _CIDR.fullmatch(text):
        return None
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None


def parse_ip(text: str) -> IPAddress | None:
    """An address without a zone; None for what is none (Go's net.ParseIP)."""
    try:
        return None if "%" in text else ip_address(text)
    except ValueError:
        return None
