"""Operations on policies and the FQDN cache, and the model of an endpoint's policy.

Policies are read-only here: they are created through objects only.

Source: Cilium 1.17, /policy, /fqdn/cache, /fqdn/names; pkg/endpoint/api.go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Any, Final

import msgspec

from cells.api import models
from cells.api.models.node import (
    DNSLookup,
    FQDNSelectorEntry,
    NameManager,
    Policy,
    SelectorIdentityMapping,
    SelectorLabel,
)
from cells.api.operations import ApiPart, Route, always
from cells.api.operations.endpoint_models import rfc3339
from cells.api.operations.status import NodeSummary
from cells.api.wire import answer, empty, parse_cidr, read_body
from cells.base.addresses import IPNetwork
from cells.endpoint import Endpoint, Endpoints
from cells.policy.control import NamedAddresses, PolicyView, PortUse, SelectorUse, name_matches
from cells.policy.maps import (
    EndpointPolicies,
    EndpointPolicy,
    PolicyEntries,
    RealizedPolicy,
    enforced_directions,
)
from cells.proxy import EndpointRedirect, Messages, RedirectCounters, Statistics
from cells.proxy.dns import NameStore
from lifecycle import Member
from lifecycle.http import Refusal, Request, Response

__all__ = ["EndpointPolicyModels", "NameOperations", "PolicyOperations", "names_part", "part"]


# Model of an endpoint's policy.
#
# Source: Cilium 1.17, pkg/endpoint/api.go, pkg/policy/l4.go: L4Filter as JSON in a text.


class EndpointPolicyModels:
    """Builds the policy models of endpoints."""

    def __init__(
        self,
        policies: EndpointPolicies,
        view: PolicyView | None,
        facts: NodeSummary,
        statistics: RedirectCounters | None,
    ) -> None:
        self._facts = facts
        self._policies = policies
        self._view = view
        self._statistics = statistics

    def wanted(self, endpoint_id: int) -> EndpointPolicy | None:
        """Return the desired policy."""
        return self._policies.table.get(endpoint_id)

    def realized(self, endpoint_id: int) -> RealizedPolicy:
        """Return the policy in the policy map."""
        return self._policies.status(endpoint_id)

    def of(self, endpoint: Endpoint) -> models.EndpointPolicyStatus:
        """Return the desired and the realized policy.

        While a policy map is not updated yet, the model does not show the previous rules.
        """
        wanted, realized = self.wanted(endpoint.id), self.realized(endpoint.id)
        written = self._policies.written(endpoint.id)
        l4 = self._l4(endpoint.id)
        spec = self._model(endpoint, wanted, l4) if wanted is not None else models.EndpointPolicyModel()
        real = models.EndpointPolicyModel(
            id=endpoint.identity,
            policy_revision=realized.revision,
            policy_enabled=self._enforced(realized),
        )
        if written is not None:
            follows = wanted is not None and written.revision == wanted.revision and not realized.error
            same = written is wanted
            real = spec if same else self._model(endpoint, written, l4 if follows else models.L4Policy())
        return models.EndpointPolicyStatus(
            spec=spec,
            realized=real,
            proxy_policy_revision=realized.revision,
            proxy_statistics=self.proxied(endpoint.id),
        )

    def proxied(self, endpoint_id: int) -> list[models.ProxyStatistics]:
        """Return the numbers of messages through proxies, by port."""
        if self._statistics is None:
            return []
        found = self._statistics.of(endpoint_id)
        return [_proxied(redirect, found[redirect]) for redirect in sorted(found)]

    def _model(
        self, endpoint: Endpoint, policy: EndpointPolicy, l4: models.L4Policy
    ) -> models.EndpointPolicyModel:
        identities = _identities(policy.entries)
        return models.EndpointPolicyModel(
            id=endpoint.identity,
            policy_revision=policy.revision,
            policy_enabled=self._enforced(policy),
            build=policy.revision,
            allowed_ingress_identities=sorted(identities[False, False]),
            denied_ingress_identities=sorted(identities[False, True]),
            allowed_egress_identities=sorted(identities[True, False]),
            denied_egress_identities=sorted(identities[True, True]),
            l4=l4,
        )

    def _enforced(self, policy: EndpointPolicy | RealizedPolicy) -> str:
        return enforced_directions(policy, audited=self._facts.audited())

    def _l4(self, endpoint_id: int) -> models.L4Policy:
        if self._view is None:
            return models.L4Policy()
        return models.L4Policy(
            ingress=[_port_rule(one) for one in self._view.ports(endpoint_id, "ingress")],
            egress=[_port_rule(one) for one in self._view.ports(endpoint_id, "egress")],
        )


def _proxied(redirect: EndpointRedirect, statistics: Statistics) -> models.ProxyStatistics:
    return models.ProxyStatistics(
        protocol=redirect.protocol,
        port=redirect.port,
        location="ingress" if redirect.ingress else "egress",
        allocated_proxy_port=redirect.proxy_port,
        statistics=models.RequestResponseStatistics(
            requests=_messages(statistics.requests), responses=_messages(statistics.responses)
        ),
    )


def _messages(messages: Messages) -> models.MessageForwardingStatistics:
    return models.MessageForwardingStatistics(
        messages.received, messages.forwarded, messages.denied, messages.error
    )


def _identities(entries: PolicyEntries) -> dict[tuple[bool, bool], list[int]]:
    """Return identities with an entry for all ports (0: any identity), by (egress, denied)."""
    found: dict[tuple[bool, bool], list[int]] = {
        (egress, deny): [] for egress in (False, True) for deny in (False, True)
    }
    for key, entry in entries.items():
        if not key.protocol and not key.port:
            found[key.egress, entry.deny].append(key.identity)
    return found


def _port_rule(use: PortUse) -> models.PolicyRule:
    filter_: dict[str, Any] = {"port": use.port}
    if use.end:
        filter_["endPort"] = use.end
    if use.port_name:
        filter_["port-name"] = use.port_name
    filter_["protocol"] = use.protocol
    filter_["l7-rules"] = [{selector: how} for selector, how in use.l7_rules.items()]
    derived = sorted({labels for found in use.origins.values() for labels in found})
    return models.PolicyRule(
        rule=msgspec.json.encode(filter_).decode().replace("&", "\\u0026"),  # as encoding/json escapes it
        derived_from_rules=[list(labels) for labels in derived],
        rules_by_selector={
            selector: [list(labels) for labels in found] for selector, found in use.origins.items()
        },
    )


# Operations on policies.

_BY_OBJECTS = always(500, "rules come from objects of the cluster or a folder of manifests: change those")


class PolicyOperations:
    """The operations on policies."""

    def __init__(self, policies: EndpointPolicies, view: PolicyView | None) -> None:
        self._policies = policies
        self._view = view

    def routes(self) -> list[Route]:
        """Return the part's routes."""
        return [
            Route("GET", "/v1/policy", self.get_policy),
            Route("PUT", "/v1/policy", _BY_OBJECTS),
            Route("DELETE", "/v1/policy", _BY_OBJECTS),
            Route("GET", "/v1/policy/selectors", self.get_selectors),
        ]

    def policy(self, labels: list[str]) -> Policy | None:
        """Return the rules with all of the labels; None if there are labels and no rule has them."""
        rules = self._view.rules(labels) if self._view is not None else []
        if labels and not rules:
            return None
        text = msgspec.json.format(msgspec.json.encode(rules)).decode()
        return Policy(policy=text, revision=self._policies.revision)

    async def get_policy(self, request: Request) -> Response:
        """GET /policy: the rules in force, or those with all labels of the body; 404 if none has."""
        found = self.policy(read_body(request, list[str], "labels") if request.body else [])
        return answer(200, found) if found is not None else empty(404)

    async def get_selectors(self, request: Request) -> Response:
        """GET /policy/selectors: the selectors in policies of this node's endpoints."""
        del request
        uses = self._view.selectors() if self._view is not None else []
        return answer(200, [_mapping(use) for use in uses])


def _mapping(use: SelectorUse) -> SelectorIdentityMapping:
    return SelectorIdentityMapping(
        selector=use.selector,
        identities=list(use.identities),
        users=use.users,
        labels=[SelectorLabel(key=one.key, value=one.value, source=one.source) for one in use.labels],
    )


def part(operations: PolicyOperations) -> Member[ApiPart]:
    """Provide the operations on policies."""
    return ApiPart("policies", operations.routes())


# Operations on the FQDN cache.
#
# Source: Cilium 1.17, /fqdn/cache, /fqdn/names.

LOOKUP, CONNECTION = "lookup", "connection"
_PATTERN: Final = re.compile(r"[-a-zA-Z0-9_.*]*")


class _LookupFilter(msgspec.Struct, frozen=True):
    """The query parameters of a request."""

    matches: Callable[[str], bool]
    inside: IPNetwork | None
    source: str

    @classmethod
    def of(cls, request: Request) -> _LookupFilter:
        """Parse the query. Raises Refusal 400 if it is invalid."""
        query = request.query
        pattern, cidr = query.get("matchpattern", ""), query.get("cidr", "")
        return cls(_matching(pattern), parse_cidr(cidr), query.get("source", ""))


class NameOperations:
    """Operations on DNS names."""

    def __init__(self, endpoints: Endpoints, store: NameStore | None, names: NamedAddresses | None) -> None:
        self._endpoints = endpoints
        self._store = store
        self._names = names

    def routes(self) -> list[Route]:
        """Return the part's routes."""
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
        """GET /fqdn/cache: addresses in DNS answers, and expired ones with open connections."""
        numbers = sorted(self._store.of) if self._store is not None else ()
        wanted = _LookupFilter.of(request)
        return answer(200, [one for number in numbers for one in self._found(number, wanted)])

    async def get_endpoint_cache(self, request: Request) -> Response:
        """GET /fqdn/cache/{id}: the cache of one endpoint; 404 for an unknown endpoint."""
        endpoint = self._endpoints.lookup(request.match_info["id"])
        if endpoint is None:
            return empty(404)
        return answer(200, list(self._found(endpoint.id, _LookupFilter.of(request))))

    async def delete_cache(self, request: Request) -> Response:
        """DELETE /fqdn/cache: remove names; the next lookup adds them again."""
        matches = _matching(request.query.get("matchpattern", ""))
        if self._store is not None:
            self._store.forget(matches)
        return empty(200)

    async def get_names(self, request: Request) -> Response:
        """GET /fqdn/names: the FQDN selectors in force."""
        del request
        entries = [
            FQDNSelectorEntry(
                selector_string=f"MatchName: {one.match_name}, MatchPattern: {one.match_pattern}",
                regex_string=one.expression,
            )
            for one in sorted(self._names.selectors if self._names is not None else ())
        ]
        return answer(200, NameManager(selectors=entries))

    def _found(self, endpoint_id: int, wanted: _LookupFilter) -> Iterator[DNSLookup]:
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
    """Return a predicate for names that match a pattern. Raises Refusal 400 for an invalid pattern."""
    if not pattern:
        return lambda _name: True
    if _PATTERN.fullmatch(pattern) is None:
        raise Refusal(400, "error parsing regexp")
    return lambda name: name_matches(pattern, name)


def names_part(operations: NameOperations) -> Member[ApiPart]:
    """Provide the operations on DNS names."""
    return ApiPart("names", operations.routes())
