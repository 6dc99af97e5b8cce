"""The operations on names: what DNS has answered endpoints, and which names rules speak of.

Needs: NameStore and NamedAddresses where there is a DNS proxy, Endpoints.   Gives: NameOperations, part.
Source: Cilium 1.17, /fqdn/cache, /fqdn/names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from ipaddress import ip_address, ip_network
from typing import Final, NamedTuple

from cells.api.models.policy import DNSLookup, FQDNSelectorEntry, NameManager
from cells.api.operations.endpoints.mapping import rfc3339
from cells.api.part import ApiPart, Route
from cells.api.wire import answer, empty
from cells.endpoint import Endpoints
from cells.ipam import IPNetwork
from cells.policy.control import NamedAddresses, name_matches
from cells.proxy.dns import NameStore
from lifecycle import Member
from lifecycle.http import Refusal, Request, Response

LOOKUP, CONNECTION = "lookup", "connection"
_PATTERN: Final = re.compile(r"[-a-zA-Z0-9_.*]*")


class _Wanted(NamedTuple):
    """Which of all that is known is asked for."""

    matches: Callable[[str], bool]
    inside: IPNetwork | None
    source: str

    @classmethod
    def of(cls, request: Request) -> _Wanted:
        """Raises Refusal 400 for what cannot be understood."""
        query = request.query
        pattern, cidr = query.get("matchpattern", ""), query.get("cidr", "")
        return cls(_matching(pattern), _network(cidr), query.get("source", ""))


class NameOperations:
    """The handlers."""

    def __init__(self, endpoints: Endpoints, store: NameStore | None, names: NamedAddresses | None) -> None:
        self._endpoints = endpoints
        self._store = store
        self._names = names

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("GET", "/v1/fqdn/cache", self.get_cache, texts=frozenset({400})),
            Route(
                "GET",
                "/v1/fqdn/cache/{id}",
                self.get_endpoint_cache,
                texts=frozenset({400}),
                bare=frozenset({404}),
            ),
            Route("DELETE", "/v1/fqdn/cache", self.delete_cache, texts=frozenset({400})),
            Route("GET", "/v1/fqdn/names", self.get_names),
        ]

    async def get_cache(self, request: Request) -> Response:
        """GET /fqdn/cache: what DNS has answered, and what is connected to after its TTL."""
        numbers = sorted(self._store.of) if self._store is not None else ()
        wanted = _Wanted.of(request)
        return answer(200, [one for number in numbers for one in self._found(number, wanted)])

    async def get_endpoint_cache(self, request: Request) -> Response:
        """GET /fqdn/cache/{id}: the same of one endpoint; an unknown one is a 404."""
        endpoint = self._endpoints.lookup(request.match_info["id"])
        if endpoint is None:
            return empty(404)
        return answer(200, list(self._found(endpoint.id, _Wanted.of(request))))

    async def delete_cache(self, request: Request) -> Response:
        """DELETE /fqdn/cache: forget names; they are learnt again when pods look them up."""
        matches = _matching(request.query.get("matchpattern", ""))
        if self._store is not None:
            self._store.forget(matches)
        return empty(200)

    async def get_names(self, request: Request) -> Response:
        """GET /fqdn/names: the selectors of names in force."""
        del request
        entries = [
            FQDNSelectorEntry(
                selector_string=f"MatchName: {one.match_name}, MatchPattern: {one.match_pattern}",
                regex_string=one.expression,
            )
            for one in sorted(self._names.selectors if self._names is not None else ())
        ]
        return answer(200, NameManager(selectors=entries))

    def _found(self, endpoint_id: int, wanted: _Wanted) -> Iterator[DNSLookup]:
        for one in self._all(endpoint_id):
            ips = [ip for ip in one.ips if wanted.inside is None or ip_address(ip) in wanted.inside]
            if ips and wanted.matches(one.fqdn) and wanted.source in ("", one.source):
                one.ips[:] = ips
                yield one

    def _all(self, endpoint_id: int) -> Iterator[DNSLookup]:
        names = self._store.of.get(endpoint_id) if self._store is not None else None
        if names is None:
            return
        for lookup in names.lookups():
            yield DNSLookup(
                fqdn=lookup.name,
                ips=sorted(map(str, lookup.addresses)),
                ttl=lookup.ttl,
                lookup_time=rfc3339(lookup.at),
                expiration_time=rfc3339(lookup.expires),
                endpoint_id=endpoint_id,
                source=LOOKUP,
            )
        for address, zombie in names.zombies.items():
            for name in sorted(zombie.names):
                yield DNSLookup(
                    fqdn=name,
                    ips=[str(address)],
                    ttl=0,
                    lookup_time=rfc3339(zombie.since),
                    expiration_time=rfc3339(zombie.since),
                    endpoint_id=endpoint_id,
                    source=CONNECTION,
                )


def _matching(pattern: str) -> Callable[[str], bool]:
    """Whether a name is meant. Raises Refusal 400 for what is no pattern."""
    if not pattern:
        return lambda _name: True
    if _PATTERN.fullmatch(pattern) is None:
        raise Refusal(400, "error parsing regexp")
    return lambda name: name_matches(pattern, name)


def _network(cidr: str) -> IPNetwork | None:
    try:
        return ip_network(cidr, strict=False) if cidr else None
    except ValueError as error:
        raise Refusal(400, f"invalid CIDR address: {cidr}") from error


def names_part(operations: NameOperations) -> Member[ApiPart]:
    """The operations as a part of the API."""
    return ApiPart("names", operations.routes())
