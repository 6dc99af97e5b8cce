"""Endpoints as the API's JSON, each encoded once for as long as it shows the same.

For: GET /endpoint, which monitoring asks for again and again.   Needs: Endpoints, Controllers.
Gives: EncodedEndpoints.
Making the model of one takes 18 µs, looking whether it is the same half of one.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from cells.api.models.v1 import NodeAddressing, ProxyStatistics
from cells.api.operations.endpoints.mapping import endpoint_model
from cells.api.operations.policy import EndpointPolicyModels
from cells.api.operations.status.controllers import controller
from cells.endpoint import Endpoint, Endpoints, StatusEntry, controllers_of
from cells.observe.controllers import Controllers, ControllerStatus
from cells.policy.maps import EndpointPolicy, RealizedPolicy


class _Encoded(NamedTuple):
    """A text and all it was made of."""

    endpoint: Endpoint
    newest: StatusEntry | None
    """Of its log; the state that is shown changes with it."""
    policy: EndpointPolicy | None
    realized: RealizedPolicy
    proxied: list[ProxyStatistics]
    controllers: tuple[ControllerStatus, ...]
    text: msgspec.Raw


class EncodedEndpoints:
    """Remembers the texts of the endpoints of the last list of all; the rows are never changed in place."""

    def __init__(self, endpoints: Endpoints, controllers: Controllers, models: EndpointPolicyModels) -> None:
        self._endpoints = endpoints
        self._controllers = controllers
        self._models = models
        self._host: NodeAddressing | None = None
        self._last: dict[int, _Encoded] = {}

    def all(self, host: NodeAddressing) -> list[msgspec.Raw]:
        """Every endpoint on a node with these addresses."""
        if self._host != host:
            self._host = host
            self._last = {}
        found = {endpoint.id: self._encode(endpoint, host) for endpoint in self._endpoints.all()}
        self._last = found
        return [each.text for each in found.values()]

    def _encode(self, endpoint: Endpoint, host: NodeAddressing) -> _Encoded:
        log = self._endpoints.status(endpoint.id)
        newest, controllers = log.newest, self._controllers.of(controllers_of(endpoint.id))
        policies = self._endpoints.policies
        policy, realized = policies.table.get(endpoint.id), policies.status(endpoint.id)
        proxied = self._models.proxied(endpoint.id)
        last = self._last.get(endpoint.id)
        if (
            last is not None
            and last.endpoint is endpoint
            and last.newest is newest
            and last.policy is policy
            and last.realized == realized
            and last.proxied == proxied
            and last.controllers == controllers
        ):
            return last
        shown = self._endpoints.shown_state(endpoint)
        enforced = self._models.of(endpoint)
        model = endpoint_model(endpoint, shown, log, host, enforced, map(controller, controllers))
        return _Encoded(
            endpoint, newest, policy, realized, proxied, controllers, msgspec.Raw(msgspec.json.encode(model))
        )
