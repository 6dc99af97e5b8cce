"""The operations on services: to look at, and by hand beside what the cluster's objects say.

Needs: Table[ServedFrontend], Table[LocalRedirect], ServicesByHand.   Gives: ServiceOperations, part.
"""

from __future__ import annotations

from collections.abc import Mapping

from cells.api.models.redirects import FrontendMapping, LRPBackend, LRPSpec
from cells.api.models.services import (
    BackendAddress,
    FrontendAddress,
    Service,
    ServiceFlags,
    ServiceRequest,
    ServiceSpec,
    ServiceStatus,
)
from cells.api.operations.services.requests import requested, requested_backends
from cells.api.part import ApiPart, Route
from cells.api.wire import answer, empty, read_body
from cells.services.control import (
    INTERNAL,
    PROTOCOLS,
    Address,
    Backend,
    Frontend,
    LocalRedirect,
    ServedFrontend,
    ServicesByHand,
)
from lifecycle import Member, Table
from lifecycle.http import Request, Response

_PROTOCOLS = {number: name for name, number in PROTOCOLS.items()}


class ServiceOperations:
    """The handlers."""

    def __init__(
        self, served: Table[ServedFrontend], redirects: Table[LocalRedirect], by_hand: ServicesByHand
    ) -> None:
        self._served = served
        self._redirects = redirects
        self._by_hand = by_hand

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("GET", "/v1/service", self.get_services),
            Route("GET", "/v1/service/{id}", self.get_service),
            Route("PUT", "/v1/service/{id}", self.put_service, texts=frozenset({460, 461, 500, 501})),
            Route("DELETE", "/v1/service/{id}", self.delete_service, texts=frozenset({500, 501})),
            Route("GET", "/v1/lrp", self.get_redirects),
        ]

    async def get_services(self, request: Request) -> Response:
        """GET /service: all of them, by number."""
        del request
        return answer(200, [service_model(one) for one in sorted(self._served.all(), key=lambda one: one.id)])

    async def get_service(self, request: Request) -> Response:
        """GET /service/{id}: one, by its number; 404 without a body."""
        found = self._find(request)
        return answer(200, service_model(found)) if found is not None else empty(404)

    async def put_service(self, request: Request) -> Response:
        """PUT /service/{id}: 201 for a new one; with updateServices, the states of backends everywhere."""
        body = read_body(request, ServiceRequest, "config")
        self._by_hand.check_followed()
        if body.update_services:
            await self._by_hand.set_states(requested_backends(body))
            return empty(200)
        return empty(201 if await self._by_hand.put(requested(body)) else 200)

    async def delete_service(self, request: Request) -> Response:
        """DELETE /service/{id}: one of an object comes back with the object's next change."""
        return empty(200 if await self._by_hand.delete(_number(request)) else 404)

    async def get_redirects(self, request: Request) -> Response:
        """GET /lrp: local redirect policies that can be done, by name."""
        del request
        found = [each for each in self._redirects.all() if each.redirect is not None]
        return answer(200, [redirect_model(each) for each in sorted(found, key=lambda one: one.name)])

    def _find(self, request: Request) -> ServedFrontend | None:
        number = _number(request)
        return next((one for one in self._served.all() if one.id == number), None)


def _number(request: Request) -> int:
    text = request.match_info["id"]
    return int(text) if text.isascii() and text.isdigit() else 0


def service_model(served: ServedFrontend) -> Service:
    """A frontend in Cilium's words."""
    frontend = served.shown
    spec = ServiceSpec(
        id=served.id,
        frontend_address=FrontendAddress(
            ip=str(frontend.key.address.ip),
            port=frontend.key.address.port,
            protocol=_protocol(frontend.key.address),
            scope="internal" if frontend.key.scope == INTERNAL else "external",
        ),
        backend_addresses=tuple(_backend(one) for one in frontend.backends),
        flags=ServiceFlags(
            ext_traffic_policy=_policy(local=frontend.ext_local),
            int_traffic_policy=_policy(local=frontend.int_local),
            traffic_policy=_policy(local=frontend.ext_local),
            health_check_node_port=frontend.health_check_node_port,
            name=frontend.service.name,
            namespace=frontend.service.namespace,
            type=frontend.type.text,
        ),
    )
    return Service(spec=spec, status=ServiceStatus(realized=spec))


def redirect_model(told: LocalRedirect) -> LRPSpec:
    """A policy in Cilium's words."""
    redirect, pods = told.redirect, dict(told.pods)
    return LRPSpec(
        uid=told.uid,
        name=told.name.name,
        namespace=told.name.namespace,
        frontend_type=redirect.kind if redirect is not None else "unknown",
        lrp_type="svc" if redirect is not None and redirect.service is not None else "addr",
        service_id=str(redirect.service) if redirect is not None and redirect.service is not None else "",
        frontend_mappings=tuple(_mapping(each, pods, told.name.namespace) for each in told.frontends),
    )


def _mapping(frontend: Frontend, pods: Mapping[str, str], namespace: str) -> FrontendMapping:
    address = frontend.key.address
    return FrontendMapping(
        frontend_address=FrontendAddress(ip=str(address.ip), port=address.port, protocol=_protocol(address)),
        backends=tuple(
            LRPBackend(
                pod_id=f"{namespace}/{pods.get(str(each.address.ip), '')}",
                backend_address=BackendAddress(ip=str(each.address.ip), port=each.address.port),
            )
            for each in frontend.backends
        ),
    )


def _backend(backend: Backend) -> BackendAddress:
    return BackendAddress(
        ip=str(backend.address.ip),
        port=backend.address.port,
        protocol=_protocol(backend.address),
        node_name=backend.node,
        preferred=backend.preferred,
        state=backend.state.name.lower(),
        weight=backend.weight,
        zone=backend.zone,
    )


def _protocol(address: Address) -> str:
    return _PROTOCOLS[address.protocol]


def _policy(*, local: bool) -> str:
    return "Local" if local else "Cluster"


def part(operations: ServiceOperations) -> Member[ApiPart]:
    """Services, as a part of the API."""
    return ApiPart("services", operations.routes())
