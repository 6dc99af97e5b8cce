"""The services this node may answer for, by policies, services, this node and its devices.

Needs: nothing.   Gives: Candidate, candidates(), announceable(), Place.
Source: Cilium 1.17. Services of other classes are left alone, and addresses of IPv6 are not announced.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Address
from typing import Final, NamedTuple

import msgspec

from cells.kubernetes import CiliumL2AnnouncementPolicy, Key, Service, served_by
from cells.node.devices import Device
from cells.node.netlink import mac_text
from cells.services.announcements.policies import L2Policy, read_policy
from cells.services.model import EXTERNAL_IPS, INGRESS, IPAddress, RefusedAddress, ServiceName

L2_CLASS: Final = "io.cilium/l2-announcer"
NAME, NAMESPACE = "io.kubernetes.service.name", "io.kubernetes.service.namespace"
"""Labels that every service has for selectors."""


class Place(NamedTuple):
    """An address, and the device by which it is asked for."""

    ip: IPv4Address
    ifindex: int
    device: str
    mac: str


class Candidate(msgspec.Struct, frozen=True):
    """A row of the table ``l2-candidates``: a service, and where this node would answer for it."""

    service: Key
    policies: tuple[str, ...]
    places: tuple[Place, ...]
    local: bool
    """Whether its externalTrafficPolicy is Local."""


def announceable(service: Service, proxy: str) -> bool:
    """Whether a policy could select it: an address for clients outside, no other class or proxy."""
    return (
        served_by(service.labels, proxy)
        and service.spec.load_balancer_class in {None, L2_CLASS}
        and bool(
            service.spec.external_ips
            or any(each.is_of_nodes for each in service.status.load_balancer.ingress or ())
        )
    )


def candidates(
    policies: Iterable[CiliumL2AnnouncementPolicy],
    services: Iterable[Service],
    node_labels: Mapping[str, str],
    devices: Sequence[Device],
    refused: Iterable[RefusedAddress] = (),
) -> dict[Key, Candidate]:
    """By namespace and name. ``devices``: those that programs are on; ``refused``: what is not served."""
    unserved = {(one.service, one.part, one.address) for one in refused}
    read = (read_policy(each)[0] for each in policies)
    followed = sorted(each for each in read if each is not None and each.is_for(node_labels))
    found: dict[Key, Candidate] = {}
    for service in services if followed else ():
        labels = {**service.labels, NAME: service.name, NAMESPACE: service.namespace}
        names: list[str] = []
        places: dict[Place, None] = {}
        for policy in followed:
            if policy.announces(labels) and (here := list(_places(policy, service, devices, unserved))):
                names.append(policy.name)
                places |= dict.fromkeys(here)
        if places:
            local = service.spec.external_traffic_policy == "Local"
            found[service.key] = Candidate(service.key, tuple(names), tuple(sorted(places)), local)
    return found


_Unserved = Container[tuple[ServiceName, str, IPAddress]]


def _places(
    policy: L2Policy, service: Service, devices: Sequence[Device], unserved: _Unserved
) -> Iterator[Place]:
    for ip in _addresses(policy, service, unserved):
        for device in devices:
            if policy.uses(device.name):
                yield Place(ip, device.ifindex, device.name, mac_text(device.mac))


def _addresses(policy: L2Policy, service: Service, unserved: _Unserved) -> Iterator[IPv4Address]:
    """To answer for an address of the router, or of another host, would draw the traffic of all to it."""
    texts: list[tuple[str, str]] = []
    if policy.balancers:
        ingress = service.status.load_balancer.ingress or ()
        texts += [(INGRESS, each.ip) for each in ingress if each.is_of_nodes]
    if policy.external:
        texts += [(EXTERNAL_IPS, text) for text in service.spec.external_ips or ()]
    name = ServiceName(*service.key)
    for part, text in texts:
        with suppress(ValueError):  # a name, or an address of IPv6
            ip = IPv4Address(text)
            if (name, part, ip) not in unserved:
                yield ip
