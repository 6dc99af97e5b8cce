"""Pods with unique labels that churn faster than identities expire do not exhaust the numbers.

Half an hour of simulated time: the collector's passes over tables, with a server that responds at once.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from datetime import datetime, tzinfo
from typing import Any

import msgspec
import pytest
import structlog

from cells.cluster.identity.numbers import CLUSTER
from cells.kubernetes.client.client import Client
from cells.kubernetes.client.transport import WriteRequest
from cells.kubernetes.objects.cilium_endpoint import CILIUM_ENDPOINTS, CiliumEndpoint
from cells.operator import gc
from cells.operator.api_server import ClusterAPI
from cells.operator.crds import CustomResources
from cells.operator.gc import SHORT_INTERVAL, GCSettings, IdentityGC, IdentityPasses
from cells.operator.objects import CLUSTER_IDENTITIES, ClusterIdentity, ClusterObjects
from cells.operator.options import ServedCluster
from lifecycle import Jobs, Table
from lifecycle.testing import fake

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]
PODS_A_SECOND, MINUTES, LIFE = 40, 30, 20
"""Each pod has labels that no other has, and is deleted after so many seconds."""


class Clock:
    """Both clocks of the collector, and the day it is."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def datetime(self) -> type[datetime]:
        clock = self

        class Today(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Today:
                return cls.fromtimestamp(clock.now, tz)

        return Today


class Cluster:
    """The server's objects, as the leader's tables have them."""

    def __init__(self) -> None:
        self.identities: Table[tuple[str, str], ClusterIdentity] = Table(
            "identities", key=lambda row: row.key
        )
        self.endpoints: Table[tuple[str, str], CiliumEndpoint] = Table("endpoints", key=lambda row: row.key)
        self.born: deque[int] = deque()

    def merge(self, kind: object, name: str, body: dict[str, Any], namespace: str = "") -> WriteRequest:
        return WriteRequest("PATCH", name, json.dumps(body["metadata"]["annotations"]).encode(), b"")

    def deletion(
        self, kind: object, name: str, namespace: str = "", *, uid: str = "", version: str = ""
    ) -> WriteRequest:
        assert (uid, version) == ("u", "1")
        return WriteRequest("DELETE", name, b"", b"")

    def send_all(self, requests: Sequence[WriteRequest]) -> list[None]:
        with self.identities.txn() as rows:
            for request in requests:
                if request.method == "DELETE":
                    rows.delete(("", request.target))
                    continue
                row = self.identities.get(("", request.target))
                assert row is not None
                meta = msgspec.structs.replace(row.metadata, annotations=json.loads(request.body))
                rows.put(msgspec.structs.replace(row, metadata=meta))
        return [None] * len(requests)

    def pods(self, first: int, count: int) -> None:
        """These come; those that have lived go."""
        with self.identities.txn() as rows:
            for number in range(first, first + count):
                meta = {
                    "metadata": {"name": str(number), "uid": "u", "resourceVersion": "1"},
                    "security-labels": {},
                }
                rows.put(CLUSTER_IDENTITIES.decoder.decode(json.dumps(meta)))
        with self.endpoints.txn() as rows:
            for number in range(first, first + count):
                body = {"metadata": {"name": str(number), "namespace": "jobs"}}
                endpoint = {**body, "status": {"id": 1, "identity": {"id": number}}}
                rows.put(CILIUM_ENDPOINTS.decoder.decode(json.dumps(endpoint)))
                self.born.append(number)
            while len(self.born) > PODS_A_SECOND * LIFE:
                rows.delete(("jobs", str(self.born.popleft())))


async def test_forty_pods_a_second_for_half_an_hour_keep_the_number_of_identities_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, cluster = Clock(), Cluster()
    monkeypatch.setattr(gc, "time", clock)
    monkeypatch.setattr(gc, "datetime", clock.datetime())
    tables = {"CiliumIdentity": cluster.identities, "CiliumEndpoint": cluster.endpoints}
    client = fake(Client, merge=cluster.merge, deletion=cluster.deletion, send_all=cluster.send_all)
    settings = GCSettings()
    collector = IdentityGC(
        settings,
        fake(ClusterAPI, client=client),
        fake(
            ClusterObjects,
            resources=fake(CustomResources, endpoints=True),
            table=lambda kind, _="": tables[kind.kind],
        ),
        IdentityPasses(settings),
        ServedCluster(),
        jobs=fake(Jobs, timer=lambda *_, **__: None),
        log=structlog.get_logger(),
    )
    counts: list[int] = []
    made, step = 256, int(SHORT_INTERVAL)
    for _ in range(MINUTES * 60 // step):
        cluster.pods(made, PODS_A_SECOND * step)
        made += PODS_A_SECOND * step
        clock.now += step
        await collector.tick()
        counts.append(len(cluster.identities))
    assert made - 256 > len(CLUSTER), "more than there are numbers"
    assert max(counts) < 0.6 * len(CLUSTER)
    later = counts[len(counts) // 2 :]
    assert max(later[len(later) // 2 :]) <= max(later) * 1.01, "level"
    used = {each.status.identity.id for each in cluster.endpoints.all() if each.status.identity is not None}
    assert used <= {int(row.name) for row in cluster.identities.all()}, "none that a pod has is gone"
