"""From what people type to the ends of a connection: pods, services, addresses, names, identities."""

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
    "Directory",
    "IPAddress",
    "RequestedPort",
    "Served",
    "ServedPort",
    "headless",
    "parse_asked",
    "parse_destination",
    "refusal",
    "source_of",
    "targets_of",
]


IPAddress = IPv4Address | IPv6Address

BALANCED: Final = (PROTOCOLS["TCP"], PROTOCOLS["UDP"], PROTOCOLS["SCTP"])
"""Protocols that services have; others go to the address itself."""
POD, SERVICE = "pod/", "svc/"
_DNS_OF_SERVICE = re.compile(r"(?P<name>[^.]+)\.(?P<namespace>[^.]+)\.svc(\..*)?")
_PORT = re.compile(r"[0-9]+|[a-z0-9-]{1,63}")


class Served(msgspec.Struct, frozen=True):
    """A backend, as clients of a frontend see it."""

    end: End
    port: int
    problem: str = ""
    """Why this client does not get there."""


class ServedPort(msgspec.Struct, frozen=True):
    """A port at which a service is served, and the pods or addresses behind it."""

    service: str
    address: str
    """Empty where it has none yet."""
    port: int
    protocol: int
    name: str
    """Of the port."""
    of_nodes: bool
    """Whether it is a port of nodes, which have others of their own."""
    backends: tuple[Served, ...]
    """New connections go to any of these."""
    headless: bool = False
    """Whether its clients have the addresses of backends, and go to them directly."""
    problem: str = ""
    """Why it cannot be used by this client."""
    note: str = ""

    @property
    def text(self) -> str:
        """``10.96.0.1:80/TCP of service default/web``."""
        if self.headless:
            return f"headless service {self.service}"
        if not self.address:
            return f"port {port_text(self.port, self.protocol)} of service {self.service}"
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{port_text(self.port, self.protocol)} of service {self.service}"


def refusal(client: End, service: str, *, inside_only: bool, ranges: Sequence[str], deny: bool) -> str:
    """Why a client outside is not served at a frontend, whatever policies say; empty where it is."""
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
    """A port of a service without an address."""
    backends = tuple(Served(end, port) for end in ends)
    return ServedPort(service, "", port, protocol, name, of_nodes=False, backends=backends, headless=True)


def _within(network: IPv4Network | IPv6Network | None, around: str) -> bool:
    outer = ip_network(around)
    if isinstance(network, IPv4Network):
        return isinstance(outer, IPv4Network) and network.subnet_of(outer)
    return isinstance(network, IPv6Network) and isinstance(outer, IPv6Network) and network.subnet_of(outer)


class RequestedPort(msgspec.Struct, frozen=True):
    """A destination's port as it was asked for: a number or a name, or nothing; likewise the protocol."""

    port: str = ""
    protocol: str = ""

    @property
    def number(self) -> int | None:
        """The port, None where it is a name or missing. Raises UnanswerableError."""
        if not self.port.isdecimal():
            return None
        if len(self.port) > 5 or int(self.port) > 65535:
            raise UnanswerableError(f"port {self.port!r}: expected a number up to 65535, or a port's name")
        if not int(self.port) and not self.protocol.startswith("ICMP"):
            raise UnanswerableError("port 0: expected a number from 1 to 65535, or a port's name")
        return int(self.port)

    @property
    def protocols(self) -> tuple[int, ...]:
        """The protocol, or without one all that it may be. Raises UnanswerableError."""
        known = [name for name in PROTOCOLS if name != "ANY"]
        if not self.protocol:
            return tuple(PROTOCOLS[name] for name in known)
        if self.protocol.upper() not in known:
            raise UnanswerableError(f"protocol {self.protocol!r}: expected one of {', '.join(known)}")
        return (PROTOCOLS[self.protocol.upper()],)


class Directory(Protocol):
    """Who and what there is. All raise UnanswerableError for what is not known."""

    place: str
    """Where this knowledge is from: ``on this node``, ``in the manifests``."""

    def reserved(self, name: str) -> End | None:
        """The end of a reserved identity, ``host`` or ``world``; None for another word."""
        ...

    def identity(self, number: int) -> End:
        """The end of an identity."""
        ...

    def pod(self, name: str) -> End | None:
        """The pod, by namespace and name; None when there is none."""
        ...

    def pods(self) -> Sequence[str]:
        """All of them, by namespace and name."""
        ...

    def pod_ports(self, pod: str) -> Sequence[NamedPodPort]:
        """The ports that a pod's containers name."""
        ...

    def has_service(self, name: str) -> bool:
        """Whether there is a service of this namespace and name."""
        ...

    def frontends(self, name: str, client: End) -> Sequence[ServedPort]:
        """The ports that a client reaches a service by."""
        ...

    def frontends_at(self, address: IPAddress, client: End) -> Sequence[ServedPort]:
        """The ports served at an address."""
        ...

    def network(self, text: str) -> End:
        """The end that a network is. Raises ValueError for what is none."""
        ...

    def at(self, address: IPAddress, client: End | None) -> Sequence[tuple[End, str]]:
        """The owner of the address, and notes about it; several where it is not certain."""
        ...

    def named(self, name: str) -> Sequence[End]:
        """The addresses of a DNS name."""
        ...

    def sent_on(self, address: IPAddress, port: int | None) -> str:
        """The service that is served at an address by others: kube-proxy, another node; empty without one."""
        ...


def parse_asked(text: str) -> RequestedPort:
    """``PORT[/PROTO]``; raises UnanswerableError."""
    port, _, protocol = text.partition("/")
    asked = RequestedPort(port, protocol.upper())
    if not _PORT.fullmatch(port) or not asked.protocols:
        raise UnanswerableError(f"port {text!r}: expected PORT/PROTO, PORT a number up to 65535 or a name")
    _ = asked.number
    return asked


def parse_destination(text: str) -> tuple[str, RequestedPort]:
    """``DST[:PORT[/PROTO]]`` in its parts; an IPv6 address with a port is in brackets.

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
    return name, parse_asked(port) if port else RequestedPort()


def source_of(directory: Directory, text: str) -> End:
    """Who connects. Raises UnanswerableError."""
    text = text.removeprefix("reserved:")
    if text.startswith(SERVICE) or (_service(directory, text) and directory.pod(_qualified(text)) is None):
        raise UnanswerableError(f"{text} is a service, which opens no connections: give a pod")
    found = _ends(directory, text, None)
    if len(found) > 1:
        names = ", ".join(end.title for end, _ in found)
        raise UnanswerableError(f"{text} is ambiguous, give one of: {names}")
    return found[0][0]


def targets_of(directory: Directory, text: str, asked: RequestedPort, client: End) -> list[Target]:
    """All that a destination leads to. Raises UnanswerableError."""
    text = text.removeprefix("reserved:")
    service = _service(directory, text)
    if service and (text.startswith(SERVICE) or directory.pod(_qualified(text)) is None):
        return list(_of_service(directory, service, asked, client))
    if service and not text.startswith(POD):
        raise UnanswerableError(f"{text} is a pod and a service: write {POD}{text} or {SERVICE}{text}")
    if text.startswith(SERVICE):
        raise UnanswerableError(f"there is no service {_qualified(text)} {directory.place}")
    try:
        address = ip_address(text)
    except ValueError:
        pass
    else:
        return list(_of_address(directory, address, asked, client))
    found: list[Target] = []
    for end, note in _ends(directory, text, client):
        found += _of_end(directory, end, asked, note)
    return found


def _service(directory: Directory, text: str) -> str:
    """The name of the service that is meant, if there is one."""
    if text.startswith(POD):
        text = text.removeprefix(POD)
    dns = _DNS_OF_SERVICE.fullmatch(text)
    name = f"{dns['namespace']}/{dns['name']}" if dns else _qualified(text)
    return name if name.count("/") == 1 and directory.has_service(name) else ""


def _qualified(text: str) -> str:
    """With the namespace ``default`` where none is written."""
    text = text.removeprefix(POD).removeprefix(SERVICE)
    return text if "/" in text else f"default/{text}"


def _ends(directory: Directory, text: str, client: End | None) -> Sequence[tuple[End, str]]:
    """The peer that is meant, and notes about it."""
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
    from difflib import get_close_matches  # only mistakes need it

    near = get_close_matches(_qualified(text), directory.pods(), 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UnanswerableError(f"there is no pod or service {_qualified(text)} {directory.place}{hint}")


def _of_end(directory: Directory, end: End, asked: RequestedPort, note: str) -> Iterator[Target]:
    """The port of an end that is not a service; its names are those of a pod's containers."""
    if not asked.port:
        yield Target(end, note=note)
    elif (number := asked.number) is not None:
        protocol = asked.protocols[0] if asked.protocol else PROTOCOLS["TCP"]
        yield Target(end, protocol, number, note=note)
    else:
        ports = directory.pod_ports(end.key) if end.key else ()
        meant = [one for one in ports if one.name == asked.port and one.protocol in asked.protocols]
        if not meant:
            names = ", ".join(sorted({one.name for one in ports})) or "none"
            raise UnanswerableError(f"{end.title} has no port named {asked.port} (it has: {names})")
        for one in meant:
            yield Target(end, one.protocol, one.port, note=note)


def _of_address(
    directory: Directory, address: IPAddress, asked: RequestedPort, client: End
) -> Iterator[Target]:
    frontends = directory.frontends_at(address, client)
    meant = [one for one in frontends if _is_meant(one, asked)]
    if not asked.port and any(not one.of_nodes for one in frontends):
        for one in frontends:
            yield from _of_frontend(one, asked)
        return
    if asked.port and meant:
        for one in meant:
            yield from _of_frontend(one, asked)
        return
    note = ""
    if frontends and asked.port and not meant:
        services = ", ".join(sorted({one.service for one in frontends}))
        note = f"no service has this port at {address} (it is of {services}): packets go to the address"
    service = directory.sent_on(address, asked.number) if asked.port else ""
    for end, more in directory.at(address, client):
        meant_end = end._replace(elsewhere=f"the node of a backend of service {service}") if service else end
        yield from _of_end(directory, meant_end, asked, more or note)


def _is_meant(frontend: ServedPort, asked: RequestedPort) -> bool:
    if frontend.protocol and frontend.protocol not in asked.protocols:
        return False
    if not frontend.protocol and asked.protocols[0] not in BALANCED:
        return False
    number = asked.number
    return frontend.port == number if number is not None else frontend.name == asked.port


def _of_service(directory: Directory, name: str, asked: RequestedPort, client: End) -> Iterator[Target]:
    frontends = directory.frontends(name, client)
    meant = [one for one in frontends if not asked.port or _is_meant(one, asked)]
    if not meant and asked.number is not None and all(one.headless for one in frontends) and frontends:
        # Backends may be asked for any port.
        protocol = asked.protocols[0] if asked.protocol else PROTOCOLS["TCP"]
        ends = {one.end.title: one.end for frontend in frontends for one in frontend.backends}
        for end in ends.values():
            yield Target(end, protocol, asked.number, via=frontends[0].text)
        return
    if not meant:
        ports = ", ".join(
            dict.fromkeys(f"{one.name} {port_text(one.port, one.protocol)}".strip() for one in frontends)
        )
        wanted = f"{asked.port}/{asked.protocol}".rstrip("/")
        what = f"no port {wanted} (it has: {ports or 'none'})" if asked.port else "no port"
        raise UnanswerableError(f"service {name} has {what}")
    for one in meant:
        yield from _of_frontend(one, asked)


def _of_frontend(frontend: ServedPort, asked: RequestedPort) -> Iterator[Target]:
    protocol = frontend.protocol or (asked.protocols[0] if asked.protocol else PROTOCOLS["TCP"])
    if frontend.problem or not frontend.backends:
        no_backend = End(f"service {frontend.service}", 0, LabelSet(()))
        problem = frontend.problem or f"service {frontend.service} has no ready backend"
        yield Target(no_backend, protocol, frontend.port, via=frontend.text, problem=problem)
        return
    for one in frontend.backends:
        yield Target(one.end, protocol, one.port, frontend.text, one.problem, frontend.note)
