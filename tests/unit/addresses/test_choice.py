"""The selection of a node's address: announced, configured, routed, then present ones."""

from ipaddress import ip_address, ip_interface

import pytest

from cells.base.addresses import Family
from cells.node.addresses import AddressSettings, NodeAddress, choose
from cells.node.devices import Device
from lifecycle import Hive, SettingsError, Sources, config, invoke, module

V4, V6 = Family.IPV4, Family.IPV6


def device(index: int, name: str, *addresses: str) -> Device:
    return Device(index, name, "", bytes(6), 1500, True, tuple(map(ip_interface, addresses)))


LO = device(1, "lo", "127.0.0.1/8", "10.9.9.9/32", "::1/128", "fd00:9::9/128")
ETH0 = device(2, "eth0", "192.0.2.7/24", "2001:db8::7/64")


def chosen(family: Family, *devices: Device, **known: str) -> str:
    internal, configured, source = (
        ip_address(known[name]) if name in known else None
        for name in ("internal", "configured", "route_source")
    )
    found = choose(family, internal=internal, configured=configured, route_source=source, devices=devices)
    return f"{found.ip} by {found.origin}" if isinstance(found, NodeAddress) else ""


def test_the_first_known_address_is_chosen() -> None:
    known = {"internal": "198.51.100.1", "configured": "198.51.100.2", "route_source": "198.51.100.3"}
    assert chosen(V4, ETH0, **known) == "198.51.100.1 by Node object"
    del known["internal"]
    assert chosen(V4, ETH0, **known) == "198.51.100.2 by setting"
    del known["configured"]
    assert chosen(V4, ETH0, **known) == "198.51.100.3 by default route"
    assert chosen(V4, ETH0) == "192.0.2.7 by device"
    assert chosen(V6, ETH0) == "2001:db8::7 by device"


def test_an_address_of_lo_counts_as_the_default_routes_source_alone() -> None:
    assert chosen(V4, LO) == ""
    assert chosen(V4, LO, ETH0) == "192.0.2.7 by device"
    assert chosen(V4, LO, ETH0, route_source="10.9.9.9") == "10.9.9.9 by default route"


def test_loopback_and_link_local_addresses_are_not_chosen() -> None:
    assert chosen(V4, LO, ETH0, route_source="127.0.0.1") == "192.0.2.7 by device"
    assert chosen(V4, device(3, "eth1", "169.254.7.7/16")) == ""


def root(_settings: AddressSettings) -> None:
    """What is asked for."""


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("ipv4-node", "host7"),
        ("ipv4-node", "127.0.0.1"),
        ("ipv4-node", "2001:db8::7"),
        ("ipv4-node", "0.0.0.0"),
        ("ipv6-node", "192.0.2.7"),
        ("ipv6-node", "fe80::7"),
    ],
)
def test_a_wrong_address_is_refused_in_one_line(flag: str, value: str) -> None:
    example = "192.0.2.7" if flag == "ipv4-node" else "2001:db8::7"
    cell = module("addresses", "Addresses", config(AddressSettings), invoke(root))
    with pytest.raises(SettingsError) as caught:
        Hive(cell, settings=Sources(argv=[f"--{flag}={value}"])).check()
    assert f"{flag}={value}: expected auto, or an address of the node such as {example}" in str(caught.value)
