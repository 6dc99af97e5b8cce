"""Ports that objects tell: those that an API server would refuse.

Needs: nothing.   Gives: wrong_port.
Source: k8s.io/kubernetes/pkg/apis/core/validation (containerPort, hostPort, port, targetPort, nodePort).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec.structs import fields

from cells.kubernetes.objects import ENDPOINT_SLICES, PODS, SERVICES, Kind, Object

_KINDS: Final = frozenset({PODS.qualified, SERVICES.qualified, ENDPOINT_SLICES.qualified})
_SMALLEST: Final = {
    "port": 1,
    "container_port": 1,
    "host_port": 0,
    "node_port": 0,
    "target_port": 0,
    "health_check_node_port": 0,
}
"""Fields that hold a port; 0 is none."""


def wrong_port(kind: Kind[Any], row: Object) -> tuple[str, str] | None:
    """The path of the first port that is none (``.spec.ports[0].port``), and what is wrong with it."""
    if kind.qualified not in _KINDS:
        return None
    return next(_wrong(row, ""), None)


def _wrong(part: Any, at: str) -> Iterator[tuple[str, str]]:
    if isinstance(part, msgspec.Struct):
        for field in fields(part):
            value, path = getattr(part, field.name), f"{at}.{field.encode_name}"
            smallest = _SMALLEST.get(field.name)
            if smallest is None:
                yield from _wrong(value, path)
            elif isinstance(value, int) and not smallest <= value < 1 << 16:
                yield path, f"{value}; expected a port, 1 to 65535"
    elif isinstance(part, tuple):
        for number, one in enumerate(part):
            yield from _wrong(one, f"{at}[{number}]")
