"""A client of the API server: ``python -m tests.bench.tools.object_clients WHO URL TOKEN PID``.

Prints its figures as a line of JSON: seconds until synced, seconds of processor time, MiB grown.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import anyio._backends._asyncio  # noqa: F401  # what clients import with their first request is not measured
import structlog

from lifecycle import invoke

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


def rss() -> float:
    """Return the resident memory in MiB."""
    return (
        int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize() / 2**20
    )


class Took:
    """Measures from its creation on."""

    def __init__(self) -> None:
        gc.collect()
        self._rss, self._cpu, self._began = rss(), time.process_time(), time.perf_counter()

    def summary(self, objects: int, **more: float) -> dict[str, float]:
        """Return the figures until now."""
        wall, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        gc.collect()
        return {"objects": objects, "wall": wall, "cpu": cpu, "rss": rss() - self._rss, **more}


async def ours(url: str, token: str) -> dict[str, float]:
    """Run reflectors of pods and nodes."""
    from cells.kubernetes.client import connect
    from cells.kubernetes.client.access import Access
    from cells.kubernetes.client.dial import Dialler  # noqa: F401  # comes with the first request: not measured
    from cells.kubernetes.objects.core import NODES, PODS
    from cells.kubernetes.reflector import Reflector
    from cells.kubernetes.sink import Sink, SourceStatus
    from lifecycle import HealthTree, Table

    took = Took()
    client = connect(Access(servers=(url,), token=token), qps=0)
    statuses: Table[str, SourceStatus] = Table("sources", key=lambda one: one.kind)
    health = HealthTree()
    tables, tasks = [], []
    for kind in (PODS, NODES):
        table: Table[Any, Any] = Table(kind.plural, key=lambda one: one.key)
        sink: Sink[Any] = Sink(kind, table, statuses, health.reporter("k8s"), structlog.get_logger())
        tasks.append(asyncio.create_task(Reflector(client, kind, sink).run()))
        tables.append(table)
    for table in tables:
        await table.wait_initialized()
    found = took.summary(sum(map(len, tables)))
    for task in tasks:
        task.cancel()
    return {**found, "decode": await decoding(client)}


async def decoding(client: Any) -> float:
    """Return the seconds of processor time to decode every page of pods."""
    from cells.kubernetes.objects.core import PODS

    pages, query = [], {"limit": "500"}
    while True:
        pages.append(await client.page(PODS, query))
        following = PODS.page_decoder.decode(pages[-1]).metadata.continue_
        if not following:
            break
        query["continue"] = following
    began = time.process_time()
    for page in pages:
        PODS.page_decoder.decode(page)
    return time.process_time() - began


async def lightkube(url: str, token: str) -> dict[str, float]:
    """List, and read the fields of each object that an agent needs: it decodes them only then."""
    from lightkube import AsyncClient, KubeConfig
    from lightkube.resources.core_v1 import Node, Pod

    config = KubeConfig.from_dict(config_of(url, token))
    took = Took()
    client = AsyncClient(config)
    rows: dict[Any, Any] = {}
    one: Any
    async for one in client.list(Pod, namespace="*"):
        meta, looked_at = one.metadata, (one.metadata.labels, one.status.podIPs, one.spec.nodeName)
        rows[meta.namespace, meta.name] = one, looked_at
    async for one in client.list(Node):
        rows["", one.metadata.name] = one, (one.metadata.labels, one.status.addresses, one.spec.podCIDRs)
    return took.summary(len(rows))


async def kubernetes_asyncio(url: str, token: str) -> dict[str, float]:
    """The same with kubernetes_asyncio."""
    from kubernetes_asyncio import client

    config = client.Configuration(host=url, api_key={"BearerToken": f"Bearer {token}"})
    took = Took()
    rows: dict[Any, Any] = {}
    async with client.ApiClient(config) as api:
        core = client.CoreV1Api(api)
        following: Any = None
        while True:
            found: Any = await core.list_pod_for_all_namespaces(limit=500, _continue=following)
            rows.update(((one.metadata.namespace, one.metadata.name), one) for one in found.items)
            following = found.metadata._continue  # as it is named there
            if not following:
                break
        rows.update((("", one.metadata.name), one) for one in (await core.list_node()).items)
    return took.summary(len(rows))


async def start(url: str, token: str) -> dict[str, float]:
    """Run a hive with every kind, as an agent has them."""
    import os
    import tempfile

    from cells import kubernetes
    from cells.config import AgentConfig, AgentSettings
    from cells.kubernetes.objects.core import PODS
    from cells.kubernetes.resources import Resources
    from lifecycle import Hive, Lifecycle, supply

    os.environ["K8S_NODE_NAME"] = "node-0"
    known = AgentConfig(AgentSettings(), Lifecycle("bench"), structlog.get_logger())

    with tempfile.TemporaryDirectory() as folder:
        settings = {"k8s-kubeconfig-path": kubeconfig(folder, url, token)}
        took = Took()
        async with Hive(kubernetes.cell, supply(known), settings=settings).started() as hive:
            resources = hive.get(Resources)
            for kind in resources.kinds:
                await resources.table(kind).wait_initialized()
            return took.summary(len(resources.table(PODS)))


async def follow(url: str, token: str) -> dict[str, float]:
    """Reconcile CiliumEndpoints to cilium_ipcache in the kernel: all of them, then a change of each."""
    import os
    import signal
    import tempfile
    from ipaddress import ip_address

    from cells import kubernetes
    from cells.cluster import identity, ipcache
    from cells.cluster.ipcache.rows import IpcacheEntry, IpcacheTarget, Source, ipcache_target
    from cells.cluster.nodes.node import INTERNAL_IP, ClusterNode, NodeIP
    from cells.cluster.remote_endpoints import RemoteEndpoint
    from cells.config import AgentConfig, AgentSettings
    from cells.endpoint import KubernetesPods
    from cells.kubernetes.client.http import HttpConnection  # noqa: F401  # comes with the first request: no pod's memory
    from cells.maps.map import Epochs, MapSpec, MapType, create_map
    from cells.maps.specs import MapSettings, map_specs, sizes
    from cells.policy import maps as policy_maps
    from cells.policy.maps import PolicyComputer, PolicyMapPool
    from cells.remote import endpoints
    from lifecycle import Hive, Lifecycle, ReadTable, Table, provide, replace, supply
    from lifecycle.injection import build  # noqa: F401  # comes with the first hive: no pod's memory
    from tests.unit.policy_maps.fakes import FakeMaps, FakeRules

    os.environ["K8S_NODE_NAME"] = "node-0"
    known = AgentConfig(AgentSettings(), Lifecycle("bench"), structlog.get_logger())
    spec = map_specs(sizes(MapSettings(), 0), preallocate=False, cpus=1)["ipcache"]
    made = create_map(spec)
    made.spec, made.epochs = spec, Epochs(create_map(MapSpec("hive_epoch", MapType.ARRAY, 4, 8, 1)))

    def nodes() -> ReadTable[str, ClusterNode]:
        def addresses(node: ClusterNode) -> tuple[object, ...]:
            return tuple(each.ip for each in node.addresses)

        table: Table[str, ClusterNode] = Table(
            "nodes", key=lambda node: node.full_name, indexes={"address": addresses}
        )
        own = NodeIP(INTERNAL_IP, ip_address("192.0.2.1"))
        with table.txn() as rows:
            rows.put(ClusterNode(cluster="default", name="one", source=Source.LOCAL, addresses=(own,)))
            for number in range(250):  # those of the endpoints, without which they are not believed
                other = NodeIP(INTERNAL_IP, ip_address(f"192.168.1.{number}"))
                rows.put(
                    ClusterNode(
                        cluster="default",
                        name=f"node-{number}",
                        source=Source.CUSTOM_RESOURCE,
                        addresses=(other,),
                    )
                )
        return table

    def needed(_: Table[tuple[str, str], RemoteEndpoint], __: Table[str, IpcacheEntry]) -> None: ...

    needed.__annotations__ = {
        "_": Table[tuple[str, str], RemoteEndpoint],
        "__": Table[str, IpcacheEntry],
        "return": None,
    }
    cells = (identity.cell, ipcache.cell, kubernetes.cell, policy_maps.cell, endpoints.cell)
    fakes = (replace(PolicyMapPool, FakeMaps()), replace(PolicyComputer, FakeRules()))
    nodes.__annotations__ = {"return": ReadTable[str, ClusterNode]}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"k8s-kubeconfig-path": kubeconfig(folder, url, token)}
        own = (provide(nodes, KubernetesPods), supply(known), invoke(needed))
        hive = Hive(
            *cells, *fakes, replace(IpcacheTarget, ipcache_target(lambda: made)), *own, settings=settings
        )
        took = Took()
        async with hive.started():
            gc.freeze()  # as an agent does once it has started
            remote, rows = (
                hive.get(Table[tuple[str, str], RemoteEndpoint]),
                hive.get(Table[str, IpcacheEntry]),
            )
            await remote.wait_initialized()
            count = len(rows)
            gc.collect()
            first = took.summary(count)
            left = {row.prefix for row in rows.all()}
            await asyncio.sleep(3)  # the first sweep is not measured
            found: list[float] = []
            busy: list[float] = []
            lags = asyncio.create_task(lag(found, busy))
            began = cpu = 0.0
            os.kill(int(sys.argv[4]), signal.SIGUSR1)
            async for changes in rows.changes(rows.revision):
                if not began:
                    began, cpu = time.perf_counter(), time.process_time()
                for change in changes:
                    left.discard(change.key)
                if not left:
                    break
            wall, cpu = time.perf_counter() - began, time.process_time() - cpu
            lags.cancel()
    return {
        **first,
        "bytes": first["rss"] * 2**20 / max(1, count),
        "events": count / wall,
        "cpu events": count / cpu,
        "lag": sorted(found)[int(0.999 * (len(found) - 1))],
        "busy": sorted(busy)[int(0.999 * (len(busy) - 1))],
    }


async def lag(found: list[float], busy: list[float]) -> None:
    """Measure the delay of a task that sleeps for a millisecond, and the loop's processor time meanwhile,
    until cancelled.

    The second separates our own work from that of other processes.
    """
    while True:
        began, computed = time.perf_counter(), time.thread_time()
        await asyncio.sleep(0.001)
        found.append(time.perf_counter() - began - 0.001)
        busy.append(time.thread_time() - computed)


async def allocate(url: str, token: str) -> dict[str, float]:
    """Allocate identities of new labels, 50 at a time."""
    import tempfile

    from cells import kubernetes, kvstore
    from cells.cluster import allocation, identity
    from cells.cluster.identity.identities import Identities
    from cells.config import AgentConfig, AgentSettings
    from cells.kubernetes.objects.cilium_endpoint import CiliumIdentity
    from cells.node.addresses import address_table
    from lifecycle import Hive, Lifecycle, Table, provide, supply

    known = AgentConfig(AgentSettings(), Lifecycle("bench"), structlog.get_logger())

    def needed(_: Identities, __: Table[tuple[str, str], CiliumIdentity]) -> None: ...

    needed.__annotations__ = {"_": Identities, "__": Table[tuple[str, str], CiliumIdentity], "return": None}
    cells = (kubernetes.cell, kvstore.cell, identity.cell, allocation.cell)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"k8s-kubeconfig-path": kubeconfig(folder, url, token), "k8s-client-qps": "0"}
        own = (supply(known), provide(address_table), invoke(needed))
        async with Hive(*cells, *own, settings=settings).started() as hive:
            await hive.get(Table[tuple[str, str], CiliumIdentity]).wait_initialized()
            identities, names = hive.get(Identities), iter(range(1000))
            run = time.time_ns()

            async def some() -> None:
                for number in names:
                    await identities.acquire((f"k8s:app={run}-{number}", "k8s:io.kubernetes.pod.namespace=x"))

            began = time.perf_counter()
            await asyncio.gather(*(some() for _ in range(50)))
            return {"rate": 1000 / (time.perf_counter() - began)}


def kubeconfig(folder: str, url: str, token: str) -> str:
    """Write a kubeconfig and return its path."""
    path = Path(folder, "kubeconfig")
    path.write_text(json.dumps(config_of(url, token)), encoding="utf-8")
    return str(path)


def config_of(url: str, token: str) -> dict[str, Any]:
    """Return it as an object."""
    return {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": token}}],
    }


CLIENTS = {
    "ours": ours,
    "lightkube": lightkube,
    "kubernetes_asyncio": kubernetes_asyncio,
    "start": start,
    "follow": follow,
    "allocate": allocate,
}

if __name__ == "__main__":
    print(json.dumps(asyncio.run(CLIENTS[sys.argv[1]](*sys.argv[2:4]))))  # noqa: T201
