"""Global identities as CiliumIdentity objects: their contents, the allocator, and the watch.

Source: Cilium 1.17, CiliumIdentity and its labels.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import chain
from typing import Any, Final

import anyio

from cells.base.labels import parse, texts
from cells.cluster.allocation.global_allocator import AllocationMode, GlobalAllocator, Labels
from cells.cluster.identity.identities import Identities
from cells.cluster.identity.numbers import CLUSTER, EVERY_CLUSTER, ClusterNumbers
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.objects.cilium_endpoint import CILIUM_IDENTITIES, CiliumIdentity
from cells.kubernetes.settings import ObjectSource
from cells.kubernetes.sink import MissingObject
from lifecycle import Backoff, Change, Health, Jobs, Logger, Table
from lifecycle.jobs import TimeSlice

HEARTBEAT: Final = "io.cilium.heartbeat"
"""The annotation by which the operator marks an unused identity."""
ATTEMPTS: Final = 16
"""Numbers from the hash of the labels that are tried first."""
_NAMESPACE_LABELS: Final = "io.cilium.k8s.namespace.labels."


def body(number: int, labels: tuple[str, ...]) -> dict[str, Any]:
    """Return the CiliumIdentity.

    Its metadata labels, for selectors, are the k8s labels without those of the namespace.
    """
    parsed = [parse(text) for text in labels]
    return {
        "apiVersion": CILIUM_IDENTITIES.api_version,
        "kind": CILIUM_IDENTITIES.kind,
        "metadata": {
            "name": str(number),
            "labels": {
                label.key: label.value
                for label in parsed
                if label.source == "k8s" and not label.key.startswith(_NAMESPACE_LABELS)
            },
        },
        "security-labels": dict(security_labels_of(labels)),
    }


def security_labels_of(labels: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the labels as sorted items of ``security-labels``, the key of the index of objects."""
    parsed = [parse(text) for text in labels]
    return tuple(sorted((f"{label.source}:{label.key}", label.value) for label in parsed))


def labels_of(security_labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the labels of an object."""
    return texts(parse(f"{key}={value}" if value else key) for key, value in security_labels.items())


def candidates(labels: tuple[str, ...], allocatable: range = CLUSTER) -> Iterator[int]:
    """Yield numbers to try for labels, the same on every node.

    Nodes that allocate the same labels concurrently try the same number: the API server accepts one of them,
    and the others find their labels in the object.
    """
    digest = sha256(";".join(labels).encode()).digest()
    for attempt in range(ATTEMPTS):
        part = int.from_bytes(sha256(digest + bytes([attempt])).digest()[:8], "big")
        yield allocatable.start + part % len(allocatable)


# The allocator.
#
# Source: Cilium 1.17, identity allocation in CRD mode. The operator deletes unused objects.

RETRY = Backoff(first=0.2, maximum=15.0)
WRITERS: Final = 8
"""Maximum number of objects created concurrently."""


class CiliumIdentityAllocator(GlobalAllocator):
    """An IdentityAllocator over CiliumIdentities."""

    def __init__(
        self,
        api: KubernetesAPI,
        table: Table[tuple[str, str], CiliumIdentity],
        span: ClusterNumbers,
        grace: float,
        *,
        health: Health,
        log: Logger,
    ) -> None:
        super().__init__(span, grace, health)
        self._api = api
        self.table = table
        """All CiliumIdentities."""
        self._log = log
        self._writers = anyio.Semaphore(WRITERS)

    async def allocate(self, labels: Labels, previous: int = 0) -> int:
        """Return the number of these labels; retry until there is an object."""
        failures = 0
        try:
            if not self.table.initialized:
                self._set_waiting(labels, "CiliumIdentity objects are not known yet")
                await self.table.wait_initialized()
            while (known := self._lookup(labels, previous)) is None:
                if (error := await self._try_allocate(labels, previous)) is None:
                    continue
                failures += 1
                if failures > 1 or not self._waiting.get(labels):
                    self._log.warning("identity not allocated", labels=labels, error=error)
                self._set_waiting(labels, error)
                await self._api.client.reachability.pause(RETRY.pause(failures))
            return known
        finally:
            self._set_waiting(labels, "")

    async def restore(self, number: int, labels: Labels) -> None:
        """Create the missing object of a number in use. Raises KubernetesError."""
        if await self._create(number, labels):  # otherwise another node was first
            self._log.warning(
                "identity in use had no CiliumIdentity, created it again", identity=number, labels=labels
            )

    async def ensure(self, number: int, labels: Labels) -> None:
        """Create the object if it does not exist, or remove the operator's mark. Raises KubernetesError."""
        existing = self.table.get(("", str(number)))
        if existing is None:
            await self._create(number, labels)
        elif HEARTBEAT in existing.annotations:
            unmarked = {"metadata": {"annotations": {HEARTBEAT: None}}}
            await self._api.client.patch(CILIUM_IDENTITIES, str(number), unmarked)

    async def _create(self, number: int, labels: Labels) -> bool:
        """Create the object; returns whether it did not exist. Raises KubernetesError."""
        from cells.kubernetes.client.errors import ConflictError  # imported only with an API server

        try:
            await self._api.client.create(CILIUM_IDENTITIES, body(number, labels))
        except ConflictError:
            return False
        return True

    def labels_of(self, number: int) -> Labels | None:
        """Return the labels of the object, or None."""
        existing = self.table.get(("", str(number)))
        return None if existing is None else labels_of(existing.security_labels)

    def _synced(self) -> bool:
        return self.table.initialized

    def numbers(self, labels: Labels) -> list[int]:
        """Return the numbers of objects with these labels, the lowest first."""
        found = (one.number for one in self.table.by("labels").get(security_labels_of(labels)))
        return sorted(number for number in found if number is not None and number in self._span.own)

    async def _try_allocate(self, labels: Labels, previous: int) -> str | None:
        """Create an object, or find that of another node; returns the error, or None."""
        from cells.kubernetes.client.errors import KubernetesError

        allocatable = self._span.allocatable
        if len(self.table) >= len(allocatable):
            return f"no free identity between {allocatable.start} and {allocatable.stop - 1}"
        try:
            async with self._writers:
                for number in self._candidates(labels, previous):
                    if await self._create_or_match(number, labels):
                        self._add_pending(labels, number)
                        return None
        except KubernetesError as error:
            return str(error) or type(error).__name__
        return "all identity numbers that were tried are in use"

    def _candidates(self, labels: Labels, previous: int) -> Iterable[int]:
        allocatable = self._span.allocatable
        first = next(candidates(labels, allocatable))
        others = chain(range(first, allocatable.stop), range(allocatable.start, first))  # if few are free
        for number in chain(self._preferred(labels, previous), candidates(labels, allocatable), others):
            taken = number in self._held or ("", str(number)) in self.table
            if number in self._span.own and not taken and self._may_use(labels, number):
                yield number

    async def _create_or_match(self, number: int, labels: Labels) -> bool:
        """Create the object; returns whether it has these labels now. Raises KubernetesError."""
        from cells.kubernetes.client.errors import ConflictError, NotFoundError

        try:
            await self._api.client.create(CILIUM_IDENTITIES, body(number, labels))
        except ConflictError:
            try:
                existing = await self._api.client.get(CILIUM_IDENTITIES, str(number))
            except NotFoundError:  # deleted in the meantime: try another number
                return False
            return labels_of(existing.security_labels) == labels
        self._allocated_at[number] = time.monotonic()
        return True


# CiliumIdentities to the table ``identities``; and missing objects of identities in use.


COMPARE: Final = 300.0
"""Seconds between comparisons of all identities in use, as in Cilium, in case the watch misses an event."""


class CiliumIdentityWatch:
    """Writes CiliumIdentities to the table ``identities``, and restores objects in use."""

    def __init__(
        self,
        table: Table[tuple[str, str], CiliumIdentity],
        identities: Identities,
        objects: CiliumIdentityAllocator,
        source: ObjectSource,
        mode: AllocationMode,
        missing_objects: Table[tuple[str, str, str], MissingObject],
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._table = table
        self._identities = identities
        self._objects = objects
        self._writes = source is ObjectSource.API_SERVER
        self._log = log
        self._absent = missing_objects
        self._applied: set[str] = set()
        """Names of objects with an identity in the table ``identities``."""
        self._missing: set[int] = set()
        """Numbers in use that had no object at the last comparison."""
        if not mode.reads_keys:
            self._first = identities.table.initializer("CiliumIdentity objects")
            jobs.observe("identities", self._batches, self._follow)
            jobs.observe("missing objects", missing_objects.changes, self._changed)
            jobs.timer("compare", self._ensure_used, COMPARE)

    async def _batches(self) -> AsyncIterator[list[Change[tuple[str, str], CiliumIdentity]] | None]:
        """Yield None, for all objects, then changes."""
        await self._table.wait_initialized()
        changes = self._table.changes(self._table.revision)
        yield None
        async for batch in changes:
            yield batch

    async def _follow(self, changes: list[Change[tuple[str, str], CiliumIdentity]] | None) -> None:
        time_slice = TimeSlice()
        if changes is None:
            existing = {row.name: row for row in self._table.all()}
            for name in {*self._applied, *existing}:
                self._apply(name, existing.get(name))
                await time_slice.pause()
            self._first.done()
        else:
            for change in changes:
                self._apply(change.key[1], change.row)
                await time_slice.pause()
        if self._writes:
            used = self._identities.in_use() if changes is None else self._affected(changes)
            await self._ensure(used)

    async def _changed(self, _: list[Change[tuple[str, str, str], MissingObject]]) -> None:
        """Create objects that the API server has lost before other nodes drop the identities."""
        await self._ensure_used()

    async def _ensure_used(self) -> None:
        """Ensure objects for all identities in use. Raises KubernetesError."""
        if self._writes and self._table.initialized:
            await self._ensure(self._identities.in_use())

    def _affected(self, changes: list[Change[tuple[str, str], CiliumIdentity]]) -> dict[int, tuple[str, ...]]:
        """Return the identities in use that changes concern, and those without an object."""
        names = {change.key[1] for change in changes}
        numbers = self._missing | {int(name) for name in names if name.isascii() and name.isdigit()}
        used = self._identities.used
        return {number: row.labels for number in numbers if (row := used.get(number)) is not None}

    def _apply(self, name: str, row: CiliumIdentity | None) -> None:
        number = int(name) if name.isascii() and name.isdigit() else 0
        if number not in EVERY_CLUSTER:
            self._log.warning("CiliumIdentity ignored: its name is not a cluster identity number", name=name)
        elif row is None:
            self._applied.discard(name)
            self._identities.forget(number)
        else:
            self._applied.add(name)
            labels = labels_of(row.security_labels)
            self._objects.confirm(labels)
            self._identities.learn(number, labels)

    async def _ensure(self, used: Mapping[int, tuple[str, ...]]) -> None:
        """Create missing objects of identities in use, and remove the operator's mark.

        An identity is superseded if the labels have another object. Raises KubernetesError.
        """
        for number, labels in used.items():
            existing = self._table.get(("", str(number)))
            self._missing.discard(number)
            if existing is None:
                self._missing.add(number)
            if existing is not None and (CILIUM_IDENTITIES.qualified, "", str(number)) not in self._absent:
                await self._objects.ensure(number, labels)
            elif self._objects.is_pending(number):
                continue
            elif existing is None and self._table.by("labels").get(security_labels_of(labels)):
                self._log.info("the cluster has another identity for labels in use", identity=number)
                self._identities.supersede(number)
            else:
                await self._objects.restore(number, labels)
