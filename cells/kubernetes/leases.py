"""Leases: one of several is the leader, and all can see which.

Source: k8s.io/client-go/tools/leaderelection; coordination.k8s.io/v1 Lease (times have six digits of
        fraction).
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final

import anyio

from cells.kubernetes.client.client import Client
from cells.kubernetes.client.errors import ConflictError, KubernetesError, NotFoundError
from cells.kubernetes.objects.kind import Kind, Object, ObjectPart
from lifecycle import Logger

__all__ = ["LEASES", "Election", "Lease"]


class LeaseSpec(ObjectPart, frozen=True, gc=False):
    """Who holds it, and for how long."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(Object, frozen=True, gc=False):
    """A lease."""

    spec: LeaseSpec = LeaseSpec()


RELEASE: Final = 2.0
"""Seconds that releasing a lease may take, so that stopping does not wait for a missing server."""
LEASES: Final = Kind(Lease, "coordination.k8s.io/v1", "leases")


def micro_time() -> str:
    """Now, as leases write it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Election:
    """Holds a lease, or waits until its holder has not renewed it for its whole duration.

    Durations are seconds. Expiry is measured by our own clock from when a change of the lease was seen: the
    clocks of two machines are never compared. ``observed`` is called with the holder after each answer.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        namespace: str,
        identity: str,
        log: Logger,
        *,
        duration: float = 15.0,
        deadline: float = 10.0,
        retry: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        observed: Callable[[str], None] | None = None,
    ) -> None:
        self._client = client
        self._name = name
        self._namespace = namespace
        self._identity = identity
        self._log = log
        self._duration = duration
        self._deadline = deadline
        self._retry = retry
        self._clock = clock
        self._observed = observed
        self._written: dict[str, Any] | None = None
        """The lease as we wrote it last: while no one else writes it, one request renews it."""
        self._seen: LeaseSpec | None = None
        self._seen_at = 0.0
        self.leader = ""
        """Who was last seen to hold it."""
        self.lost = False
        """Whether it was ours and is not any more, though the work was not done."""

    async def run(self, work: Callable[[], Awaitable[object]]) -> None:
        """Wait for the lease, then work while it is held; released at the end.

        Returns when `work` is done, or cancels it and returns when the lease is lost.
        """
        while not await self._try():  # noqa: ASYNC110  # a lease can only be asked for
            await anyio.sleep(self._retry * (1 + random.random() / 5))  # noqa: S311  # spreads load
        self._log.info("elected leader", lease=self._name)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._renew, group.cancel_scope)
                await work()
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(RELEASE):
                await self._release()

    async def _renew(self, scope: anyio.CancelScope) -> None:
        """Keep it; without success within the deadline it counts as lost."""
        held = self._clock()
        while True:
            await anyio.sleep(self._retry)
            with anyio.move_on_after(max(0.0, held + self._deadline - self._clock())):
                if await self._try():
                    held = self._clock()
                    continue
            if self.leader != self._identity or self._clock() - held >= self._deadline:
                self._log.warning("leader election lost", lease=self._name, holder=self.leader)
                self.lost = True
                scope.cancel()
                return

    async def _try(self) -> bool:
        """Whether the lease is ours now."""
        try:
            taken = await self._take()
        except KubernetesError as error:
            self._log.warning("lease cannot be acquired", lease=self._name, error=str(error))
            return False
        if self._observed is not None:
            self._observed(self.leader)
        return taken

    async def _take(self) -> bool:
        if self._written is not None and await self._write(self._claimed(self._written.get("spec") or {})):
            return True
        try:
            live = await self._client.whole(LEASES, self._name, self._namespace)
        except NotFoundError:
            return await self._make()
        spec = live.get("spec") or {}
        self._look(spec)
        if self.leader not in {"", self._identity} and not self._expired(spec):
            return False
        self._written = live
        return await self._write(self._claimed(spec))

    async def _write(self, spec: dict[str, Any]) -> bool:
        """Write the lease over what is known of it; False when it is another one by now."""
        known, self._written = self._written, None
        try:
            written = await self._client.replace(
                LEASES, self._name, {**(known or {}), "spec": spec}, self._namespace
            )
        except (ConflictError, NotFoundError):
            return False
        self.leader = spec["holderIdentity"]
        if self.leader:
            self._written = written
        return True

    def _look(self, spec: dict[str, Any]) -> None:
        seen = LeaseSpec(
            spec.get("holderIdentity"), spec.get("leaseDurationSeconds"), None, spec.get("renewTime")
        )
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._clock()
        self.leader = spec.get("holderIdentity") or ""

    def _expired(self, spec: dict[str, Any]) -> bool:
        lasts = float(spec.get("leaseDurationSeconds") or self._duration)
        return self._clock() - self._seen_at >= lasts

    def _claimed(self, before: dict[str, Any]) -> dict[str, Any]:
        now = micro_time()
        renewed = before.get("holderIdentity") == self._identity
        transitions = int(before.get("leaseTransitions") or 0)
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, int(self._duration)),
            "acquireTime": before.get("acquireTime") if renewed else now,
            "renewTime": now,
            "leaseTransitions": transitions if renewed else transitions + 1,
        }

    async def _make(self) -> bool:
        body = {
            "apiVersion": LEASES.api_version,
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {**self._claimed({}), "leaseTransitions": 0},
        }
        try:
            await self._client.create(LEASES, body, self._namespace)
        except ConflictError:
            return False
        self.leader = self._identity
        return True

    async def _release(self) -> None:
        """Let the next one have it at once, if it is still ours."""
        try:
            if self._written is None:
                live = await self._client.whole(LEASES, self._name, self._namespace)
                if (live.get("spec") or {}).get("holderIdentity") != self._identity:
                    return
                self._written = live
            spec = self._written.get("spec") or {}
            await self._write(
                {**spec, "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": micro_time()}
            )
        except KubernetesError as error:
            self._log.warning("lease cannot be released", lease=self._name, error=str(error))
