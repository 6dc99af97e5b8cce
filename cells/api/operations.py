"""The operations of the REST API: each reads its request, asks a cell, and answers.

Needs: the cells behind the operations, through Api.   Gives: Operations, routes().
The statuses of each route, and which of them have a body, are those of Cilium 1.17's OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Protocol

from cells.api import config_mapping, endpoint_mapping, ipam_mapping, models, status_mapping
from cells.api.controller_mapping import controller
from cells.api.encoded import EncodedEndpoints
from cells.api.health_table import HealthTable
from cells.api.inspection import Inspection
from cells.api.metrics_list import MetricsList
from cells.api.statedb import StateDB
from cells.api.wire import FrameworkError, answer, empty, parse_bool, read_body
from cells.controllers import Controllers
from cells.datapath import Telling
from cells.endpoint import (
    Endpoint,
    EndpointChanges,
    EndpointError,
    EndpointRequest,
    Endpoints,
    PolicyEnforcement,
    controllers_of,
)
from cells.health import StatusCollector
from cells.http import Request, Response
from cells.ipam import Family, Ipam, IpamError
from cells.maps import PoolEmpty
from lifecycle import HiveError

Operation = Callable[[Request], Awaitable[Response]]


class Facts(Protocol):
    """What the answers tell of the node besides endpoints and addresses."""

    def node(self) -> config_mapping.NodeFacts:
        """Routers, pod CIDRs and MTU."""
        ...

    def tell(self, telling: Telling) -> None:
        """Have the datapath tell this of packets from now on; raises OSError."""
        ...

    def log_debug(self, on: bool) -> None:
        """Have the agent log what helps to find a fault, or no longer."""
        ...

    def settings(self) -> Mapping[str, object]:
        """The daemon's configuration, for people."""
        ...

    def status(self) -> status_mapping.StatusFacts:
        """What GET /healthz tells besides the verdict."""
        ...


class PolicyPool(Protocol):
    """The prepared policy maps; cells.maps.PolicyMaps."""

    async def ready(self) -> None:
        """Return once one is prepared."""
        ...


@dataclass(frozen=True, slots=True)
class Route:
    """One operation: where it is, and how an EndpointError or IpamError of it is answered."""

    method: str
    path: str
    operation: Operation
    texts: frozenset[int] = frozenset()
    """Error statuses whose body is the text."""
    bare: frozenset[int] = frozenset()
    """Error statuses without a body."""

    def refusal(self, error: EndpointError | IpamError) -> Response:
        """The answer to an error of the cell behind; one outside the schema becomes the nearest in it."""
        if error.status in self.texts:
            return answer(error.status, error.text)
        if error.status in self.bare:
            return empty(error.status)
        if error.status < 500 and 404 in self.bare:
            return empty(404)
        return answer(500, error.text)


class Operations:
    """The handlers. What an operation waits for comes first: then it acts in one piece."""

    def __init__(
        self,
        endpoints: Endpoints,
        controllers: Controllers,
        changes: EndpointChanges,
        enforcement: PolicyEnforcement,
        pool: PolicyPool,
        ipam: Ipam,
        collector: StatusCollector,
        facts: Facts,
        inspection: Inspection,
        statedb: StateDB,
        health_table: HealthTable,
        metrics: MetricsList,
    ) -> None:
        self._endpoints = endpoints
        self._controllers = controllers
        self._changes = changes
        self._encoded = EncodedEndpoints(endpoints, controllers)
        self._enforcement = enforcement
        self._pool = pool
        self._ipam = ipam
        self._collector = collector
        self._facts = facts
        self._inspection = inspection
        self._statedb = statedb
        self._health_table = health_table
        self._metrics = metrics

    def routes(self) -> list[Route]:
        """All operations; what is not here is answered 404 or 405."""
        one = "/v1/endpoint/{id}"
        client, gone, failed = frozenset({400}), frozenset({404}), frozenset({500})
        neither = client | gone
        return [
            Route("GET", "/v1/config", self.get_config),
            Route("PATCH", "/v1/config", self.patch_config),
            Route("GET", "/v1/healthz", self.get_healthz),
            Route("GET", "/v1/endpoint", self.list_endpoints),
            Route("DELETE", "/v1/endpoint", self.delete_endpoints, texts=neither),
            Route("GET", one, self.get_endpoint, texts=client, bare=gone),
            Route("PUT", one, self.put_endpoint, texts=client | failed),
            Route("DELETE", one, self.delete_endpoint, texts=client, bare=gone),
            Route("GET", f"{one}/healthz", self.get_endpoint_health, bare=neither),
            Route("GET", f"{one}/log", self.get_endpoint_log, bare=neither),
            Route("GET", f"{one}/labels", self.get_endpoint_labels, bare=gone),
            Route("PATCH", f"{one}/labels", self.patch_endpoint_labels, texts=failed, bare=gone),
            Route("GET", f"{one}/config", self.get_endpoint_config, bare=gone),
            Route("PATCH", f"{one}/config", self.patch_endpoint_config, texts=failed, bare=neither),
            Route("POST", "/v1/ipam", self.post_ipam),
            Route("POST", "/v1/ipam/{ip}", self.post_ipam_address, texts=failed),
            Route("DELETE", "/v1/ipam/{ip}", self.delete_ipam_address, texts=failed),
            Route("GET", "/v1/metrics", self._metrics.get),
            Route("GET", "/v1/metrics/", self._metrics.get),
            Route("GET", "/hive/graph", self._inspection.get_graph),
            Route("GET", "/hive/timeline", self._inspection.get_timeline),
            Route("GET", "/hive/loop", self._inspection.get_loop),
            Route("GET", "/hive/config", self._inspection.get_config),
            Route("GET", "/statedb/tables", self._statedb.list_tables),
            Route("GET", "/statedb/dump", self._statedb.dump_all),
            Route("GET", "/statedb/dump/{table}", self._statedb.dump),
            Route("GET", "/statedb/changes/{table}", self._statedb.changes),
            Route("GET", "/statedb/query", self._health_table.query),
        ]

    def open(self) -> None:
        """Let streams go on for ever: the server starts, perhaps again."""
        self._statedb.open()

    def close(self) -> None:
        """End what would go on for ever: the server stops."""
        self._statedb.close()

    # --- the daemon ------------------------------------------------------------------------------

    async def get_config(self, _request: Request) -> Response:
        """GET /config; never rate limited: the plugin probes with it twice a second."""
        facts = self._facts
        model = config_mapping.configuration_model(facts.node(), facts.settings(), self._enforcement.now)
        return answer(200, model)

    async def patch_config(self, request: Request) -> Response:
        """PATCH /config: every endpoint's maps follow before the answer; what is unchanged does nothing."""
        body = read_body(request, models.DaemonConfigurationSpec, "configuration")
        try:
            node = self._facts.node()
            wanted, telling = config_mapping.requested_configuration(
                body, self._enforcement.now, node.telling
            )
            debug = config_mapping.requested_debug(body, node.debug)
        except ValueError as error:
            return answer(400, str(error))
        try:
            self._facts.tell(telling)
        except OSError as error:
            return answer(500, f"the datapath cannot be told: {error}")
        self._facts.log_debug(debug)
        failed = await self._enforcement.change(wanted)
        if failed:
            return answer(500, f"endpoints {failed} could not follow yet, they are tried again")
        return empty(200)

    async def get_healthz(self, request: Request) -> Response:
        """GET /healthz: always 200, the verdict is in the body."""
        status = self._collector.status()
        facts = self._facts.status()
        if parse_bool(request.headers.get("brief"), default=False):
            return answer(200, status_mapping.brief_response(status, facts.version, facts.revision))
        return answer(200, status_mapping.status_response(status, facts))

    # --- endpoints -------------------------------------------------------------------------------

    async def list_endpoints(self, request: Request) -> Response:
        """GET /endpoint: all, or those that have every label of the body; none of these is a 404."""
        if not request.body:
            return answer(200, self._encoded.all(config_mapping.host_addressing(self._facts.node())))
        wanted = read_body(request, list[str], "labels")
        found = [e for e in self._endpoints.all() if endpoint_mapping.has_labels(e, wanted)]
        if wanted and not found:
            return empty(404)
        return answer(200, [self._model(endpoint) for endpoint in found])

    async def get_endpoint(self, request: Request) -> Response:
        """GET /endpoint/{id}."""
        return answer(200, self._model(self._find(request)))

    async def put_endpoint(self, request: Request) -> Response:
        """PUT /endpoint/{id}: make the endpoint of a link that is there; the id in the path is ignored."""
        body = read_body(request, models.EndpointChangeRequest, "endpoint")
        wanted = endpoint_mapping.endpoint_request(body)
        self._check_families(wanted)
        await self._endpoints.forgotten(wanted.addresses)
        while True:
            try:
                return answer(201, self._model(self._endpoints.create(wanted)))
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
        """DELETE /endpoint/{id}."""
        return self._deleted([self._find(request)])

    async def delete_endpoints(self, request: Request) -> Response:
        """DELETE /endpoint: all endpoints of a container, as the plugin's DEL asks."""
        body = read_body(request, models.EndpointBatchDeleteRequest, "endpoint")
        if not body.container_id:
            return answer(400, "invalid container id")
        found = self._endpoints.by_container(body.container_id)
        if not found:
            return answer(404, "endpoints not found")
        return self._deleted(found)

    def _deleted(self, endpoints: list[Endpoint]) -> Response:
        """Delete them: 200, or 206 and how many things went wrong. The log of the endpoint cell says what."""
        errors = sum(len(self._endpoints.delete(endpoint)) for endpoint in endpoints)
        return answer(206, errors) if errors else empty(200)

    async def get_endpoint_health(self, request: Request) -> Response:
        """GET /endpoint/{id}/healthz, which the plugin's CHECK asks."""
        return answer(200, endpoint_mapping.health_model(self._endpoints.shown_state(self._find(request))))

    async def get_endpoint_log(self, request: Request) -> Response:
        """GET /endpoint/{id}/log, the newest line first."""
        log = self._endpoints.status(self._find(request).id)
        return answer(200, [endpoint_mapping.log_line(entry) for entry in log.entries()])

    async def get_endpoint_labels(self, request: Request) -> Response:
        """GET /endpoint/{id}/labels."""
        return answer(200, endpoint_mapping.labels_model(self._find(request)))

    async def get_endpoint_config(self, request: Request) -> Response:
        """GET /endpoint/{id}/config."""
        realized = endpoint_mapping.configuration_model(self._find(request))
        immutable = config_mapping.event_options(self._facts.node().telling)
        return answer(200, models.EndpointConfigurationStatus(realized=realized, immutable=immutable))

    async def patch_endpoint_config(self, request: Request) -> Response:
        """PATCH /endpoint/{id}/config: the endpoint is built by the time of the answer."""
        endpoint = self._find(request)
        body = read_body(request, models.EndpointConfigurationSpec, "endpointConfiguration")
        verify = endpoint_mapping.requested_verification(
            body,
            not endpoint.datapath.disable_sip_verification,
            config_mapping.event_options(self._facts.node().telling),
        )
        return _built(await self._changes.verify_source(endpoint, verify))

    async def patch_endpoint_labels(self, request: Request) -> Response:
        """PATCH /endpoint/{id}/labels: ``user`` is all that a user wants on it."""
        endpoint = self._find(request)
        body = read_body(request, models.LabelConfigurationSpec, "configuration")
        return _built(await self._changes.relabel(endpoint, body.user))

    def _find(self, request: Request) -> Endpoint:
        text = request.match_info["id"]
        endpoint = self._endpoints.lookup(text)
        if endpoint is None:
            raise EndpointError(404, f"endpoint {text} not found")
        return endpoint

    def _model(self, endpoint: Endpoint) -> models.Endpoint:
        addressing = config_mapping.host_addressing(self._facts.node())
        shown, log = self._endpoints.shown_state(endpoint), self._endpoints.status(endpoint.id)
        controllers = map(controller, self._controllers.of(controllers_of(endpoint.id)))
        return endpoint_mapping.endpoint_model(endpoint, shown, log, addressing, controllers)

    # --- addresses -------------------------------------------------------------------------------

    async def post_ipam(self, request: Request) -> Response:
        """POST /ipam: the next free address of each family, or of the one asked for; all or none.

        With ``expiration`` they are free again unless they are used soon. Any failure is 502.
        """
        query = request.query
        family = query.get("family", "").lower()
        if family not in ("", *Family):
            raise FrameworkError(422, 606, "family in query should be one of [ipv4 ipv6]")
        addressing = config_mapping.host_addressing(self._facts.node())
        expires = parse_bool(request.headers.get("expiration"), default=False)
        allocate = self._ipam.allocate_next_expiring if expires else self._ipam.allocate_next
        try:
            got = allocate(query.get("owner", ""), query.get("pool", ""), Family(family) if family else None)
        except IpamError as error:
            return answer(502, error.text)
        return answer(201, ipam_mapping.allocation_model(got, addressing))

    async def post_ipam_address(self, request: Request) -> Response:
        """POST /ipam/{ip}: that very address; every error is 500, as upstream."""
        text = request.match_info["ip"]
        try:
            address = ip_address(text)
        except ValueError:
            return answer(500, f"invalid IP address: {text}")
        self._ipam.allocate(address, request.query.get("owner", ""), request.query.get("pool", ""))
        return empty(200)

    async def delete_ipam_address(self, request: Request) -> Response:
        """DELETE /ipam/{ip}: free it again, unless an endpoint or the router has it."""
        try:
            address = ip_address(request.match_info["ip"])
        except ValueError:
            return empty(400)
        user = next((e for e in self._endpoints.all() if address in e.addresses), None)
        if user is not None:
            return answer(500, f"IP is in use by endpoint {user.id}")
        if address in self._facts.node().router_ips:
            return answer(500, "IP is in use by router")
        self._ipam.release(address, request.query.get("pool", ""))
        return empty(200)


def _built(wrong: str) -> Response:
    """The answer to a change of an endpoint, from what its build failed with."""
    return (
        answer(500, f"the endpoint could not follow yet, it is tried again: {wrong}") if wrong else empty(200)
    )
