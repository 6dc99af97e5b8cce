"""What endpoints are in the kernel: their edges to it, their rows in maps, their claims in the ipcache."""

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

# What an endpoint is in the kernel: rows in maps, and a program on its link.


class EndpointMaps(Protocol):
    """The maps that say what the datapath does with an endpoint's packets. All calls are synchronous."""

    def put_config(self, endpoint: Endpoint, *, any_source: bool) -> None:
        """Row of the link's index in hive_endpoints; not written when it is right already.

        ``any_source``: packets from addresses other than the endpoint's own go through.
        """
        ...

    def drop_config(self, endpoint: Endpoint) -> None:
        """Remove the row; it need not be there."""
        ...

    def put_lxc(self, endpoint: Endpoint) -> None:
        """Rows of the addresses in cilium_lxc; not written where they are right already."""
        ...

    def drop_lxc(self, endpoint: Endpoint) -> None:
        """Remove the rows, but for those no longer this endpoint's (a host address, another endpoint)."""
        ...

    def once(self) -> AbstractContextManager[object]:
        """Of all that is written in the block, to any map, void verdicts at its end. Without await inside."""
        ...

    async def forget_flows(self, addresses: Collection[IPAddress]) -> int:
        """Remove the conntrack entries from and to these addresses; how many there were."""
        ...


class EndpointPrograms(Protocol):
    """The programs on an endpoint's link."""

    def attach_endpoint(self, ifindex: int, *, egress_prog: bool = False) -> None:
        """Attach to the host side of the link, replacing what is there; raises OSError.

        ``egress_prog``: to what it sends to the pod, too.
        """
        ...


class EndpointRoutes(Protocol):
    """The node's routes over endpoints' links."""

    def route_pod(self, ifindex: int, address: IPAddress, mac: bytes) -> None:
        """To the pod's address, at its MAC address; raises OSError, also for a link that is down."""
        ...


class EndpointAddresses(Protocol):
    """The address allocator, as far as an endpoint's life touches it."""

    @property
    def default_pool(self) -> str:
        """The pool of addresses for requests without one."""
        ...

    def release(self, ip: IPAddress, pool: str) -> None:
        """Give the address back."""
        ...

    def stop_expiration(self, ip: IPAddress, pool: str, uuid: str) -> None:
        """The address is in use now: it no longer expires. Raises when no such timer runs."""
        ...


# What an endpoint claims in the ipcache: its addresses, each alone.


def resource_of(endpoint_id: int) -> str:
    """The owner of these claims."""
    return f"ep//{endpoint_id}"


def claims_of(endpoint: Endpoint) -> list[IpcacheEntry]:
    """Its addresses have its identity; the pod is on this node, so there is no tunnel endpoint."""
    resource, identity = resource_of(endpoint.id), endpoint.identity
    return [
        IpcacheEntry(prefix=prefix_of(ip), identity=identity, source=Source.LOCAL, resource=resource)
        for ip in endpoint.addresses
    ]


def restored_claims(endpoint_id: int, identity: int, addresses: Iterable[IPAddress]) -> list[IpcacheEntry]:
    """Addresses that an earlier agent's endpoint has, until it is regenerated."""
    resource = resource_of(endpoint_id)
    return [
        IpcacheEntry(prefix=prefix_of(ip), identity=identity, source=Source.RESTORED, resource=resource)
        for ip in addresses
    ]


# An endpoint's rows in the BPF maps.
#
# Source: Cilium 1.17 for cilium_lxc; hive_endpoints is our own.
#
# A row that is right is not written again: a running pod's traffic reads it at this moment.


def config_row(endpoint: Endpoint, *, any_source: bool) -> tuple[bytes, bytes]:
    """Key and value in hive_endpoints."""
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
    """What its addresses have in cilium_lxc."""
    return LxcValue(
        ifindex=endpoint.ifindex,
        endpoint_id=endpoint.id,
        mac=endpoint.pod_mac,
        node_mac=endpoint.host_mac,
        identity=endpoint.identity,
    )


def ifindex_key(ifindex: int) -> bytes:
    """Key of hive_endpoints."""
    return struct.pack("<I", ifindex)


class KernelMaps:
    """The real :class:`~cells.endpoint.kernel.EndpointMaps`."""

    def __init__(self, maps: Maps, local: LocalAddresses, collector: ConntrackCollector) -> None:
        self._maps = maps
        self._local = local
        self._collector = collector

    def put_config(self, endpoint: Endpoint, *, any_source: bool) -> None:
        """Write the row unless it is right."""
        key, row = config_row(endpoint, any_source=any_source)
        self._maps.endpoints.update_changed(key, row)

    def drop_config(self, endpoint: Endpoint) -> None:
        """Remove the row."""
        self._maps.endpoints.delete(ifindex_key(endpoint.ifindex))

    def put_lxc(self, endpoint: Endpoint) -> None:
        """Claim its addresses."""
        self._local.put_endpoint(endpoint.addresses, lxc_value(endpoint))

    def drop_lxc(self, endpoint: Endpoint) -> None:
        """Withdraw what is still this endpoint's."""
        for address in endpoint.addresses:
            self._local.drop_endpoint(address, endpoint.id)

    def once(self) -> AbstractContextManager[object]:
        """Void verdicts at the end of the block: by one call for the node, and one for the endpoint."""
        return self._maps.epochs

    async def forget_flows(self, addresses: Collection[IPAddress]) -> int:
        """Collect garbage in the conntrack maps, in the kernel."""
        return await self._collector.forget(addresses)


# Removes the conntrack entries of addresses without endpoints.
#
# Source: Cilium 1.17, the conntrack scrub when an endpoint is deleted.

REST = 0.1
"""Seconds between two walks over the conntrack maps, which keep a processor busy for milliseconds each."""
PATIENCE = 5.0
"""Seconds an address waits for its flows to be forgotten before it is used again all the same."""


class ConntrackScrub:
    """A job that walks over the maps for many addresses at once, so that removing an endpoint never waits."""

    def __init__(self, maps: EndpointMaps, jobs: Jobs, log: Logger) -> None:
        self._maps = maps
        self._log = log
        self._removed: set[IPAddress] = set()
        """Addresses that have flows to forget."""
        self._walked: frozenset[IPAddress] = frozenset()
        """Addresses in the middle of conntrack clean-up."""
        self._forgotten = anyio.Event()
        self._scrub = jobs.timer("forget-flows", self._forget, math.inf, rest=REST)

    def forget_flows(self, address: IPAddress) -> None:
        """Remove the conntrack entries of this address soon; many at once cost no more than one."""
        self._removed.add(address)
        self._scrub.trigger()

    async def forgotten(self, addresses: Collection[IPAddress]) -> None:
        """Return once no flow of these addresses is left to forget, or that does not work for a while."""
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
            self._removed |= batch  # the job is tried again
            raise
        finally:
            self._walked = frozenset()
        self._forgotten.set()
        self._forgotten = anyio.Event()
        self._log.debug("flows of removed endpoints forgotten", addresses=len(batch), entries=removed)


# What an endpoint is in the kernel and on disk: made, compared, taken away, in the one order that is safe.
#
# Source: Cilium 1.17, the order of an endpoint's regeneration and deletion.
#
# The order of every step is such that an agent killed in the middle leaves nothing that a restart cannot
# distinguish from a working endpoint: policy first, the state file last (the creator of the endpoint brings
# the link up after that), and the reverse when removing.

REFUSALS: Final = (OSError, HiveError, NoIdentityError, IpamError)
"""What a step of an endpoint's life may raise."""

Step = tuple[str, Callable[[Endpoint], object]]
Undo = list[Step]
"""How to take back what was done, the last step last."""


class Realization:
    """Makes kernel and state file agree with endpoints' rows. All of it is synchronous."""

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
        """Whether each new endpoint gets a route of its own."""
        self._maps = maps
        self._programs = programs
        self._routes = routes
        self._ipcache = ipcache
        self._policies = policies
        self._files = files
        self._log = log

    def make(self, endpoint: Endpoint, undo: Undo) -> None:
        """Make all of a new endpoint; each step's opposite goes to ``undo`` before it. Raises REFUSALS."""
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
        """Repair whatever differs from the endpoint's row. Raises REFUSALS.

        What is right already is not written: a running pod notices nothing.
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
        """Give the endpoint this row's identity in the kernel: in its peers' policies first, in packets last.

        Raises OSError. Where its rules contradict each other the policy it has stays; its build reports it.
        """
        try:
            self._realize_policy(endpoint)
        except HiveError as error:
            self._log.warning("policy not realized", endpoint=endpoint.id, error=str(error))
        self._maps.put_lxc(endpoint)
        self._maps.put_config(endpoint, any_source=self._any_source(endpoint))
        self._ipcache.upsert(*claims_of(endpoint))

    def route(self, endpoint: Endpoint) -> None:
        """Set the routes to the pod over its link, where it has its own; raises OSError.

        The link has to be up. They are deleted with it; the cell endpoint-routes restores them.
        """
        if endpoint.datapath.install_endpoint_route:
            for address in endpoint.addresses:
                self._routes.route_pod(endpoint.ifindex, address, endpoint.pod_mac)

    def withdraw(self, endpoint: Endpoint) -> None:
        """Release its addresses in the maps; raises OSError."""
        self._ipcache.withdraw(resource_of(endpoint.id), map(prefix_of, endpoint.addresses))

    def remove(self, endpoint: Endpoint) -> list[str]:
        """Remove all of it but identity and addresses, whatever becomes of each step; what went wrong."""
        wrong: list[str] = []
        failed = self.quietly("verdicts", self._remove, endpoint, wrong)
        return [*wrong, failed] if failed else wrong

    def _remove(self, endpoint: Endpoint, wrong: list[str]) -> None:
        with self._maps.once():
            wrong += self.take_back(
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
        """Take these steps, the last one first, whatever becomes of each; what went wrong."""
        return [wrong for what, do in reversed(steps) if (wrong := self.quietly(what, do, endpoint))]

    def quietly(self, what: str, do: Callable[..., object], *args: object) -> str:
        """Take one step back; a failure is logged and returned as text, the next step still happens."""
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
