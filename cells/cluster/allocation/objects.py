"""What a CiliumIdentity object looks like, and which number labels are to have.

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
from cells.cluster.allocation.agreed import AgreedNumbers, AllocationMode, Labels
from cells.cluster.identity.identities import Identities
from cells.cluster.identity.numbers import CLUSTER, EVERY_CLUSTER, ClusterNumbers
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.objects.cilium_endpoint import CILIUM_IDENTITIES, CiliumIdentity
from cells.kubernetes.settings import ObjectSource
from cells.kubernetes.sink import MissingObject
from lifecycle import Backoff, Change, Health, Jobs, Logger, Table
from lifecycle.jobs import TimeSlice

HEARTBEAT: Final = "io.cilium.heartbeat"
"""Annotation by which the operator marks an identity as unused."""
ATTEMPTS: Final = 16
"""Numbers that are tried for labels, before the next round."""
_NAMESPACE_LABELS: Final = "io.cilium.k8s.namespace.labels."


def body(number: int, labels: tuple[str, ...]) -> dict[str, Any]:
    """The object: labels for selectors are those of Kubernetes, without those of the namespace."""
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
        "security-labels": dict(meaning(labels)),
    }


def meaning(labels: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The labels as ``security-labels`` of the object, sorted: what objects are found by."""
    parsed = [parse(text) for text in labels]
    return tuple(sorted((f"{label.source}:{label.key}", label.value) for label in parsed))


def labels_of(security_labels: Mapping[str, str]) -> tuple[str, ...]:
    """The labels of an object."""
    return texts(parse(f"{key}={value}" if value else key) for key, value in security_labels.items())


def candidates(labels: tuple[str, ...], given: range = CLUSTER) -> Iterator[int]:
    """Numbers to try for labels, the same on every node.

    So two nodes that want the same labels at once try the same number, and the API server lets one of them
    have it: the other finds the labels it wanted.
    """
    digest = sha256(";".join(labels).encode()).digest()
    for attempt in range(ATTEMPTS):
        part = int.from_bytes(sha256(digest + bytes([attempt])).digest()[:8], "big")
        yield given.start + part % len(given)


# Numbers of identities, by CiliumIdentity objects.
#
# Source: Cilium 1.17, identity allocation in CRD mode. The operator deletes unused objects.

RETRY = Backoff(first=0.2, maximum=15.0)
WRITERS: Final = 8
"""Objects made at the same time."""


class CiliumIdentityAllocator(AgreedNumbers):
    """An IdentityAllocator over objects: labels that have one have its number, others get a new one."""

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
        """The objects."""
        self._log = log
        self._writers = anyio.Semaphore(WRITERS)

    async def allocate(self, labels: Labels, previous: int = 0) -> int:
        """The number of these labels, once there is an object; tried until there is one."""
        failures = 0
        try:
            if not self.table.initialized:
                self._wait(labels, "CiliumIdentity objects are not known yet")
                await self.table.wait_initialized()
            while (known := self._known(labels, previous)) is None:
                if (error := await self._make(labels, previous)) is None:
                    continue
                failures += 1
                if failures > 1 or not self._waiting.get(labels):
                    self._log.warning("identity not allocated", labels=labels, error=error)
                self._wait(labels, error)
                await self._api.client.reach.pause(RETRY.pause(failures))
            return known
        finally:
            self._wait(labels, "")

    async def restore(self, number: int, labels: Labels) -> None:
        """Make the object of a number in use again. Raises KubernetesError."""
        if await self._created(number, labels):  # else another node was faster: the watch brings its labels
            self._log.warning(
                "identity in use had no CiliumIdentity, created it again", identity=number, labels=labels
            )

    async def keep(self, number: int, labels: Labels) -> None:
        """Create the object, or remove the operator's mark of disuse from it. Raises KubernetesError."""
        there = self.table.get(("", str(number)))
        if there is None:
            await self._created(number, labels)
        elif HEARTBEAT in there.annotations:
            unmarked = {"metadata": {"annotations": {HEARTBEAT: None}}}
            await self._api.client.patch(CILIUM_IDENTITIES, str(number), unmarked)

    async def _created(self, number: int, labels: Labels) -> bool:
        """Whether there was none, and is one now. Raises KubernetesError."""
        from cells.kubernetes.client.errors import ConflictError  # loaded where there is a server

        try:
            await self._api.client.create(CILIUM_IDENTITIES, body(number, labels))
        except ConflictError:
            return False
        return True

    def labels_of(self, number: int) -> Labels | None:
        """Those of its object."""
        there = self.table.get(("", str(number)))
        return None if there is None else labels_of(there.security_labels)

    def _all_known(self) -> bool:
        return self.table.initialized

    def numbers(self, labels: Labels) -> list[int]:
        """The numbers of objects with these labels, the lowest first."""
        found = (one.number for one in self.table.by("labels").get(meaning(labels)))
        return sorted(number for number in found if number is not None and number in self._span.own)

    async def _make(self, labels: Labels, previous: int) -> str | None:
        """Create an object, or find the one that another node made; else why there is none."""
        from cells.kubernetes.client.errors import KubernetesError

        given = self._span.given
        if len(self.table) >= len(given):
            return f"no free identity between {given.start} and {given.stop - 1}"
        try:
            async with self._writers:
                for number in self._free(labels, previous):
                    if await self._have(number, labels):
                        self._has_made(labels, number)
                        return None
        except KubernetesError as error:
            return str(error) or type(error).__name__
        return "every identity number that was tried is in use"

    def _free(self, labels: Labels, previous: int) -> Iterable[int]:
        given = self._span.given
        first = next(candidates(labels, given))
        others = chain(range(first, given.stop), range(given.start, first))  # where few are left
        for number in chain(self._preferred(labels, previous), candidates(labels, given), others):
            taken = number in self._held or ("", str(number)) in self.table
            if number in self._span.own and not taken and self._may_take(labels, number):
                yield number

    async def _have(self, number: int, labels: Labels) -> bool:
        """Whether the number is that of the labels now. Raises KubernetesError."""
        from cells.kubernetes.client.errors import ConflictError, NotFoundError

        try:
            await self._api.client.create(CILIUM_IDENTITIES, body(number, labels))
        except ConflictError:
            try:
                there = await self._api.client.get(CILIUM_IDENTITIES, str(number))
            except NotFoundError:  # deleted in this moment: another number is as good
                return False
            return labels_of(there.security_labels) == labels
        self._fresh[number] = time.monotonic()
        return True


# CiliumIdentity objects to rows of the table ``identities``; and what is in use here keeps its object.
#
# Controller: Table[tuple[str, str], CiliumIdentity] in, ``identities`` out; writes objects that are missing.


COMPARE: Final = 300.0
"""Seconds between two looks at all that is in use, as in Cilium: an object may go unseen by the watch."""


class CiliumIdentityWatch:
    """Follows objects, once all are known."""

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
        self._known: set[str] = set()
        """The names of the objects that were taken in."""
        self._missing: set[int] = set()
        """Numbers in use without an object, when they were looked at last."""
        if not mode.reads_keys:
            self._first = identities.table.initializer("CiliumIdentity objects")
            jobs.observe("identities", self._rounds, self._follow)
            jobs.observe("missing objects", missing_objects.changes, self._look)
            jobs.timer("compare", self._keep_used, COMPARE)

    async def _rounds(self) -> AsyncIterator[list[Change[tuple[str, str], CiliumIdentity]] | None]:
        """None at the beginning: everything is to be looked at."""
        await self._table.wait_initialized()
        changes = self._table.changes(self._table.revision)
        yield None
        async for batch in changes:
            yield batch

    async def _follow(self, changes: list[Change[tuple[str, str], CiliumIdentity]] | None) -> None:
        time_slice = TimeSlice()
        if changes is None:
            there = {row.name: row for row in self._table.all()}
            for name in {*self._known, *there}:
                self._take(name, there.get(name))
                await time_slice.pause()
            self._first.done()
        else:
            for change in changes:
                self._take(change.key[1], change.row)
                await time_slice.pause()
        if self._writes:
            used = self._identities.in_use() if changes is None else self._touched(changes)
            await self._keep(used)

    async def _look(self, _: list[Change[tuple[str, str, str], MissingObject]]) -> None:
        """The server has lost objects: those in use here are made again, before others drop them."""
        await self._keep_used()

    async def _keep_used(self) -> None:
        """All that is in use here has objects. Raises KubernetesError."""
        if self._writes and self._table.initialized:
            await self._keep(self._identities.in_use())

    def _touched(self, changes: list[Change[tuple[str, str], CiliumIdentity]]) -> dict[int, tuple[str, ...]]:
        """The numbers in use here that changes may concern: theirs, and those that had no object so far."""
        names = {change.key[1] for change in changes}
        numbers = self._missing | {int(name) for name in names if name.isascii() and name.isdigit()}
        used = self._identities.used
        return {number: row.labels for number in numbers if (row := used.get(number)) is not None}

    def _take(self, name: str, row: CiliumIdentity | None) -> None:
        number = int(name) if name.isascii() and name.isdigit() else 0
        if number not in EVERY_CLUSTER:
            self._log.warning("CiliumIdentity ignored: its name is not a cluster identity number", name=name)
        elif row is None:
            self._known.discard(name)
            self._identities.unlearn(number)
        else:
            self._known.add(name)
            labels = labels_of(row.security_labels)
            self._objects.seen(labels)
            self._identities.learn(number, labels)

    async def _keep(self, used: Mapping[int, tuple[str, ...]]) -> None:
        """These numbers in use have objects, and no mark of the operator's. Raises KubernetesError."""
        for number, labels in used.items():
            there = self._table.get(("", str(number)))
            self._missing.discard(number)
            if there is None:
                self._missing.add(number)
            if there is not None and (CILIUM_IDENTITIES.qualified, "", str(number)) not in self._absent:
                await self._objects.keep(number, labels)
            elif self._objects.is_on_its_way(number):
                continue
            elif there is None and self._table.by("labels").get(meaning(labels)):
                self._log.info("the cluster has another identity for labels in use", identity=number)
                self._identities.supersede(number)
            else:
                await self._objects.restore(number, labels)
