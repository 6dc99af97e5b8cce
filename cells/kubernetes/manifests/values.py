"""Values in objects that an API server would refuse: ports, and words of which there are a few.

Needs: nothing.   Gives: wrong_value.
Source: k8s.io/kubernetes/pkg/apis/core/validation (containerPort, hostPort, ValidateService), and
        discovery/validation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import fields

from cells.kubernetes.objects import (
    ENDPOINT_SLICES,
    PODS,
    SERVICE_TYPES,
    SERVICES,
    EndpointSlice,
    Kind,
    Object,
    ServicePort,
)
from cells.kubernetes.objects.services import EndpointPort, ServiceSpec

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
_PROTOCOLS: Final = ("TCP", "UDP", "SCTP", "")
_POLICIES: Final = ("Cluster", "Local", "")
_WORDS: Final[Mapping[type[msgspec.Struct], Mapping[str, tuple[str, ...]]]] = {
    ServiceSpec: {
        "type": (*SERVICE_TYPES, ""),
        "session_affinity": ("None", "ClientIP", ""),
        "external_traffic_policy": _POLICIES,
        "internal_traffic_policy": _POLICIES,
    },
    ServicePort: {"protocol": _PROTOCOLS},
    EndpointPort: {"protocol": _PROTOCOLS},
    EndpointSlice: {"address_type": ("IPv4", "IPv6", "FQDN")},
}
"""Fields that hold one of a few words; an empty one stands for the default."""


def wrong_value(kind: Kind[Any], row: Object) -> tuple[str, str] | None:
    """The path of the first value that is none (``.spec.ports[0].port``), and what is wrong with it."""
    if kind.qualified not in _KINDS:
        return None
    return next(_wrong(row, ""), None)


def _wrong(part: Any, at: str) -> Iterator[tuple[str, str]]:
    if isinstance(part, msgspec.Struct):
        words = _WORDS.get(type(part), {})
        for field in fields(part):
            value, path = getattr(part, field.name), f"{at}.{field.encode_name}"
            smallest = _SMALLEST.get(field.name)
            if value is not None and value not in words.get(field.name, (value,)):
                *most, last = filter(None, words[field.name])
                yield path, f"{value!r}; expected {', '.join(most)} or {last}"
            elif smallest is None:
                yield from _wrong(value, path)
            elif isinstance(value, int) and not smallest <= value < 1 << 16:
                yield path, f"{value}; expected a port, 1 to 65535"
    elif isinstance(part, tuple):
        for number, one in enumerate(part):
            yield from _wrong(one, f"{at}[{number}]")
