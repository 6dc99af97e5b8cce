"""The router retains its address as long as possible."""

from ipaddress import IPv4Network, ip_address, ip_network

import pytest
import structlog
from structlog.testing import capture_logs

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.node.ipam.allocator import Allocation
from cells.node.ipam.ranges import IpamError
from cells.node.router import choose_address
from lifecycle import HiveError


class FakeAddresses:
    """A range with some addresses taken."""

    default_pool = "default"

    def __init__(self, *taken: str, free: str | None = "10.0.1.77") -> None:
        self.ranges: dict[Family, IPNetwork] = {
            Family.IPV6: ip_network("fd00:1::/112"),
            Family.IPV4: IPv4Network("10.0.1.0/24"),
        }
        self.taken: dict[IPAddress, str] = {ip_address(each): "web" for each in taken}
        self._free = free

    def allocate(self, ip: IPAddress, owner: str, pool: str) -> Allocation:
        if ip not in self.ranges[Family.of(ip)]:
            raise IpamError(500, "provided IP is not in the valid range")
        if ip in self.taken:
            raise IpamError(500, "provided IP is already allocated")
        self.taken[ip] = owner
        return Allocation(ip, pool, owner)

    def allocate_next(
        self, owner: str, pool: str = "", family: Family | None = None
    ) -> tuple[Allocation, ...]:
        if self._free is None:
            raise IpamError(502, "range is full")
        assert family is Family.of(ip_address(self._free))
        return (self.allocate(ip_address(self._free), owner, pool or self.default_pool),)


def choose(addresses: FakeAddresses, *found: str, family: Family = Family.IPV4) -> tuple[str, list[str]]:
    """The choice, and the warnings on the way."""
    with capture_logs() as logs:
        before = [ip_address(each) for each in found]
        ip = choose_address(family, before, addresses, structlog.get_logger())
    assert addresses.taken[ip] == "router"
    return str(ip), [f"{entry['event']} {entry.get('ip', '')}".strip() for entry in logs]


def test_without_a_past_it_is_the_next_free_one() -> None:
    assert choose(FakeAddresses()) == ("10.0.1.77", [])


def test_the_address_on_cilium_host_stays_the_router_address() -> None:
    assert choose(FakeAddresses(), "10.0.1.5") == ("10.0.1.5", [])


def test_the_first_restorable_router_address_is_used() -> None:
    ip, warnings = choose(FakeAddresses(), "192.0.2.1", "10.0.1.5", "10.0.1.6")
    assert ip == "10.0.1.5"
    assert warnings == ["Unable to restore router IP from filesystem 192.0.2.1"]


def test_only_addresses_of_the_family_are_tried() -> None:
    assert choose(FakeAddresses(), "fd00:1::5", "10.0.1.5") == ("10.0.1.5", [])
    assert choose(FakeAddresses(), "10.0.1.5", "fd00:1::5", family=Family.IPV6) == ("fd00:1::5", [])
    assert choose(FakeAddresses(free="fd00:1::7"), "10.0.1.5", family=Family.IPV6) == ("fd00:1::7", [])


def test_a_lost_address_is_warned_about() -> None:
    ip, warnings = choose(FakeAddresses("10.0.1.5"), "10.0.1.5")
    assert ip == "10.0.1.77"
    assert warnings == [
        "Unable to restore router IP from filesystem 10.0.1.5",
        "Router IP could not be re-allocated: a new one will cause brief network disruption",
    ]


def test_a_full_range_ends_the_start_in_one_line() -> None:
    with pytest.raises(HiveError) as caught:
        choose(FakeAddresses(free=None))
    assert str(caught.value) == (
        "Unable to allocate router IP for family ipv4: range is full; "
        "every address of 10.0.1.0/24 is taken, choose a larger ipv4-range"
    )
