"""An endpoint's state in the kernel: entries in maps, programs, routes, claims in the ipcache."""

import math
import struct
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Final, Protocol

import anyio

from cells.cluster.identity.identities import NoIdentityError
from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry, Source, prefix_of
from cells.config.shared import EndpointSettings
from cells.datapath.collector import ConntrackCollector
from cells.endpoint.model import Endpoint, IPAddress, Level
from cells.endpoint.state.directory import StateFiles
from cells.maps.node_maps import Maps
from cells.maps.records.endpoints import (
    ENDPOINT_ANY_SOURCE,
    ENDPOINT_PASSES_NEIGHBOURS,
    ENDPOINT_REQUIRE_EGRESS_PROG,
    ENDPOINT_ROUTED_BY_HOST,
    EndpointConfig,
    LxcValue,
)
from cells.node.ipam.ranges import IpamError
from cells.node.local_addresses import LocalAddresses
from cells.policy.maps import EndpointPolicies
from lifecycle import HiveError, Jobs, Logger

# The interfaces to the kernel and to the address allocator.


class EndpointMaps(Protocol):
    """The maps by which the datapath handles an endpoint's packets. All but one method are synchronous."""

    def put_config(self, endpoint: Endpoint, *, any_source: bool) -> None:
        """Write the entry of hive_endpoints for the endpoint's link, unless it is up to date.

        ``any_source``: packets from addresses other than the endpoint's own are allowed.
        """
        ...

    def drop_config(self, endpoint: Endpoint) -> None:
        """Remove the entry; it need not exist."""
        ...

    def put_lxc(self, endpoint: Endpoint) -> None:
        """Write entries of cilium_lxc for the endpoint's addresses, unless they are up to date."""
        ...

    def drop_lxc(self, endpoint: Endpoint) -> None:
        """Remove its entries of cilium_lxc; entries of the host or of other endpoints stay."""
        ...

    def once(self) -> AbstractContextManager[object]:
        """Invalidate cached verdicts once, at the end of the block, for all its map writes.

        No await inside.
        """
        ...

    async def forget_flows(self, addresses: Collection[IPAddress]) -> int:
        """Remove conntrack entries from and to these addresses; return their number."""
        ...


class EndpointPrograms(Protocol):
    """The programs on an endpoint's link."""

    def attach_endpoint(self, ifindex: int, *, egress_prog: bool = False) -> None:
        """Attach to the host side of the link, replacing other programs; raises OSError.

        ``egress_prog``: attach also to packets that the link sends to the pod.
        """
        ...


class EndpointRoutes(Protocol):
    """Routes of the node over endpoints' links."""

    def route_pod(self, ifindex: int, address: IPAddress, mac: bytes) -> None:
        """Set the route and the neighbour entry of a pod's address.

        Raises OSError, also if the link is down.
        """
        ...


class EndpointAddresses(Protocol):
    """The address allocator, as endpoints use it."""

    @property
    def default_pool(self) -> str:
        """The pool for requests that name none."""
        ...

    def release(self, ip: IPAddress, pool: str) -> None:
        """Return the address to its pool."""
        ...

    def stop_expiration(self, ip: IPAddress, pool: str, uuid: str) -> None:
        """Keep the address allocated; it no longer expires. Raises if no such timer runs."""
        ...


# Claims in the ipcache: one prefix for each address of an endpoint.


def resource_of(endpoint_id: int) -> str:
    """Owner of the endpoint's claims in the ipcache."""
    return f"ep//{endpoint_id}"


def claims_of(endpoint: Endpoint) -> list[IpcacheEntry]:
    """Claims of the endpoint's identity for its addresses; without a tunnel endpoint: the pod is local."""
    resource, identity = resource_of(endpoint.id), endpoint.identity
    return [
        IpcacheEntry(prefix=prefix_of(ip), identity=identity, source=Source.LOCAL, resource=resource)
        for ip in endpoint.addresses
    ]


def restored_claims(endpoint_id: int, identity: int, addresses: Iterable[IPAddress]) -> list[IpcacheEntry]:
    """Claims for the addresses of a previous agent's endpoint, until it is regenerated."""
    resource = resource_of(endpoint_id)
    return [
        IpcacheEntry(prefix=prefix_of(ip), identity=identity, source=Source.RESTORED, resource=resource)
        for ip in addresses
    ]


# Entries of an endpoint in BPF maps.
#
# Source: Cilium 1.17 for cilium_lxc; hive_endpoints is our own.
#
# An entry that is up to date is not written again: the traffic of a running pod reads it.


def config_row(endpoint: Endpoint, *, any_source: bool) -> tuple[bytes, bytes]:
    """Key and value of the endpoint in hive_endpoints."""
    value = EndpointConfig(
        ipv4=endpoint.ipv4,
        endpoint_id=endpoint.id,
        identity=endpoint.identity,
        host_mac=endpoint.host_mac,
        pod_mac=endpoint.pod_mac,
        flags=_flags(endpoint, any_source=any_source),
        ipv6=endpoint.ipv6,
        netns_cookie=endpoint.netns_cookie,
    )
    return ifindex_key(endpoint.ifindex), value.pack()


def _flags(endpoint: Endpoint, *, any_source: bool) -> int:
    wanted = endpoint.datapath
    return (
        (ENDPOINT_PASSES_NEIGHBOURS if wanted.require_arp_passthrough else 0)
        | (ENDPOINT_ANY_SOURCE if any_source else 0)
        | (ENDPOINT_REQUIRE_EGRESS_PROG if wanted.egress_prog else 0)
        | (ENDPOINT_ROUTED_BY_HOST if wanted.require_routing is False else 0)
    )


def lxc_value(endpoint: Endpoint) -> LxcValue:
    """Value of the endpoint's addresses in cilium_lxc."""
    return LxcValue(
        ifindex=endpoint.ifindex,
        endpoint_id=endpoint.id,
        mac=endpoint.pod_mac,
        node_mac=endpoint.host_mac,
        identity=endpoint.identity,
    )


def ifindex_key(ifindex: int) -> bytes:
    """Key of a link in hive_endpoints."""
    return struct.pack("<I", ifindex)


class KernelMaps:
    """Implements :class:`~cells.endpoint.kernel.EndpointMaps` by the node's maps."""

    def __init__(self, maps: Maps, local: LocalAddresses, collector: ConntrackCollector) -> None:
        self._maps = maps
        self._local = local
        self._collector = collector

    def put_config(self, endpoint: Endpoint, *, any_source: bool) -> None:
        """Write the entry unless it is up to date."""
        key, row = config_row(endpoint, any_source=any_source)
        self._maps.endpoints.update_changed(key, row)

    def drop_config(self, endpoint: Endpoint) -> None:
        """Remove the entry."""
        self._maps.endpoints.delete(ifindex_key(endpoint.ifindex))

    def put_lxc(self, endpoint: Endpoint) -> None:
        """Claim the endpoint's addresses."""
        self._local.put_endpoint(endpoint.addresses, lxc_value(endpoint))

    def drop_lxc(self, endpoint: Endpoint) -> None:
        """Remove the entries that still are this endpoint's."""
        for address in endpoint.addresses:
            self._local.drop_endpoint(address, endpoint.id)

    def once(self) -> AbstractContextManager[object]:
        """Invalidate verdicts at the end of the block: one call for the node, one for the endpoint."""
        return self._maps.epochs

    async def forget_flows(self, addresses: Collection[IPAddress]) -> int:
        """Remove the entries by garbage collection in the kernel."""
        return await self._collector.forget(addresses)


# Removes the conntrack entries of addresses without endpoints.
#
# Source: Cilium 1.17, the conntrack scrub when an endpoint is deleted.

REST = 0.1
"""Minimum number of seconds between two walks over the conntrack maps: a walk takes milliseconds of a CPU."""
PATIENCE = 5.0
"""Maximum number of seconds before an address is used again with old conntrack entries."""


class ConntrackScrub:
    """A job that removes conntrack entries of many addresses in one walk: deletions do not wait for it."""

    def __init__(self, maps: EndpointMaps, jobs: Jobs, log: Logger) -> None:
        self._maps = maps
        self._log = log
        self._removed: set[IPAddress] = set()
        """Addresses with entries that the next walk removes."""
        self._walked: frozenset[IPAddress] = frozenset()
        """Addresses of the walk in progress."""
        self._forgotten = anyio.Event()
        self._scrub = jobs.timer("forget-flows", self._forget, math.inf, rest=REST)

    def forget_flows(self, address: IPAddress) -> None:
        """Remove the address's conntrack entries soon; one walk serves many addresses."""
        self._removed.add(address)
        self._scrub.trigger()

    async def forgotten(self, addresses: Collection[IPAddress]) -> None:
        """Wait until the entries of these addresses are removed, but no longer than PATIENCE."""
        with anyio.move_on_after(PATIENCE):
            while not (self._removed | self._walked).isdisjoint(addresses):
                await self._forgotten.wait()

    async def _forget(self) -> None:
        batch = self._walked = frozenset(self._removed)
        self._removed.clear()
        if not batch:
            return
        try:
            removed = await self._maps.forget_flows(batch)
        except BaseException:
            self._removed |= batch  # the job is retried
            raise
        finally:
            self._walked = frozenset()
        self._forgotten.set()
        self._forgotten = anyio.Event()
        self._log.debug("flows of removed endpoints forgotten", addresses=len(batch), entries=removed)


# Creation, repair and removal of an endpoint's state in the kernel and on disk, in a safe order.
#
# Source: Cilium 1.17, the order of an endpoint's regeneration and deletion.
#
# If the agent is killed between two steps, its restart can distinguish the remains from a working endpoint:
# the policy is written first and the state file last (then the creator sets the link up). Removal is in
# reverse order.

REFUSALS: Final = (OSError, HiveError, NoIdentityError, IpamError)
"""Errors that a step of a creation, repair or removal may raise."""

Step = tuple[str, Callable[[Endpoint], object]]
Undo = list[Step]
"""Steps that undo a creation, the last one last."""


class Realization:
    """Applies endpoints' rows to the kernel and to state files. Every method is synchronous."""

    def __init__(
        self,
        maps: EndpointMaps,
        programs: EndpointPrograms,
        routes: EndpointRoutes,
        ipcache: Ipcache,
        policies: EndpointPolicies,
        files: StateFiles,
        settings: EndpointSettings,
        log: Logger,
    ) -> None:
        self.source_ip_verification = settings.enable_source_ip_verification
        """Whether pods may send from their own addresses only; an endpoint may be exempt."""
        self.own_routes = settings.enable_endpoint_routes
        """Whether each new endpoint has a route of its own."""
        self._maps = maps
        self._programs = programs
        self._routes = routes
        self._ipcache = ipcache
        self._policies = policies
        self._files = files
        self._log = log

    def make(self, endpoint: Endpoint, undo: Undo) -> None:
        """Create all state of an endpoint; append how to undo each step to ``undo``. Raises REFUSALS."""
        with self._maps.once():
            self._realize_policy(endpoint)
            undo.append(("endpoint config", self._maps.drop_config))
            self._maps.put_config(endpoint, any_source=self._any_source(endpoint))
            undo.append(("cilium_lxc", self._maps.drop_lxc))
            self._maps.put_lxc(endpoint)
            undo.append(("cilium_ipcache", self.withdraw))
            self._ipcache.upsert(*claims_of(endpoint))
        self._programs.attach_endpoint(endpoint.ifindex, egress_prog=endpoint.datapath.egress_prog)
        undo.append(("state directory", self._forget_state))
        self._files.write(endpoint)

    def rewrite(self, endpoint: Endpoint, level: Level) -> None:
        """Repair all state that differs from the endpoint's row. Raises REFUSALS.

        State that is up to date is not written, so a running pod notices nothing.
        """
        with self._maps.once():
            self._realize_policy(endpoint)
            self._maps.put_config(endpoint, any_source=self._any_source(endpoint))
            if level is Level.POLICY:
                return
            self._maps.put_lxc(endpoint)
            self._ipcache.upsert(*claims_of(endpoint))
        self._programs.attach_endpoint(endpoint.ifindex, egress_prog=endpoint.datapath.egress_prog)
        self._files.refresh(endpoint)

    def carry(self, endpoint: Endpoint) -> None:
        """Apply a changed identity: to the policy map first, to the endpoint's packets last.

        Raises OSError. If its rules contradict each other, the policy map stays and its build reports the
        error.
        """
        try:
            self._realize_policy(endpoint)
        except HiveError as error:
            self._log.warning("policy not realized", endpoint=endpoint.id, error=str(error))
        self._maps.put_lxc(endpoint)
        self._maps.put_config(endpoint, any_source=self._any_source(endpoint))
        self._ipcache.upsert(*claims_of(endpoint))

    def route(self, endpoint: Endpoint) -> None:
        """Set routes to the pod over its link, if it has its own; raises OSError.

        The link must be up. The kernel removes them with the link; the cell endpoint-routes restores them.
        """
        if endpoint.datapath.install_endpoint_route:
            for address in endpoint.addresses:
                self._routes.route_pod(endpoint.ifindex, address, endpoint.pod_mac)

    def withdraw(self, endpoint: Endpoint) -> None:
        """Withdraw the endpoint's claims in the ipcache; raises OSError."""
        self._ipcache.withdraw(resource_of(endpoint.id), map(prefix_of, endpoint.addresses))

    def remove(self, endpoint: Endpoint) -> list[str]:
        """Remove all state but identity and addresses; try every step; return the errors."""
        errors: list[str] = []
        failed = self.quietly("verdicts", self._remove, endpoint, errors)
        return [*errors, failed] if failed else errors

    def _remove(self, endpoint: Endpoint, errors: list[str]) -> None:
        with self._maps.once():
            errors += self.take_back(
                [
                    ("state directory", self._forget_state),
                    ("policy map", self._release_policy),
                    ("endpoint config", self._maps.drop_config),
                    ("cilium_ipcache", self.withdraw),
                    ("cilium_lxc", self._maps.drop_lxc),
                ],
                endpoint,
            )

    def take_back(self, steps: Undo, endpoint: Endpoint) -> list[str]:
        """Undo the steps, the last one first; try every step; return the errors."""
        return [error for what, do in reversed(steps) if (error := self.quietly(what, do, endpoint))]

    def quietly(self, what: str, do: Callable[..., object], *args: object) -> str:
        """Call ``do``; log a failure and return it as text, so that further steps follow."""
        try:
            do(*args)
        except REFUSALS as error:
            self._log.warning("endpoint not removed completely", what=what, error=str(error))
            return f"{what}: {error}"
        return ""

    def _realize_policy(self, endpoint: Endpoint) -> None:
        pod = (endpoint.pod_namespace, endpoint.pod_name)
        self._policies.realize(endpoint.id, endpoint.identity, endpoint.labels, pod)

    def _forget_state(self, endpoint: Endpoint) -> None:
        self._files.remove(endpoint.id)

    def _release_policy(self, endpoint: Endpoint) -> None:
        self._policies.release(endpoint.id)

    def _any_source(self, endpoint: Endpoint) -> bool:
        return endpoint.datapath.disable_sip_verification or not self.source_ip_verification
