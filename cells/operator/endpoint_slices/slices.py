"""Which endpoint is in which slice.

Needs: nothing.   Gives: Slices, SliceRow, core_endpoint().
Source: Cilium 1.17, operator/pkg/ciliumendpointslice: the fullest slice that has room; an endpoint stays
        where it is, but in mode identity it moves when its identity changes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from cells.kubernetes import CiliumEndpoint, CiliumEndpointSlice, CoreEndpoint, Key

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
    """What a slice says of an endpoint; None before it has an identity and addresses."""
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
        """Have the slices hold all these endpoints and no others; every slice."""
        rows = {one.key: one for one in endpoints}
        self.update(rows)
        self.update(dict.fromkeys(self._of.keys() - rows.keys()))
        for name in [name for name, one in self._slices.items() if not one.members]:
            self._forget(name)
        return {name: self._row(name) for name in self._slices}

    def update(self, changed: Mapping[Key, CiliumEndpoint | None]) -> dict[str, SliceRow | None]:
        """Take in endpoints that have changed (None: they are gone); the slices that have, None for none."""
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
