"""What each attachment takes: the edges to other cells, the start of an endpoint, MAC addresses, and undo."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from typing import Final, NamedTuple, Protocol

import msgspec

from cells.base.addresses import IPAddress
from cells.cni.protocol import CniError, ErrorContext
from cells.cni.request import NetConf, PodReference
from cells.endpoint import MAC_ANNOTATION, Endpoint, EndpointError, EndpointRequest, NewEndpoint, State
from cells.netlink.connection import NetlinkError
from cells.netlink.links import CreatedLink
from cells.netlink.messages import VethPair
from cells.netlink.rows import LinkInfo, parse_unicast_mac, random_mac
from cells.node.ipam.allocator import Allocation
from lifecycle import Logger

# What the CNI server needs of other cells, in its own words, so that a test's fake takes a line.


class Links(Protocol):
    """The node's links; cells.netlink.HostLinks. Methods raise NetlinkError."""

    def create_veth(self, pair: VethPair) -> CreatedLink:
        """Create a pair, the peer in the pod at once."""
        ...

    def start_create_veth(self, pair: VethPair) -> None:
        """Begin with that in the background; one at a time."""
        ...

    def finish_create_veth(self) -> CreatedLink:
        """Wait for the pair that was started."""
        ...

    def activate(self, ifindex: int, alias: str) -> None:
        """Alias and up."""
        ...

    def sync_carrier(self, ifindex: int) -> None:
        """Let the link send at once after its other end came up."""
        ...

    def find(self, name: str) -> LinkInfo | None:
        """The link of that name."""
        ...

    def at(self, ifindex: int) -> LinkInfo | None:
        """The link with that index."""
        ...

    async def reap(self, ifindexes: Iterable[int]) -> None:
        """Delete, off the loop; returns when they no longer exist."""
        ...


class PodEnd(Protocol):
    """One pod's links; cells.netlink.PodLink. Methods raise NetlinkError."""

    def configure(
        self,
        ifindex: int,
        name: str,
        addresses: Sequence[IPAddress],
        gateways: Sequence[IPAddress],
        mtu: int,
    ) -> None:
        """Up, addresses, routes through the gateways (one per address)."""
        ...

    def addresses(self, name: str) -> Collection[IPAddress] | None:
        """Those of the link; None when there is no such link."""
        ...

    def links(self) -> list[LinkInfo]:
        """Every link of the pod."""
        ...

    def addresses_of(self, ifindex: int) -> list[IPAddress]:
        """Those of the link, the first one first."""
        ...

    def set_mac(self, ifindex: int, name: str, mac: bytes) -> None:
        """Give the link another MAC address."""
        ...

    def set_route_mtu(self, mtu: int) -> None:
        """Give all routes this MTU."""
        ...

    def delete(self, name: str) -> bool:
        """Delete, blocking; False when there is none."""
        ...


class AttachAllocator(Protocol):
    """The address allocator; cells.node.ipam.Ipam. Methods raise IpamError."""

    def allocate_next(self, owner: str) -> tuple[Allocation, ...]:
        """A free address of each family."""
        ...

    def release(self, ip: IPAddress, pool: str) -> None:
        """Give it back."""
        ...


class Flows(Protocol):
    """Conntrack entries of deleted pods; cells.endpoint.Endpoints."""

    async def forgotten(self, addresses: Collection[IPAddress]) -> None:
        """Return once nothing of these addresses is left."""
        ...


class AttachEndpoints(Protocol):
    """The endpoints; cells.endpoint.Endpoints. Methods raise EndpointError."""

    def begin(self, request: EndpointRequest) -> NewEndpoint:
        """The first half of making it; raises PoolEmpty when a policy map must be waited for."""
        ...

    async def identify(self, new: NewEndpoint) -> None:
        """Wait for its identity, all or nothing."""
        ...

    def complete(self, new: NewEndpoint) -> Endpoint:
        """The second half, all or nothing."""
        ...

    def route(self, endpoint: Endpoint) -> None:
        """The routes to the pod, where it has its own; raises OSError."""
        ...

    def delete(self, endpoint: Endpoint, *, release_address: bool = True) -> tuple[str, ...]:
        """Remove it; what went wrong on the way."""
        ...

    def lookup(self, id_text: str) -> Endpoint | None:
        """By any id the API knows."""
        ...

    def by_attachment(self, container_id: str, container_ifname: str) -> Endpoint | None:
        """By container and interface."""
        ...

    def by_container(self, container_id: str) -> list[Endpoint]:
        """All of a container."""
        ...

    def all(self) -> list[Endpoint]:
        """Everyone."""
        ...

    def shown_state(self, endpoint: Endpoint) -> State:
        """Its state, and whether something is wrong with it."""
        ...


class AttachPolicyPool(Protocol):
    """The prepared policy maps; cells.maps.PolicyMaps."""

    async def ready(self) -> None:
        """Return once one is prepared; raises HiveError when there will be none."""
        ...


# What has been done so far, and how to take it back.


class Undo:
    """A stack of opposites. Taking back never stops half-way: each failure is logged, none skips the rest."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], Awaitable[None] | None]]] = []

    def __bool__(self) -> bool:
        return bool(self._steps)

    def push(self, what: str, step: Callable[[], Awaitable[None] | None]) -> None:
        """Remember how to take ``what`` back."""
        self._steps.append((what, step))

    def forget(self) -> None:
        """All is well: nothing will be taken back."""
        self._steps.clear()

    async def roll_back(self, log: Logger) -> None:
        """Take everything back, last things first."""
        while self._steps:
            what, step = self._steps.pop()
            try:
                waiting = step()
                if waiting is not None:
                    await waiting
            except Exception as error:  # whatever it is, the steps below must still run
                log.exception("roll-back step failed", step=what, error=str(error))


def remove_endpoint(endpoints: AttachEndpoints, endpoint: Endpoint) -> None:
    """Take back an endpoint without releasing its addresses; raises CniError if a part remains."""
    problems = endpoints.delete(endpoint, release_address=False)
    if problems:
        raise CniError("; ".join(problems))


# The first half of creating an endpoint, common to every ADD.


class PendingEndpoint(msgspec.Struct, frozen=True):
    """An ADD with a started endpoint."""

    new: NewEndpoint
    finish: Callable[[Endpoint], bytes]
    """What is left once the endpoint is complete; what the plugin prints. Raises CniError."""

    @property
    def identified(self) -> bool:
        """Whether it can be completed without waiting."""
        return self.new.identity is not None


NO_ENDPOINT: Final = ErrorContext(EndpointError, "unable to create endpoint")


def begin_endpoint(endpoints: AttachEndpoints, request: EndpointRequest, undo: Undo) -> NewEndpoint:
    """Begin the endpoint; ``undo`` gets the opposite. Raises CniError, PoolEmpty."""
    with NO_ENDPOINT:
        new = endpoints.begin(request)
    undo.push("endpoint", partial(remove_endpoint, endpoints, new.endpoint))
    return new


# Which MAC addresses a new pod's interface and its other end get.

MODES: Final = ("", "random", "deterministic")
_FIRST_INTERFACE: Final = "eth0"


class MacPair(NamedTuple):
    """Both ends of a link."""

    pod: bytes
    host: bytes


def macs_of(conf: NetConf, pod: PodReference, ifname: str) -> MacPair:
    """The addresses for this pod's interface; raises CniError for a value no interface can have.

    Every value of the configuration is checked, not only the one that is used. An unknown mode is
    random: ``conf.mac_addr_mode not in MODES`` decides.
    """
    chosen = list(_chosen(conf, pod, ifname))
    if conf.mac_addr_mode == "deterministic" and pod.name:
        seed = pod.owner if ifname == _FIRST_INTERFACE else f"{pod.owner}/{ifname}"
        host_seed = f"{pod.owner}/host" if ifname == _FIRST_INTERFACE else f"{pod.owner}/host/{ifname}"
        return MacPair(chosen[0] if chosen else _derived(seed), _derived(host_seed))
    return MacPair(chosen[0] if chosen else random_mac(), random_mac())


def annotated_mac(conf: NetConf, ifname: str) -> bytes | None:
    """The address of the annotation, where the runtime passes it; CniError for what no interface can have."""
    annotated = (conf.runtime_config.annotations or {}).get(MAC_ANNOTATION)
    return _unicast(annotated, ifname, f"pod annotation {MAC_ANNOTATION}") if annotated else None


def set_pod_mac(inside: PodEnd, ifindex: int, name: str, mac: bytes) -> None:
    """Give the pod's interface another MAC address. Raises CniError."""
    try:
        inside.set_mac(ifindex, name, mac)
    except NetlinkError as error:
        raise CniError(f"unable to set MAC address on interface {name}: {error}") from error


def _chosen(conf: NetConf, pod: PodReference, ifname: str) -> Iterator[bytes]:
    """The addresses asked for, most important first."""
    annotated = annotated_mac(conf, ifname)
    if annotated is not None:
        yield annotated
    if conf.fixed_mac:
        yield _unicast(conf.fixed_mac, ifname, "fixedMac")
    if conf.prefix_mac_map:
        macs = {
            prefix: _unicast(mac, ifname, f"prefixMacMap {prefix}")
            for prefix, mac in conf.prefix_mac_map.items()
        }
        matching = [prefix for prefix in macs if pod.name.startswith(prefix)]
        if matching:
            yield macs[max(matching, key=len)]


def _unicast(text: str, ifname: str, source: str) -> bytes:
    """The address of one interface; not of a group, not zero."""
    try:
        return parse_unicast_mac(text)
    except ValueError as error:
        raise _invalid(text, ifname, f"{source}: {error}") from error


def _invalid(text: str, ifname: str, details: str) -> CniError:
    message = f"unable to set MAC address on interface {ifname}: address {text}: invalid MAC address"
    return CniError(message, details=details)


def _derived(seed: str) -> bytes:
    """A locally administered unicast address, the same for the same seed on every node."""
    digest = sha256(seed.encode()).digest()
    return bytes(((digest[0] | 0x02) & 0xFE,)) + digest[1:6]
