"""The agent's services and endpoints as the policy explanation needs them.

``explain`` uses AgentDirectory; ``ends`` has the endpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cells.api.operations.ends import HOST, REMOTE_NODES, AgentEnds
from cells.base.addresses import IPAddress
from cells.kubernetes.objects.core import EndpointSlice, Service
from cells.policy.explain import End, UnanswerableError
from cells.policy.explain.directory import BackendForClient, ServedPort, headless, refusal
from cells.services import Frontend as ServedAt
from cells.services import FrontendKey, LoadBalancerOptions, ServiceName, ServiceType
from cells.services.control import ServedFrontend
from cells.services.model.backends import backends_by_port, backends_of, selectable
from cells.services.model.frontends import is_headless, visible_in_cluster
from cells.services.sockets import SocketLB
from lifecycle import Table


class AgentServices:
    """Services of this node, and services that kube-proxy or other nodes implement."""

    def __init__(
        self,
        served: Table[FrontendKey, ServedFrontend],
        services: Table[tuple[str, str], Service],
        slices: Table[tuple[str, str], EndpointSlice],
        options: LoadBalancerOptions,
        sockets: SocketLB | None,
        ends: AgentEnds,
    ) -> None:
        self._served = served
        self._services = services
        self._slices = slices
        self._options = options
        self._sockets = sockets
        self._ends = ends

    def has_service(self, name: str) -> bool:
        """Whether a service with this namespace and name exists."""
        namespace, _, short = name.partition("/")
        if self._services.get((namespace, short)) is not None:
            return True
        return any(row.frontend.service == (namespace, short) for row in self._served.all())

    def frontends(self, name: str, client: End) -> Sequence[ServedPort]:
        """Return the ports on which a client reaches a service."""
        namespace, _, short = name.partition("/")
        service = self._services.get((namespace, short))
        if service is not None and service.spec.type == "ExternalName":
            raise UnanswerableError(
                f"service {name} is another name of {service.spec.external_name}: ask of that"
            )
        if service is not None and is_headless(service):
            return list(self._headless(service, client))
        wanted = ServiceName(namespace, short)
        rows = [row.in_maps for row in self._served.all() if row.frontend.service == wanted]
        found = self._seen(rows, client)
        found = [one for one in found if not one.key.address.is_wildcard]
        if not found:
            raise UnanswerableError(f"service {name} is not served by this node: see hive service list")
        inside = (ServiceType.CLUSTER_IP, ServiceType.LOCAL_REDIRECT)
        selected = [one for one in found if (one.type in inside) != client.is_outside] or found
        return [self._shown(one, client) for one in selected]

    def frontends_at(self, address: IPAddress, client: End) -> Sequence[ServedPort]:
        """Return the ports served at an address; with socket LB, also those of any node's address."""
        rows = [row.in_maps for row in self._served.all()]
        exact = [one for one in rows if one.key.address.ip == address]
        found = self._seen(exact, client)
        if self._sockets is not None and self._sockets.enabled and not client.is_outside:
            served = {(one.key.address.port, one.key.address.protocol) for one in found}
            of_nodes = [
                one
                for one in rows
                if one.key.address.is_wildcard
                and one.key.address.version == address.version
                and (one.key.address.port, one.key.address.protocol) not in served
                and one.type is ServiceType.NODE_PORT
            ]
            if of_nodes and self._ends.identity_at(address) in (HOST, *REMOTE_NODES):
                found += self._seen(of_nodes, client)
        return [self._shown(one, client, str(address)) for one in found]

    def served_elsewhere(self, address: IPAddress, port: int | None) -> str:
        """Return the service that kube-proxy or another node serves at an address; empty if none."""
        text = str(address)
        of_node = self._ends.identity_at(address) in (HOST, *REMOTE_NODES)
        for service in self._services.all():
            spec, ingress = service.spec, service.status.load_balancer.ingress or ()
            external = {*(spec.external_ips or ()), *(one.ip for one in ingress)}
            for one in spec.ports or ():
                if port == (one.port if text in external else one.node_port if of_node else None):
                    return "/".join(service.key)
        return ""

    @staticmethod
    def _seen(frontends: Sequence[ServedAt], client: End) -> list[ServedAt]:
        if client.is_outside:
            return [one for one in frontends if not one.key.scope]
        return visible_in_cluster(frontends)

    def _headless(self, service: Service, client: End) -> Iterator[ServedPort]:
        name = "/".join(service.key)
        backends = backends_of(self._slices.by("service").get(service.key), self._options)
        for port_name, port, protocol, some in backends_by_port(backends):
            ends = [end for one in some for end, _ in self._ends.at(one.address.ip, client)]
            yield headless(name, port_name, port, protocol, ends)

    def _shown(self, frontend: ServedAt, client: End, at: str = "") -> ServedPort:
        address, name = frontend.key.address, str(frontend.service)
        if frontend.l7_proxy_port:
            raise UnanswerableError(
                f"service {name} is served by Envoy, which selects the backend: ask about its backends"
            )
        chosen, _ = selectable(frontend.backends)
        return ServedPort(
            service=name,
            address=at or str(address.ip),
            port=address.port,
            protocol=address.protocol,
            name=frontend.port_name,
            of_nodes=frontend.type is ServiceType.NODE_PORT,
            backends=tuple(
                BackendForClient(end, one.address.port, self._hairpin_fault(end, client, one.address.version))
                for one in chosen
                for end, _ in self._ends.at(one.address.ip, client)
            ),
            problem=refusal(
                client,
                name,
                inside_only=not frontend.routable,
                ranges=frontend.source_ranges,
                deny=frontend.source_ranges_deny,
            ),
        )

    def _hairpin_fault(self, backend: End, client: End, version: int) -> str:
        """Return why a backend cannot reach itself through a service, or an empty text.

        Hairpin traffic needs a loopback address.
        """
        if not client.key or backend.key != client.key or version == 4:
            return ""
        if self._sockets is not None and self._sockets.enabled:
            return ""
        return f"{client.title} does not reach itself through a service by IPv6 without bpf-lb-sock"


class AgentDirectory:
    """Endpoints and services for the policy explanation."""

    place = "that this node knows"

    def __init__(self, ends: AgentEnds, services: AgentServices) -> None:
        self.ends = ends
        self.reserved = ends.reserved
        self.identity = ends.identity
        self.pod = ends.pod
        self.pods = ends.pods
        self.pod_ports = ends.pod_ports
        self.network = ends.network
        self.named = ends.named
        self.at = ends.at
        self.has_service = services.has_service
        self.frontends = services.frontends
        self.frontends_at = services.frontends_at
        self.served_elsewhere = services.served_elsewhere
