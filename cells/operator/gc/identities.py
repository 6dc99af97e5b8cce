"""Deletes identities that no endpoint has had for a while.

Needs: ClusterAPI, ClusterObjects, GCSettings, IdentityPasses.   Gives: IdentityGC.
Source: Cilium 1.17, operator/identitygc: an identity without endpoints is marked with the time; an agent that
        uses it again takes the mark away; one that has been marked for the heartbeat timeout goes.

Numbers are few (65,279 for a cluster). When half of them are given out, marks count after a minute, passes
come quickly and the limit of deletions is lifted, so that pods that come and go do not use up all of them.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import UTC, datetime
from typing import Final

import anyio

from cells.kubernetes import CILIUM_ENDPOINTS, api
from cells.operator.api_server import ClusterAPI
from cells.operator.gc.passes import IdentityPasses
from cells.operator.gc.settings import GCSettings
from cells.operator.objects import CLUSTER_IDENTITIES, ClusterIdentity, ClusterObjects
from lifecycle import Jobs, Logger

HEARTBEAT: Final = "io.cilium.heartbeat"
CRD: Final = "crd"
MOST: Final = 65279
"""Identities a cluster can have: 256 to 65535."""
CROWDED: Final = MOST // 2
SHORT_TIMEOUT, SHORT_INTERVAL = 60.0, 15.0
"""Seconds, when it is crowded."""
AT_ONCE: Final = 16
"""Requests under way together."""


class IdentityGC:
    """Looks every identity-gc-interval."""

    def __init__(
        self,
        settings: GCSettings,
        server: ClusterAPI,
        objects: ClusterObjects,
        passes: IdentityPasses,
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._server = server
        self._log = log
        self._identities = objects.table(CLUSTER_IDENTITIES)
        self._seen: dict[str, float] = {}
        """When an endpoint was last seen with an identity, in seconds of the monotonic clock."""
        self._began = time.monotonic()
        self._window: deque[float] = deque()
        """When identities were deleted, within the last identity-gc-rate-interval."""
        self._deleted = 0
        """In this pass."""
        self._passes = passes
        passes.expect(CRD)
        if settings.identity_gc_interval and objects.endpoints:
            self._endpoints = objects.table(CILIUM_ENDPOINTS)
            interval = min(settings.identity_gc_interval, SHORT_INTERVAL)
            self._due = time.monotonic() + settings.identity_gc_interval
            jobs.timer("identities", self.tick, interval)

    @property
    def crowded(self) -> bool:
        """Whether numbers run short."""
        return len(self._identities) > CROWDED

    async def tick(self) -> None:
        """A pass when one is due, or when numbers run short."""
        if time.monotonic() < self._due - 0.001 and not self.crowded:
            self._look()
            return
        self._due = time.monotonic() + self._settings.identity_gc_interval
        with self._passes.counted(CRD):
            await self.collect()

    def _look(self) -> None:
        """Remember which identities are in use now."""
        now = time.monotonic()
        for endpoint in self._endpoints.all():
            if endpoint.status.identity is not None:
                self._seen[str(endpoint.status.identity.id)] = now

    async def collect(self) -> None:
        """One pass. Raises KubernetesError."""
        await self._identities.wait_initialized()
        await self._endpoints.wait_initialized()
        self._look()
        timeout = float(self._settings.identity_heartbeat_timeout)
        if self.crowded:
            timeout = min(timeout, SHORT_TIMEOUT)
        now = time.monotonic()
        live = {name for name, seen in self._seen.items() if now - seen < timeout}
        self._seen = {name: seen for name, seen in self._seen.items() if name in live}
        unused = [one for one in self._identities.all() if one.name not in live]
        alive = len(self._identities) - len(unused)
        self._deleted = 0
        self._passes.found(CRD, alive=alive, deleted=0)
        if now - self._began < timeout:
            return  # endpoints may not be known again that are there
        waiting = iter(unused)
        failures: list[api.KubernetesError] = []

        async def work() -> None:
            for identity in waiting:
                try:
                    await self._treat(identity, timeout)
                except (api.NotFoundError, api.ConflictError):
                    continue  # somebody has it again, or it is gone: the next pass sees
                except api.KubernetesError as error:
                    failures.append(error)

        async with anyio.create_task_group() as group:
            for _ in range(min(AT_ONCE, len(unused))):
                group.start_soon(work)
        self._passes.found(CRD, alive=alive, deleted=self._deleted)
        if self._deleted:
            self._log.info("identities without endpoints deleted", count=self._deleted, alive=alive)
        if failures:
            raise failures[0]

    async def _treat(self, identity: ClusterIdentity, patience: float) -> None:
        marked = _time(identity.annotations.get(HEARTBEAT))
        client = self._server.client
        if marked is None:
            stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            body = {"metadata": {"uid": identity.metadata.uid, "annotations": {HEARTBEAT: stamp}}}
            await client.patch(CLUSTER_IDENTITIES, identity.name, body)
            return
        if time.time() - marked < patience:
            return
        if not self._allowed():
            return  # the next pass goes on
        known = identity.metadata  # whoever has written it since, such as to take the mark away, prevents it
        if await client.delete(
            CLUSTER_IDENTITIES, identity.name, uid=known.uid, version=known.resource_version
        ):
            self._deleted += 1

    def _allowed(self) -> bool:
        """Whether one more may be deleted now."""
        now = time.monotonic()
        while self._window and now - self._window[0] >= self._settings.identity_gc_rate_interval:
            self._window.popleft()
        if len(self._window) >= self._settings.identity_gc_rate_limit and not self.crowded:
            self._due = min(self._due, now + self._settings.identity_gc_rate_interval)
            return False
        self._window.append(now)
        return True


def _time(text: str | None) -> float | None:
    """Seconds since the epoch; None for what is no time."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None
