"""Rows of the endpoint table."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address
from typing import Any

from cells.endpoint import Endpoint, State


def endpoint(number: int = 7, **changes: Any) -> Endpoint:
    values: dict[str, Any] = {
        "id": number,
        "container_id": f"cid{number}",
        "container_ifname": "eth0",
        "ifname": "lxc1",
        "ifindex": 100,
        "pod_mac": bytes(6),
        "host_mac": bytes(6),
        "ipv4": IPv4Address(f"10.0.1.{number}"),
        "ipv6": IPv6Address(f"fd00::{number}"),
        "pool": "default",
        "identity": 300,
        "labels": ("k8s:app=web",),
        "pod_name": "web",
        "pod_namespace": "default",
        "pod_uid": "uid-web",
        "netns_cookie": 0,
        "state": State.READY,
        "created": 1.0,
    }
    return Endpoint(**(values | changes))
