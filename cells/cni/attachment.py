"""Interfaces of other cells for the CNI server; roll-back steps, start of an endpoint, MAC addresses."""

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
from cells.netlink.messages import IPInterface, VethPair
from cells.netlink.rows import LinkInfo, parse_unicast_mac, random_mac
from cells.node.ipam.allocator import Allocation
from lifecycle import Logger

# Interfaces of other cells, as protocols, so that tests can use small fakes.


class Links(Protocol):
    """The node's links; implemented by cells.netlink.HostLinks. Methods raise NetlinkError."""

    def create_veth(self, pair: VethPair) -> CreatedLink:
        """Create a veth pair, with the peer in the pod's namespace."""
        ...

    def start_create_veth(self, pair: VethPair) -> None:
        """Start to create a pair in the background, one at a time."""
        ...

    def finish_create_veth(self) -> CreatedLink:
        """Wait for the started pair."""
        ...

    def activate(self, ifindex: int, alias: str) -> None:
        """Set the alias and bring the link up."""
        ...

    def sync_carrier(self, ifindex: int) -> None:
        """Make the link transmit immediately after its peer came up."""
        ...

    def find(self, name: str) -> LinkInfo | None:
        """Return the link with a name, or None."""
        ...

    def at(self, ifindex: int) -> LinkInfo | None:
        """Return the link with an index, or None."""
        ...

    async def reap(self, ifindexes: Iterable[int]) -> None:
        """Delete links without blocking the event loop; return when they no longer exist."""
        ...


class PodNetlink(Protocol):
    """A pod's links; implemented by cells.netlink.PodLink. Methods raise NetlinkError."""

    def configure(
        self,
        ifindex: int,
        name: str,
        addresses: Sequence[IPAddress],
        gateways: Sequence[IPAddress],
        mtu: int,
    ) -> None:
        """Bring the link up, with addresses and with routes through the gateways (one per address)."""
        ...

    def addresses(self, name: str) -> Collection[IPInterface] | None:
        """Return the addresses of a link with their prefix lengths, or None if it does not exist."""
        ...

    def links(self) -> list[LinkInfo]:
        """Return all links of the pod."""
        ...

    def addresses_of(self, ifindex: int) -> list[IPAddress]:
        """Return the addresses of a link, in the kernel's order."""
        ...

    def set_mac(self, ifindex: int, name: str, mac: bytes) -> None:
        """Set the MAC address of a link."""
        ...

    def set_route_mtu(self, mtu: int) -> None:
        """Set the MTU of all routes."""
        ...

    def delete(self, name: str) -> bool:
        """Delete a link, blocking; return False if it does not exist."""
        ...


class AttachAllocator(Protocol):
    """The address allocator; implemented by cells.node.ipam.Ipam. Methods raise IpamError."""

    def allocate_next(self, owner: str) -> tuple[Allocation, ...]:
        """Allocate a free address of each family."""
        ...

    def release(self, ip: IPAddress, pool: str) -> None:
        """Release an address."""
        ...


class ConntrackCleanup(Protocol):
    """Conntrack entries of deleted pods; implemented by cells.endpoint.Endpoints."""

    async def wait_scrubbed(self, addresses: Collection[IPAddress]) -> None:
        """Return once the addresses have no conntrack or NAT entries."""
        ...


class AttachEndpoints(Protocol):
    """The endpoints; implemented by cells.endpoint.Endpoints. Methods raise EndpointError."""

    def begin(self, request: EndpointRequest) -> NewEndpoint:
        """Start to create an endpoint. Raises PoolEmpty if no policy map is prepared."""
        ...

    async def identify(self, new: NewEndpoint) -> None:
        """Wait for the identity; rolled back on failure."""
        ...

    def complete(self, new: NewEndpoint) -> Endpoint:
        """Finish the creation of an endpoint; rolled back on failure."""
        ...

    def route(self, endpoint: Endpoint) -> None:
        """Add the routes to the pod, if pods have their own routes. Raises OSError."""
        ...

    def delete(self, endpoint: Endpoint, *, release_address: bool = True) -> tuple[str, ...]:
        """Delete an endpoint; return the errors."""
        ...

    def lookup(self, id_text: str) -> Endpoint | None:
        """Return the endpoint with an id in any form of the API, or None."""
        ...

    def by_attachment(self, container_id: str, container_ifname: str) -> Endpoint | None:
        """Return the endpoint of a container's interface, or None."""
        ...

    def by_container(self, container_id: str) -> list[Endpoint]:
        """Return all endpoints of a container."""
        ...

    def all(self) -> list[Endpoint]:
        """Return all endpoints."""
        ...

    def shown_state(self, endpoint: Endpoint) -> State:
        """Return the endpoint's state as the API shows it, including errors."""
        ...


class AttachPolicyPool(Protocol):
    """The pool of prepared policy maps; implemented by cells.maps.PolicyMaps."""

    async def ready(self) -> None:
        """Return once a map is prepared. Raises HiveError if none can be."""
        ...


# Roll-back of an ADD.


class Undo:
    """A stack of roll-back steps. A failing step is logged, and the others still run."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], Awaitable[None] | None]]] = []

    def __bool__(self) -> bool:
        return bool(self._steps)

    def push(self, what: str, step: Callable[[], Awaitable[None] | None]) -> None:
        """Add the step that undoes ``what``."""
        self._steps.append((what, step))

    def forget(self) -> None:
        """Discard the steps after success."""
        self._steps.clear()

    async def roll_back(self, log: Logger) -> None:
        """Run the steps, the last one first."""
        while self._steps:
            what, step = self._steps.pop()
            try:
                waiting = step()
                if waiting is not None:
                    await waiting
            except Exception as error:  # any error: the remaining steps must still run
                log.exception("roll-back step failed", step=what, error=str(error))


def remove_endpoint(endpoints: AttachEndpoints, endpoint: Endpoint) -> None:
    """Delete an endpoint without releasing its addresses. Raises CniError if a part remains."""
    problems = endpoints.delete(endpoint, release_address=False)
    if problems:
        raise CniError("; ".join(problems))


# The first half of creating an endpoint, common to every ADD.


class PendingEndpoint(msgspec.Struct, frozen=True):
    """A started endpoint of an ADD."""

    new: NewEndpoint
    finish: Callable[[Endpoint], bytes]
    """Configures the pod after the endpoint is complete; returns the plugin's output. Raises CniError."""

    @property
    def identified(self) -> bool:
        """Whether the endpoint has its identity, so that it can be completed without waiting."""
        return self.new.identity is not None


NO_ENDPOINT: Final = ErrorContext(EndpointError, "unable to create endpoint")


def begin_endpoint(endpoints: AttachEndpoints, request: EndpointRequest, undo: Undo) -> NewEndpoint:
    """Start to create an endpoint, and add its roll-back step. Raises CniError, PoolEmpty."""
    with NO_ENDPOINT:
        new = endpoints.begin(request)
    undo.push("endpoint", partial(remove_endpoint, endpoints, new.endpoint))
    return new


# MAC addresses of both ends of a new pod's link.

MODES: Final = ("", "random", "deterministic")
_FIRST_INTERFACE: Final = "eth0"


class MacPair(NamedTuple):
    """MAC addresses of both ends of a link."""

    pod: bytes
    host: bytes


def macs_of(conf: NetConf, pod: PodReference, ifname: str) -> MacPair:
    """Return the MAC addresses of a pod's link. Raises CniError for an invalid address.

    Every value in the configuration is validated, not only the one in use. An unknown mode means random; the
    caller compares ``conf.mac_addr_mode`` with MODES.
    """
    chosen = list(_configured_macs(conf, pod, ifname))
    if conf.mac_addr_mode == "deterministic" and pod.name:
        seed = pod.owner if ifname == _FIRST_INTERFACE else f"{pod.owner}/{ifname}"
        host_seed = f"{pod.owner}/host" if ifname == _FIRST_INTERFACE else f"{pod.owner}/host/{ifname}"
        return MacPair(chosen[0] if chosen else _deterministic_mac(seed), _deterministic_mac(host_seed))
    return MacPair(chosen[0] if chosen else random_mac(), random_mac())


def annotated_mac(conf: NetConf, ifname: str) -> bytes | None:
    """Return the MAC address of the pod's annotation, or None. Raises CniError for an invalid one."""
    annotated = (conf.runtime_config.annotations or {}).get(MAC_ANNOTATION)
    return _unicast(annotated, ifname, f"pod annotation {MAC_ANNOTATION}") if annotated else None


def set_pod_mac(pod_links: PodNetlink, ifindex: int, name: str, mac: bytes) -> None:
    """Set the MAC address of the pod's interface. Raises CniError."""
    try:
        pod_links.set_mac(ifindex, name, mac)
    except NetlinkError as error:
        raise CniError(f"unable to set MAC address on interface {name}: {error}") from error


def _configured_macs(conf: NetConf, pod: PodReference, ifname: str) -> Iterator[bytes]:
    """Yield the configured addresses, in order of precedence."""
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
    """Parse a MAC address; it must be unicast and not zero. Raises CniError."""
    try:
        return parse_unicast_mac(text)
    except ValueError as error:
        raise _invalid(text, ifname, f"{source}: {error}") from error


def _invalid(text: str, ifname: str, details: str) -> CniError:
    message = f"unable to set MAC address on interface {ifname}: address {text}: invalid MAC address"
    return CniError(message, details=details)


def _deterministic_mac(seed: str) -> bytes:
    """Return a locally administered unicast address, a hash of the seed."""
    digest = sha256(seed.encode()).digest()
    return bytes(((digest[0] | 0x02) & 0xFE,)) + digest[1:6]
