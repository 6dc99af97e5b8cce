"""The result of an ADD, in the form of the protocol version that was asked for.

Needs: nothing.   Gives: Attached, result_json.
Source: CNI spec 0.2.0 (ip4), 0.3.1 (interfaces, ips with a version), 1.0.0 (ips without); as recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address

import msgspec

from cells.netlink import mac_text


@dataclass(frozen=True, slots=True)
class Attached:
    """What the runtime is told of a new attachment."""

    host_name: str
    host_mac: bytes
    ifname: str
    pod_mac: bytes
    netns: str
    address: IPv4Address
    gateway: IPv4Address


def result_json(attached: Attached, version: str) -> bytes:
    """The result object in protocol ``version``, one of those the plugin serves."""
    address, gateway = f"{attached.address}/32", str(attached.gateway)
    routes = [{"dst": f"{gateway}/32"}, {"dst": "0.0.0.0/0", "gw": gateway}]
    if version in {"0.1.0", "0.2.0"}:
        ip4 = {"ip": address, "gateway": gateway, "routes": routes}
        return msgspec.json.encode({"cniVersion": version, "ip4": ip4, "dns": {}}) + b"\n"
    ip: dict[str, object] = {"interface": 1, "address": address, "gateway": gateway}
    result: dict[str, object] = {
        "cniVersion": version,
        "interfaces": [
            {"name": attached.host_name, "mac": mac_text(attached.host_mac)},
            {"name": attached.ifname, "mac": mac_text(attached.pod_mac), "sandbox": attached.netns},
        ],
        "ips": [ip],
        "routes": routes,
    }
    if version.startswith("0."):
        ip["version"] = "4"
        result["dns"] = {}
    return msgspec.json.encode(result) + b"\n"
