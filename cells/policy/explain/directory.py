"""Resolve a query's text to the ends of a connection: pods, services, addresses, names, identities."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, Protocol

import msgspec

from cells.policy.compute.policies import NamedPodPort
from cells.policy.explain import End, Target, UnanswerableError, port_text
from cells.policy.labels import LabelSet
from cells.policy.rules import PROTOCOLS

__all__ = [
    "BackendForClient",
    "Directory",
    "IPAddress",
    "RequestedPort",
    "ServedPort",
    "headless",
    "parse_destination",
    "parse_port",
    "refusal",
    "source_of",
    "targets_of",
]


IPAddress = IPv4Address | IPv6Address

SERVICE_PROTOCOLS: Final = (PROTOCOLS["TCP"], PROTOCOLS["UDP"], PROTOCOLS["SCTP"])
"""Protocols that services translate; others go to the address itself."""
POD, SERVICE = "pod/", "svc/"
_DNS_OF_SERVICE = re.compile(r"(?P<name>[^.]+)\.(?P<namespace>[^.]+)\.svc(\..*)?")
_PORT = re.compile(r"[0-9]+|[a-z0-9-]{1,63}")


class BackendForClient(msgspec.Struct, frozen=True):
    """A backend of a frontend, for a particular client."""

    end: End
    port: int
    problem: str = ""
    """Why the client does not reach it."""


class ServedPort(msgspec.Struct, frozen=True):
    """A frontend of a service, and its backends."""

    service: str
    address: str
    """The address; empty if it has none yet."""
    port: int
    protocol: int
    name: str
    """The name of the port."""
    of_nodes: bool
    """Whether it is a NodePort."""
    backends: tuple[BackendForClient, ...]
    """The backends among which new connections are distributed."""
    headless: bool = False
    """Whether clients resolve the service to backend addresses and connect directly."""
    problem: str = ""
    """Why the client cannot use it."""
    note: str = ""

    @property
    def text(self) -> str:
        """The frontend as text: ``10.96.0.1:80/TCP of service default/web``."""
        if self.headless:
            return f"headless service {self.service}"
        if not self.address:
            return f"port {port_text(self.port, self.protocol)} of service {self.service}"
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{port_text(self.port, self.protocol)} of service {self.service}"


def refusal(client: End, service: str, *, inside_only: bool, ranges: Sequence[str], deny: bool) -> str:
    """Return why a frontend drops a client from outside, regardless of policies; empty if it does not."""
    if not client.is_outside:
        return ""
    if inside_only:
        return f"service {service} is served to clients in the cluster only"
    if ranges and client.network is None:
        raise UnanswerableError(f"service {service} has source ranges: give the client's address")
    if not ranges or any(_within(client.network, one) for one in ranges) != deny:
        return ""
    return f"source ranges of service {service} do not include {client.title}"


def headless(service: str, name: str, port: int, protocol: int, ends: Iterable[End]) -> ServedPort:
    """Return a port of a service without an address."""
    backends = tuple(BackendForClient(end, port) for end in ends)
    return ServedPort(service, "", port, protocol, name, of_nodes=False, backends=backends, headless=True)


def _within(network: IPv4Network | IPv6Network | None, around: str) -> bool:
    outer = ip_network(around)
    if isinstance(network, IPv4Network):
        return isinstance(outer, IPv4Network) and network.subnet_of(outer)
    return isinstance(network, IPv6Network) and isinstance(outer, IPv6Network) and network.subnet_of(outer)


class RequestedPort(msgspec.Struct, frozen=True):
    """The port and protocol of a query: the port is a number, a name, or empty; the protocol may be empty."""

    port: str = ""
    protocol: str = ""

    @property
    def number(self) -> int | None:
        """The port number; None if it is a name or missing. Raises UnanswerableError."""
        if not self.port.isdecimal():
            return None
        if len(self.port) > 5 or int(self.port) > 65535:
            raise UnanswerableError(f"port {self.port!r}: expected a number up to 65535, or a port's name")
        if not int(self.port) and not self.protocol.startswith("ICMP"):
            raise UnanswerableError("port 0: expected a number from 1 to 65535, or a port's name")
        return int(self.port)

    @property
    def protocols(self) -> tuple[int, ...]:
        """The protocol; without one, all that are possible. Raises UnanswerableError."""
        known = [name for name in PROTOCOLS if name != "ANY"]
        if not self.protocol:
            return tuple(PROTOCOLS[name] for name in known)
        if self.protocol.upper() not in known:
            raise UnanswerableError(f"protocol {self.protocol!r}: expected one of {', '.join(known)}")
        return (PROTOCOLS[self.protocol.upper()],)


class Directory(Protocol):
    """Looks up pods, services and addresses. Methods raise UnanswerableError for unknown ones."""

    place: str
    """The scope of the lookup: ``on this node``, ``in the manifests``."""

    def reserved(self, name: str) -> End | None:
        """Return the end of a reserved identity by name (``host``, ``world``), or None."""
        ...

    def identity(self, number: int) -> End:
        """Return the end of an identity."""
        ...

    def pod(self, name: str) -> End | None:
        """Return the pod with a namespace and name, or None."""
        ...

    def pods(self) -> Sequence[str]:
        """Return all pods, as ``NAMESPACE/NAME``."""
        ...

    def pod_ports(self, pod: str) -> Sequence[NamedPodPort]:
        """Return the named ports of a pod's containers."""
        ...

    def has_service(self, name: str) -> bool:
        """Whether the service ``NAMESPACE/NAME`` exists."""
        ...

    def frontends(self, name: str, client: End) -> Sequence[ServedPort]:
        """Return the frontends at which a client reaches a service."""
        ...

    def frontends_at(self, address: IPAddress, client: End) -> Sequence[ServedPort]:
        """Return the frontends of an address."""
        ...

    def network(self, text: str) -> End:
        """Return the end of a prefix. Raises ValueError for other text."""
        ...

    def at(self, address: IPAddress, client: End | None) -> Sequence[tuple[End, str]]:
        """Return the owners of an address, with notes; several if the owner is ambiguous."""
        ...

    def named(self, name: str) -> Sequence[End]:
        """Return the addresses of a DNS name."""
        ...

    def served_elsewhere(self, address: IPAddress, port: int | None) -> str:
        """Return the service that kube-proxy or another node serves at an address, or ""."""
        ...


def parse_port(text: str) -> RequestedPort:
    """Parse ``PORT[/PROTO]``. Raises UnanswerableError."""
    port, _, protocol = text.partition("/")
    requested = RequestedPort(port, protocol.upper())
    if not _PORT.fullmatch(port) or not requested.protocols:
        raise UnanswerableError(f"port {text!r}: expected PORT/PROTO, PORT a number up to 65535 or a name")
    _ = requested.number
    return requested


def parse_destination(text: str) -> tuple[str, RequestedPort]:
    """Split ``DST[:PORT[/PROTO]]``; an IPv6 address with a port is in brackets.

    Raises UnanswerableError.
    """
    text = text.removeprefix("reserved:")
    if text.startswith("["):
        name, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    elif text.count(":") > 1:
        name, port = text, ""
    else:
        name, _, port = text.partition(":")
    return name, parse_port(port) if port else RequestedPort()


def source_of(directory: Directory, text: str) -> End:
    """Resolve the source of a connection. Raises UnanswerableError."""
    text = text.removeprefix("reserved:")
    if text.startswith(SERVICE) or (_service(directory, text) and directory.pod(_qualified(text)) is None):
        raise UnanswerableError(f"{text} is a service, which opens no connections: give a pod")
    found = _ends(directory, text, None)
    if len(found) > 1:
        names = ", ".join(end.title for end, _ in found)
        raise UnanswerableError(f"{text} is ambiguous, give one of: {names}")
    return found[0][0]


def targets_of(directory: Directory, text: str, requested: RequestedPort, client: End) -> list[Target]:
    """Resolve a destination to its targets: one per backend of a service. Raises UnanswerableError."""
    text = text.removeprefix("reserved:")
    service = _service(directory, text)
    if service and (text.startswith(SERVICE) or directory.pod(_qualified(text)) is None):
        return list(_of_service(directory, service, requested, client))
    if service and not text.startswith(POD):
        raise UnanswerableError(f"{text} is a pod and a service: write {POD}{text} or {SERVICE}{text}")
    if text.startswith(SERVICE):
        raise UnanswerableError(f"there is no service {_qualified(text)} {directory.place}")
    try:
        address = ip_address(text)
    except ValueError:
        pass
    else:
        return list(_of_address(directory, address, requested, client))
    found: list[Target] = []
    for end, note in _ends(directory, text, client):
        found += _of_end(directory, end, requested, note)
    return found


def _service(directory: Directory, text: str) -> str:
    """Return the name of the service that the text refers to, or ""."""
    if text.startswith(POD):
        text = text.removeprefix(POD)
    dns = _DNS_OF_SERVICE.fullmatch(text)
    name = f"{dns['namespace']}/{dns['name']}" if dns else _qualified(text)
    return name if name.count("/") == 1 and directory.has_service(name) else ""


def _qualified(text: str) -> str:
    """Return ``NAMESPACE/NAME``; the default namespace is ``default``."""
    text = text.removeprefix(POD).removeprefix(SERVICE)
    return text if "/" in text else f"default/{text}"


def _ends(directory: Directory, text: str, client: End | None) -> Sequence[tuple[End, str]]:
    """Resolve text that is not a service, with notes."""
    if (reserved := directory.reserved(text)) is not None:
        return [(reserved, "")]
    if text.isascii() and text.isdigit():
        return [(directory.identity(int(text)), "")]
    try:
        return directory.at(ip_address(text), client)
    except ValueError:
        pass
    try:
        return [(directory.network(text), "")]
    except ValueError:
        pass
    pod = directory.pod(_qualified(text))
    if pod is not None:
        return [(pod, "")]
    if "." in text and "/" not in text:
        return [(end, "") for end in directory.named(text)]
    from difflib import get_close_matches  # needed only for error messages

    near = get_close_matches(_qualified(text), directory.pods(), 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UnanswerableError(f"there is no pod or service {_qualified(text)} {directory.place}{hint}")


def _of_end(directory: Directory, end: End, requested: RequestedPort, note: str) -> Iterator[Target]:
    """Yield targets at an end that is not a service; port names are those of a pod's containers."""
    if not requested.port:
        yield Target(end, note=note)
    elif (number := requested.number) is not None:
        protocol = requested.protocols[0] if requested.protocol else PROTOCOLS["TCP"]
        yield Target(end, protocol, number, note=note)
    else:
        ports = directory.pod_ports(end.key) if end.key else ()
        matching = [
            one for one in ports if one.name == requested.port and one.protocol in requested.protocols
        ]
        if not matching:
            names = ", ".join(sorted({one.name for one in ports})) or "none"
            raise UnanswerableError(f"{end.title} has no port named {requested.port} (it has: {names})")
        for one in matching:
            yield Target(end, one.protocol, one.port, note=note)


def _of_address(
    directory: Directory, address: IPAddress, requested: RequestedPort, client: End
) -> Iterator[Target]:
    frontends = directory.frontends_at(address, client)
    matching = [one for one in frontends if _matches(one, requested)]
    if not requested.port and any(not one.of_nodes for one in frontends):
        for one in frontends:
            yield from _of_frontend(one, requested)
        return
    if requested.port and matching:
        for one in matching:
            yield from _of_frontend(one, requested)
        return
    note = ""
    if frontends and requested.port and not matching:
        services = ", ".join(sorted({one.service for one in frontends}))
        note = f"no service has this port at {address} (it is of {services}): packets go to the address"
    service = directory.served_elsewhere(address, requested.number) if requested.port else ""
    for end, more in directory.at(address, client):
        meant_end = end._replace(elsewhere=f"the node of a backend of service {service}") if service else end
        yield from _of_end(directory, meant_end, requested, more or note)


def _matches(frontend: ServedPort, requested: RequestedPort) -> bool:
    if frontend.protocol and frontend.protocol not in requested.protocols:
        return False
    if not frontend.protocol and requested.protocols[0] not in SERVICE_PROTOCOLS:
        return False
    number = requested.number
    return frontend.port == number if number is not None else frontend.name == requested.port


def _of_service(directory: Directory, name: str, requested: RequestedPort, client: End) -> Iterator[Target]:
    frontends = directory.frontends(name, client)
    matching = [one for one in frontends if not requested.port or _matches(one, requested)]
    if not matching and requested.number is not None and all(one.headless for one in frontends) and frontends:
        # Backends may be requested for any port.
        protocol = requested.protocols[0] if requested.protocol else PROTOCOLS["TCP"]
        ends = {one.end.title: one.end for frontend in frontends for one in frontend.backends}
        for end in ends.values():
            yield Target(end, protocol, requested.number, via=frontends[0].text)
        return
    if not matching:
        ports = ", ".join(
            dict.fromkeys(f"{one.name} {port_text(one.port, one.protocol)}".strip() for one in frontends)
        )
        wanted = f"{requested.port}/{requested.protocol}".rstrip("/")
        what = f"no port {wanted} (it has: {ports or 'none'})" if requested.port else "no port"
        raise UnanswerableError(f"service {name} has {what}")
    for one in matching:
        yield from _of_frontend(one, requested)


def _of_frontend(frontend: ServedPort, requested: RequestedPort) -> Iterator[Target]:
    protocol = frontend.protocol or (requested.protocols[0] if requested.protocol else PROTOCOLS["TCP"])
    if frontend.problem or not frontend.backends:
        no_backend = End(f"service {frontend.service}", 0, LabelSet(()))
        problem = frontend.problem or f"service {frontend.service} has no ready backend"
        yield Target(no_backend, protocol, frontend.port, via=frontend.text, problem=problem)
        return
    for one in frontend.backends:
        yield Target(one.end, protocol, one.port, frontend.text, one.problem, frontend.note)
