"""The operations on policies: those of the cluster's objects can be looked at, none can be made by hand.

Needs: PolicyView where rules are known, EndpointPolicies.   Gives: PolicyOperations, part.
"""

from __future__ import annotations

import msgspec

from cells.api.models.policy import Policy, SelectorIdentityMapping, SelectorLabel
from cells.api.operations.absent.answers import always
from cells.api.part import ApiPart, Route
from cells.api.wire import answer, empty, read_body
from cells.policy.control import PolicyView, SelectorUse
from cells.policy.maps import EndpointPolicies
from lifecycle import Member
from lifecycle.http import Request, Response

_BY_OBJECTS = always(500, "rules come from objects of the cluster or a folder of manifests: change those")


class PolicyOperations:
    """The handlers."""

    def __init__(self, policies: EndpointPolicies, view: PolicyView | None) -> None:
        self._policies = policies
        self._view = view

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("GET", "/v1/policy", self.get_policy),
            Route("PUT", "/v1/policy", _BY_OBJECTS),
            Route("DELETE", "/v1/policy", _BY_OBJECTS),
            Route("GET", "/v1/policy/selectors", self.get_selectors),
        ]

    def policy(self, labels: list[str]) -> Policy | None:
        """The rules that have all of the labels; None when labels are given and no rule has them."""
        rules = self._view.rules(labels) if self._view is not None else []
        if labels and not rules:
            return None
        text = msgspec.json.format(msgspec.json.encode(rules)).decode()
        return Policy(policy=text, revision=self._policies.revision)

    async def get_policy(self, request: Request) -> Response:
        """GET /policy: the rules in force, or those with all labels of the body; none of these is a 404."""
        found = self.policy(read_body(request, list[str], "labels") if request.body else [])
        return answer(200, found) if found is not None else empty(404)

    async def get_selectors(self, request: Request) -> Response:
        """GET /policy/selectors: what the policies of this node's endpoints select."""
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
    """Policies, as a part of the API."""
    return ApiPart("policies", operations.routes())
