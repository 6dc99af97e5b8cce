"""MAC addresses as text and bytes."""

import pytest

from cells.netlink.rows import mac_text, parse_mac, random_mac


def test_a_mac_goes_to_text_and_back() -> None:
    assert mac_text(parse_mac("0A:bc:00:00:00:01")) == "0a:bc:00:00:00:01"


@pytest.mark.parametrize(
    "text", ["", "02:00:00:00:00", "02-00:00-00-00-01", "2:0:0:0:0:1", "zz:00:00:00:00:01"]
)
def test_an_invalid_mac_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is not a MAC address: expected six hex pairs"):
        parse_mac(text)


def test_random_macs_are_local_unicast_and_differ() -> None:
    macs = {random_mac() for _ in range(100)}
    assert len(macs) == 100
    assert all(len(mac) == 6 and mac[0] & 0x03 == 0x02 for mac in macs)
