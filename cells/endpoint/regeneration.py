"""The queue of endpoint regenerations, and the retries of failed ones.

Changes of policies, labels and configuration request regenerations; ``Endpoints.build`` executes them.

Source: Cilium 1.17, pkg/endpoint: one build of an endpoint at a time, a bounded number of builders.
"""

import os
from collections.abc import Iterable

import anyio
import anyio.lowlevel

from cells.endpoint.creation import RegenerationRecovery
from cells.endpoint.manager import Endpoints
from cells.endpoint.model import RegenerationLevel
from cells.policy.maps import EndpointPolicies, OutdatedPolicy
from lifecycle import Change, Jobs

# The queue.
#
# Source: Cilium 1.17, endpoint regeneration: a bounded number of builders, one build of an endpoint at a
#         time.

REMOVED = "the endpoint no longer exists"


def builds_per_step() -> int:
    """Return the number of builds between two yields to the event loop: one per CPU, at least 2."""
    return max(2, len(os.sched_getaffinity(0)))


class Regeneration:
    """A requested regeneration; further requests for the endpoint are merged while it is queued."""

    def __init__(self, endpoint_id: int, created: float, level: RegenerationLevel, reason: str) -> None:
        self.endpoint_id = endpoint_id
        self.created = created
        """Creation time of the endpoint: a later endpoint may have the same id."""
        self.level = level
        self.reasons = [reason]
        self._done = anyio.Event()
        self._error = ""

    def join(self, level: RegenerationLevel, reason: str) -> None:
        """Merge another request into this one."""
        self.level = max(self.level, level)
        if reason not in self.reasons:
            self.reasons.append(reason)

    def finish(self, error: str) -> None:
        """Set the result and wake all waiters."""
        self._error = error
        self._done.set()

    async def result(self) -> str:
        """Wait for the regeneration; return its error, empty if it succeeded."""
        await self._done.wait()
        return self._error


class Regenerations:
    """Regenerates endpoints sequentially, in the order of the requests.

    The controller ``endpoint-<id>-regeneration-recovery`` retries a failed regeneration.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        policies: EndpointPolicies,
        recovery: RegenerationRecovery,
        jobs: Jobs,
    ) -> None:
        self._endpoints = endpoints
        self._recovery = recovery
        self._waiting: dict[int, Regeneration] = {}
        self._requested = anyio.Event()
        jobs.observe("follow policies", policies.outdated.changes, self.follow_policies)
        jobs.one_shot("regenerate endpoints", self._run)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ids of queued endpoints."""
        return tuple(self._waiting)

    def request(self, endpoint_id: int, level: RegenerationLevel, reason: str) -> Regeneration:
        """Queue a regeneration of the endpoint; await its result() if needed."""
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is None:
            return _finished(endpoint_id, REMOVED)
        if self._endpoints.is_new(endpoint_id):
            return _finished(endpoint_id, "")  # its first build includes the request
        queued = self._waiting.get(endpoint_id)
        if queued is not None and queued.created == endpoint.created:
            queued.join(level, reason)
            return queued
        if not self._endpoints.announce_build(endpoint_id, reason):
            return _finished(endpoint_id, f"the endpoint is {endpoint.state.value}")
        wanted = self._waiting[endpoint_id] = Regeneration(endpoint_id, endpoint.created, level, reason)
        if queued is not None:
            queued.finish(REMOVED)
        self._requested.set()
        return wanted

    async def follow_policies(self, changes: Iterable[Change[int, OutdatedPolicy]]) -> None:
        """Regenerate endpoints with outdated policies."""
        for row in (change.row for change in changes):
            if row is not None and not self._endpoints.realize_policy(row.endpoint_id):
                self.request(row.endpoint_id, RegenerationLevel.POLICY, row.reason)

    async def _run(self) -> None:
        while True:
            if not self._waiting:
                self._requested = anyio.Event()
                await self._requested.wait()
            for endpoint_id in list(self._waiting)[: builds_per_step()]:
                self._regenerate(self._waiting.pop(endpoint_id))
            await anyio.lowlevel.checkpoint()

    def _regenerate(self, wanted: Regeneration) -> None:
        error = "the regeneration was cancelled"
        try:
            endpoint = self._endpoints.get(wanted.endpoint_id)
            if endpoint is None or endpoint.created != wanted.created:
                error = REMOVED
                return
            error = self._endpoints.build(wanted.endpoint_id, wanted.level, ", ".join(wanted.reasons))
            if error:
                self._recovery.recover(wanted.endpoint_id, self._retry)
        finally:
            wanted.finish(error)

    async def _retry(self, endpoint_id: int) -> str:
        """Regenerate after a failure, unless a regeneration is queued or the endpoint is removed."""
        if endpoint_id in self._waiting or self._endpoints.get(endpoint_id) is None:
            return ""
        return await self.request(endpoint_id, RegenerationLevel.DATAPATH, "retrying regeneration").result()


def _finished(endpoint_id: int, error: str) -> Regeneration:
    """Return a finished request without a build; ``error`` is empty if none is needed."""
    refused = Regeneration(endpoint_id, 0.0, RegenerationLevel.POLICY, "")
    refused.finish(error)
    return refused
