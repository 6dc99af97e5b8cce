"""Claims on frontends: which addresses services may not use, and which of several claims is served.

``ServiceCatalog`` asks ReservedAddresses about every external address, and writes the table ``frontends``
through Claims. Addresses in use by the cluster, or reachable on no other host, are refused: users may put any
address into externalIPs, and divert the cluster's traffic (CVE-2020-8554). Only controllers write a load
balancer's addresses, so these may be a node's (class ``io.cilium/node``) or the API server's. Local redirect
policies may not redirect a cluster address of another namespace.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from enum import IntEnum
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from types import TracebackType
from typing import Final, Self

import msgspec

from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, NodeIP
from cells.kubernetes.objects.core import SERVICE_TYPES, Pod, Service, ServicePort
from cells.services import (
    IPV6,
    PROTOCOLS,
    BackendState,
    Frontend,
    FrontendKey,
    IPAddress,
    LoadBalancerOptions,
    ServiceAddress,
    ServiceName,
    ServiceType,
    host_of,
    is_port,
    is_special,
    parse_address,
    parse_host,
    parse_prefix,
    plain,
)
from cells.services.model.backends import addresses_of
from cells.services.model.redirect import claimant
from lifecycle import Table

__all__ = [
    "EXTERNAL_IPS",
    "HOST_IP",
    "INGRESS",
    "Holder",
    "RefusedAddress",
    "Reservation",
    "ReservedAddresses",
    "cluster_hosts",
    "frontends",
    "node_reservations",
    "pod_reservations",
    "unsupported_parts",
]


IPNetwork = IPv4Network | IPv6Network

EXTERNAL_IPS, INGRESS = "externalIPs", "status.loadBalancer.ingress"
"""The fields of a Service with addresses for clients outside."""
HOST_IP: Final = "hostIP"
"""The field of a pod's port with an address of the node."""
FOREIGN_HOST_IP: Final = "is not an address of this node's devices"
SPECIAL_ADDRESS: Final = "is loopback, link-local, multicast or unspecified"

_OUTSIDE: Final = (ServiceType.EXTERNAL_IPS, ServiceType.LOAD_BALANCER)


class Holder(IntEnum):
    """The kind of object that uses an address; the lowest value takes precedence."""

    CLUSTER_IP = 1
    ROUTER = 2
    NODE = 3
    SYSTEM = 4
    """An endpoint of the API server or of the cluster's DNS."""
    POD = 5


class Reservation(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """An address or range, and a description of its use.

    The hash is cached: hashing an address calls Python code, and every service has reservations.
    """

    what: IPAddress | IPNetwork
    holder: Holder
    use: str
    namespace: str = ""
    """The namespace of the service with the cluster address."""


class RefusedAddress(msgspec.Struct, frozen=True):
    """An address that a service or a pod's host port requests and may not use."""

    service: ServiceName
    """For a pod ``pod/NAME``, which is not a valid name of a service."""
    address: IPAddress
    part: str
    """The field of the object."""
    reason: str
    announced_only: bool = False
    """Whether it is not served anyway, and only the announcement (BGP, L2) is refused."""

    @property
    def outcome(self) -> str:
        """The consequence, in words."""
        return "not announced" if self.announced_only else "not served"

    @property
    def object_name(self) -> str:
        """Namespace and name of the Service or Pod."""
        return f"{self.service.namespace}/{self.service.name.removeprefix('pod/')}"


_NONE: Final[frozenset[Reservation]] = frozenset()
_NO_HOSTS: Final[list[bytes]] = []


class ReservedAddresses:
    """Addresses and ranges in use, by the object that uses them."""

    def __init__(self) -> None:
        self._by_object: dict[str, frozenset[Reservation]] = {}
        self._reservations: dict[IPAddress | IPNetwork, dict[Reservation, int]] = {}
        self._cluster_of: dict[ServiceName, list[bytes]] = {}
        self._cluster: dict[bytes, dict[ServiceName, None]] = {}
        """Services by cluster address: reservations for them are created only when one is looked up."""
        self._lengths: dict[int, dict[int, int]] = {4: {}, 6: {}}
        """Numbers of ranges by family and prefix length: each length needs one look-up of an address."""

    def replace(self, name: str, reservations: Iterable[Reservation]) -> Collection[IPAddress | IPNetwork]:
        """Replace the reservations of an object; return the changed addresses and ranges."""
        reservations = frozenset(
            [
                msgspec.structs.replace(each, what=plain(each.what))
                if isinstance(each.what, IPv6Address)
                else each
                for each in reservations
            ]
        )
        before = self._by_object.get(name, _NONE)
        if reservations == before:
            return ()
        if reservations:
            self._by_object[name] = reservations
        else:
            del self._by_object[name]
        for each in before - reservations:
            self._count(each, -1)
        for each in reservations - before:
            self._count(each, 1)
        return [each.what for each in before ^ reservations]

    def replace_cluster(self, name: ServiceName, hosts: list[bytes]) -> Collection[bytes]:
        """Replace the cluster addresses of a service; return the changed ones."""
        before = self._cluster_of.get(name, _NO_HOSTS)
        if hosts == before:
            return ()
        for host in before:
            del self._cluster[host][name]
            if not self._cluster[host]:
                del self._cluster[host]
        if hosts:
            self._cluster_of[name] = hosts
        else:
            del self._cluster_of[name]
        for host in hosts:
            self._cluster.setdefault(host, {})[name] = None
        return {*before} ^ {*hosts} if before else hosts

    def _count(self, one: Reservation, step: int) -> None:
        held = self._reservations.get(one.what)
        if held is None:
            self._reservations[one.what] = {one: step}
        elif count := held.get(one, 0) + step:
            held[one] = count
        else:
            del held[one]
            if not held:
                del self._reservations[one.what]
        if isinstance(one.what, IPv4Network | IPv6Network):
            lengths = self._lengths[one.what.version]
            lengths[one.what.prefixlen] = lengths.get(one.what.prefixlen, 0) + step
            if not lengths[one.what.prefixlen]:
                del lengths[one.what.prefixlen]

    def serves(self, frontend: Frontend, options: LoadBalancerOptions) -> bool:
        """Whether the service of the frontend may use its address."""
        ip, type_ = frontend.key.address.ip, frontend.type
        return type_ not in _OUTSIDE or not self.refusal(ip, type_, options)

    def refusal(self, ip: IPAddress, type_: ServiceType, options: LoadBalancerOptions) -> str:
        """Return why services may not use the address in this type of frontend; empty if they may."""
        address = plain(ip)
        if is_special(address):
            return SPECIAL_ADDRESS
        found = sorted(set(self._of(address)), key=lambda one: (one.holder.value, one.use))
        of_node = any(one.holder is Holder.NODE for one in found)
        for one in found:
            if one.holder is Holder.NODE or (one.holder is Holder.POD and of_node):
                if type_ is ServiceType.LOAD_BALANCER or options.enable_external_ips_of_nodes:
                    continue
            elif one.holder is Holder.SYSTEM and type_ is ServiceType.LOAD_BALANCER:
                continue
            return f"is {one.use}"
        return ""

    def redirect_refusal(self, ip: IPAddress, namespace: str) -> str:
        """Return why policies of the namespace may not redirect the address; or empty.

        Policies may redirect external addresses, link-local ones such as those of metadata and DNS servers,
        and cluster addresses of services in their own namespace.
        """
        address = plain(ip)
        if is_special(address) and not address.is_link_local:
            return "is loopback, multicast or unspecified"
        found = sorted(set(self._of(address)), key=lambda one: (one.holder.value, one.use))
        for one in found:
            if one.holder is not Holder.CLUSTER_IP or one.namespace != namespace:
                return f"is {one.use}"
        return ""

    def _of(self, ip: IPAddress) -> Iterator[Reservation]:
        for name in self._cluster.get(host_of(ip), ()):
            yield Reservation(ip, Holder.CLUSTER_IP, f"the cluster address of {name}", name.namespace)
        yield from self._reservations.get(ip, ())
        bits = ip.max_prefixlen
        network = IPv4Network if ip.version == 4 else IPv6Network
        for length in self._lengths[ip.version]:
            shift = bits - length
            yield from self._reservations.get(network((int(ip) >> shift << shift, length)), ())


def node_reservations(
    name: str, addresses: Iterable[NodeIP], ranges: Iterable[IPNetwork]
) -> Iterator[Reservation]:
    """Yield a node's addresses and its pod CIDRs."""
    for each in addresses:
        if each.type == CILIUM_INTERNAL_IP:
            yield Reservation(each.ip, Holder.ROUTER, f"the router's address of node {name}")
        else:
            yield Reservation(each.ip, Holder.NODE, f"an address of node {name}")
    for cidr in ranges:
        yield Reservation(cidr, Holder.POD, f"in {cidr}, the pods' range of node {name}")


def pod_reservations(pod: Pod) -> Iterator[Reservation]:
    """Yield a pod's addresses; none for host network pods, which use the node's."""
    if pod.spec.host_network or pod.finished:
        return
    for ip in map(parse_address, pod.addresses):
        if ip is not None:
            yield Reservation(ip, Holder.POD, f"the address of pod {pod.namespace}/{pod.name}")


def outside_addresses(
    service: Service, options: LoadBalancerOptions
) -> Iterator[tuple[ServiceType, str, IPAddress, bool]]:
    """Yield a service's external addresses with their field, and whether they are served."""
    served = service.spec.type != "ExternalName" and service.spec.cluster_ip != "None"
    for each in service.status.load_balancer.ingress or ():
        ip = parse_address(each.ip) if each.is_of_nodes else None
        if ip is not None:
            yield ServiceType.LOAD_BALANCER, INGRESS, ip, served and options.enable_node_port
    for text in service.spec.external_ips or ():
        ip = parse_address(text)
        if ip is not None:
            yield ServiceType.EXTERNAL_IPS, EXTERNAL_IPS, ip, served and options.enable_external_ips


def cluster_hosts(service: Service) -> list[bytes]:
    """Return the distinct cluster addresses of a service, served or not, as family and address."""
    spec = service.spec
    texts = spec.cluster_ips or ()
    if spec.cluster_ip and spec.cluster_ip not in texts:
        texts = (*texts, spec.cluster_ip)
    found = [host for host in map(parse_host, texts) if host is not None]
    if len(found) < 2 and not (found and found[0][0] == IPV6):
        return found
    return list(dict.fromkeys([host_of(plain(ip_address(host[1:]))) for host in found]))


def same_cluster_addresses(one: Service, other: Service) -> bool:
    """Whether two versions of a service have the same cluster addresses."""
    return one.spec.cluster_ip == other.spec.cluster_ip and one.spec.cluster_ips == other.spec.cluster_ips


# Parts of a service's spec that are not served, for log and events.


def unsupported_parts(service: Service, options: LoadBalancerOptions) -> Iterator[tuple[str, str]]:
    """Yield the fields of the spec that are not served, with the reason."""
    spec = service.spec
    if spec.type == "ExternalName" or spec.cluster_ip == "None":
        return
    if spec.type and spec.type not in SERVICE_TYPES:
        yield "type", f"{spec.type!r}: expected one of {', '.join(SERVICE_TYPES)}: served as ClusterIP"
    for name, texts in (("clusterIPs", spec.cluster_ips), ("externalIPs", spec.external_ips)):
        yield from ((name, reason) for text in texts or () for reason in _faults_in_address(name, text))
    for text in spec.load_balancer_source_ranges or ():
        if parse_prefix(text) is None:
            yield "loadBalancerSourceRanges", f"{text!r}: expected an IP network: left out"
    first: dict[int, ServicePort] = {}
    for port in spec.ports or ():
        served = first.setdefault(port.port, port)
        if not options.bpf_lb_proto_diff and _target_of(port) != _target_of(served):
            what = f"bpf-lb-proto-diff is off: {port.protocol} is served as {served.protocol} is"
            yield f"port {port.port}", f"{what}, by its target"
        yield from ((f"port {port.port}", reason) for reason in _faults(port, options))


def _faults_in_address(name: str, text: str) -> Iterator[str]:
    """Yield invalid addresses; special external addresses are reported as refused instead."""
    parsed = parse_address(text)
    if text and parsed is None:
        yield f"{text!r}: expected an IP address"
    elif parsed is not None and name == "clusterIPs" and is_special(parsed):
        yield f"{text}: {SPECIAL_ADDRESS}"


def _target_of(port: ServicePort) -> tuple[int | str, int]:
    return port.target_port or port.port, port.node_port


def _faults(port: ServicePort, options: LoadBalancerOptions) -> Iterator[str]:
    if port.protocol not in PROTOCOLS:
        yield f"{port.protocol!r}: expected TCP, UDP or SCTP"
    elif not is_port(port.port) or not (is_port(port.node_port) or port.node_port == 0):
        yield f"{port.node_port if is_port(port.port) else port.port}: expected a port, 1 to 65535"
    elif port.protocol == "SCTP":
        yield from _faults_in_sctp(port, options)


def _faults_in_sctp(port: ServicePort, options: LoadBalancerOptions) -> Iterator[str]:
    """Yield translated SCTP ports: SCTP's checksum covers the ports. Named targets are not checked."""
    if not options.enable_sctp:
        yield "enable-sctp is off: SCTP is dropped"
        return
    target = 0 if isinstance(port.target_port, str) else port.target_port or port.port
    for number in (port.port, port.node_port if options.enable_node_port else 0):
        if target and number and number != target:
            yield f"{number}: SCTP keeps its port, and the target's is {target}: expected one number"


# One of several claims on a frontend is served.

CLAIMANT: Final = "claimant"
"""The index of the table ``frontends`` by claimant."""


def frontends() -> Table[FrontendKey, Frontend]:
    """Create the table ``frontends``: every served address with its backends, by address and scope."""
    return Table("frontends", key=lambda one: one.key, indexes={CLAIMANT: lambda one: (claimant(one),)})


class Claims:
    """Selects one of several claims on a frontend; the only writer of the table ``frontends``.

    A frontend is served for one claimant until that claim is withdrawn. A manual setting lasts until a
    claimant changes the frontend, a manual backend state while any frontend has the backend.

    A sole claim is stored only as its row. Claims are stored separately if they differ from the row: several
    claims, a manual setting, or manual backend states.

    Changes within a ``with`` block are one transaction; otherwise each call is one.
    """

    def __init__(self, table: Table[FrontendKey, Frontend]) -> None:
        self._table = table
        self._index = table.by(CLAIMANT)
        self._rows = table.txn()
        self._depth = 0
        self._written: dict[ServiceName, dict[FrontendKey, None]] = {}
        """Frontends, by claimant, that the transaction put, and that are not yet in the index."""
        self._claims: dict[FrontendKey, dict[ServiceName, Frontend]] = {}
        self._keys_of: dict[ServiceName, dict[FrontendKey, None]] = {}
        self._manual: dict[FrontendKey, Frontend | None] = {}
        """None: not served, whatever the claims."""
        self._states: dict[ServiceAddress, BackendState] = {}
        self._frontend_of: dict[ServiceAddress, FrontendKey] = {}
        """For each of these backends one frontend with it: others are searched only if this one changes."""
        self.contested: dict[FrontendKey, tuple[ServiceName, ...]] = {}
        """Frontends that several services claim: the served claimant, then the others."""

    def __enter__(self) -> Self:
        if not self._depth:
            self._rows = self._table.txn().__enter__()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._written.clear()
            self._rows.__exit__(kind, error, trace)

    def clear(self) -> None:
        """Delete previous rows, within a ``with`` block that puts the current claims."""
        self._rows.replace_all(())

    def move_to(self, table: Table[FrontendKey, Frontend]) -> None:
        """Write to another table from now on: replace its rows in one transaction."""
        with table.txn() as rows:
            rows.replace_all(self._table.all())
        self._table, self._index, self._rows = table, table.by(CLAIMANT), table.txn()

    def replace(self, owner: ServiceName, frontends: Iterable[Frontend]) -> None:
        """Replace the claims of one owner."""
        wanted = {frontend.key: frontend for frontend in frontends}
        with self:
            for key in self._claimed_by(owner, exclude=wanted):
                self._withdraw(key, owner)
            for key, frontend in wanted.items():
                self._claim(key, owner, frontend)
            if self._states:
                self._prune_states()

    def override(self, key: FrontendKey, frontend: Frontend | None) -> None:
        """Serve a manual frontend, or nothing if None, in place of any claim."""
        with self:
            claims = self._claims_on(key)
            self._manual[key] = frontend
            self._put_row(key, claims)
            self._prune_states()

    def clear_override(self, key: FrontendKey) -> None:
        """Serve the claimed frontend again."""
        with self:
            claims = self._claims_on(key)
            self._manual.pop(key, None)
            self._put_row(key, claims)
            self._prune_states()

    def set_state(self, address: ServiceAddress, state: BackendState) -> None:
        """Set a backend's state manually in all frontends; a no-op without a frontend with the backend."""
        with self:
            users = [key for key in self._keys() if self._has(key, address)]
            if users:
                self._states[address] = state
                self._frontend_of[address] = users[0]
            for key in users:
                self._put_row(key, self._claims_on(key))

    def _claimed_by(self, owner: ServiceName, *, exclude: Container[FrontendKey]) -> Iterable[FrontendKey]:
        """Return the owner's frontends except ``exclude``; the index misses uncommitted changes."""
        found = [*self._index.keys(owner), *self._written.get(owner, ()), *self._keys_of.get(owner, ())]
        if not found:
            return ()
        more = [key for key in found if key not in exclude]
        return [
            key
            for key in dict.fromkeys(more)
            if self._is_only_of(key, owner) or owner in self._claims.get(key, ())
        ]

    def _is_only_of(self, key: FrontendKey, owner: ServiceName) -> bool:
        row = self._rows.get(key)
        return row is not None and key not in self._claims and claimant(row) == owner

    def _claims_on(self, key: FrontendKey) -> Mapping[ServiceName, Frontend]:
        claims = self._claims.get(key)
        if claims is None:
            row = self._rows.get(key)
            claims = {claimant(row): row} if row is not None else {}
        return claims

    def _claim(self, key: FrontendKey, owner: ServiceName, frontend: Frontend) -> None:
        if key not in self._claims and not self._states:
            row = self._rows.get(key)
            if row is None or claimant(row) == owner:  # nearly always: the only claimant
                self._written.setdefault(owner, {})[key] = None
                self._rows.put(frontend)
                return
        claims = self._claims_on(key)
        if claims.get(owner) != frontend:
            self._manual.pop(key, None)
            self._put_row(key, {**claims, owner: frontend})

    def _withdraw(self, key: FrontendKey, owner: ServiceName) -> None:
        self._manual.pop(key, None)
        self._put_row(key, {name: one for name, one in self._claims_on(key).items() if name != owner})

    def _put_row(self, key: FrontendKey, claims: Mapping[ServiceName, Frontend]) -> None:
        """Put the row that these claims imply; store the claims unless the row equals a sole claim."""
        for name in self._claims.pop(key, ()):
            del self._keys_of[name][key]
            if not self._keys_of[name]:
                del self._keys_of[name]
        self._record_conflict(key, claims)
        manual = key in self._manual
        plain = self._manual[key] if manual else _preferred_claim(claims)
        served = _with_states(plain, self._states) if plain is not None else None
        if manual or len(claims) > 1 or served is not plain:
            self._claims[key] = dict(claims)
            for name in claims:
                self._keys_of.setdefault(name, {})[key] = None
        elif served is not None:
            self._written.setdefault(next(iter(claims)), {})[key] = None
        if served is None:
            self._rows.delete(key)
        else:
            self._rows.put(served)

    def _record_conflict(self, key: FrontendKey, claims: Mapping[ServiceName, Frontend]) -> None:
        """Record whether several services claim the frontend; local redirects are no conflict."""
        self.contested.pop(key, None)
        served = _preferred_claim(claims) if len(claims) > 1 else None
        if served is not None and served.type is not ServiceType.LOCAL_REDIRECT:
            others = [one.service for one in claims.values() if one is not served]
            self.contested[key] = (served.service, *others)

    def _keys(self) -> Iterable[FrontendKey]:
        written = [key for keys in self._written.values() for key in keys]
        return dict.fromkeys([*self._table.keys(), *written, *self._claims])

    def _has(self, key: FrontendKey, address: ServiceAddress) -> bool:
        frontend = self._manual[key] if key in self._manual else _preferred_claim(self._claims_on(key))
        return frontend is not None and address in addresses_of(frontend.backends)

    def _prune_states(self) -> None:
        for address, user in list(self._frontend_of.items()):
            if self._has(user, address):
                continue
            other = next((key for key in self._keys() if self._has(key, address)), None)
            if other is not None:
                self._frontend_of[address] = other
            else:
                del self._states[address], self._frontend_of[address]


def _with_states(frontend: Frontend, states: Mapping[ServiceAddress, BackendState]) -> Frontend:
    """Apply manual states, except to backends that are terminating by their source."""
    if not states or states.keys().isdisjoint(addresses_of(frontend.backends)):
        return frontend
    backends = tuple(
        msgspec.structs.replace(one, state=states[one.address], manual=True)
        if one.address in states and one.state is not BackendState.TERMINATING
        else one
        for one in frontend.backends
    )
    return msgspec.structs.replace(frontend, backends=backends)


def _preferred_claim(claims: Mapping[ServiceName, Frontend]) -> Frontend | None:
    """Return the claim to serve: a service's before a host port's, otherwise the oldest.

    Cluster addresses take precedence over external ones: no other service may divert them. Redirects take
    precedence over cluster addresses, but not over external ones.
    """
    if len(claims) < 2:
        return next(iter(claims.values()), None)
    in_cluster = any(one.type is ServiceType.CLUSTER_IP for one in claims.values())
    ranks = _CLUSTER_RANKS if in_cluster else _OUTSIDE_RANKS
    return min(claims.values(), key=lambda one: ranks.get(one.type, 2))


_CLUSTER_RANKS = {ServiceType.LOCAL_REDIRECT: 0, ServiceType.CLUSTER_IP: 1, ServiceType.HOST_PORT: 4}
_OUTSIDE_RANKS = {ServiceType.LOCAL_REDIRECT: 3, ServiceType.HOST_PORT: 4}
