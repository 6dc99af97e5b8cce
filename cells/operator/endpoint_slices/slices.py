"""Assigns endpoints to slices.

Source: Cilium 1.17, operator/pkg/ciliumendpointslice: an endpoint goes to the fullest slice with room and
stays there. In mode identity it moves when its identity changes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Final

import anyio
import msgspec
from msgspec import Meta
from msgspec.structs import replace

from cells.kubernetes.objects.cilium_endpoint import (
    CILIUM_ENDPOINT_SLICES,
    CILIUM_ENDPOINTS,
    CiliumEndpoint,
    CiliumEndpointSlice,
    CoreEndpoint,
)
from cells.kubernetes.objects.cilium_node import CILIUM_NODES
from cells.kubernetes.objects.core import NAMESPACES, Namespace
from cells.kubernetes.objects.kind import Key
from cells.operator.objects import ClusterObjects
from lifecycle import Change, Jobs, Settings, Table
from lifecycle.tables import Changes

# How endpoints are batched, and the rate limits of writes.
#
# Source: Cilium 1.17, options of the operator's CES controller.

MODES: Final = ("identity", "fcfs")
OPTION: Final = "ces-rate-limits"


class WriteLimit(msgspec.Struct, frozen=True):
    """The rate limit of clusters with at least this number of nodes."""

    nodes: Annotated[int, msgspec.Meta(ge=0)]
    limit: Annotated[float, msgspec.Meta(gt=0)]
    """Writes per second."""
    burst: Annotated[int, msgspec.Meta(ge=1)]


class SliceSettings(Settings, frozen=True):
    """Settings of the endpoint-slices cell; used with enable-cilium-endpoint-slice."""

    ces_max_ciliumendpoints_per_ces: Annotated[int, Meta(ge=1)] = 100
    """Maximum number of endpoints in a CiliumEndpointSlice."""

    ces_slice_mode: str = "identity"
    """How endpoints are batched: identity, by namespace and identity; fcfs, by namespace, first come, first
    served.
    """

    ces_rate_limits: str = '[{"nodes":0,"limit":10,"burst":20}]'
    """Rate limits of writes, as JSON. The entry with the highest nodes that the cluster reaches applies;
    limit is in writes per second.
    """

    def faults(self) -> Iterator[str]:
        if self.ces_slice_mode not in MODES:
            yield f"ces-slice-mode={self.ces_slice_mode}: Invalid slicing mode: expected identity or fcfs"
        try:
            self.limits()
        except ValueError as error:
            yield f"{OPTION}={self.ces_rate_limits}: {error}"

    def limits(self) -> list[WriteLimit]:
        """Return the rate limits, ordered by number of nodes. Raises ValueError."""
        try:
            found = msgspec.json.decode(self.ces_rate_limits, type=list[WriteLimit])
        except msgspec.MsgspecError as error:
            raise ValueError(
                f'{error}: expected a list such as [{{"nodes":0,"limit":10,"burst":20}}]'
            ) from None
        if not found:
            raise ValueError('expected one limit at least, such as [{"nodes":0,"limit":10,"burst":20}]')
        return sorted(found, key=lambda one: one.nodes)

    def limit(self, nodes: int) -> WriteLimit:
        """Return the rate limit for a number of nodes; below the first, the first."""
        limits = self.limits()
        found = [one for one in limits if one.nodes <= nodes] or limits[:1]
        return found[-1]


_LETTERS: Final = "bcdfghjklmnpqrstvwxyz2456789"
"""Alphabet of random names in Kubernetes (k8s.io/apimachinery, SafeEncodeString), without vowels."""

Group = tuple[str, int]
"""Namespace and identity; identity 0 in mode fcfs."""


class SliceRow(msgspec.Struct, frozen=True, gc=False):
    """The desired content of a slice."""

    name: str
    namespace: str
    endpoints: tuple[CoreEndpoint, ...]
    priority: bool = False
    """Whether its namespace has priority."""


def core_endpoint(endpoint: CiliumEndpoint) -> CoreEndpoint | None:
    """Return an endpoint as it is in a slice, or None if it lacks an identity or addresses."""
    status = endpoint.status
    if status.identity is None or not status.identity.id or status.networking is None:
        return None
    return CoreEndpoint(
        endpoint.name, status.identity.id, status.networking, status.encryption, status.named_ports
    )


class _Slice:
    def __init__(self, group: Group) -> None:
        self.group = group
        self.members: dict[str, CoreEndpoint] = {}


class Slices:
    """All slices, and the slice of each endpoint."""

    def __init__(self, most: int, *, by_identity: bool) -> None:
        self._most = most
        self._by_identity = by_identity
        self._slices: dict[str, _Slice] = {}
        self._of: dict[Key, str] = {}
        self._open: dict[Group, set[str]] = {}
        """Group -> the slices with room."""

    def adopt(self, rows: Iterable[CiliumEndpointSlice]) -> None:
        """Start with the existing slices; an endpoint in two of them stays in the first."""
        for row in sorted(rows, key=lambda one: one.name):
            number = row.endpoints[0].id if row.endpoints and self._by_identity else 0
            one = self._slices[row.name] = _Slice((row.of_namespace, number))
            for member in row.endpoints:
                if (row.of_namespace, member.name) not in self._of:
                    one.members[member.name] = member
                    self._of[row.of_namespace, member.name] = row.name
            self._note(row.name)

    def begin(self, endpoints: Iterable[CiliumEndpoint]) -> dict[str, SliceRow | None]:
        """Assign the initial endpoints to slices; return every slice."""
        rows = {one.key: one for one in endpoints}
        self.update(rows)
        self.update(dict.fromkeys(self._of.keys() - rows.keys()))
        for name in [name for name, one in self._slices.items() if not one.members]:
            self._forget(name)
        return {name: self._row(name) for name in self._slices}

    def update(self, changed: Mapping[Key, CiliumEndpoint | None]) -> dict[str, SliceRow | None]:
        """Apply changed endpoints (None: deleted); return the changed slices (None: deleted)."""
        touched: set[str] = set()
        for key, endpoint in changed.items():
            core = core_endpoint(endpoint) if endpoint is not None else None
            at = self._of.get(key)
            if at is not None and (core is None or self._slices[at].group != self._group(key, core)):
                touched.add(self._take_out(key, at))
                at = None
            if core is None:
                continue
            if at is None:
                at = self._place(key, core)
            elif self._slices[at].members[core.name] == core:
                continue
            self._slices[at].members[core.name] = core
            self._note(at)
            touched.add(at)
        found = {name: self._row(name) for name in touched}
        for name, row in found.items():
            if row is None:
                self._forget(name)
        return found

    def _group(self, key: Key, core: CoreEndpoint) -> Group:
        return key[0], core.id if self._by_identity else 0

    def _place(self, key: Key, core: CoreEndpoint) -> str:
        group = self._group(key, core)
        room = self._open.get(group, ())
        name = max(room, key=lambda one: (len(self._slices[one].members), one), default="")
        if not name:
            name = self._fresh()
            self._slices[name] = _Slice(group)
        self._of[key] = name
        return name

    def _take_out(self, key: Key, name: str) -> str:
        del self._of[key]
        del self._slices[name].members[key[1]]
        self._note(name)
        return name

    def _note(self, name: str) -> None:
        """Update whether the slice has room."""
        one = self._slices[name]
        room = self._open.setdefault(one.group, set())
        if len(one.members) < self._most:
            room.add(name)
        else:
            room.discard(name)

    def _forget(self, name: str) -> None:
        one = self._slices.pop(name)
        self._open[one.group].discard(name)
        if not self._open[one.group]:
            del self._open[one.group]

    def _row(self, name: str) -> SliceRow | None:
        one = self._slices[name]
        return SliceRow(name, one.group[0], tuple(one.members.values())) if one.members else None

    def _fresh(self) -> str:
        while True:
            letters = ("".join(random.choices(_LETTERS, k=length)) for length in (9, 5))  # noqa: S311  # a name
            name = f"ces-{'-'.join(letters)}"
            if name not in self._slices:
                return name


# Keeps the desired slices up to date with CiliumEndpoints.
#
# Source: Cilium 1.17: annotation ``cilium.io/ces-namespace`` of a namespace, ``priority`` or empty.

ANNOTATION: Final = "cilium.io/ces-namespace"
DELAY: Final = 0.5
"""Seconds for which changes are batched before a slice is written."""


class EndpointSlices:
    """Maintains the desired slices, once endpoints and slices are synchronized."""

    def __init__(
        self,
        settings: SliceSettings,
        objects: ClusterObjects,
        rows: Table[str, SliceRow],
        *,
        jobs: Jobs,
    ) -> None:
        self.active = objects.resources.endpoint_slices and objects.resources.endpoints
        """Whether slices are used."""
        self._settings = settings
        self._rows = rows
        self._first = rows.initializer("endpoints of the cluster")
        self.waiting: dict[str, float] = {}
        """Slice -> since when it waits to be written, in seconds of the monotonic clock."""
        if self.active:
            self._endpoints = objects.table(CILIUM_ENDPOINTS)
            self._slices = objects.table(CILIUM_ENDPOINT_SLICES)
            self._nodes = objects.table(CILIUM_NODES)
            self._namespaces = objects.table(NAMESPACES)
            jobs.one_shot("batch", self._run)
            jobs.observe("priorities", self._namespaces.changes, self._follow_namespaces)

    def live(self) -> list[CiliumEndpointSlice]:
        """Return the actual slices."""
        return self._slices.all()

    def changes(self) -> Changes[Key, CiliumEndpointSlice]:
        """Follow the actual slices."""
        return self._slices.changes()

    def drifted(self, name: str) -> bool:
        """Whether another writer has changed, deleted or created a slice that does not wait to be written."""
        live, row = self.find(name), self._rows.get(name)
        if name in self.waiting or live is None or row is None:
            return name not in self.waiting and (live is None) is not (row is None)
        return (live.of_namespace, live.endpoints) != (row.namespace, row.endpoints)

    def find(self, name: str) -> CiliumEndpointSlice | None:
        """Return the actual slice of a name, or None."""
        return self._slices.get(("", name))

    def has_priority(self, namespace: str) -> bool:
        """Whether the namespace has priority."""
        row = self._namespaces.get(("", namespace))
        return row is not None and row.annotations.get(ANNOTATION) == "priority"

    def limit(self) -> WriteLimit:
        """Return the rate limit for the current number of nodes."""
        return self._settings.limit(len(self._nodes))

    async def _run(self) -> None:
        """Apply the initial state, then batches of changes."""
        for table in (self._endpoints, self._slices, self._nodes, self._namespaces):
            await table.wait_initialized()
        settings = self._settings
        slices = Slices(
            settings.ces_max_ciliumendpoints_per_ces, by_identity=settings.ces_slice_mode == "identity"
        )
        slices.adopt(self._slices.all())
        feed = self._endpoints.changes()
        first = [one.row for one in feed.take() if one.row is not None]
        with self._rows.txn() as txn:
            txn.replace_all(
                self._with_priority(row for row in slices.begin(first).values() if row is not None)
            )
        self._first.done()
        while True:
            await feed.wait()
            await anyio.sleep(DELAY)
            changed = slices.update({one.key: one.row for one in feed.take()})
            with self._rows.txn() as txn:
                for name in (name for name, row in changed.items() if row is None):
                    txn.delete(name)
                for row in self._with_priority(row for row in changed.values() if row is not None):
                    txn.put(row)

    def _with_priority(self, rows: Iterable[SliceRow]) -> Iterable[SliceRow]:
        """Set the priority of slices, and note since when they wait to be written."""
        now = time.monotonic()
        for row in rows:
            live = self.find(row.name)
            if live is not None and (live.of_namespace, live.endpoints) == (row.namespace, row.endpoints):
                self.waiting.pop(row.name, None)
            else:
                self.waiting.setdefault(row.name, now)
            yield replace(row, priority=self.has_priority(row.namespace))

    async def _follow_namespaces(self, changes: list[Change[tuple[str, str], Namespace]]) -> None:
        changed = {one.key[1] for one in changes}
        with self._rows.txn() as txn:
            for row in self._rows.all():
                if row.namespace in changed and row.priority != self.has_priority(row.namespace):
                    txn.put(replace(row, priority=not row.priority))
