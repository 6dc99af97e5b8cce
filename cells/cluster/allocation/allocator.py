"""Numbers of identities, by CiliumIdentity objects.

For:    Identities. Needs: KubernetesAPI, Table[CiliumIdentity]. Gives: CiliumIdentityAllocator.
Source: Cilium 1.17, identity allocation in CRD mode. The operator deletes unused objects.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain
from typing import Final

import anyio

from cells.cluster.allocation.agreed import AgreedNumbers, Labels
from cells.cluster.allocation.objects import HEARTBEAT, body, candidates, labels_of, meaning
from cells.cluster.identity import CLUSTER
from cells.kubernetes import CILIUM_IDENTITIES, CiliumIdentity, KubernetesAPI
from lifecycle import Backoff, Health, Logger, Table

RETRY = Backoff(first=0.2, maximum=15.0)
WRITERS: Final = 8
"""Objects made at the same time."""


class CiliumIdentityAllocator(AgreedNumbers):
    """An IdentityAllocator over objects: labels that have one have its number, others get a new one."""

    def __init__(
        self, api: KubernetesAPI, table: Table[CiliumIdentity], grace: float, *, health: Health, log: Logger
    ) -> None:
        super().__init__(grace, health)
        self._api = api
        self._table = table
        self._log = log
        self._writers = anyio.Semaphore(WRITERS)

    async def allocate(self, labels: Labels, former: int = 0) -> int:
        """The number of these labels, once there is an object; tried until there is one."""
        failures = 0
        try:
            if not self._table.initialized:
                self._wait(labels, "CiliumIdentity objects are not known yet")
                await self._table.wait_initialized()
            while (known := self._known(labels, former)) is None:
                if (error := await self._make(labels, former)) is None:
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
                "identity in use had no object, it has one again", identity=number, labels=labels
            )

    async def keep(self, number: int, labels: Labels) -> None:
        """Create the object, or remove the operator's mark of disuse from it. Raises KubernetesError."""
        there = self._table.get(("", str(number)))
        if there is None:
            await self._created(number, labels)
        elif HEARTBEAT in there.annotations:
            unmarked = {"metadata": {"annotations": {HEARTBEAT: None}}}
            await self._api.client.patch(CILIUM_IDENTITIES, str(number), unmarked)

    async def _created(self, number: int, labels: Labels) -> bool:
        """Whether there was none, and is one now. Raises KubernetesError."""
        from cells.kubernetes import api  # loaded where there is a server

        try:
            await self._api.client.create(CILIUM_IDENTITIES, body(number, labels))
        except api.ConflictError:
            return False
        return True

    def labels_of(self, number: int) -> Labels | None:
        """Those of its object."""
        there = self._table.get(("", str(number)))
        return None if there is None else labels_of(there.security_labels)

    def _all_known(self) -> bool:
        return self._table.initialized

    def numbers(self, labels: Labels) -> list[int]:
        """The numbers of objects with these labels, the lowest first."""
        found = (one.number for one in self._table.by("labels").get(meaning(labels)))
        return sorted(number for number in found if number is not None and number in CLUSTER)

    async def _make(self, labels: Labels, former: int) -> str | None:
        """Create an object, or find the one that another node made; else why there is none."""
        from cells.kubernetes import api

        if len(self._table) >= len(CLUSTER):
            return f"no free identity between {CLUSTER.start} and {CLUSTER.stop - 1}"
        try:
            async with self._writers:
                for number in self._free(labels, former):
                    if await self._have(number, labels):
                        self._made[labels] = number
                        return None
        except api.KubernetesError as error:
            return str(error) or type(error).__name__
        return "every number tried is another identity's"

    def _free(self, labels: Labels, former: int) -> Iterable[int]:
        first = next(candidates(labels))
        others = (*range(first, CLUSTER.stop), *range(CLUSTER.start, first))  # where few are left
        for number in chain(self._preferred(labels, former), candidates(labels), others):
            taken = number in self._held or ("", str(number)) in self._table
            if number in CLUSTER and not taken and self._may_take(labels, number):
                yield number

    async def _have(self, number: int, labels: Labels) -> bool:
        """Whether the number is that of the labels now. Raises KubernetesError."""
        from cells.kubernetes import api

        try:
            await self._api.client.create(CILIUM_IDENTITIES, body(number, labels))
        except api.ConflictError:
            try:
                there = await self._api.client.get(CILIUM_IDENTITIES, str(number))
            except api.NotFoundError:  # gone in this moment: another number is as good
                return False
            return labels_of(there.security_labels) == labels
        self._fresh[number] = time.monotonic()
        return True
