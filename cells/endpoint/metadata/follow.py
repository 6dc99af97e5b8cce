"""Endpoints follow the labels of their pods and namespaces.

Controller: tables of pods, namespaces, identities and endpoints in, changes of endpoints out.
Needs:  KubernetesPods, EndpointChanges, Table[Endpoint], Table[Pod], Table[Namespace].
Gives:  PodLabelsWatch.
Source: Cilium 1.17, updates of pods and namespaces.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any, Final

import anyio

from cells.cluster.identity import Identity, Label
from cells.endpoint.metadata.pods import KubernetesPods
from cells.endpoint.options.changes import EndpointChanges
from cells.endpoint.table.model import Endpoint, EndpointError
from cells.endpoint.table.states import State
from cells.kubernetes import Namespace, Pod
from lifecycle import Backoff, Change, Health, Jobs, Logger, Table

RETRY: Final = Backoff(first=1.0, maximum=30.0)


class PodLabelsWatch:
    """Looks again at the endpoints of what has changed, each on its own: one may wait for its identity."""

    def __init__(
        self,
        pods: KubernetesPods,
        changes: EndpointChanges,
        endpoints: Table[Endpoint],
        *,
        pod_table: Table[Pod],
        namespaces: Table[Namespace],
        identities: Table[Identity],
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self._pods = pods
        self._changes = changes
        self._endpoints = endpoints
        self._health = health.child("pod-labels")
        self._log = log
        self._due: set[int] = set()
        self._busy: set[int] = set()
        self._failing: dict[int, str] = {}
        self._asked = anyio.Event()
        jobs.observe("pods", pod_table.changes, self._follow_pods)
        jobs.observe("namespaces", namespaces.changes, self._follow_namespaces)
        jobs.observe("identities", identities.changes, self._follow_identities)
        jobs.observe("endpoints", partial(endpoints.changes, only=self._lags), self._follow_endpoints)
        jobs.one_shot("rules", self._follow_rules)
        jobs.one_shot("pod-labels", self._run)

    async def _follow_rules(self) -> None:
        """Labels count from the moment on that the rules are known."""
        await self._pods.ready()
        self._look(one.id for one in self._endpoints.all())

    async def _follow_pods(self, changes: list[Change[Pod]]) -> None:
        self._look_at({change.key for change in changes}, lambda one: (one.pod_namespace, one.pod_name))

    async def _follow_namespaces(self, changes: list[Change[Namespace]]) -> None:
        self._look_at({change.key for change in changes}, lambda one: ("", one.pod_namespace))

    async def _follow_endpoints(self, changes: list[Change[Endpoint]]) -> None:
        """One that was begun or restored may have missed a change of its pod."""
        self._look(change.row.id for change in changes if change.row is not None)

    def _lags(self, _key: Hashable, _old: Endpoint | None, row: Endpoint | None) -> bool:
        return row is not None and self._is_outdated(row.id)

    async def _follow_identities(self, changes: list[Change[Identity]]) -> None:
        """One whose labels or number have changed is not kept."""
        self._look_at({change.key for change in changes}, lambda one: one.identity)

    def _look_at(self, keys: set[Any], key_of: Any) -> None:
        self._look(one.id for one in self._endpoints.all() if key_of(one) in keys)

    def _look(self, numbers: Iterable[int]) -> None:
        self._due.update(numbers)
        if self._due:
            self._asked.set()

    async def _run(self) -> None:
        async with anyio.create_task_group() as tasks:
            while True:
                if not self._due - self._busy:
                    self._asked = anyio.Event()
                    await self._asked.wait()
                for number in self._due - self._busy:
                    self._due.discard(number)
                    if self._is_outdated(number):
                        self._busy.add(number)
                        tasks.start_soon(self._follow, number)
                await anyio.lowlevel.checkpoint()

    def _is_outdated(self, number: int) -> bool:
        endpoint = self._endpoints.get(number)
        if endpoint is None or endpoint.state is not State.READY:
            return False
        return self._changes.is_outdated(endpoint, self._labels(endpoint))

    def _labels(self, endpoint: Endpoint) -> list[Label] | None:
        """Those of its pod, None where there is nothing new to know of it."""
        if not endpoint.pod_name:
            return None
        return self._pods.of(endpoint.pod_namespace, endpoint.pod_name, endpoint.pod_uid)

    async def _follow(self, number: int) -> None:
        failures = 0
        try:
            while (endpoint := self._endpoints.get(number)) is not None:
                try:
                    await self._changes.follow_pod(endpoint, self._labels(endpoint))
                    break
                except EndpointError as error:
                    failures += 1
                    self._tell(number, f"{endpoint.title}: {error.text}")
                    await anyio.sleep(RETRY.pause(failures))
            self._tell(number, "")
        finally:
            self._busy.discard(number)
            self._look([number])

    def _tell(self, number: int, error: str) -> None:
        if not error:
            self._failing.pop(number, None)
        elif self._failing.get(number) != error:
            self._failing[number] = error
            self._log.warning("labels of a pod not followed", endpoint=number, error=error)
        if self._failing:
            more = f" and {len(self._failing) - 1} more" if len(self._failing) > 1 else ""
            self._health.degraded(f"{next(iter(self._failing.values()))}{more}")
        else:
            self._health.ok("endpoints have the labels of their pods")
