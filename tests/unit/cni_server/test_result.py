"""The result of an ADD in every protocol version, as recorded from client 1.17."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv6Address

import pytest
from msgspec.structs import replace

from cells.cni.protocol import Attached, result_json
from cells.cni.request import SERVED_VERSIONS
from cells.netlink.rows import parse_mac

ATTACHED = Attached(
    "lxc8b2f74ca7061",
    parse_mac("02:00:00:00:00:01"),
    "eth0",
    parse_mac("02:00:00:00:00:02"),
    "/var/run/netns/testpod",
    (IPv4Address("10.0.1.77"),),
    (IPv4Address("10.0.1.5"),),
    1450,
)
ROUTES = [{"dst": "10.0.1.5/32"}, {"dst": "0.0.0.0/0", "gw": "10.0.1.5"}]
INTERFACES = [
    {"name": "lxc8b2f74ca7061", "mac": "02:00:00:00:00:01"},
    {"name": "eth0", "mac": "02:00:00:00:00:02", "sandbox": "/var/run/netns/testpod"},
]
IP = {"interface": 1, "address": "10.0.1.77/32", "gateway": "10.0.1.5"}


@pytest.mark.parametrize("version", SERVED_VERSIONS)
def test_every_version_gets_its_form(version: str) -> None:
    forms: dict[str, object]
    if version in {"0.1.0", "0.2.0"}:
        forms = {"ip4": {"ip": "10.0.1.77/32", "gateway": "10.0.1.5", "routes": ROUTES}, "dns": {}}
    elif version == "1.0.0":
        forms = {"interfaces": INTERFACES, "ips": [IP], "routes": ROUTES}
    elif version == "1.1.0":
        forms = {"interfaces": INTERFACES, "ips": [IP], "routes": [ROUTES[0], {**ROUTES[1], "mtu": 1450}]}
    else:
        forms = {"interfaces": INTERFACES, "ips": [{"version": "4", **IP}], "routes": ROUTES, "dns": {}}
    assert json.loads(result_json(ATTACHED, version)) == {"cniVersion": version, **forms}


def test_both_families_are_listed_ipv6_first() -> None:
    both = replace(
        ATTACHED,
        addresses=(IPv6Address("fd00::77"), *ATTACHED.addresses),
        gateways=(IPv6Address("fd00::5"), *ATTACHED.gateways),
    )
    routes6 = [{"dst": "fd00::5/128"}, {"dst": "::/0", "gw": "fd00::5"}]
    ip6 = {"interface": 1, "address": "fd00::77/128", "gateway": "fd00::5"}
    modern = json.loads(result_json(both, "1.0.0"))
    assert modern["ips"] == [ip6, IP]
    assert modern["routes"] == routes6 + ROUTES
    assert json.loads(result_json(both, "0.3.1"))["ips"] == [{"version": "6", **ip6}, {"version": "4", **IP}]
    legacy = json.loads(result_json(both, "0.2.0"))
    assert legacy["ip6"] == {"ip": "fd00::77/128", "gateway": "fd00::5", "routes": routes6}
    assert legacy["ip4"]["routes"] == ROUTES
