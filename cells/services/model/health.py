"""The answer of a service's health check node port: whether this node has endpoints of its own.

Source: core/v1 ServiceSpec.healthCheckNodePort; kube-proxy's service health server.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from cells.services.model.types import EXTERNAL, BackendState, Frontend, ServiceName


class HealthAnswer(NamedTuple):
    """What an HTTP request for any path gets."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def health_answers(frontends: Iterable[Frontend]) -> dict[int, HealthAnswer]:
    """The answers by port, for every service that has a health check port.

    200 while an active backend is local, 503 without one; a service behind a proxy always has one.
    """
    counts: dict[int, tuple[ServiceName, int]] = {}
    for frontend in frontends:
        port = frontend.health_check_node_port
        if not port or frontend.key.scope != EXTERNAL:
            continue
        active = sum(one.state is BackendState.ACTIVE for one in frontend.backends)
        count = 1 if frontend.l7_proxy_port else active
        counts[port] = (frontend.service, max(count, counts.get(port, (frontend.service, 0))[1]))
    return {port: _answer(service, count) for port, (service, count) in counts.items()}


def _answer(service: ServiceName, count: int) -> HealthAnswer:
    said = {"service": {"namespace": service.namespace, "name": service.name}, "localEndpoints": count}
    body = msgspec.json.encode(said) + b"\n"
    headers = (
        ("Content-Type", "application/json"),
        ("X-Content-Type-Options", "nosniff"),
        ("X-Load-Balancing-Endpoint-Weight", str(count)),
    )
    return HealthAnswer(200 if count else 503, headers, body)
