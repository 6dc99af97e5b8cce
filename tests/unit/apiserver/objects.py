"""Objects and paths for requests to the fake API server."""

from __future__ import annotations

import json
from typing import Any

from tests.support.apiserver import ADMIN_TOKEN
from tests.unit.apiserver.wire_client import Received, Sent, exchange, target

AUTH = ("Authorization", f"Bearer {ADMIN_TOKEN}")
PODS = "/api/v1/namespaces/default/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
SERVICES = "/api/v1/namespaces/default/services"
MERGE = "application/merge-patch+json"


class Caller:
    """Sends requests to a server as its administrator."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        media: str = "application/json",
        **query: object,
    ) -> Received:
        headers = [AUTH, ("Content-Type", media)] if body is not None else [AUTH]
        data = json.dumps(body).encode() if body is not None else b""
        answer = await exchange(self.url, Sent(method, target(path, dict(query)), headers, data))
        assert answer is not None
        return answer


def pod(name: str, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "x"}], **spec}}
