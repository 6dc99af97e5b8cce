"""The API requests of a CNI plugin for one pod."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.unit.api.node import Node


def request_body(
    address: str, uuid: str = "", container: str = "cid1", changes: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """Return the body of the plugin's PUT /endpoint for a container's eth0, updated by ``changes``."""
    addressing = {"ipv4": address, "ipv4-pool-name": "default"} | (
        {"ipv4-expiration-uuid": uuid} if uuid else {}
    )
    return {
        "addressing": addressing,
        "container-id": container,
        "container-interface-name": "eth0",
        "datapath-configuration": {},
        "host-mac": "02:00:00:00:00:01",
        "interface-index": 12,
        "interface-name": "lxc0123456789ab",
        "k8s-namespace": "default",
        "k8s-pod-name": "web-0",
        "k8s-uid": "6f0d7a3e-1111-4222-8333-944455556666",
        "mac": "02:00:00:00:00:02",
        "netns-cookie": "4242",
        "state": "waiting-for-identity",
        "sync-build-endpoint": True,
        **(changes or {}),
    }


async def added(node: Node, container: str = "cid1") -> tuple[int, str]:
    """Send the requests of ADD; return endpoint id and address."""
    lease = await node.ask("POST", "/v1/ipam?owner=default%2Fweb-0", headers={"Expiration": "true"})
    address, uuid = lease.body["address"]["ipv4"], lease.body["ipv4"]["expiration-uuid"]
    made = await node.ask("PUT", "/v1/endpoint/cilium-local:0", request_body(address, uuid, container))
    assert made.status == 201, made.raw
    return made.body["id"], address
