"""Operations on endpoints: create, delete, list, and read or change their options and labels.

Each decodes its request and calls the endpoint cell; a list is encoded from cached JSON.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from msgspec.structs import replace

from cells.api import models
from cells.api.models import NodeAddressing, ProxyStatistics
from cells.api.operations import ApiPart, Route, config_mapping
from cells.api.operations import endpoint_models as endpoint_mapping
from cells.api.operations.endpoint_models import controller, endpoint_model
from cells.api.operations.policy import EndpointPolicyModels
from cells.api.operations.status import NodeSummary
from cells.api.wire import answer, empty, read_body
from cells.base.addresses import Family
from cells.endpoint import (
    Endpoint,
    EndpointChanges,
    EndpointError,
    EndpointRequest,
    Endpoints,
    State,
    StatusEntry,
    StatusLog,
    controllers_of,
)
from cells.endpoint.host import HostEndpoint
from cells.maps.policy_maps import PoolEmpty
from cells.observe.controllers import Controllers, ControllerState
from cells.policy.maps import EndpointPolicy, RealizedPolicy
from lifecycle import HiveError, Member
from lifecycle.http import Request, Response

# Cache of encoded endpoints.


class _Encoded(msgspec.Struct, frozen=True):
    """The JSON of an endpoint, and the inputs it was computed from."""

    endpoint: Endpoint
    newest: StatusEntry | None
    """The newest log line; each change of the shown state adds one."""
    policy: EndpointPolicy | None
    realized: RealizedPolicy
    proxied: list[ProxyStatistics]
    controllers: tuple[ControllerState, ...]
    text: msgspec.Raw


class EncodedEndpoints:
    """Caches the JSON of the endpoints in the last complete list; rows are immutable."""

    def __init__(self, endpoints: Endpoints, controllers: Controllers, models: EndpointPolicyModels) -> None:
        self._endpoints = endpoints
        self._controllers = controllers
        self._models = models
        self._host: NodeAddressing | None = None
        self._last: dict[int, _Encoded] = {}

    def all(self, host: NodeAddressing) -> list[msgspec.Raw]:
        """Return the JSON of every endpoint; ``host`` are the node's addresses."""
        if self._host != host:
            self._host = host
            self._last = {}
        found = {endpoint.id: self._encode(endpoint, host) for endpoint in self._endpoints.all()}
        self._last = found
        return [each.text for each in found.values()]

    def _encode(self, endpoint: Endpoint, host: NodeAddressing) -> _Encoded:
        log = self._endpoints.status(endpoint.id)
        newest, controllers = log.newest, self._controllers.of(controllers_of(endpoint.id))
        policy, realized = self._models.wanted(endpoint.id), self._models.realized(endpoint.id)
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


# Operations.


class PolicyPool(Protocol):
    """Interface to the pool of prepared policy maps; implemented by cells.maps.PolicyMaps."""

    async def ready(self) -> None:
        """Wait until a policy map is prepared."""
        ...


class EndpointOperations:
    """The operations. Each waits for its preconditions before it changes anything."""

    def __init__(
        self,
        endpoints: Endpoints,
        controllers: Controllers,
        changes: EndpointChanges,
        pool: PolicyPool,
        policies: EndpointPolicyModels,
        facts: NodeSummary,
        host: HostEndpoint | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._host = host
        self._controllers = controllers
        self._changes = changes
        self._encoded = EncodedEndpoints(endpoints, controllers, policies)
        self._policies = policies
        self._pool = pool
        self._facts = facts

    def routes(self) -> list[Route]:
        """Return the part's routes."""
        one = "/v1/endpoint/{id}"
        client, missing, failed = frozenset({400}), frozenset({404}), frozenset({500})
        neither = client | missing
        return [
            Route("GET", "/v1/endpoint", self.list_endpoints),
            Route("DELETE", "/v1/endpoint", self.delete_endpoints, texts=neither),
            Route("GET", one, self.get_endpoint, texts=client, bare=missing),
            Route("PUT", one, self.put_endpoint, texts=client | failed),
            Route("DELETE", one, self.delete_endpoint, texts=client, bare=missing),
            Route("GET", f"{one}/healthz", self.get_endpoint_health, bare=neither),
            Route("GET", f"{one}/log", self.get_endpoint_log, bare=neither),
            Route("GET", f"{one}/labels", self.get_endpoint_labels, bare=missing),
            Route("PATCH", f"{one}/labels", self.patch_endpoint_labels, texts=failed, bare=missing),
            Route("GET", f"{one}/config", self.get_endpoint_config, bare=missing),
            Route("PATCH", f"{one}/config", self.patch_endpoint_config, texts=failed, bare=neither),
        ]

    async def list_endpoints(self, request: Request) -> Response:
        """GET /endpoint: all endpoints, or those with all labels of the body; 404 if none has."""
        host = self._host.row if self._host is not None else None
        if not request.body:
            found = self._encoded.all(config_mapping.host_addressing(self._facts.node()))
            return answer(200, found if host is None else [*found, self._model(host)])
        wanted = read_body(request, list[str], "labels")
        every = self._endpoints.all() if host is None else [*self._endpoints.all(), host]
        chosen = [e for e in every if endpoint_mapping.has_labels((*e.labels, *e.info_labels), wanted)]
        if wanted and not chosen:
            return empty(404)
        return answer(200, [self._model(endpoint) for endpoint in chosen])

    async def get_endpoint(self, request: Request) -> Response:
        """GET /endpoint/{id}."""
        return answer(200, self._model(self._find(request)))

    async def put_endpoint(self, request: Request) -> Response:
        """PUT /endpoint/{id}: create the endpoint of an existing link; the id in the path is ignored."""
        body = read_body(request, models.EndpointChangeRequest, "endpoint")
        wanted = endpoint_mapping.endpoint_request(body)
        self._check_families(wanted)
        await self._endpoints.wait_scrubbed(wanted.addresses)
        while True:
            try:
                return answer(201, self._model(await self._endpoints.create(wanted)))
            except PoolEmpty:
                await self._policy_map_ready()

    def _check_families(self, wanted: EndpointRequest) -> None:
        known = self._facts.node().addressing
        for address in wanted.addresses:
            family = Family.of(address)
            if family not in known:
                text = f"{family.text} address {address}: {family.text} is disabled on this node"
                raise EndpointError(400, text)

    async def _policy_map_ready(self) -> None:
        try:
            await self._pool.ready()
        except HiveError as error:
            raise EndpointError(500, str(error)) from error

    async def delete_endpoint(self, request: Request) -> Response:
        """DELETE /endpoint/{id}: delete a pod's endpoint; the node's own endpoints are refused."""
        endpoint = self._find(request)
        if endpoint.is_reserved:
            raise EndpointError(400, "endpoint may not be associated reserved labels")
        return self._delete_all([endpoint])

    async def delete_endpoints(self, request: Request) -> Response:
        """DELETE /endpoint: delete all endpoints of a container, for the CNI plugin's DEL."""
        body = read_body(request, models.EndpointBatchDeleteRequest, "endpoint")
        if not body.container_id:
            return answer(400, "invalid container id")
        found = self._endpoints.by_container(body.container_id)
        if not found:
            return answer(404, "endpoints not found")
        return self._delete_all(found)

    def _delete_all(self, endpoints: list[Endpoint]) -> Response:
        """Delete endpoints and return 200, or 206 with the number of errors, which are logged."""
        errors = sum(len(self._endpoints.delete(endpoint)) for endpoint in endpoints)
        return answer(206, errors) if errors else empty(200)

    async def get_endpoint_health(self, request: Request) -> Response:
        """GET /endpoint/{id}/healthz, for the CNI plugin's CHECK."""
        return answer(200, endpoint_mapping.health_model(self._shown_state(self._find(request))[0]))

    async def get_endpoint_log(self, request: Request) -> Response:
        """GET /endpoint/{id}/log, newest line first."""
        _, log = self._shown_state(self._find(request))
        return answer(200, [endpoint_mapping.log_line(entry) for entry in log.entries()])

    async def get_endpoint_labels(self, request: Request) -> Response:
        """GET /endpoint/{id}/labels."""
        return answer(200, endpoint_mapping.labels_model(self._find(request)))

    async def get_endpoint_config(self, request: Request) -> Response:
        """GET /endpoint/{id}/config."""
        realized = self._configuration(self._find(request))
        immutable = config_mapping.event_options(self._facts.node().notifications)
        return answer(200, models.EndpointConfigurationStatus(realized=realized, immutable=immutable))

    async def patch_endpoint_config(self, request: Request) -> Response:
        """PATCH /endpoint/{id}/config: change options, and answer after the regeneration."""
        endpoint = self._find(request)
        body = read_body(request, models.EndpointConfigurationSpec, "endpointConfiguration")
        if self._host is not None and endpoint is self._host.row:
            self._host.audit(
                endpoint_mapping.requested_audit(
                    body,
                    self._host.audited,
                    config_mapping.event_options(self._facts.node().notifications),
                )
            )
            return empty(200)
        verify = endpoint_mapping.requested_verification(
            body,
            not endpoint.datapath.disable_sip_verification,
            config_mapping.event_options(self._facts.node().notifications),
        )
        return _regeneration_response(await self._changes.verify_source(endpoint, verify))

    async def patch_endpoint_labels(self, request: Request) -> Response:
        """PATCH /endpoint/{id}/labels: replace the user's labels."""
        endpoint = self._find_pod(request)
        body = read_body(request, models.LabelConfigurationSpec, "configuration")
        return _regeneration_response(await self._changes.relabel(endpoint, body.user))

    def _find(self, request: Request) -> Endpoint:
        text = request.match_info["id"]
        endpoint = self._endpoints.lookup(text)
        host = self._host.row if self._host is not None else None
        if endpoint is None and host is not None and text in {str(host.id), f"cilium-local:{host.id}"}:
            return host
        if endpoint is None:
            raise EndpointError(404, f"endpoint {text} not found")
        return endpoint

    def _find_pod(self, request: Request) -> Endpoint:
        endpoint = self._find(request)
        if self._host is not None and endpoint is self._host.row:
            raise EndpointError(
                400, f"endpoint {endpoint.id} is the node itself: its labels are those of its Node object"
            )
        return endpoint

    def _shown_state(self, endpoint: Endpoint) -> tuple[State, StatusLog]:
        """Return the state that clients see, and the log."""
        if self._host is not None and endpoint is self._host.row:
            return self._host.shown_state, self._host.status
        return self._endpoints.shown_state(endpoint), self._endpoints.status(endpoint.id)

    def _configuration(self, endpoint: Endpoint) -> models.EndpointConfigurationSpec:
        configuration = endpoint_mapping.configuration_model(endpoint)
        if self._host is None or endpoint is not self._host.row:
            return configuration
        return replace(configuration, options=endpoint_mapping.audit_option(self._host.audited))

    def _model(self, endpoint: Endpoint) -> models.EndpointModel:
        addressing = config_mapping.host_addressing(self._facts.node())
        shown, log = self._shown_state(endpoint)
        controllers = map(controller, self._controllers.of(controllers_of(endpoint.id)))
        policy = self._policies.of(endpoint)
        model = endpoint_mapping.endpoint_model(endpoint, shown, log, addressing, policy, controllers)
        if self._host is None or endpoint is not self._host.row:
            return model
        return replace(model, spec=self._configuration(endpoint))


def _regeneration_response(error: str) -> Response:
    """Return the response to a change of an endpoint, by the error of its regeneration."""
    return answer(500, f"the endpoint has failed to regenerate, retrying: {error}") if error else empty(200)


def part(operations: EndpointOperations) -> Member[ApiPart]:
    """Provide the operations."""
    return ApiPart("endpoints", operations.routes())
