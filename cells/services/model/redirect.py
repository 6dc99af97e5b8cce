"""Frontends with pods of this node as their only backends: local redirect policies and host ports.

``ServiceCatalog`` calls these functions for pods and CiliumLocalRedirectPolicies. A policy redirects an
address, or a service's cluster addresses, while a selected pod of the node is ready; otherwise the service
uses its own backends.

Source: Cilium 1.17, CiliumLocalRedirectPolicy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import msgspec

from cells.kubernetes.objects.cilium_policy import CiliumLocalRedirectPolicy
from cells.kubernetes.objects.cilium_policy import RedirectPort as ObjectPort
from cells.kubernetes.objects.core import ContainerPort, Pod, Service
from cells.kubernetes.objects.kind import LabelSelector
from cells.services import (
    ANY_PROTOCOL,
    PROTOCOLS,
    Backend,
    Frontend,
    FrontendKey,
    IPAddress,
    LoadBalancerOptions,
    ServiceAddress,
    ServiceName,
    ServiceType,
    ServingNode,
    is_wildcard,
    parse_address,
    plain,
)

__all__ = ["RedirectPolicy", "read_redirect"]


# Host ports of pods as frontends.
#
# Source: core/v1 ContainerPort. Ports in the NodePort range are for NodePort services only. A hostIP must be
#         an address of the node: users who may create pods must not take over another host's address.

WILDCARDS: Mapping[int, IPAddress] = {4: IPv4Address(0), 6: IPv6Address(0)}


def host_port_frontends(pod: Pod, node: ServingNode, options: LoadBalancerOptions) -> list[Frontend]:
    """Return the frontends of a pod's host ports; the last port wins if two have one address."""
    if not options.enable_host_port or pod.spec.host_network or pod.finished:
        return []
    found: dict[FrontendKey, Frontend] = {}
    for port in _host_ports(pod):
        protocol = PROTOCOLS.get(port.protocol.upper())
        if not port.host_port or protocol is None:
            continue
        if options.node_port_min <= port.host_port <= options.node_port_max:
            continue
        for frontend in _frontends(pod, port, protocol if options.bpf_lb_proto_diff else ANY_PROTOCOL, node):
            if options.serves(frontend.key.address.ip):
                found[frontend.key] = frontend
    return list(found.values())


def foreign_host_ips(pod: Pod, own: Collection[IPAddress], options: LoadBalancerOptions) -> list[IPAddress]:
    """Return the hostIPs of a pod's host ports that are not addresses of this node (``own``)."""
    if not options.enable_host_port or pod.spec.host_network or pod.finished:
        return []
    given = {parse_address(port.host_ip): None for port in _host_ports(pod) if port.host_port}
    return [
        ip for ip in given if ip is not None and not (is_wildcard(ip) or ip.is_loopback or plain(ip) in own)
    ]


def _frontends(pod: Pod, port: ContainerPort, protocol: int, node: ServingNode) -> Iterator[Frontend]:
    given = parse_address(port.host_ip)
    loopback = given is not None and given.is_loopback
    addresses: list[IPAddress]
    if given is None or is_wildcard(given):
        addresses = [*node.node_port_addresses, *WILDCARDS.values()]
    else:
        addresses = [WILDCARDS[given.version]] if loopback else [given]
    parsed = map(parse_address, pod.addresses)
    own_addresses = [address for address in parsed if address is not None]
    pods = {address.version: address for address in reversed(own_addresses)}
    for address in addresses:
        own = pods.get(address.version)
        if own is None:
            continue
        yield Frontend(
            key=FrontendKey(ServiceAddress(address, port.host_port, protocol)),
            type=ServiceType.HOST_PORT,
            service=host_port_name(pod.namespace, pod.name, port.host_port),
            backends=(Backend(ServiceAddress(own, port.container_port, protocol), weight=0),),
            loopback=loopback,
            routable=not is_wildcard(address),
        )


def _host_ports(pod: Pod) -> Iterator[ContainerPort]:
    """Yield the ports of all containers."""
    for container in (*(pod.spec.init_containers or ()), *(pod.spec.containers or ())):
        yield from container.ports or ()


# The claimants of host ports and redirects; services claim their frontends by their own names.

_HOST_PORT: Final = "/host-port/"
_REDIRECT: Final = "-local-redirect"


def pod_claimant(namespace: str, name: str) -> ServiceName:
    """Return the name by which a pod claims its host ports; not a valid name of a service."""
    return ServiceName(namespace, f"pod/{name}")


def redirect_claimant(redirect: ServiceName) -> ServiceName:
    """Return the name by which a policy claims its frontends; not a valid name of a service."""
    return ServiceName(redirect.namespace, f"redirect/{redirect.name}")


def host_port_name(namespace: str, pod: str, port: int) -> ServiceName:
    """Return the service name in the frontends of a pod's host port."""
    return ServiceName(namespace, f"{pod}{_HOST_PORT}{port}")


def redirect_name(redirect: ServiceName) -> ServiceName:
    """Return the service name in the frontends of a local redirect policy."""
    return ServiceName(redirect.namespace, redirect.name + _REDIRECT)


def claimant(frontend: Frontend) -> ServiceName:
    """Return the service, pod or policy that claims a frontend, unless it is set manually."""
    name = frontend.service
    if frontend.type is ServiceType.HOST_PORT:
        return pod_claimant(name.namespace, name.name.partition(_HOST_PORT)[0])
    if frontend.type is ServiceType.LOCAL_REDIRECT:
        return redirect_claimant(ServiceName(name.namespace, name.name.removesuffix(_REDIRECT)))
    return name


class LocalRedirectPort(msgspec.Struct, frozen=True):
    """A port of a policy; frontend and backend ports match by name."""

    name: str
    port: int
    protocol: int


class RedirectPolicy(msgspec.Struct, frozen=True):
    """A parsed policy, which redirects either an address or a service."""

    name: ServiceName
    uid: str
    address: IPAddress | None
    service: ServiceName | None
    ports: tuple[LocalRedirectPort, ...]
    """Empty: every port of the service."""
    backend_ports: tuple[LocalRedirectPort, ...]
    selector: LabelSelector
    skip: bool
    """skipRedirectFromBackend: the backend pods reach the original address."""

    @property
    def unpaired(self) -> list[LocalRedirectPort]:
        """The ports without a matching backend port, which are not redirected."""
        return [port for port in self.ports if _backend_port(port, self.ports, self.backend_ports) is None]

    @property
    def kind(self) -> str:
        """The type of the policy's frontend, as Cilium's commands print it."""
        if self.address is not None:
            return "IP + named ports" if len(self.ports) > 1 else "IP + port"
        if not self.ports:
            return "clusterIP + all svc ports"
        return "clusterIP + named ports" if len(self.ports) > 1 else "clusterIP + port"


def read_redirect(policy: CiliumLocalRedirectPolicy) -> RedirectPolicy:
    """Parse a policy. Raises ValueError with one line if it is invalid."""
    spec = policy.spec
    if spec is None:
        raise ValueError("spec is missing: expected redirectFrontend and redirectBackend")
    at, of = spec.redirect_frontend.address_matcher, spec.redirect_frontend.service_matcher
    if (at is None) == (of is None):
        raise ValueError("redirectFrontend: expected either addressMatcher or serviceMatcher")
    backends = _ports("redirectBackend", spec.redirect_backend.to_ports)
    if not backends:
        raise ValueError("redirectBackend.toPorts: expected at least one port")
    address = service = None
    if at is not None:
        address = parse_address(at.ip)
        if address is None:
            raise ValueError(f"addressMatcher.ip={at.ip}: expected an IP address")
        ports = _ports("addressMatcher", at.to_ports)
        if not ports:
            raise ValueError("addressMatcher.toPorts: expected at least one port")
    else:
        assert of is not None  # noqa: S101  (one of both)
        if of.namespace != policy.namespace:
            raise ValueError(
                f"serviceMatcher.namespace={of.namespace}: expected the policy's own, {policy.namespace}"
            )
        service = ServiceName(of.namespace, of.service_name)
        ports = _ports("serviceMatcher", of.to_ports or ())
    _check_backend_ports(ports, backends)
    return RedirectPolicy(
        name=ServiceName(policy.namespace, policy.name),
        uid=policy.metadata.uid,
        address=address,
        service=service,
        ports=ports,
        backend_ports=backends,
        selector=spec.redirect_backend.local_endpoint_selector,
        skip=spec.skip_redirect_from_backend,
    )


def redirect_frontends(
    redirect: RedirectPolicy,
    pods: Iterable[Pod],
    service: Service | None,
    node: ServingNode,
    options: LoadBalancerOptions,
) -> list[Frontend]:
    """Return the frontends of a policy that have a ready pod on this node."""
    local = [pod for pod in pods if serves(redirect, pod, node)]
    addresses, ports = _targets(redirect, service)
    found = []
    for ip in filter(options.serves, addresses):
        for port in ports:
            target = _backend_port(port, ports, redirect.backend_ports)
            if target is None:
                continue
            named = target.name if len(ports) > 1 else ""
            if backends := tuple(_backends(target, named, ip, local, options)):
                key = FrontendKey(ServiceAddress(ip, port.port, _protocol(port, options)))
                name = redirect_name(redirect.name)
                found.append(Frontend(key, ServiceType.LOCAL_REDIRECT, name, backends, port_name=port.name))
    return found


def serves(redirect: RedirectPolicy, pod: Pod, node: ServingNode) -> bool:
    """Whether a pod is a backend of the policy: in its namespace, on this node, selected and ready."""
    if pod.namespace != redirect.name.namespace or pod.spec.node_name != node.name or pod.finished:
        return False
    return pod.is_ready and redirect.selector.matches(pod.metadata.labels or {})


def _targets(
    redirect: RedirectPolicy, service: Service | None
) -> tuple[list[IPAddress], Sequence[LocalRedirectPort]]:
    """Return the redirected addresses and ports."""
    if redirect.address is not None:
        return [redirect.address], redirect.ports
    if service is None:
        return [], ()
    spec = service.spec
    addresses = map(parse_address, spec.cluster_ips or (spec.cluster_ip,))
    own = [
        LocalRedirectPort(port.name or "", port.port, PROTOCOLS.get(port.protocol, ANY_PROTOCOL))
        for port in spec.ports or ()
    ]
    return [ip for ip in addresses if ip is not None], redirect.ports or own


def _backend_port(
    port: LocalRedirectPort, ports: Sequence[LocalRedirectPort], backends: Sequence[LocalRedirectPort]
) -> LocalRedirectPort | None:
    """Return the backend port for a redirected port; None without a match.

    Several ports match by name. A single port without a match by name uses the first backend port.
    """
    default = backends[0] if len(ports) == 1 else None
    target = next((each for each in backends if each.name and each.name == port.name), default)
    return target if target is not None and target.protocol == port.protocol else None


def _backends(
    target: LocalRedirectPort, named: str, ip: IPAddress, pods: Sequence[Pod], options: LoadBalancerOptions
) -> Iterator[Backend]:
    """Yield pods at a port, in the family of ``ip``; with ``named``, only pods with a port of this name."""
    for pod in sorted(pods, key=lambda one: one.name):
        if named and named not in {each.name for each in pod.named_ports}:
            continue
        for own in map(parse_address, pod.addresses):
            if own is not None and own.version == ip.version:
                address = ServiceAddress(own, target.port, _protocol(target, options))
                yield Backend(address, node=pod.spec.node_name, weight=0)


def _protocol(port: LocalRedirectPort, options: LoadBalancerOptions) -> int:
    return port.protocol if options.bpf_lb_proto_diff else ANY_PROTOCOL


def _ports(where: str, ports: Iterable[ObjectPort]) -> tuple[LocalRedirectPort, ...]:
    found = tuple(_port(where, each) for each in ports)
    if len(found) > 1 and (nameless := next((each for each in found if not each.name), None)):
        raise ValueError(f"{where}.toPorts: port {nameless.port} needs a name, as there are several")
    return found


def _port(where: str, given: ObjectPort) -> LocalRedirectPort:
    text, protocol = given.port, given.protocol
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise ValueError(f"{where}.toPorts: port {text}: expected a number, 1 to 65535")
    if protocol not in {"TCP", "UDP"}:
        raise ValueError(f"{where}.toPorts: protocol {protocol}: expected TCP or UDP")
    return LocalRedirectPort(given.name.lower(), int(text), PROTOCOLS[protocol])


def _check_backend_ports(ports: Sequence[LocalRedirectPort], backends: Sequence[LocalRedirectPort]) -> None:
    """Raise ValueError unless at least one port has a backend port of its protocol."""
    if not ports or any(_backend_port(port, ports, backends) for port in ports):
        return
    if len(ports) == 1:
        raise ValueError("redirectBackend.toPorts: expected the protocol of the frontend")
    names = ", ".join(port.name for port in ports)
    raise ValueError(
        f"redirectBackend.toPorts: expected a port of one of the frontend's names and its protocol: {names}"
    )
