"""What the allocator promises, and its texts, which Cilium's clients show."""

import re
from ipaddress import IPv4Address, IPv4Network

import pytest

from cells.ipam import EXPIRATION, Allocation, Allocator, IpamError
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
    handed_out = {ipam.allocate_next("default/web").ip for _ in range(14)}
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
    handed_out = sorted(str(ipam.allocate_next("x").ip) for _ in usable)
    assert handed_out == usable
    assert sorted(ipam.dump()) == usable
    with refused(502, "range is full"):
        ipam.allocate_next("x")


@pytest.mark.parametrize(
    ("network", "capacity"),
    [("10.0.1.0/32", 0), ("10.0.1.0/31", 0), ("10.0.1.0/30", 2), ("10.0.0.0/16", 65534)],
)
def test_the_status_tells_the_capacity_and_ends_with_a_comma(network: str, capacity: int) -> None:
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
    assert len({ipam.allocate_next("x").ip for _ in range(5)}) == 5
    with refused(502, "range is full"):
        ipam.allocate_next("x")
    assert ipam.owner(IPv4Address("10.0.1.3")) == "node-ip (excluded)"
    assert ipam.status() == "IPv4: 6/6 allocated from 10.0.1.0/29, "


def test_releasing_what_nobody_has_is_no_error() -> None:
    ipam = allocator()
    ipam.release(IPv4Address("10.0.1.7"), "default")
    ipam.release(IPv4Address("192.0.2.1"), "default")
    with refused(500, "no IPAM pool provided for IP release of 10.0.1.7"):
        ipam.release(IPv4Address("10.0.1.7"), "")


def test_other_pools_are_refused_by_name() -> None:
    ipam = allocator()
    text = 'unknown IPAM pool "blue": this node has the pool "default" only'
    with refused(502, text):
        ipam.allocate_next("x", "blue")
    with refused(500, text):
        ipam.allocate(IPv4Address("10.0.1.7"), "x", "blue")
    with refused(500, text):
        ipam.release(IPv4Address("10.0.1.7"), "blue")
    with refused(500, text):
        ipam.exclude(IPv4Address("10.0.1.7"), "x", "blue")
    assert ipam.allocate_next("x", "default").pool == "default"


def test_an_address_nobody_confirms_goes_back_after_ten_minutes() -> None:
    clock = FakeClock()
    ipam = allocator(clock=clock)
    lost, kept = ipam.allocate_next_expiring("default/lost"), ipam.allocate_next_expiring("default/kept")
    ipam.stop_expiration(kept.ip, kept.pool, kept.expiration_uuid)
    clock.time += EXPIRATION - 1
    assert ipam.release_expired() == []
    assert ipam.next_expiration() == 1
    clock.time += 1
    assert ipam.release_expired() == [lost]
    assert ipam.dump() == {str(kept.ip): "default/kept"}
    assert ipam.next_expiration() is None


def test_a_timer_is_stopped_only_by_its_own_uuid() -> None:
    ipam = allocator()
    pod = ipam.allocate_next_expiring("default/web")
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
    first = ipam.allocate_next_expiring("default/first")
    ipam.release(first.ip, first.pool)
    clock.time += EXPIRATION / 2
    second = ipam.allocate_next_expiring("default/second")
    clock.time += EXPIRATION / 2
    assert ipam.release_expired() == []
    assert ipam.owner(second.ip) == "default/second"


def test_no_range_no_address() -> None:
    with pytest.raises(NotStartedError, match="depend on Ipam"):
        Allocator("default", FakeClock()).allocate_next("x")
