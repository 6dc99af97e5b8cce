"""IPAM metrics: used and available addresses, and operations."""

from __future__ import annotations

from ipaddress import IPv4Address, ip_network

import pytest

from cells.node.ipam import families
from cells.node.ipam.allocator import Allocator, Clock
from cells.node.ipam.ranges import IpamError


def series(ipam: Allocator) -> dict[str, dict[tuple[str, ...], object]]:
    """Every family's series."""
    return {family.name: dict(family.series) for family in families(ipam)}


def test_addresses_are_counted_by_family() -> None:
    ipam = Allocator("default", Clock())
    ipam.use(ip_network("10.0.0.0/29"), ip_network("fd00::/96"))
    v6, v4 = ipam.allocate_next("a/b")
    other = IPv4Address("10.0.0.1") if v4.ip != IPv4Address("10.0.0.1") else IPv4Address("10.0.0.2")
    ipam.allocate(other, "c/d", "default")
    ipam.release(v6.ip, "default")
    ipam.release(v6.ip, "default")
    assert series(ipam) == {
        "cilium_ipam_capacity": {("ipv4",): 6, ("ipv6",): 2**32 - 2},
        "cilium_ipam_events_total": {
            ("allocate", "ipv4"): 2,
            ("allocate", "ipv6"): 1,
            ("release", "ipv4"): 0,
            ("release", "ipv6"): 1,
        },
        "cilium_ip_addresses": {("ipv4",): 2, ("ipv6",): 0},
    }


def test_refused_requests_count_no_event_and_a_disabled_family_has_no_series() -> None:
    ipam = Allocator("default", Clock())
    ipam.use(ip_network("10.0.0.0/29"))
    for number in range(6):
        ipam.allocate_next(f"a/{number}")
    with pytest.raises(IpamError):
        ipam.allocate_next("a/b")
    assert series(ipam)["cilium_ipam_events_total"] == {("allocate", "ipv4"): 6, ("release", "ipv4"): 0}
    assert series(ipam)["cilium_ip_addresses"] == {("ipv4",): 6}
