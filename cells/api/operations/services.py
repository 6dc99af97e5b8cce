"""Operations on services: list them, and add or delete services that have no Service object.

Source: Cilium 1.17, PUT /service/{id}: 460 is an invalid frontend, 461 an invalid backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TypeVar

from cells.api.models.node import (
    BackendAddress,
    FrontendAddress,
    FrontendMapping,
    LRPBackend,
    LRPSpec,
    ServiceFlags,
    ServiceModel,
    ServiceRequest,
    ServiceSpecModel,
    ServiceStatusModel,
)
from cells.api.operations import ApiPart, Route
from cells.api.wire import FrameworkError, answer, empty, read_body
from cells.services import (
    INTERNAL,
    PROTOCOLS,
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    ServiceAddress,
    ServiceName,
    ServiceType,
)
from cells.services.control import LocalRedirect, ManualServices, RequestedService, ServedFrontend
from lifecycle import Member, Table
from lifecycle.http import Refusal, Request, Response

__all__ = ["ServiceOperations", "part"]


# Parsing of requests.

Value = TypeVar("Value")

BAD_FRONTEND, BAD_BACKEND = 460, 461
MAX_ID = 65535
_STATES = {"": BackendState.ACTIVE} | {one.name.lower(): one for one in BackendState}
_TYPES = {"": ServiceType.CLUSTER_IP} | {one.text: one for one in ServiceType}
_POLICIES = {"": False, "Cluster": False, "Local": True}


def requested(body: ServiceRequest) -> RequestedService:
    """Parse the requested frontend.

    Raises Refusal, or FrameworkError for an invalid enum value or number.
    """
    if body.id > MAX_ID:
        raise Refusal(500, f"service ID {body.id} exceeds the maximum limit of {MAX_ID}")
    if body.id <= 0:
        raise Refusal(500, f"invalid service ID {body.id}")
    given = body.frontend_address
    address = _address(BAD_FRONTEND, given.ip, given.port, given.protocol)
    flags = body.flags
    return RequestedService(
        number=body.id,
        key=FrontendKey(address, INTERNAL if given.scope == "internal" else 0),
        type=_word(_TYPES, "type", flags.type),
        backends=requested_backends(body, address.protocol),
        name=ServiceName(flags.namespace, flags.name),
        ext_local=_ext_local(flags),
        int_local=_word(_POLICIES, "intTrafficPolicy", flags.int_traffic_policy),
        health_check_node_port=_uint16("healthCheckNodePort", flags.health_check_node_port),
    )


def requested_backends(body: ServiceRequest, protocol: int = 0) -> tuple[Backend, ...]:
    """Parse the requested backends; ``protocol`` is the default protocol. Raises Refusal."""
    return tuple(_requested_backend(one, protocol) for one in body.backend_addresses)


def _requested_backend(given: BackendAddress, protocol: int) -> Backend:
    address = _address(BAD_BACKEND, given.ip, given.port or 0, given.protocol)
    state = _STATES.get(given.state)
    if state is None:
        raise Refusal(BAD_BACKEND, f"invalid backend state [{given.state}]")
    weight = given.weight or 0
    if not weight:
        state = BackendState.MAINTENANCE  # no new connections
    return Backend(
        address if address.protocol else ServiceAddress(address.ip, address.port, protocol),
        state,
        given.node_name,
        weight=weight,
        preferred=given.preferred,
    )


def _address(status: int, text: str, port: int, protocol: str) -> ServiceAddress:
    number = PROTOCOLS.get(protocol.upper()) if protocol.upper() not in {"", "NONE"} else 0
    if number is None:
        raise Refusal(status, f"unknown protocol {protocol!r}: expected TCP, UDP, SCTP or ANY")
    return ServiceAddress(_ip(status, text), _uint16("port", port), number)


def _uint16(name: str, number: int) -> int:
    """Return the number; others are not read from JSON in Cilium. Raises FrameworkError 400."""
    if not 0 <= number < 1 << 16:
        problem = f"{name} is {number}: expected 0 to 65535"
        raise FrameworkError(400, 400, f'parsing config body from "" failed, because {problem}')
    return number


def _ip(status: int, text: str) -> IPv4Address | IPv6Address:
    if not text:
        raise FrameworkError(422, 602, "ip in body is required")
    try:
        return ip_address(text)
    except ValueError:
        raise Refusal(status, f"invalid IP address {text!r}") from None


def _ext_local(flags: ServiceFlags) -> bool:
    policy = flags.ext_traffic_policy or flags.traffic_policy
    return _word(_POLICIES, "extTrafficPolicy", policy)


def _word(known: dict[str, Value], name: str, text: str) -> Value:
    if text not in known:
        words = ", ".join(one for one in known if one)
        raise FrameworkError(422, 606, f"flags.{name} in body should be one of [{words}]")
    return known[text]


# Operations.

_PROTOCOLS = {number: name for name, number in PROTOCOLS.items()}


class ServiceOperations:
    """The operations on services."""

    def __init__(
        self,
        served: Table[FrontendKey, ServedFrontend],
        redirects: Table[ServiceName, LocalRedirect],
        manual: ManualServices,
    ) -> None:
        self._served = served
        self._redirects = redirects
        self._manual = manual

    def routes(self) -> list[Route]:
        """Return the part's routes."""
        return [
            Route("GET", "/v1/service", self.get_services),
            Route("GET", "/v1/service/{id}", self.get_service),
            Route("PUT", "/v1/service/{id}", self.put_service, texts=frozenset({460, 461, 500, 501})),
            Route("DELETE", "/v1/service/{id}", self.delete_service, texts=frozenset({500, 501})),
            Route("GET", "/v1/lrp", self.get_redirects),
        ]

    async def get_services(self, request: Request) -> Response:
        """GET /service: all services by ID."""
        del request
        return answer(200, [service_model(one) for one in sorted(self._served.all(), key=lambda one: one.id)])

    async def get_service(self, request: Request) -> Response:
        """GET /service/{id}: the service with this ID; 404 without a body."""
        found = self._find(request)
        return answer(200, service_model(found)) if found is not None else empty(404)

    async def put_service(self, request: Request) -> Response:
        """PUT /service/{id}: 201 for a new service; ID 0 and updateServices: set backend states.

        The ID in the body counts.
        """
        body = read_body(request, ServiceRequest, "config")
        self._manual.check_followed()
        if body.update_services and not body.id:
            await self._manual.set_states(requested_backends(body))
            return empty(200)
        return empty(201 if await self._manual.put(requested(body)) else 200)

    async def delete_service(self, request: Request) -> Response:
        """DELETE /service/{id}: one with a Service object returns when the object changes."""
        return empty(200 if await self._manual.delete(_number(request)) else 404)

    async def get_redirects(self, request: Request) -> Response:
        """GET /lrp: valid local redirect policies, by name."""
        del request
        found = [each for each in self._redirects.all() if each.redirect is not None]
        return answer(200, [redirect_model(each) for each in sorted(found, key=lambda one: one.name)])

    def _find(self, request: Request) -> ServedFrontend | None:
        number = _number(request)
        return next((one for one in self._served.all() if one.id == number), None)


def _number(request: Request) -> int:
    text = request.match_info["id"]
    return int(text) if text.isascii() and text.isdigit() else 0


def service_model(served: ServedFrontend) -> ServiceModel:
    """Return the model of a frontend."""
    frontend = served.in_maps
    spec = ServiceSpecModel(
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
    return ServiceModel(spec=spec, status=ServiceStatusModel(realized=spec))


def redirect_model(redirect_row: LocalRedirect) -> LRPSpec:
    """Return the model of a local redirect policy."""
    redirect, pods = redirect_row.redirect, dict(redirect_row.pods)
    return LRPSpec(
        uid=redirect_row.uid,
        name=redirect_row.name.name,
        namespace=redirect_row.name.namespace,
        frontend_type=redirect.kind if redirect is not None else "unknown",
        lrp_type="svc" if redirect is not None and redirect.service is not None else "addr",
        service_id=str(redirect.service) if redirect is not None and redirect.service is not None else "",
        frontend_mappings=tuple(
            _mapping(each, pods, redirect_row.name.namespace) for each in redirect_row.frontends
        ),
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
    )


def _protocol(address: ServiceAddress) -> str:
    return _PROTOCOLS[address.protocol]


def _policy(*, local: bool) -> str:
    return "Local" if local else "Cluster"


def part(operations: ServiceOperations) -> Member[ApiPart]:
    """Provide the operations."""
    return ApiPart("services", operations.routes())
