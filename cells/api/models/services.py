"""The wire types of services.

Needs: Model.   Gives: Service and its parts, ServiceRequest.
Source: Cilium 1.17, api/v1/openapi.yaml, Service.
"""

from __future__ import annotations

from msgspec import field

from cells.api.models.v1 import Model


class FrontendAddress(Model, frozen=True):
    """Where a service is reached; who only sets states of backends leaves it empty."""

    ip: str = ""
    port: int = 0
    protocol: str = ""
    scope: str = ""


class BackendAddress(Model, frozen=True):
    """Who serves it."""

    ip: str
    node_name: str = field(name="nodeName", default="")
    port: int | None = None
    preferred: bool = False
    protocol: str = ""
    state: str = ""
    weight: int | None = None
    zone: str = ""


class ServiceFlags(Model, frozen=True):
    """How it is served."""

    cluster: str = ""
    ext_traffic_policy: str = field(name="extTrafficPolicy", default="")
    health_check_node_port: int = field(name="healthCheckNodePort", default=0)
    int_traffic_policy: str = field(name="intTrafficPolicy", default="")
    name: str = ""
    namespace: str = ""
    nat_policy: str = field(name="natPolicy", default="")
    traffic_policy: str = field(name="trafficPolicy", default="")
    type: str = ""


class ServiceSpec(Model, frozen=True):
    """A service: one address, its backends."""

    id: int
    frontend_address: FrontendAddress
    backend_addresses: tuple[BackendAddress, ...] = ()
    flags: ServiceFlags = ServiceFlags()


class ServiceRequest(Model, frozen=True):
    """A requested service, or states of backends in all services."""

    frontend_address: FrontendAddress
    id: int = 0
    backend_addresses: tuple[BackendAddress, ...] = ()
    flags: ServiceFlags = ServiceFlags()
    update_services: bool = field(name="updateServices", default=False)


class ServiceStatus(Model, frozen=True):
    """The service as the datapath has it."""

    realized: ServiceSpec


class Service(Model, frozen=True):
    """A service, and what has become of it."""

    spec: ServiceSpec
    status: ServiceStatus
