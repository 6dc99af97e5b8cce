"""Leader election by Leases.

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
    """Holder and duration of a lease."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(Object, frozen=True, gc=False):
    """A lease."""

    spec: LeaseSpec = LeaseSpec()


RELEASE: Final = 2.0
"""Timeout in seconds for the release of a lease, so that a stop does not wait for an unreachable server."""
LEASES: Final = Kind(Lease, "coordination.k8s.io/v1", "leases")


def micro_time() -> str:
    """Return the current time in the format of leases."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Election:
    """Acquires a lease, or waits until its holder has not renewed it for the lease's duration.

    Durations are seconds. The lease expires by the local clock, from the time its last change was seen:
    clocks of two machines are never compared. ``observed`` is called with the holder after each successful
    request.
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
        """The lease as it was last written here: while no other client writes it, one request renews it."""
        self._seen: LeaseSpec | None = None
        self._seen_at = 0.0
        self.leader = ""
        """The last observed holder."""
        self.lost = False
        """Whether this process lost the lease before the work was done."""

    async def run(self, work: Callable[[], Awaitable[object]]) -> None:
        """Wait for the lease, then work while it is renewed; release it at the end.

        Returns when `work` is done; if the lease is lost, cancels `work` and returns.
        """
        while not await self._try():  # noqa: ASYNC110  # a lease can only be polled
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
        """Renew the lease; it counts as lost if no renewal succeeds within the deadline."""
        renewed = self._clock()
        while True:
            await anyio.sleep(self._retry)
            with anyio.move_on_after(max(0.0, renewed + self._deadline - self._clock())):
                if await self._try():
                    renewed = self._clock()
                    continue
            if self.leader != self._identity or self._clock() - renewed >= self._deadline:
                self._log.warning("leader election lost", lease=self._name, holder=self.leader)
                self.lost = True
                scope.cancel()
                return

    async def _try(self) -> bool:
        """Try to acquire or renew the lease; return whether it succeeded."""
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
            return await self._create()
        spec = live.get("spec") or {}
        self._observe(spec)
        if self.leader not in {"", self._identity} and not self._expired(spec):
            return False
        self._written = live
        return await self._write(self._claimed(spec))

    async def _write(self, spec: dict[str, Any]) -> bool:
        """Replace the lease at the version read last; return False if it has changed in between."""
        last, self._written = self._written, None
        try:
            written = await self._client.replace(
                LEASES, self._name, {**(last or {}), "spec": spec}, self._namespace
            )
        except (ConflictError, NotFoundError):
            return False
        self.leader = spec["holderIdentity"]
        if self.leader:
            self._written = written
        return True

    def _observe(self, spec: dict[str, Any]) -> None:
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

    async def _create(self) -> bool:
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
        """Release the lease, if it is still held, so that the next leader does not wait."""
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
