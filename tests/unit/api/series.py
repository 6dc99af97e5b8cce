"""Reads series of the API's metrics."""

from __future__ import annotations

from typing import Any

from tests.unit.api.node import Node


async def series(node: Node, name: str, path: str = "/v1/metrics/") -> list[Any]:
    """Return the series of one metric."""
    got = await node.ask("GET", path)
    assert got.status == 200
    return [metric for metric in got.body if metric["name"] == name]
