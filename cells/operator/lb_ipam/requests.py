"""What a service asks of LB-IPAM, and whether two services may have one address.

Needs: the settings of LB-IPAM.   Gives: Request, request_of(), incompatible().
Source: Cilium 1.17: annotations lbipam.cilium.io/…, with their older names; the first that is there counts.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from ipaddress import ip_address
from typing import Final

import msgspec

from cells.kubernetes import Key
from cells.operator.lb_ipam.pools import Address, AddressPool
from cells.operator.objects import ClusterService

IPS: Final = ("lbipam.cilium.io/ips", "io.cilium/lb-ipam-ips")
SHARING: Final = ("lbipam.cilium.io/sharing-key", "io.cilium/lb-ipam-sharing-key")
ACROSS: Final = (
    "lbipam.cilium.io/sharing-cross-namespace",
    "io.cilium/lb-ipam-sharing-cross-namespace",
)
NAME, NAMESPACE = "io.kubernetes.service.name", "io.kubernetes.service.namespace"
SATISFIED: Final = "cilium.io/IPAMRequestSatisfied"


class Request(msgspec.Struct, frozen=True):
    """A service that addresses are given to."""

    key: Key
    uid: str
    labels: dict[str, str]
    versions: tuple[int, ...]
    """The families it wants an address of."""
    wanted: tuple[Address, ...]
    """The addresses it asks for; any will do when there is none."""
    sharing: str
    across: frozenset[str]
    """Namespaces it shares with, besides its own; ``*`` for all."""
    ports: frozenset[tuple[int, str]]
    """Numbers and protocols, which are empty where agents do not tell them apart."""
    policy: str
    selector: tuple[tuple[str, str], ...]
    has: tuple[Address, ...]
    """The addresses it has, by its status."""

    def matches(self, pool: AddressPool) -> bool:
        """Whether a pool is for it."""
        return pool.selector is None or pool.selector.matches(self.labels)


def request_of(service: ClusterService, versions: Collection[int], *, proto_diff: bool = True) -> Request:
    """What a service asks for, of the families that there are.

    Without ``proto_diff`` a port number is taken in every protocol, as agents serve it.
    """
    spec = service.spec
    ports = ((one.port, one.protocol or "TCP") for one in spec.ports or ())
    families = {"IPv4": 4, "IPv6": 6}
    asked = {families[one] for one in spec.ip_families or ("IPv4",) if one in families}
    return Request(
        key=service.key,
        uid=service.metadata.uid,
        labels={**service.labels, NAME: service.name, NAMESPACE: service.namespace},
        versions=tuple(sorted(asked & set(versions))),
        wanted=_wanted(service),
        sharing=_annotation(service, SHARING),
        across=frozenset(one for one in _annotation(service, ACROSS).split(",") if one),
        ports=frozenset((number, protocol if proto_diff else "") for number, protocol in ports),
        policy=spec.external_traffic_policy or "Cluster",
        selector=tuple(sorted((spec.selector or {}).items())),
        has=_addresses(service.addresses),
    )


def incompatible(one: Request, other: Request) -> str:
    """Why two services cannot have one address; nothing when they can. No key, no sharing."""
    if not one.sharing or one.sharing != other.sharing:
        return "different sharing key"
    if one.key[0] != other.key[0] and not (_lets_in(one, other) and _lets_in(other, one)):
        return "different namespace"
    if one.ports & other.ports:
        return "same port"
    if one.policy != other.policy:
        return "different externalTrafficPolicy"
    if one.policy == "Local" and one.selector != other.selector:
        return "different selector"
    return ""


def _lets_in(one: Request, other: Request) -> bool:
    return "*" in one.across or other.key[0] in one.across


def _annotation(service: ClusterService, names: tuple[str, ...]) -> str:
    return next((service.annotations[name] for name in names if name in service.annotations), "")


def _wanted(service: ClusterService) -> tuple[Address, ...]:
    texts = [service.spec.load_balancer_ip, *_annotation(service, IPS).split(",")]
    return tuple(dict.fromkeys(_addresses(texts)))


def _addresses(texts: Collection[str]) -> tuple[Address, ...]:
    found: list[Address] = []
    for text in texts:
        with suppress(ValueError):  # what is no address asks for nothing
            found.append(ip_address(text.strip()))
    return tuple(found)
