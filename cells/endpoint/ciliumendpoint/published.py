"""The table ``ciliumendpoint``: what other nodes are to know of this node's pods.

Controller: endpoints, pods, realized policies and this node in; Table[PodEndpoint] out.
Needs:  the tables, ExposedEndpoints.   Gives: PodEndpoints, pod_endpoints.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

from cells.cluster.nodes import ClusterNode
from cells.endpoint import Endpoint
from cells.endpoint.ciliumendpoint.model import PodEndpoint, pod_endpoint
from cells.endpoint.restore import ExposedEndpoints
from cells.kubernetes import Pod
from cells.policy.maps import RealizedPolicy
from lifecycle import Change, Jobs, ReadTable, Table, after


def pod_endpoints() -> Table[PodEndpoint]:
    """The ``ciliumendpoint`` table, by namespace and name."""
    return Table("ciliumendpoint", key=lambda one: one.key)


@after(ExposedEndpoints)
class PodEndpoints:
    """Keeps the table; it is complete once restored endpoints, pods and this node are known."""

    def __init__(
        self,
        table: Table[PodEndpoint],
        endpoints: Table[Endpoint],
        pods: Table[Pod],
        policies: Table[RealizedPolicy],
        nodes: ReadTable[ClusterNode],
        jobs: Jobs,
    ) -> None:
        self._table = table
        self._endpoints = endpoints
        self._pods = pods
        self._policies = policies
        self._nodes = nodes
        self._own = ""
        """The name of this node's row."""
        self._first = table.initializer("endpoints and their pods")
        self._names: dict[int, tuple[str, str]] = {}
        """The objects to write, by endpoint."""
        jobs.observe("endpoints", partial(endpoints.changes, only=self._matters), self._follow)
        jobs.observe("policies", partial(policies.changes, only=self._differs), self._follow)
        jobs.observe("pods", pods.changes, self._follow_pods)
        jobs.observe("node", self._own_row, self._follow_node)

    async def _own_row(self) -> AsyncIterator[None]:
        await self._pods.wait_initialized()
        await self._nodes.wait_initialized()
        self._own = next((node.full_name for node in self._nodes.all() if node.local), "")
        seen = self._nodes.get(self._own)
        yield
        while True:
            seen = await self._nodes.wait_changed(self._own, seen)
            yield

    async def _follow_node(self, _: None) -> None:
        self._tell(one.id for one in self._endpoints.all())
        self._first.done()

    def _matters(self, number: Hashable, _old: object, _row: object) -> bool:
        """Whether the endpoint has, or may get, an object: without pods there is none."""
        return number in self._names or len(self._pods) > 0

    def _differs(self, number: Hashable, old: RealizedPolicy | None, row: RealizedPolicy | None) -> bool:
        """Whether an object has to say something else; one that is yet to be made will read the policy."""
        return number in self._names and _enforced(old) != _enforced(row)

    async def _follow(self, changes: Sequence[Change[Any]]) -> None:
        self._tell(int(str(change.key)) for change in changes)

    async def _follow_pods(self, changes: Sequence[Change[Pod]]) -> None:
        changed: set[Any] = {change.key for change in changes}
        self._tell(one.id for one in self._endpoints.all() if (one.pod_namespace, one.pod_name) in changed)

    def _tell(self, numbers: Iterable[int]) -> None:
        found = {number: self._row(number) for number in numbers}
        with self._table.txn() as rows:
            for number, row in found.items():
                before = self._names.pop(number, None)
                if before is not None and (row is None or row.key != before):
                    rows.delete(before)
                if row is not None:
                    rows.put(row)
                    self._names[number] = row.key

    def _row(self, number: int) -> PodEndpoint | None:
        endpoint = self._endpoints.get(number)
        if endpoint is None or not endpoint.pod_name:
            return None
        pod = self._pods.get((endpoint.pod_namespace, endpoint.pod_name))
        if pod is None:
            return None
        return pod_endpoint(endpoint, pod, self._policies.get(number), self._nodes.get(self._own))


def _enforced(policy: RealizedPolicy | None) -> tuple[bool, bool] | None:
    """All that an object says of it."""
    return None if policy is None else (policy.ingress_enforced, policy.egress_enforced)
