"""Which endpoint is in which slice.

Source: Cilium 1.17, operator/pkg/ciliumendpointslice: the fullest slice that has room; an endpoint stays
        where it is, but in mode identity it moves when its identity changes.
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

# How endpoints are batched, and how fast slices are written.
#
# Source: Cilium 1.17, options of the operator's CES controller.

MODES: Final = ("identity", "fcfs")
OPTION: Final = "ces-rate-limits"


class WriteLimit(msgspec.Struct, frozen=True):
    """How fast slices are written in a cluster of so many nodes or more."""

    nodes: Annotated[int, msgspec.Meta(ge=0)]
    limit: Annotated[float, msgspec.Meta(gt=0)]
    """Writes a second."""
    burst: Annotated[int, msgspec.Meta(ge=1)]


class SliceSettings(Settings, frozen=True):
    """Settings of the endpoint-slices cell; they count with enable-cilium-endpoint-slice."""

    ces_max_ciliumendpoints_per_ces: Annotated[int, Meta(ge=1)] = 100
    """How many endpoints a CiliumEndpointSlice holds at most."""

    ces_slice_mode: str = "identity"
    """Which endpoints share a slice: identity, those of one identity; fcfs, any of a namespace, first come,
    first served."""

    ces_rate_limits: str = '[{"nodes":0,"limit":10,"burst":20}]'
    """How fast slices are written, as JSON: the entry with the most nodes that the cluster has counts; limit
    is in writes a second."""

    def faults(self) -> Iterator[str]:
        if self.ces_slice_mode not in MODES:
            yield f"ces-slice-mode={self.ces_slice_mode}: Invalid slicing mode: expected identity or fcfs"
        try:
            self.limits()
        except ValueError as error:
            yield f"{OPTION}={self.ces_rate_limits}: {error}"

    def limits(self) -> list[WriteLimit]:
        """The limits, for the fewest nodes first; raises ValueError."""
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
        """The one that counts for so many nodes; below the first, the first."""
        limits = self.limits()
        found = [one for one in limits if one.nodes <= nodes] or limits[:1]
        return found[-1]


_LETTERS: Final = "bcdfghjklmnpqrstvwxyz2456789"
"""Of names that Kubernetes makes up (k8s.io/apimachinery, SafeEncodeString): no words come about."""

Group = tuple[str, int]
"""A namespace, and an identity; 0 where any may be together."""


class SliceRow(msgspec.Struct, frozen=True, gc=False):
    """What a slice holds."""

    name: str
    namespace: str
    endpoints: tuple[CoreEndpoint, ...]
    priority: bool = False
    """Whether its namespace goes first."""


def core_endpoint(endpoint: CiliumEndpoint) -> CoreEndpoint | None:
    """The fields of an endpoint in a slice; None before it has an identity and addresses."""
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
    """All slices, and where each endpoint is."""

    def __init__(self, most: int, *, by_identity: bool) -> None:
        self._most = most
        self._by_identity = by_identity
        self._slices: dict[str, _Slice] = {}
        self._of: dict[Key, str] = {}
        self._open: dict[Group, set[str]] = {}
        """The slices of a group that have room."""

    def adopt(self, rows: Iterable[CiliumEndpointSlice]) -> None:
        """Start with the slices there are; of an endpoint that two of them hold, the first keeps it."""
        for row in sorted(rows, key=lambda one: one.name):
            number = row.endpoints[0].id if row.endpoints and self._by_identity else 0
            one = self._slices[row.name] = _Slice((row.of_namespace, number))
            for member in row.endpoints:
                if (row.of_namespace, member.name) not in self._of:
                    one.members[member.name] = member
                    self._of[row.of_namespace, member.name] = row.name
            self._note(row.name)

    def begin(self, endpoints: Iterable[CiliumEndpoint]) -> dict[str, SliceRow | None]:
        """Distribute these endpoints over slices; returns every slice."""
        rows = {one.key: one for one in endpoints}
        self.update(rows)
        self.update(dict.fromkeys(self._of.keys() - rows.keys()))
        for name in [name for name, one in self._slices.items() if not one.members]:
            self._forget(name)
        return {name: self._row(name) for name in self._slices}

    def update(self, changed: Mapping[Key, CiliumEndpoint | None]) -> dict[str, SliceRow | None]:
        """Take in endpoints that have changed (None: deleted); the slices that change, None for none."""
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
        """Remember whether the slice has room."""
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


# Keeps slices up to date with CiliumEndpoints.
#
# Source: Cilium 1.17: the annotation ``cilium.io/ces-namespace`` of a namespace, ``priority`` or nothing.

ANNOTATION: Final = "cilium.io/ces-namespace"
DELAY: Final = 0.5
"""Seconds that a change waits for others, so that a slice is written once for all of them."""


class EndpointSlices:
    """Places endpoints once all of them, and all slices, are known."""

    def __init__(
        self,
        settings: SliceSettings,
        objects: ClusterObjects,
        rows: Table[str, SliceRow],
        *,
        jobs: Jobs,
    ) -> None:
        self.active = objects.resources.endpoint_slices and objects.resources.endpoints
        """Whether there are to be slices."""
        self._settings = settings
        self._rows = rows
        self._first = rows.initializer("endpoints of the cluster")
        self.waiting: dict[str, float] = {}
        """Since when slices wait to be written, in seconds of the monotonic clock."""
        if self.active:
            self._endpoints = objects.table(CILIUM_ENDPOINTS)
            self._slices = objects.table(CILIUM_ENDPOINT_SLICES)
            self._nodes = objects.table(CILIUM_NODES)
            self._namespaces = objects.table(NAMESPACES)
            jobs.one_shot("batch", self._run)
            jobs.observe("priorities", self._namespaces.changes, self._follow_namespaces)

    def live(self) -> list[CiliumEndpointSlice]:
        """The slices there are."""
        return self._slices.all()

    def find(self, name: str) -> CiliumEndpointSlice | None:
        """The slice of this name, if there is one."""
        return self._slices.get(("", name))

    def goes_first(self, namespace: str) -> bool:
        """Whether the slices of a namespace are written before those of others."""
        row = self._namespaces.get(("", namespace))
        return row is not None and row.annotations.get(ANNOTATION) == "priority"

    def limit(self) -> WriteLimit:
        """How fast slices may be written, now that the cluster has so many nodes."""
        return self._settings.limit(len(self._nodes))

    async def _run(self) -> None:
        """All there is, then what changes; what comes together is taken together."""
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
            txn.replace_all(self._marked(row for row in slices.begin(first).values() if row is not None))
        self._first.done()
        while True:
            await feed.wait()
            await anyio.sleep(DELAY)
            changed = slices.update({one.key: one.row for one in feed.take()})
            with self._rows.txn() as txn:
                for name in (name for name, row in changed.items() if row is None):
                    txn.delete(name)
                for row in self._marked(row for row in changed.values() if row is not None):
                    txn.put(row)

    def _marked(self, rows: Iterable[SliceRow]) -> Iterable[SliceRow]:
        """Slices with whether they go first; those that are to be written wait from now on."""
        now = time.monotonic()
        for row in rows:
            live = self.find(row.name)
            if live is not None and (live.of_namespace, live.endpoints) == (row.namespace, row.endpoints):
                self.waiting.pop(row.name, None)
            else:
                self.waiting.setdefault(row.name, now)
            yield replace(row, priority=self.goes_first(row.namespace))

    async def _follow_namespaces(self, changes: list[Change[tuple[str, str], Namespace]]) -> None:
        changed = {one.key[1] for one in changes}
        with self._rows.txn() as txn:
            for row in self._rows.all():
                if row.namespace in changed and row.priority != self.goes_first(row.namespace):
                    txn.put(replace(row, priority=not row.priority))
