"""An endpoint's state in the kernel: map entries, programs, routes, and its claims in the ipcache.

``Realization`` writes, repairs and removes it in a crash-safe order; ``ConntrackScrub`` deletes conntrack
entries of removed endpoints. ``creation``, ``labels`` and ``manager`` use both.
"""

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
from cells.endpoint.model import Endpoint, IPAddress, RegenerationLevel
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

# Interfaces to maps, programs, routes and IPAM.


class EndpointMaps(Protocol):
    """The maps by which the datapath handles an endpoint's packets; synchronous except for one method."""

    def put_config(self, endpoint: Endpoint, *, any_source: bool) -> None:
        """Write the entry of hive_endpoints for the endpoint's link, unless it is up to date.

        ``any_source``: allow packets from addresses other than the endpoint's own.
        """
        ...

    def drop_config(self, endpoint: Endpoint) -> None:
        """Delete the endpoint's entry of hive_endpoints; a missing one is a no-op."""
        ...

    def put_lxc(self, endpoint: Endpoint) -> None:
        """Write entries of cilium_lxc for the endpoint's addresses, unless they are up to date."""
        ...

    def drop_lxc(self, endpoint: Endpoint) -> None:
        """Delete the endpoint's entries of cilium_lxc; those of the host or other endpoints stay."""
        ...

    def invalidate_once(self) -> AbstractContextManager[object]:
        """Invalidate cached verdicts once, at the end of the block, for all its map writes.

        Do not await in the block.
        """
        ...

    async def scrub_conntrack(self, addresses: Collection[IPAddress]) -> int:
        """Delete conntrack entries from and to these addresses; return their number."""
        ...


class EndpointPrograms(Protocol):
    """The interface to the programs on an endpoint's link."""

    def attach_endpoint(self, ifindex: int, *, egress_prog: bool = False) -> None:
        """Attach to the host side of the link, replacing other programs; raises OSError.

        ``egress_prog``: attach also to packets that the link transmits to the pod.
        """
        ...


class EndpointRoutes(Protocol):
    """The interface to the node's routes over endpoints' links."""

    def route_pod(self, ifindex: int, address: IPAddress, mac: bytes) -> None:
        """Set the route and the neighbour entry of a pod's address.

        Raises OSError, also if the link is down.
        """
        ...


class EndpointAddresses(Protocol):
    """The interface to the node's IPAM."""

    @property
    def default_pool(self) -> str:
        """The pool for requests without a pool."""
        ...

    def release(self, ip: IPAddress, pool: str) -> None:
        """Return the address to its pool."""
        ...

    def stop_expiration(self, ip: IPAddress, pool: str, uuid: str) -> None:
        """Stop the expiration timer of the address. Raises IpamError if it does not run."""
        ...


# Claims in the ipcache: one prefix for each address of an endpoint.


def resource_of(endpoint_id: int) -> str:
    """Return the owner of the endpoint's claims in the ipcache."""
    return f"ep//{endpoint_id}"


def ipcache_claims(endpoint: Endpoint) -> list[IpcacheEntry]:
    """Return the ipcache entries of the endpoint's addresses; local pods have no tunnel endpoint."""
    resource, identity = resource_of(endpoint.id), endpoint.identity
    return [
        IpcacheEntry(prefix=prefix_of(ip), identity=identity, source=Source.LOCAL, resource=resource)
        for ip in endpoint.addresses
    ]


def restored_claims(endpoint_id: int, identity: int, addresses: Iterable[IPAddress]) -> list[IpcacheEntry]:
    """Return the ipcache entries of a restored endpoint's addresses, valid until it is regenerated."""
    resource = resource_of(endpoint_id)
    return [
        IpcacheEntry(prefix=prefix_of(ip), identity=identity, source=Source.RESTORED, resource=resource)
        for ip in addresses
    ]


# Entries of an endpoint in BPF maps.
#
# Source: Cilium 1.17 for cilium_lxc; hive_endpoints is our own.
#
# An entry that is up to date is not rewritten: programs read it concurrently.


def config_row(endpoint: Endpoint, *, any_source: bool) -> tuple[bytes, bytes]:
    """Return key and value of the endpoint in hive_endpoints."""
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
    """Return the value of the endpoint's addresses in cilium_lxc."""
    return LxcValue(
        ifindex=endpoint.ifindex,
        endpoint_id=endpoint.id,
        mac=endpoint.pod_mac,
        node_mac=endpoint.host_mac,
        identity=endpoint.identity,
    )


def ifindex_key(ifindex: int) -> bytes:
    """Return the key of a link in hive_endpoints."""
    return struct.pack("<I", ifindex)


class KernelMaps:
    """Implements :class:`~cells.endpoint.kernel.EndpointMaps` by the node's BPF maps."""

    def __init__(self, maps: Maps, local: LocalAddresses, collector: ConntrackCollector) -> None:
        self._maps = maps
        self._local = local
        self._collector = collector

    def put_config(self, endpoint: Endpoint, *, any_source: bool) -> None:
        """Write the entry unless it is up to date."""
        key, row = config_row(endpoint, any_source=any_source)
        self._maps.endpoints.update_changed(key, row)

    def drop_config(self, endpoint: Endpoint) -> None:
        """Delete the entry."""
        self._maps.endpoints.delete(ifindex_key(endpoint.ifindex))

    def put_lxc(self, endpoint: Endpoint) -> None:
        """Write the endpoint's addresses to cilium_lxc."""
        self._local.put_endpoint(endpoint.addresses, lxc_value(endpoint))

    def drop_lxc(self, endpoint: Endpoint) -> None:
        """Delete the entries that still belong to this endpoint."""
        for address in endpoint.addresses:
            self._local.drop_endpoint(address, endpoint.id)

    def invalidate_once(self) -> AbstractContextManager[object]:
        """Invalidate verdicts at the end of the block: one call for the node, one for the endpoint."""
        return self._maps.epochs

    async def scrub_conntrack(self, addresses: Collection[IPAddress]) -> int:
        """Delete the entries with the datapath's garbage collector."""
        return await self._collector.forget(addresses)


# Deletion of conntrack entries of removed endpoints.
#
# Source: Cilium 1.17, the conntrack scrub when an endpoint is deleted.

SCRUB_INTERVAL = 0.1
"""Minimum number of seconds between two walks over the conntrack maps; each takes milliseconds of a CPU."""
SCRUB_TIMEOUT = 5.0
"""Maximum number of seconds that the reuse of an address waits for the scrub."""


class ConntrackScrub:
    """Deletes conntrack entries of removed endpoints in a job, many addresses per walk over the maps."""

    def __init__(self, maps: EndpointMaps, jobs: Jobs, log: Logger) -> None:
        self._maps = maps
        self._log = log
        self._pending: set[IPAddress] = set()
        """Addresses for the next walk."""
        self._walked: frozenset[IPAddress] = frozenset()
        """Addresses of the walk in progress."""
        self._scrubbed = anyio.Event()
        self._scrub = jobs.timer("conntrack-scrub", self._walk, math.inf, rest=SCRUB_INTERVAL)

    def scrub_conntrack(self, address: IPAddress) -> None:
        """Queue the deletion of the address's conntrack entries."""
        self._pending.add(address)
        self._scrub.trigger()

    async def wait_scrubbed(self, addresses: Collection[IPAddress]) -> None:
        """Wait until the entries of these addresses are deleted, at most SCRUB_TIMEOUT."""
        with anyio.move_on_after(SCRUB_TIMEOUT):
            while not (self._pending | self._walked).isdisjoint(addresses):
                await self._scrubbed.wait()

    async def _walk(self) -> None:
        batch = self._walked = frozenset(self._pending)
        self._pending.clear()
        if not batch:
            return
        try:
            removed = await self._maps.scrub_conntrack(batch)
        except BaseException:
            self._pending |= batch  # the job is retried
            raise
        finally:
            self._walked = frozenset()
        self._scrubbed.set()
        self._scrubbed = anyio.Event()
        self._log.debug(
            "conntrack entries of removed endpoints deleted", addresses=len(batch), entries=removed
        )


# Creation, repair and removal of an endpoint's state in the kernel and on disk, in a safe order.
#
# Source: Cilium 1.17, the order of an endpoint's regeneration and deletion.
#
# If the agent is killed between two steps, its restart can distinguish the remains from a working endpoint:
# the policy is written first and the state file last (then the creator sets the link up). Removal is in
# reverse order.

REALIZATION_ERRORS: Final = (OSError, HiveError, NoIdentityError, IpamError)
"""Errors that a step of a creation, repair or removal may raise."""

Step = tuple[str, Callable[[Endpoint], object]]
Undo = list[Step]
"""Steps that undo a creation, run from the last to the first."""


class Realization:
    """Applies endpoints' rows to the kernel and to state files. All methods are synchronous."""

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
        """Whether pods may send from their own addresses only; single endpoints may be exempt."""
        self.endpoint_routes = settings.enable_endpoint_routes
        """Whether each new endpoint has its own route."""
        self._maps = maps
        self._programs = programs
        self._routes = routes
        self._ipcache = ipcache
        self._policies = policies
        self._files = files
        self._log = log

    def create(self, endpoint: Endpoint, undo: Undo) -> None:
        """Create all state of an endpoint, and append the reverse of each step to ``undo``.

        Raises REALIZATION_ERRORS.
        """
        with self._maps.invalidate_once():
            self._realize_policy(endpoint)
            undo.append(("endpoint config", self._maps.drop_config))
            self._maps.put_config(endpoint, any_source=self._any_source(endpoint))
            undo.append(("cilium_lxc", self._maps.drop_lxc))
            self._maps.put_lxc(endpoint)
            undo.append(("cilium_ipcache", self.withdraw))
            self._ipcache.upsert(*ipcache_claims(endpoint))
        self._programs.attach_endpoint(endpoint.ifindex, egress_prog=endpoint.datapath.egress_prog)
        undo.append(("state directory", self._remove_state_files))
        self._files.write(endpoint)

    def repair(self, endpoint: Endpoint, level: RegenerationLevel) -> None:
        """Write all state that differs from the endpoint's row. Raises REALIZATION_ERRORS.

        State that is up to date is not written, so running pods are not affected.
        """
        with self._maps.invalidate_once():
            self._realize_policy(endpoint)
            self._maps.put_config(endpoint, any_source=self._any_source(endpoint))
            if level is RegenerationLevel.POLICY:
                return
            self._maps.put_lxc(endpoint)
            self._ipcache.upsert(*ipcache_claims(endpoint))
        self._programs.attach_endpoint(endpoint.ifindex, egress_prog=endpoint.datapath.egress_prog)
        self._files.refresh(endpoint)

    def update_identity(self, endpoint: Endpoint) -> None:
        """Apply a changed identity: to the policy map first, to the endpoint's packets last.

        Raises OSError. If its rules contradict each other, the policy map stays; the next regeneration
        reports the error.
        """
        try:
            self._realize_policy(endpoint)
        except HiveError as error:
            self._log.warning("policy map not updated", endpoint=endpoint.id, error=str(error))
        self._maps.put_lxc(endpoint)
        self._maps.put_config(endpoint, any_source=self._any_source(endpoint))
        self._ipcache.upsert(*ipcache_claims(endpoint))

    def route(self, endpoint: Endpoint) -> None:
        """Install routes to the pod over its link, if the endpoint has its own; raises OSError.

        The link must be up. The kernel removes them with the link; the cell endpoint-routes reinstalls
        missing ones.
        """
        if endpoint.datapath.install_endpoint_route:
            for address in endpoint.addresses:
                self._routes.route_pod(endpoint.ifindex, address, endpoint.pod_mac)

    def withdraw(self, endpoint: Endpoint) -> None:
        """Withdraw the endpoint's claims in the ipcache; raises OSError."""
        self._ipcache.withdraw(resource_of(endpoint.id), map(prefix_of, endpoint.addresses))

    def remove(self, endpoint: Endpoint) -> list[str]:
        """Remove all state except identity and addresses; try every step, and return the errors."""
        errors: list[str] = []
        failed = self.best_effort("verdicts", self._remove, endpoint, errors)
        return [*errors, failed] if failed else errors

    def _remove(self, endpoint: Endpoint, errors: list[str]) -> None:
        with self._maps.invalidate_once():
            errors += self.roll_back(
                [
                    ("state directory", self._remove_state_files),
                    ("policy map", self._release_policy),
                    ("endpoint config", self._maps.drop_config),
                    ("cilium_ipcache", self.withdraw),
                    ("cilium_lxc", self._maps.drop_lxc),
                ],
                endpoint,
            )

    def roll_back(self, steps: Undo, endpoint: Endpoint) -> list[str]:
        """Run the steps from the last to the first; try every step, and return the errors."""
        return [error for what, do in reversed(steps) if (error := self.best_effort(what, do, endpoint))]

    def best_effort(self, what: str, do: Callable[..., object], *args: object) -> str:
        """Call ``do``; log an error and return it as text, so that further steps run."""
        try:
            do(*args)
        except REALIZATION_ERRORS as error:
            self._log.warning("endpoint operation failed", what=what, error=str(error))
            return f"{what}: {error}"
        return ""

    def _realize_policy(self, endpoint: Endpoint) -> None:
        pod = (endpoint.pod_namespace, endpoint.pod_name)
        self._policies.realize(endpoint.id, endpoint.identity, endpoint.labels, pod)

    def _remove_state_files(self, endpoint: Endpoint) -> None:
        self._files.remove(endpoint.id)

    def _release_policy(self, endpoint: Endpoint) -> None:
        self._policies.release(endpoint.id)

    def _any_source(self, endpoint: Endpoint) -> bool:
        return endpoint.datapath.disable_sip_verification or not self.source_ip_verification
