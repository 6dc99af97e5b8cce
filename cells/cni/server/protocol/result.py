"""The result of an ADD, in the form of the protocol version that was asked for.

Needs: nothing.   Gives: Attached, result_json, passed_on.
Source: CNI spec 0.2.0 (ip4, ip6), 0.3.1 (interfaces, ips with a version), 1.0.0 (ips without), 1.1.0 (routes
with an MTU); as recorded.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import msgspec

from cells.ipam import text_of
from cells.node.netlink import mac_text


class Attached(msgspec.Struct, frozen=True):
    """The result for the runtime of a new attachment."""

    host_name: str
    host_mac: bytes
    ifname: str
    pod_mac: bytes
    netns: str
    addresses: tuple[IPv4Address | IPv6Address, ...]
    """IPv6 first, where there are both."""
    gateways: tuple[IPv4Address | IPv6Address, ...]
    """One per address, in the same order."""
    mtu: int


def result_json(attached: Attached, version: str) -> bytes:
    """The result object in protocol ``version``, one of those the plugin serves."""
    legacy = version in {"0.1.0", "0.2.0"}
    by_family: dict[str, object] = {}
    ips: list[dict[str, object]] = []
    routes: list[dict[str, object]] = []
    for ip, router in zip(attached.addresses, attached.gateways, strict=True):
        four, gateway = ip.version == 4, text_of(router)
        bits = 32 if four else 128
        address = f"{text_of(ip)}/{bits}"
        default: dict[str, object] = {"dst": "0.0.0.0/0" if four else "::/0", "gw": gateway}
        if version == "1.1.0":
            default["mtu"] = attached.mtu
        own: list[dict[str, object]] = [{"dst": f"{gateway}/{bits}"}, default]
        if legacy:
            by_family["ip4" if four else "ip6"] = {"ip": address, "gateway": gateway, "routes": own}
            continue
        form: dict[str, object] = {"interface": 1, "address": address, "gateway": gateway}
        ips.append({"version": "4" if four else "6", **form} if version.startswith("0.") else form)
        routes += own
    if legacy:
        return msgspec.json.encode({"cniVersion": version, **by_family, "dns": {}}) + b"\n"
    result: dict[str, object] = {
        "cniVersion": version,
        "interfaces": [
            {"name": attached.host_name, "mac": mac_text(attached.host_mac)},
            {"name": attached.ifname, "mac": mac_text(attached.pod_mac), "sandbox": attached.netns},
        ],
        "ips": ips,
        "routes": routes,
    }
    if version.startswith("0."):
        result["dns"] = {}
    return msgspec.json.encode(result) + b"\n"


def passed_on(previous: bytes, version: str, mac: tuple[str, bytes] | None = None) -> bytes:
    """The result of the plugin before us as ours, in protocol ``version``: what it says stays as it is.

    ``mac``: the name of the pod's interface, and the MAC address it has now.
    """
    result: dict[str, object] = {**msgspec.json.decode(previous), "cniVersion": version}
    if version.startswith("0."):
        result.setdefault("dns", {})
    elif not result.get("dns"):
        result.pop("dns", None)
    interfaces = result.get("interfaces")
    if mac is not None and isinstance(interfaces, list):
        result["interfaces"] = [
            {**each, "mac": mac_text(mac[1])} if each.get("name") == mac[0] and each.get("sandbox") else each
            for each in interfaces
        ]
    return msgspec.json.encode(result) + b"\n"
