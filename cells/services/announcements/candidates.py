"""The services this node may answer for, by policies, services, this node and its devices.

Needs: nothing.   Gives: Candidate, candidates(), announceable(), Place.
Source: Cilium 1.17. Services of other classes are left alone, and addresses of IPv6 are not announced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Address
from typing import Final, NamedTuple

import msgspec

from cells.kubernetes import CiliumL2AnnouncementPolicy, Key, Service, served_by
from cells.node.devices import Device
from cells.node.netlink import mac_text
from cells.services.announcements.policies import L2Policy, read_policy

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
) -> dict[Key, Candidate]:
    """By namespace and name. ``devices``: those that programs are on."""
    read = (read_policy(each)[0] for each in policies)
    followed = sorted(each for each in read if each is not None and each.is_for(node_labels))
    found: dict[Key, Candidate] = {}
    for service in services if followed else ():
        labels = {**service.labels, NAME: service.name, NAMESPACE: service.namespace}
        names: list[str] = []
        places: dict[Place, None] = {}
        for policy in followed:
            if policy.announces(labels) and (here := list(_places(policy, service, devices))):
                names.append(policy.name)
                places |= dict.fromkeys(here)
        if places:
            local = service.spec.external_traffic_policy == "Local"
            found[service.key] = Candidate(service.key, tuple(names), tuple(sorted(places)), local)
    return found


def _places(policy: L2Policy, service: Service, devices: Sequence[Device]) -> Iterator[Place]:
    for ip in _addresses(policy, service):
        for device in devices:
            if policy.uses(device.name):
                yield Place(ip, device.ifindex, device.name, mac_text(device.mac))


def _addresses(policy: L2Policy, service: Service) -> Iterator[IPv4Address]:
    texts: list[str] = []
    if policy.balancers:
        texts += [each.ip for each in service.status.load_balancer.ingress or () if each.is_of_nodes]
    if policy.external:
        texts += service.spec.external_ips or ()
    for text in texts:
        with suppress(ValueError):  # a name, or an address of IPv6
            yield IPv4Address(text)
