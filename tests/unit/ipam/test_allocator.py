"""The IP allocator: its guarantees, and the messages that Cilium's clients show."""

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest

from cells.base.addresses import Family
from cells.node.ipam.allocator import EXPIRATION, Allocation, Allocator
from cells.node.ipam.ranges import IpamError
from lifecycle import NotStartedError
from tests.unit.ipam.clock import FakeClock


def allocator(network: str = "10.0.1.0/24", clock: FakeClock | None = None) -> Allocator:
    made = Allocator("default", clock or FakeClock())
    made.use(IPv4Network(network))
    return made


def refused(status: int, text: str) -> "pytest.RaisesExc[IpamError]":
    return pytest.raises(IpamError, match=f"^{re.escape(text)}$", check=lambda error: error.status == status)


def test_every_address_but_the_first_and_last_is_handed_out_once() -> None:
    ipam = allocator("10.0.1.0/28")
    handed_out = {ipam.allocate_next("default/web")[0].ip for _ in range(14)}
    assert handed_out == set(IPv4Network("10.0.1.0/28").hosts())
    with refused(502, "range is full"):
        ipam.allocate_next("default/late")


@pytest.mark.parametrize(
    ("network", "usable"),
    [
        ("10.0.1.4/32", ["10.0.1.4"]),
        ("10.0.1.4/31", ["10.0.1.4", "10.0.1.5"]),
        ("10.0.1.4/30", ["10.0.1.5", "10.0.1.6"]),
    ],
)
def test_the_smallest_ranges_are_used_whole(network: str, usable: list[str]) -> None:
    ipam = allocator(network)
    handed_out = sorted(str(ipam.allocate_next("x")[0].ip) for _ in usable)
    assert handed_out == usable
    assert sorted(ipam.dump()) == usable
    with refused(502, "range is full"):
        ipam.allocate_next("x")


@pytest.mark.parametrize(
    ("network", "capacity"),
    [("10.0.1.0/32", 0), ("10.0.1.0/31", 0), ("10.0.1.0/30", 2), ("10.0.0.0/16", 65534)],
)
def test_the_status_has_the_capacity_and_ends_with_a_comma(network: str, capacity: int) -> None:
    ipam = allocator(network)
    ipam.allocate_next("x")
    assert ipam.status() == f"IPv4: 1/{capacity} allocated from {network}, "


def test_a_restored_address_is_refused_when_taken_excluded_or_foreign() -> None:
    ipam = allocator()
    ipam.exclude(IPv4Address("10.0.1.9"), "node-ip")
    first = ipam.allocate(IPv4Address("10.0.1.7"), "default/web", "default")
    assert first == Allocation(IPv4Address("10.0.1.7"), "default", "default/web")
    with refused(500, "provided IP is already allocated"):
        ipam.allocate(IPv4Address("10.0.1.7"), "default/other", "default")
    with refused(500, "IP 10.0.1.9 is excluded, owned by node-ip"):
        ipam.allocate(IPv4Address("10.0.1.9"), "default/other", "default")
    for foreign in ("10.0.1.0", "10.0.1.255", "10.0.2.1", "9.0.0.1"):
        with refused(500, "provided IP is not in the valid range. The range of valid IPs is 10.0.1.0/24"):
            ipam.allocate(IPv4Address(foreign), "default/other", "default")
    with refused(500, 'unable to restore IP 10.0.1.8 for "default/web": pool name must be provided'):
        ipam.allocate(IPv4Address("10.0.1.8"), "default/web", "")
    assert ipam.dump() == {"10.0.1.7": "default/web"}


def test_an_excluded_address_is_never_handed_out_but_counts() -> None:
    ipam = allocator("10.0.1.0/29")
    ipam.exclude(IPv4Address("10.0.1.3"), "node-ip")
    ipam.exclude(IPv4Address("192.0.2.1"), "node-ip")
    assert len({ipam.allocate_next("x")[0].ip for _ in range(5)}) == 5
    with refused(502, "range is full"):
        ipam.allocate_next("x")
    assert ipam.owner(IPv4Address("10.0.1.3")) == "node-ip (excluded)"
    assert ipam.status() == "IPv4: 6/6 allocated from 10.0.1.0/29, "


def test_releasing_a_free_address_succeeds() -> None:
    ipam = allocator()
    ipam.release(IPv4Address("10.0.1.7"), "default")
    ipam.release(IPv4Address("192.0.2.1"), "default")
    with refused(500, "no IPAM pool provided for IP release of 10.0.1.7"):
        ipam.release(IPv4Address("10.0.1.7"), "")


def test_a_node_with_one_pool_gives_addresses_of_it_whatever_pool_is_asked_for() -> None:
    ipam = allocator()
    assert ipam.allocate_next("x", "blue")[0].pool == "default"
    assert ipam.allocate_next("x", "default")[0].pool == "default"


def test_an_address_outlives_a_change_of_the_pools_name() -> None:
    ipam = allocator()
    ip = IPv4Address("10.0.1.7")
    assert ipam.allocate(ip, "default/web [restored]", "the-former-name").pool == "default"
    ipam.release(ip, "the-former-name")
    assert ipam.dump() == {}


def dual(ipv4: str = "10.0.1.0/24", ipv6: str = "fd00::/112", clock: FakeClock | None = None) -> Allocator:
    made = Allocator("default", clock or FakeClock())
    made.use(IPv4Network(ipv4), IPv6Network(ipv6))
    return made


def test_with_both_families_ipv6_comes_first() -> None:
    ipam = dual()
    six, four = ipam.allocate_next("default/web")
    assert (six.ip.version, four.ip.version) == (6, 4)
    assert list(ipam.dump()) == [str(four.ip), str(six.ip)]
    assert ipam.status() == (
        "IPv4: 1/254 allocated from 10.0.1.0/24, IPv6: 1/65534 allocated from fd00::/112"
    )
    [only] = ipam.allocate_next("default/web", family=Family.IPV6)
    assert only.ip.version == 6


def test_without_ipv4_left_no_ipv6_address_is_lost() -> None:
    ipam = dual("10.0.1.4/31")
    for _ in range(2):
        ipam.allocate_next("default/web", family=Family.IPV4)
    with refused(502, "range is full"):
        ipam.allocate_next_expiring("default/late")
    assert all(IPv4Address(ip) for ip in ipam.dump())
    assert ipam.next_expiration() is None


def test_a_family_that_is_off_is_refused() -> None:
    with refused(502, "IPv6 allocator not available"):
        allocator().allocate_next("x", family=Family.IPV6)
    with refused(500, "IPv6 allocation disabled"):
        allocator().allocate(IPv6Address("fd00::1"), "x", "default")
    only6 = Allocator("default", FakeClock())
    only6.use(IPv6Network("fd00::/96"))
    assert only6.status() == ", IPv6: 0/4294967294 allocated from fd00::/96"
    with refused(500, "IPv4 allocation disabled"):
        only6.allocate(IPv4Address("10.0.1.7"), "x", "default")


def test_of_a_wide_ipv6_range_the_low_16_bits_are_used() -> None:
    ipam = Allocator("default", FakeClock())
    ipam.use(IPv6Network("fd00::/64"))
    got = {ipam.allocate_next("x")[0].ip for _ in range(65534)}
    assert (min(map(int, got)) & 0xFFFF, max(map(int, got)) & 0xFFFF) == (1, 0xFFFE)
    with refused(502, "range is full"):
        ipam.allocate_next("x")


def test_an_unconfirmed_address_is_released_after_ten_minutes() -> None:
    clock = FakeClock()
    ipam = allocator(clock=clock)
    (lost,) = ipam.allocate_next_expiring("default/lost")
    (retained,) = ipam.allocate_next_expiring("default/kept")
    ipam.stop_expiration(retained.ip, retained.pool, retained.expiration_uuid)
    clock.time += EXPIRATION - 1
    assert ipam.release_expired() == []
    assert ipam.next_expiration() == 1
    clock.time += 1
    assert ipam.release_expired() == [lost]
    assert ipam.dump() == {str(retained.ip): "default/kept"}
    assert ipam.next_expiration() is None


def test_a_timer_is_stopped_only_by_its_own_uuid() -> None:
    ipam = allocator()
    (pod,) = ipam.allocate_next_expiring("default/web")
    with refused(500, "expiration timer already registered"):
        ipam.arm_expiration(pod.ip, pod.pool)
    with refused(500, "UUID mismatch, not stopping expiration timer"):
        ipam.stop_expiration(pod.ip, pod.pool, "another")
    ipam.stop_expiration(pod.ip, pod.pool, pod.expiration_uuid)
    with refused(500, "no expiration timer registered"):
        ipam.stop_expiration(pod.ip, pod.pool, pod.expiration_uuid)


def test_the_old_timer_of_a_released_address_does_not_hurt_its_next_owner() -> None:
    clock = FakeClock()
    ipam = allocator("10.0.1.4/32", clock)
    (first,) = ipam.allocate_next_expiring("default/first")
    ipam.release(first.ip, first.pool)
    clock.time += EXPIRATION / 2
    (second,) = ipam.allocate_next_expiring("default/second")
    clock.time += EXPIRATION / 2
    assert ipam.release_expired() == []
    assert ipam.owner(second.ip) == "default/second"


def test_without_a_range_allocation_fails() -> None:
    with pytest.raises(NotStartedError, match="depend on Ipam"):
        Allocator("default", FakeClock()).allocate_next("x")


def test_an_address_in_use_is_not_allocated_from_a_range_added_later() -> None:
    ipam = allocator("10.0.1.0/30")
    retained = IPv4Address("10.0.2.1")
    assert not ipam.covers(retained)
    ipam.hold(retained, "default/old [restored]")
    ipam.follow(Family.IPV4, [IPv4Network("10.0.1.0/30"), IPv4Network("10.0.2.0/30")])
    handed_out = {ipam.allocate_next("default/web")[0].ip for _ in range(3)}
    assert handed_out == {IPv4Address(f"10.0.{text}") for text in ("1.1", "1.2", "2.2")}
    with refused(502, "range is full"):
        ipam.allocate_next("default/late")
    with refused(500, "provided IP is already allocated"):
        ipam.allocate(retained, "default/late", "default")
    ipam.release(retained, "default")
    assert ipam.allocate_next("default/late")[0].ip == retained
