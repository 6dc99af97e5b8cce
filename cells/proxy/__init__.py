"""Statistics of redirected traffic by endpoint; the packages of the DNS proxy and of Envoy.

The proxies count messages in RedirectCounters; the API shows them with the endpoint.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import partial
from typing import Final, NamedTuple

import msgspec

from cells.endpoint import Endpoint
from lifecycle import Change, Jobs, Table, module, provide

__all__ = ["EndpointRedirect", "Messages", "RedirectCounters", "Statistics", "cell"]


# ``proxy-statistics`` of endpoints in the API.
#
# Source: Cilium 1.17, Endpoint.UpdateProxyStatistics.

FORWARDED: Final = "Forwarded"
DENIED: Final = "Denied"
ERROR: Final = "Error"


class EndpointRedirect(NamedTuple):
    """A redirect of an endpoint's traffic to a proxy."""

    protocol: str
    """``dns`` or ``http``."""
    ingress: bool
    port: int
    """Destination port of the connection."""
    proxy_port: int


class Messages(msgspec.Struct):
    """Number of requests, or of responses, by verdict."""

    received: int = 0
    forwarded: int = 0
    denied: int = 0
    error: int = 0

    def count(self, verdict: str) -> None:
        """Count one message with this verdict."""
        self.received += 1
        if verdict == FORWARDED:
            self.forwarded += 1
        elif verdict == DENIED:
            self.denied += 1
        elif verdict == ERROR:
            self.error += 1


class Statistics(msgspec.Struct):
    """Messages of one redirect."""

    requests: Messages
    responses: Messages


class RedirectCounters:
    """Statistics of redirects since the start of the agent, dropped with their endpoint."""

    def __init__(self, endpoints: Table[int, Endpoint], *, jobs: Jobs) -> None:
        self._endpoints = endpoints
        self._by_endpoint: dict[int, dict[EndpointRedirect, Statistics]] = {}
        jobs.observe("endpoints", partial(endpoints.changes, only=_is_removed), self._drop_deleted)

    def of(self, endpoint_id: int) -> dict[EndpointRedirect, Statistics]:
        """Return the statistics of an endpoint, by redirect."""
        return self._by_endpoint.get(endpoint_id, {})

    def request(self, endpoint_id: int, redirect: EndpointRedirect, verdict: str) -> None:
        """Count a request by its verdict; Error means that it has no response."""
        found = self.redirect(endpoint_id, redirect)
        if found is not None:
            found.requests.count(verdict)

    def response(self, endpoint_id: int, redirect: EndpointRedirect, verdict: str) -> None:
        """Count a response by its verdict."""
        found = self.redirect(endpoint_id, redirect)
        if found is not None:
            found.responses.count(verdict)

    def redirect(self, endpoint_id: int, redirect: EndpointRedirect) -> Statistics | None:
        """Return the statistics of a redirect; None for a deleted endpoint."""
        if self._endpoints.get(endpoint_id) is None:
            return None
        known = self._by_endpoint.setdefault(endpoint_id, {})
        found = known.get(redirect)
        if found is None:
            found = known[redirect] = Statistics(Messages(), Messages())
        return found

    async def _drop_deleted(self, changes: Iterable[Change[int, Endpoint]]) -> None:
        for change in changes:
            if change.deleted:
                self._by_endpoint.pop(change.key, None)


def _is_removed(_key: Hashable, _old: Endpoint | None, row: Endpoint | None) -> bool:
    return row is None


cell = module("proxy-statistics", "Statistics of messages that passed proxies", provide(RedirectCounters))
