"""The scan for a free address."""

from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cells.base.addresses import AddressRange, RangeFull


@given(start=st.floats(0, 1, exclude_max=True), taken=st.sets(st.integers(0, 13)))
def test_the_scan_begins_anywhere_and_wraps_round(start: float, taken: set[int]) -> None:
    addresses = AddressRange(IPv4Network("10.0.1.0/28"), lambda: start)
    for offset in taken:
        assert addresses.allocate(IPv4Address("10.0.1.1") + offset)
    order = [(int(start * 14) + i) % 14 for i in range(14)]
    expected = [IPv4Address("10.0.1.1") + offset for offset in order if offset not in taken]
    assert [addresses.allocate_next() for _ in expected] == expected
    with pytest.raises(RangeFull):
        addresses.allocate_next()


def test_a_range_too_wide_to_count_holds_nothing() -> None:
    assert AddressRange(IPv4Network("0.0.0.0/0")).size == 0
    assert AddressRange(IPv4Network("0.0.0.0/1")).size == 0


def test_membership_is_of_what_is_taken() -> None:
    addresses = AddressRange(IPv4Network("10.0.1.0/24"))
    ip = addresses.allocate_next()
    assert ip in addresses
    assert list(addresses) == [ip]
    assert IPv4Address("10.0.2.1") not in addresses
    assert addresses.release(ip) is True
    assert addresses.release(ip) is False
    assert addresses.release(IPv4Address("9.9.9.9")) is False
