"""CiliumEndpoints of other nodes, and the cells that read them."""

from __future__ import annotations

from typing import Any

from cells.kubernetes.objects.cilium_endpoint import NODE_NAME

HERE, THERE = "192.0.2.1", "192.0.2.2"


def cep(
    name: str, ip: str, number: int, node: str = THERE, written_by: str = "", **more: Any
) -> dict[str, Any]:
    networking = {"addressing": [{"ipv4": ip, "ipv6": f"fd00::{ip.rpartition('.')[2]}"}], "node": node}
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumEndpoint",
        "metadata": {"name": name, "namespace": "shop", "annotations": {NODE_NAME: written_by}},
        "status": {"id": 7, "identity": {"id": number}, "networking": networking, **more},
    }
