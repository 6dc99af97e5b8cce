"""Pods of other nodes, from CiliumEndpoints or CiliumEndpointSlices.

Source: Cilium 1.17: disable-endpoint-crd requires a kvstore, and is reset to false without one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import lru_cache
from ipaddress import ip_address
from itertools import islice
from typing import Any, Final, TypeVar

import anyio.lowlevel
import msgspec

from cells.base.addresses import IPAddress
from cells.cluster.identity.identities import Identities
from cells.cluster.identity.numbers import INIT, Scope, scope_of
from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry, Source, tunnel_endpoint_of
from cells.cluster.nodes.node import (
    AddressHolders,
    ChangedNodeAddresses,
    ClusterNode,
    EndpointNodeIndex,
    endpoint_location_of,
    is_at,
    number_of,
    wait_own,
)
from cells.config import ChainingMode
from cells.kubernetes.objects.cilium_endpoint import (
    SLIM_ENDPOINT_SLICES,
    SLIM_ENDPOINTS,
    SlimEndpoint,
    SlimEndpointSlice,
)
from cells.kubernetes.objects.cilium_node import CILIUM_NODES
from cells.kubernetes.objects.core import NODES
from cells.kubernetes.objects.kind import Key
from cells.kubernetes.resources import Resources
from cells.kvstore.store import KVStore
from lifecycle import Change, Health, Jobs, Logger, Member, ReadTable, Settings, Table

__all__ = [
    "ClusterEndpointSettings",
    "EndpointObjects",
    "PeerPods",
    "RemoteEndpoint",
    "RemoteEndpoints",
    "chunks",
    "endpoint_objects",
    "remote_endpoints",
]


class ClusterEndpointSettings(Settings, frozen=True):
    """How nodes learn of each other's pods."""

    enable_cilium_endpoint_slice: bool = False
    """Read other nodes' pods from CiliumEndpointSlices, which the operator writes, not CiliumEndpoints."""

    disable_endpoint_crd: bool = False
    """Publish pods in the kvstore only: CiliumEndpoints are neither written nor used. Needs a kvstore;
    without one it is reset to false, with a warning."""


class EndpointObjects(msgspec.Struct, frozen=True):
    """The objects from which nodes read each other's pods."""

    served: bool = True
    """Whether CiliumEndpoints are written and read."""
    slices: bool = False
    """Whether those of other nodes are read from CiliumEndpointSlices."""


def endpoint_objects(
    settings: ClusterEndpointSettings, store: KVStore | None, log: Logger
) -> EndpointObjects:
    """The objects that the settings select."""
    served = not settings.disable_endpoint_crd
    if not served and (store is None or not store.enabled):
        log.warning("disable-endpoint-crd needs a kvstore: using false instead")
        served = True
    return EndpointObjects(served, settings.enable_cilium_endpoint_slice)


# CiliumEndpoints of other nodes to claims in the ipcache.
#
# Source: the kinds SLIM_ENDPOINTS or SLIM_ENDPOINT_SLICES in; RemoteEndpoints and claims out. Objects
#         and rows share their values, to save memory.
# Source: Cilium 1.17, CiliumEndpoint watcher. An address that two nodes claim is the latest one's.
# Why:    Cilium accepts them all. This agent refuses an object with addresses that its node cannot have (of
#         another node, or outside of its ranges), with an identity that no pod has, or of an unknown node.

Item = TypeVar("Item")
CHUNK: Final = 50
"""Number of endpoints that are processed before a yield to the event loop: a few milliseconds."""
COMPARED_CHUNK: Final = 1000
"""Number of objects that are compared in the same time, if nothing changes for them."""


RemoteEndpoint = SlimEndpoint
"""A row of the table ``remote-endpoints``: a pod of another node."""


class PeerPods(msgspec.Struct, frozen=True):
    """Further pods of other nodes and clusters: egress rules may refer to their named ports."""

    table: Table[Any, Any]
    """Rows with ``ports``, each with a name, a protocol and a port."""


def remote_endpoints() -> Table[tuple[str, str], RemoteEndpoint]:
    """The ``remote-endpoints`` table, by namespace and name."""
    return Table("remote-endpoints", key=lambda one: one.key)


def resource_of(endpoint: RemoteEndpoint) -> str:
    """The resource of the claims."""
    return f"cep/{endpoint.namespace}/{endpoint.name}"


def claims_of(endpoint: RemoteEndpoint) -> Iterator[IpcacheEntry]:
    """A claim for each address of an endpoint, with its node as tunnel endpoint."""
    resource = resource_of(endpoint)
    for prefix in endpoint.prefixes:
        yield IpcacheEntry(
            prefix=prefix,
            identity=endpoint.identity,
            source=Source.CUSTOM_RESOURCE,
            resource=resource,
            tunnel_endpoint=tunnel_endpoint_of(endpoint.node),
            encrypt_key=endpoint.encrypt_key,
        )


class RemoteEndpoints:
    """Follows objects once all of them, and this node, are known; until then, leftovers of the map stay."""

    def __init__(
        self,
        objects: EndpointObjects,
        resources: Resources,
        nodes: ReadTable[str, ClusterNode],
        table: Table[tuple[str, str], RemoteEndpoint],
        *,
        identities: Identities,
        ipcache: Ipcache,
        modes: list[Member[ChainingMode]],
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self.table = table
        self._log = log
        self._health = health.child("claims")
        self._nodes = nodes
        self._holders = AddressHolders(nodes)
        self._own_addresses = all(mode.own_links for mode in modes)
        """Whether pods' addresses are in ranges of their nodes; not if another plugin assigns them."""
        self._refused: dict[object, dict[Key, str]] = {}
        """By object: refused endpoints, with reasons."""
        self._identities = identities
        self._ipcache = ipcache
        self._claimed = ipcache.table.initializer("cluster-endpoints")
        self._first = table.initializer("cluster-endpoints")
        self._slices = objects.slices
        self._names: dict[object, tuple[tuple[str, str], ...]] = {}
        """By slice: its endpoints."""
        self._counts: Counter[tuple[str, str]] = Counter()
        """Number of slices that contain an endpoint: two while it moves from one to another."""
        self._is_local: dict[str, bool] = {}
        """Whether an address is this node's, at a revision of the table of nodes."""
        self._is_local_revision = -1
        self._places = EndpointNodeIndex()
        self._unchecked: list[Change[str, ClusterNode]] = []
        """Changes of nodes for which not all endpoints have been checked."""
        if not objects.served:
            self._claimed.done()
            self._first.done()
            return
        kind = SLIM_ENDPOINT_SLICES if objects.slices else SLIM_ENDPOINTS
        self._resources = resources
        self._objects: Table[Any, Any] = resources.table(kind)
        jobs.observe(kind.plural, self._batches, self._follow)
        jobs.observe("places of endpoints", self._moved_nodes, self._recheck)

    async def _batches(self) -> AsyncIterator[Sequence[Change[Any, Any]] | None]:
        """Iterate over batches of changes; None at the beginning, for everything.

        Identities come first: no rule denies a number without known labels.
        """
        await self._identities.table.wait_initialized()
        await self._objects.wait_initialized()
        await self._resources.table(NODES).wait_initialized()  # those of remote clusters may be late
        await self._resources.table(CILIUM_NODES).wait_initialized()
        await wait_own(self._nodes)
        changes = self._objects.changes(self._objects.revision)
        yield None
        async for batch in changes:
            yield batch

    async def _follow(self, changes: Sequence[Change[Any, Any]] | None) -> None:
        if changes is None:
            await self._process_all()
            self._claimed.done()
            self._first.done()
            return
        for chunk in self._chunks(changes, lambda change: change.key):
            for change in chunk:
                self._places.replace(change.old, change.row)
            self._update({change.key: self._endpoints_of(change.key) for change in chunk})
            await anyio.lowlevel.checkpoint()
        self._report()

    async def _process_all(self) -> None:
        self._refused = {key: refused for key, refused in self._refused.items() if key in self._objects}
        known = self._names if self._slices else self.table.keys()
        removed = [key for key in known if key not in self._objects]
        self._places = EndpointNodeIndex()
        for lost in self._chunks(removed):
            self._update(dict.fromkeys(lost, ()))
            await anyio.lowlevel.checkpoint()
        for keys in self._chunks(list(self._objects.keys())):
            for row in map(self._objects.get, keys):
                if row is not None:
                    self._places.add(row)
            self._update({key: self._endpoints_of(key) for key in keys})
            await anyio.lowlevel.checkpoint()
        self._report()

    async def _moved_nodes(self) -> AsyncIterator[Sequence[Change[str, ClusterNode]]]:
        """Nodes with changed addresses or ranges, after all objects have been processed."""
        await self.table.wait_initialized()
        changed = self._nodes.changes(self._nodes.revision)
        if self._unchecked:  # an earlier check failed
            yield ()
        async for changes in changed:
            if any(
                endpoint_location_of(change.old) != endpoint_location_of(change.row) for change in changes
            ):
                yield changes

    async def _recheck(self, changes: Sequence[Change[str, ClusterNode]]) -> None:
        """Check endpoints of changed nodes again: refused ones may be valid now, and the reverse."""
        self._unchecked += changes
        moved = [
            each
            for each in self._unchecked
            if endpoint_location_of(each.old) != endpoint_location_of(each.row)
        ]
        nodes = [node for each in moved for node in (each.old, each.row) if node is not None]
        places, concerned = ChangedNodeAddresses(nodes), dict.fromkeys(self._refused)
        near = dict.fromkeys(key for node in nodes for key in self._places.around(node))
        for some in self._chunks(near, most=COMPARED_CHUNK):
            rows = [row for row in map(self._objects.get, some) if row is not None]
            concerned |= dict.fromkeys(
                row.key for row in rows if any(is_at(places, one) for one in row.endpoints)
            )
            await anyio.lowlevel.checkpoint()
        for keys in self._chunks(concerned):
            found = {key: self._endpoints_of(key) for key in keys}
            differ = {
                key: rows for key, rows in found.items() if {one.key for one in rows} != self._accepted(key)
            }
            if differ:
                self._update(differ)
            await anyio.lowlevel.checkpoint()
        self._unchecked.clear()
        self._report()

    def _chunks(
        self, items: Iterable[Item], key_of: Callable[[Item], Any] = lambda item: item, most: int = CHUNK
    ) -> Iterator[list[Item]]:
        """Objects in batches of endpoints that may be processed at once; one slice may have more."""
        if not self._slices:
            yield from chunks(items, most)
            return
        chunk: list[Item] = []
        count = 0
        for item in items:
            row: SlimEndpointSlice | None = self._objects.get(key_of(item))
            count += max(1, len(self._names.get(key_of(item), ())), len(row.endpoints) if row else 0)
            chunk.append(item)
            if count >= most:
                yield chunk
                chunk, count = [], 0
        if chunk:
            yield chunk

    def _accepted(self, key: Any) -> set[Key]:
        """The valid endpoints of an object."""
        names = self._names.get(key, ()) if self._slices else (key,)
        return {name for name in names if name in self.table}

    def _endpoints_of(self, key: Any) -> tuple[RemoteEndpoint, ...]:
        """The valid endpoints of an object; newly refused ones are reported."""
        row: SlimEndpoint | SlimEndpointSlice | None = self._objects.get(key)
        found = () if row is None else row.endpoints
        reached = [one for one in found if one.is_reached and not self._on_this_node(one.node)]
        reasons = {one.key: _wrong_identity(one) or self._wrong_place(one) for one in reached}
        refused = {name: reason for name, reason in reasons.items() if reason}
        before = self._refused.pop(key, {})
        if refused:
            self._refused[key] = refused
        for name, reason in refused.items():
            if before.get(name) != reason:
                self._log.warning("refusing a CiliumEndpoint", endpoint="/".join(name), reason=reason)
        return tuple(one for one in reached if not reasons[one.key])

    def _wrong_place(self, endpoint: RemoteEndpoint) -> str:
        """Why its addresses cannot be those of a pod on its node; empty if they can.

        The node must be known by the address in the object, by the name in the object if there is one
        (NODE_NAME; Cilium's objects and slices have none), and must have the addresses in its ranges, if it
        has ranges of that family.
        """
        at = _number_of_node(endpoint.node)
        node = self._holders.at(at) if at is not None else None
        named = endpoint.node_name
        if named and (node is None or node.name != named):
            return f"its node {named} is not known with the address {endpoint.node}"
        if node is None:
            return f"no node is known with the address {endpoint.node}"
        for prefix in endpoint.prefixes:
            ip = prefix.partition("/")[0]
            number = number_of(ip)
            if number is None:
                continue
            if (taken := self._holders.at(number)) is not None:
                return f"{ip} is an address of node {taken.name}"
            if not self._own_addresses:
                continue
            holder = self._holders.of_range(number)
            if holder is not None and holder is not node and holder.full_name != node.full_name:
                return f"{ip} is in the pods' range of node {holder.name}"
            if holder is None and _has_range(node, number[0]):
                return f"{ip} is in no range of its node {node.name}"
        return ""

    def _report(self) -> None:
        refused = {name: reason for several in self._refused.values() for name, reason in several.items()}
        if not refused:
            self._health.ok("no CiliumEndpoint claims addresses of others")
            return
        name, reason = next(iter(refused.items()))
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        self._health.degraded(f"refused CiliumEndpoints: {'/'.join(name)}: {reason}{more}")

    def _update(self, reported: dict[Any, tuple[RemoteEndpoint, ...]]) -> None:
        """Set the endpoints of these objects. Raises OSError if the ipcache cannot be updated."""
        now = {one.key: one for found in reported.values() for one in found}
        names = (
            {name for key in reported for name in self._names.get(key, ())}
            if self._slices
            else reported.keys()
        )
        removed = [
            row for name in names if name not in now and (row := self._last(name, reported)) is not None
        ]
        self._claim([one for name, one in now.items() if self.table.get(name) != one])
        for row in removed:
            self._ipcache.withdraw(resource_of(row), row.prefixes)
        with self.table.txn() as rows:
            for row in removed:
                rows.delete(row.key)
            for one in now.values():
                rows.put(one)
        if self._slices:
            self._note(reported)

    def _last(self, name: Any, reported: Mapping[Any, object]) -> RemoteEndpoint | None:
        """The row of an endpoint that these objects no longer contain, unless other objects do."""
        if self._slices:
            before = sum(name in self._names.get(key, ()) for key in reported)
            if self._counts[name] > before:
                return None
        return self.table.get(name)

    def _note(self, reported: Mapping[Any, tuple[RemoteEndpoint, ...]]) -> None:
        for key, found in reported.items():
            names = tuple(one.key for one in found)
            for name in self._names.pop(key, ()):
                self._counts[name] -= 1
                if not self._counts[name]:
                    del self._counts[name]
            self._counts.update(names)
            if names:
                self._names[key] = names

    def _claim(self, endpoints: Collection[RemoteEndpoint]) -> None:
        for one in endpoints:
            before = self.table.get(one.key)
            if before is not None and (left := set(before.prefixes).difference(one.prefixes)):
                self._ipcache.withdraw(resource_of(one), left)
        self._ipcache.upsert(*(claim for one in endpoints for claim in claims_of(one)))

    def _on_this_node(self, node: str) -> bool:
        if self._is_local_revision != self._nodes.revision:
            self._is_local.clear()
            self._is_local_revision = self._nodes.revision
        found = self._is_local.get(node)
        if found is None:
            ip = _address(node)
            own = ip is not None and any(one.local for one in self._nodes.by("address").get(ip))
            found = self._is_local[node] = own
        return found


def chunks(items: Iterable[Item], most: int = CHUNK) -> Iterator[list[Item]]:
    """The items in batches that may be processed at once."""
    rest = iter(items)
    while chunk := list(islice(rest, most)):
        yield chunk


def _wrong_identity(endpoint: RemoteEndpoint) -> str:
    """Why an endpoint cannot have its identity: its writer must not claim the host's, the API server's or a
    node's.
    """
    number = endpoint.identity
    if number == INIT or scope_of(number) in (Scope.CLUSTER, Scope.WELL_KNOWN):
        return ""
    return f"identity {number} is not an identity of pods"


def _has_range(node: ClusterNode, version: int) -> bool:
    return bool(node.ipv6_alloc_cidrs if version == 6 else node.ipv4_alloc_cidrs)


@lru_cache(maxsize=8192)
def _number_of_node(address: str) -> tuple[int, int] | None:
    """The number of a node's address, cached, as many pods have one node."""
    return number_of(address)


def _address(text: str) -> IPAddress | None:
    try:
        return ip_address(text)
    except ValueError:
        return None
