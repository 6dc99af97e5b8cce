"""Computes backends from EndpointSlices and remote services, and responses of health check node ports.

``ServiceCatalog`` combines the backends with Services to frontends; ``LoadBalancer`` writes them. Pure
functions.

Source: discovery.k8s.io/v1, KEP-1669 (terminating endpoints), KEP-2433 (topology hints); Cilium 1.17, global
services.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from operator import attrgetter
from socket import AF_INET, AF_INET6, inet_pton
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import msgspec

from cells.kubernetes.objects.core import EndpointConditions, EndpointSlice, SliceEndpoint
from cells.services import (
    ANY_PROTOCOL,
    DEFAULT_WEIGHT,
    FIRST_BYTES_OF_SPECIAL,
    PROTOCOLS,
    Backend,
    BackendState,
    Frontend,
    LoadBalancerOptions,
    ServiceAddress,
    ServiceName,
    address_end,
    is_port,
    is_special,
    parse_address,
    parse_host,
)

if TYPE_CHECKING:
    from cells.clustermesh.tables import RemotePort, RemoteService

__all__ = [
    "WEIGHT",
    "Affinity",
    "HealthAnswer",
    "RefusedBackend",
    "SliceBackends",
    "addresses_of",
    "backends_by_port",
    "backends_of",
    "health_answers",
    "refused_backends",
    "selectable",
    "state_of",
    "weight_of",
    "with_missing",
    "with_remote",
]


WEIGHT = "service.cilium.io/weight"
"""Annotation of a slice: the weight of its backends with Maglev, as in Cilium 1.20."""
_MAX_WEIGHT = 65535

Backends = Mapping[str, Sequence[Backend]]
"""Backends by port name, sorted by address."""


class SliceBackends(Sequence[Backend]):
    """The active backends of one port of a slice, as a column of addresses.

    Backend objects are created on access: there are ten times as many as services, and few are accessed.
    """

    __slots__ = ("_endpoints", "_port_name", "_weight", "addresses")

    def __init__(
        self, addresses: Sequence[bytes], endpoints: Sequence[SliceEndpoint], port_name: str, weight: int
    ) -> None:
        """``addresses`` are the bytes of ServiceAddress."""
        self.addresses = addresses
        self._endpoints = endpoints
        self._port_name = port_name
        self._weight = weight

    def __len__(self) -> int:
        return len(self.addresses)

    @overload
    def __getitem__(self, at: int) -> Backend: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Backend]: ...
    def __getitem__(self, at: int | slice) -> Backend | Sequence[Backend]:
        if isinstance(at, slice):
            return tuple(self)[at]
        return self._backend(self.addresses[at], self._endpoints[at])

    def __iter__(self) -> Iterator[Backend]:
        return map(self._backend, self.addresses, self._endpoints)

    def _backend(self, address: bytes, endpoint: SliceEndpoint) -> Backend:
        return Backend(
            ServiceAddress.read(address),
            BackendState.ACTIVE,
            endpoint.node_name or "",
            self._port_name,
            self._weight,
            _hinted_zones(endpoint),
        )

    def extended(self, more: Sequence[Backend], at: Iterable[int]) -> Sequence[Backend]:
        """Return these backends and the ones of ``more`` at these indexes."""
        if not isinstance(more, SliceBackends) or self.shared() != more.shared():
            return (*self, *(more[each] for each in at))
        addresses = [*self.addresses, *(more.addresses[each] for each in at)]
        endpoints = [*self._endpoints, *(more._endpoints[each] for each in at)]  # noqa: SLF001  # of the same class
        return SliceBackends(addresses, endpoints, *self.shared())

    def shared(self) -> tuple[str, int]:
        """Return the port name and weight, which all have in common."""
        return self._port_name, self._weight

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SliceBackends):
            if self.addresses != other.addresses or self.shared() != other.shared():
                return False
            return self._endpoints == other._endpoints or tuple(self) == tuple(other)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[type[tuple[Backend, ...]], tuple[list[Backend]]]:
        return tuple, (list(self),)


def addresses_of(backends: Sequence[Backend]) -> Sequence[bytes]:
    """Return the backends' addresses, in the same order."""
    return backends.addresses if isinstance(backends, SliceBackends) else [one.address for one in backends]


def state_of(conditions: EndpointConditions, options: LoadBalancerOptions) -> BackendState | None:
    """Return the state of an endpoint; None if it must not receive traffic.

    An endpoint that is neither ready nor serving has none. One that is not ready, but serving and
    terminating, keeps its connections. An endpoint without a ready condition is ready.
    """
    if conditions.ready is not False:
        return BackendState.ACTIVE
    if not options.enable_k8s_terminating_endpoint or not conditions.serving:
        return None
    return BackendState.TERMINATING if conditions.terminating else BackendState.ACTIVE


def terminating_addresses(slice_: EndpointSlice, options: LoadBalancerOptions) -> int:
    """Count the addresses that still serve while their endpoint terminates."""
    return sum(
        len(one.addresses or ())
        for one in slice_.endpoints or ()
        if one.conditions.ready is False and state_of(one.conditions, options) is BackendState.TERMINATING
    )


def weight_of(slice_: EndpointSlice) -> int:
    """Return the weight in the annotation. Raises ValueError unless it is a number from 1 to 65535."""
    text = (slice_.metadata.annotations or {}).get(WEIGHT)
    if text is None:
        return DEFAULT_WEIGHT
    digits = text.lstrip("0")[:6]  # six digits suffice to detect larger numbers
    if not (text.isascii() and text.isdigit() and digits and int(digits) <= _MAX_WEIGHT):
        raise ValueError(f"{text!r}: expected a number from 1 to {_MAX_WEIGHT}")
    return int(digits)


def with_missing(backends: Sequence[Backend], before: Sequence[Backend]) -> Sequence[Backend]:
    """Append the previous backends that are missing."""
    now = set(addresses_of(backends))
    missing = [at for at, address in enumerate(addresses_of(before)) if address not in now]
    if not missing:
        return backends
    if isinstance(backends, SliceBackends):
        return backends.extended(before, missing)
    return (*backends, *(before[at] for at in missing))


def selectable(backends: Sequence[Backend]) -> tuple[list[Backend], list[Backend]]:
    """Split backends into those for new connections, and the others.

    Active backends are selectable, or the terminating ones if none is active.
    """
    active = [one for one in backends if one.state is BackendState.ACTIVE]
    if len(active) == len(backends):
        return active, []
    if not active:
        active = [one for one in backends if one.state is BackendState.TERMINATING]
    chosen = set(map(id, active))
    return active, [one for one in backends if id(one) not in chosen]


def backends_by_port(backends: Backends) -> Iterator[tuple[str, int, int, list[Backend]]]:
    """Yield the backends that a headless service's name resolves to, by port name, number and protocol."""
    for name, some in backends.items():
        found: dict[tuple[int, int], list[Backend]] = {}
        for one in selectable(some)[0]:
            found.setdefault((one.address.port, one.address.protocol), []).append(one)
        for (port, protocol), selected in found.items():
            yield name, port, protocol, selected


def backends_of(slices: Sequence[EndpointSlice], options: LoadBalancerOptions) -> Backends:
    """Return the backends of a service's slices; an address in several is active if it is active in one."""
    if len(slices) == 1 and (columns := _columns(slices[0], options)) is not None:
        return columns
    found: dict[str, dict[ServiceAddress, Backend]] = {}
    for slice_ in slices:
        _add(found, slice_, options)
    return {name: tuple([of_port[key] for key in sorted(of_port)]) for name, of_port in found.items()}


def _columns(slice_: EndpointSlice, options: LoadBalancerOptions) -> Backends | None:
    """Return the backends of a sole slice; None unless each endpoint is ready and has one address.

    Nearly all slices qualify, and most of the time to read services is spent here.
    """
    endpoints = slice_.endpoints
    if not endpoints or slice_.address_type not in _FAMILIES:
        return None
    mark, family = _FAMILIES[slice_.address_type]
    hosts = _hosts(endpoints, family)
    by_host = dict(zip(hosts, endpoints, strict=False))
    if len(by_host) != len(endpoints):
        return None
    ordered = sorted(hosts)
    if ordered != hosts:
        endpoints = tuple([by_host[one] for one in ordered])
    found: dict[str, Sequence[Backend]] = {}
    weight = _weight(slice_)
    for port in slice_.ports or ():
        number = _protocol(port.protocol or "TCP", options)
        if number is None or not is_port(port.port):
            continue
        name = port.name or ""
        if name in found:
            return None
        end = address_end(port.port, number)
        found[name] = SliceBackends([mark + one + end for one in ordered], endpoints, name, weight)
    return found


def _hosts(endpoints: Sequence[SliceEndpoint], family: int) -> list[bytes]:
    """Return the endpoints' addresses, up to the first that is not ready or has no single valid address."""
    found = []
    for endpoint in endpoints:
        texts = endpoint.addresses
        if texts is None or len(texts) != 1 or endpoint.conditions.ready is False:
            break
        try:
            packed = inet_pton(family, texts[0])
        except (OSError, ValueError):
            break
        if packed[0] in FIRST_BYTES_OF_SPECIAL:
            break
        found.append(packed)
    return found


def _hinted_zones(endpoint: SliceEndpoint) -> tuple[str, ...] | None:
    """Return the zones in an endpoint's hints; None without hints."""
    hints = endpoint.hints.for_zones if endpoint.hints is not None else None
    return tuple([each.name for each in hints]) if hints else None


def _add(
    found: dict[str, dict[ServiceAddress, Backend]], slice_: EndpointSlice, options: LoadBalancerOptions
) -> None:
    """Add the backends of a slice."""
    if slice_.address_type not in _FAMILIES:
        return
    mark, family = _FAMILIES[slice_.address_type]
    active, weight = BackendState.ACTIVE, _weight(slice_)
    ports = [
        (name := port.name or "", address_end(port.port, number), found.setdefault(name, {}))
        for port in slice_.ports or ()
        if is_port(port.port) and (number := _protocol(port.protocol or "TCP", options)) is not None
    ]
    for endpoint in slice_.endpoints or ():
        conditions = endpoint.conditions
        state = active if conditions.ready is not False else state_of(conditions, options)
        if state is None:
            continue
        hinted = _hinted_zones(endpoint)
        for text in endpoint.addresses or ():
            try:
                packed = inet_pton(family, text)
            except (OSError, ValueError):
                continue
            if packed[0] in FIRST_BYTES_OF_SPECIAL and is_special(ip_address(packed)):
                continue
            for name, end, of_port in ports:
                address = new(ServiceAddress, mark + packed + end)  # ServiceAddress.read(), inlined
                held = of_port.get(address)
                if held is None or state < held.state:
                    of_port[address] = Backend(address, state, endpoint.node_name or "", name, weight, hinted)


def _weight(slice_: EndpointSlice) -> int:
    """Return the weight of the slice's backends; invalid annotations are reported elsewhere."""
    try:
        return weight_of(slice_) if slice_.metadata.annotations else DEFAULT_WEIGHT
    except ValueError:
        return DEFAULT_WEIGHT


def _protocol(name: str, options: LoadBalancerOptions) -> int | None:
    """Return the protocol number; None if unsupported; ANY with bpf-lb-proto-diff=false."""
    number = PROTOCOLS.get(name)
    return number if number is None or options.bpf_lb_proto_diff else ANY_PROTOCOL


# Backends in remote clusters.

Affinity = Literal["", "local", "remote"]
"""Which backends of a global service are preferred: local ones, remote ones, or none."""


class RefusedBackend(NamedTuple):
    """An address in a remote cluster that may not be a backend of a global service."""

    cluster: str
    address: str
    reason: str
    conflict: bool = True
    """Whether the address is a backend in another cluster."""


def with_remote(
    local: Backends, remote: Iterable[RemoteService], affinity: Affinity, options: LoadBalancerOptions
) -> tuple[Backends, list[RefusedBackend]]:
    """Merge local and remote backends of a global service; also return refused remote addresses.

    An address in several clusters belongs to the local cluster, or else to the first by name.
    """
    found = {name: _preferred(some, preferred=affinity == "local") for name, some in local.items()}
    owners = {address[:-3]: "" for some in local.values() for address in addresses_of(some)}
    refused: list[RefusedBackend] = []
    for service in sorted(remote, key=attrgetter("cluster")):
        for text, ports in service.backends.items():
            host = parse_host(text)
            if host is None or (host[1] in FIRST_BYTES_OF_SPECIAL and is_special(ip_address(host[1:]))):
                reason = "is not an address of a backend"
                refused.append(RefusedBackend(service.cluster, text, reason, conflict=False))
            elif (owner := owners.setdefault(host, service.cluster)) != service.cluster:
                reason = f"is a backend of cluster {owner}, too" if owner else "is a local backend, too"
                refused.append(RefusedBackend(service.cluster, text, reason))
            else:
                _add_remote(found, host, ports, service.cluster, affinity, options)
    ordered = {name: [of_port[key] for key in sorted(of_port)] for name, of_port in found.items()}
    return {name: tuple(some) for name, some in ordered.items()}, refused


def _preferred(backends: Sequence[Backend], *, preferred: bool) -> dict[ServiceAddress, Backend]:
    return {
        one.address: msgspec.structs.replace(one, preferred=True) if preferred else one for one in backends
    }


def _add_remote(
    found: dict[str, dict[ServiceAddress, Backend]],
    host: bytes,
    ports: Mapping[str, RemotePort],
    cluster: str,
    affinity: Affinity,
    options: LoadBalancerOptions,
) -> None:
    """Add a remote backend for each port with a supported protocol."""
    for name, port in ports.items():
        number = _protocol(port.protocol, options)
        if number is None or not is_port(port.port):
            continue
        address = ServiceAddress.read(host + address_end(port.port, number))
        found.setdefault(name, {})[address] = Backend(
            address, port_name=name, preferred=affinity == "remote", cluster=cluster
        )


def refused_backends(slice_: EndpointSlice) -> list[str]:
    """Return special addresses of endpoints, which are refused; the API server refuses them, too."""
    doubtful = [
        text
        for endpoint in slice_.endpoints or ()
        for text in endpoint.addresses or ()
        if text.startswith(_SPECIAL_TEXTS)
    ]
    return [text for text in doubtful if (ip := parse_address(text)) is not None and is_special(ip)]


_SPECIAL_TEXTS = ("0", "127.", "169.254.", "22", "23", ":", "f", "F")
"""First characters of special addresses."""
_FAMILIES = {"IPv4": (b"\4", int(AF_INET)), "IPv6": (b"\6", int(AF_INET6))}
"""The first byte of a :class:`ServiceAddress`, and the family for parsing, by address type."""
new = bytes.__new__


# The response of a service's health check node port: whether this node has local endpoints.
#
# Source: core/v1 ServiceSpec.healthCheckNodePort; kube-proxy's service health server.


class HealthAnswer(NamedTuple):
    """The response of a health check node port to any HTTP request."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def health_answers(frontends: Iterable[Frontend]) -> dict[int, HealthAnswer]:
    """Return the responses by health check node port.

    200 while an active backend is local, otherwise 503; a service behind a proxy always has one. If several
    services share a port, that of the first frontend counts.
    """
    counts: dict[int, tuple[ServiceName, int]] = {}
    for frontend in frontends:
        port = frontend.answered_port
        if not port:
            continue
        active = sum(one.state is BackendState.ACTIVE for one in frontend.backends)
        count = 1 if frontend.l7_proxy_port else active
        service, most = counts.get(port, (frontend.service, 0))
        if service == frontend.service:
            counts[port] = (service, max(count, most))
    return {port: _health_answer(service, count) for port, (service, count) in counts.items()}


def _health_answer(service: ServiceName, count: int) -> HealthAnswer:
    health = {"service": {"namespace": service.namespace, "name": service.name}, "localEndpoints": count}
    body = msgspec.json.encode(health) + b"\n"
    headers = (
        ("Content-Type", "application/json"),
        ("X-Content-Type-Options", "nosniff"),
        ("X-Load-Balancing-Endpoint-Weight", str(count)),
    )
    return HealthAnswer(200 if count else 503, headers, body)
