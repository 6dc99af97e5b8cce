"""``hive cluster bundle``: one archive with nodes' bundles, objects, events and logs; without secrets."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import click

from hive.kube import (
    AGENT,
    CONTAINER,
    OPERATOR,
    Found,
    access_of,
    cluster_options,
    is_ready,
    list_objects,
    name_of,
    node_of,
)
from hive.redact import redacted, redacted_file

if TYPE_CHECKING:
    from cells.kubernetes.client.client import Client

OBJECTS: Final = {
    "nodes": "/api/v1/nodes",
    "namespaces": "/api/v1/namespaces",
    "pods": "/api/v1/pods",
    "services": "/api/v1/services",
    "endpointslices": "/apis/discovery.k8s.io/v1/endpointslices",
    "networkpolicies": "/apis/networking.k8s.io/v1/networkpolicies",
    "events": "/apis/events.k8s.io/v1/events",
    "daemonsets": "/apis/apps/v1/namespaces/{}/daemonsets",
    "deployments": "/apis/apps/v1/namespaces/{}/deployments",
    "leases": "/apis/coordination.k8s.io/v1/namespaces/{}/leases",
}
"""Lists to collect; ``{}`` is the agents' namespace. Never Secrets, and only two ConfigMaps."""
CONFIG_MAPS: Final = ("cilium-config", "cilium-envoy-config")
GROUPS: Final = ("/apis/cilium.io/v2", "/apis/cilium.io/v2alpha1")
LOG_LINES: Final = "5000"
AT_ONCE: Final = 4
"""Number of nodes in parallel: a bundle is some megabytes."""


@click.command()
@cluster_options
@click.option(
    "-f", "--file", "target", type=click.Path(path_type=Path, dir_okay=False), help="The archive to write."
)
@click.option(
    "--node", "nodes", multiple=True, metavar="NODE", help="Only this node's bundle; may be repeated."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    help="Seconds for each node, and for all objects.",
)
def bundle(
    kubeconfig: Path | None,
    context: str,
    namespace: str,
    target: Path | None,
    nodes: tuple[str, ...],
    timeout: float,
) -> None:
    """Write one archive with the bundles of all nodes, objects, events and logs; secrets are left out.

    errors.txt and the last lines of output name parts that cannot be collected. Exits 1 if no node's bundle
    could be collected.
    """
    import anyio

    from cells.kubernetes.client import connect
    from cells.kubernetes.client.errors import KubernetesError

    access = access_of(kubeconfig, context)
    name = f"hive-cluster-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    path = target or Path(f"{name}.tar.gz")

    async def collect(parts: _Parts) -> None:
        client = connect(access, agent="hive-cluster", qps=0, timeout=timeout)
        try:
            await _Collector(client, namespace, parts, timeout).collect(nodes)
        finally:
            await client.reset()

    with _archive(path, name) as parts:
        try:
            anyio.run(collect, parts)
        except KubernetesError as error:
            raise click.ClickException(str(error)) from error
    several = "node" if len(parts.nodes) == 1 else "nodes"
    click.echo(f"{path}: {parts.count} parts, with the bundles of {len(parts.nodes)} {several}")
    for line in parts.errors:
        click.echo(f"not collected: {line}", err=True)
    if not parts.nodes:
        raise click.exceptions.Exit(1)


class _Parts:
    """The content of the archive."""

    def __init__(self, archive: tarfile.TarFile, name: str) -> None:
        self._archive = archive
        self._name = name
        self.count = 0
        self.errors: list[str] = []
        self.nodes: list[str] = []

    def add(self, name: str, content: bytes) -> None:
        """Add a file, with possible secrets removed."""
        content = redacted_file(name, content)
        entry = tarfile.TarInfo(f"{self._name}/{name}")
        entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
        self._archive.addfile(entry, io.BytesIO(content))
        self.count += 1

    def add_json(self, name: str, value: object) -> None:
        """Add a document, with possible secrets removed."""
        self.add(f"{name}.json", json.dumps(redacted(value)).encode())


@contextmanager
def _archive(path: Path, name: str) -> Iterator[_Parts]:
    """Open a new archive that only its owner can read; it is removed after an interrupt or an error."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise click.ClickException(
            f"{path} cannot be written: {error.strerror}; choose another --file"
        ) from error
    try:
        with open(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:  # noqa: PTH123
            parts = _Parts(archive, name)
            yield parts
            parts.add("errors.txt", "".join(f"{line}\n" for line in parts.errors).encode())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


class _Collector:
    """Collects one part after the other; failures are noted, and the others continue."""

    def __init__(self, client: Client, namespace: str, parts: _Parts, timeout: float) -> None:
        self._client = client
        self._namespace = namespace
        self._parts = parts
        self._timeout = timeout

    async def collect(self, nodes: Sequence[str]) -> None:
        """Collect all parts.

        Raises KubernetesError if the API server does not answer at all, click.UsageError.
        """
        import anyio

        version = await self._get("/version")
        self._parts.add_json("cluster/version", version)
        here = f"/api/v1/namespaces/{quote(self._namespace, safe='')}/pods"
        agents = await list_objects(self._client, here, AGENT)
        operators = await list_objects(self._client, here, OPERATOR)
        with_agent = {node_of(one): one for one in agents}
        if unknown := [node for node in nodes if node not in with_agent]:
            known = ", ".join(sorted(with_agent)) or "none"
            raise click.UsageError(f"--node {unknown[0]}: no agent runs there; expected one of {known}")
        await self._objects()
        limit = anyio.CapacityLimiter(AT_ONCE)
        async with anyio.create_task_group() as tasks:
            for node, pod in sorted(with_agent.items()):
                if not nodes or node in nodes:
                    tasks.start_soon(self._limited, limit, self._node, node, pod)
            for pod in operators:
                tasks.start_soon(self._limited, limit, self._operator, name_of(pod), pod)
        if not agents:
            self._parts.errors.append(
                f"nodes: no pods with {AGENT} in namespace {self._namespace} (--namespace)"
            )

    async def _limited(
        self, limit: Any, collect: Callable[[str, Found], Awaitable[None]], name: str, pod: Found
    ) -> None:
        async with limit:
            await collect(name, pod)

    async def _objects(self) -> None:
        for name, path in {**OBJECTS, **await self._custom()}.items():
            await self._noted(
                f"objects/{name}", self._listed, name, path.format(quote(self._namespace, safe=""))
            )
        for name in CONFIG_MAPS:
            path = f"/api/v1/namespaces/{quote(self._namespace, safe='')}/configmaps/{name}"
            await self._noted(f"objects/configmaps/{name}", self._one, f"objects/configmaps/{name}", path)

    async def _custom(self) -> Mapping[str, str]:
        """Return the lists of Cilium's resources that this cluster has."""
        from cells.kubernetes.client.errors import NotFoundError

        found: dict[str, str] = {}
        for group in GROUPS:
            try:
                resources = (await self._get(group)).get("resources") or ()
            except NotFoundError:
                continue
            found |= {one["name"]: f"{group}/{one['name']}" for one in resources if "/" not in one["name"]}
        return found

    async def _listed(self, name: str, path: str) -> None:
        self._parts.add_json(f"objects/{name}", await list_objects(self._client, path))

    async def _one(self, name: str, path: str) -> None:
        self._parts.add_json(name, await self._get(path))

    async def _node(self, node: str, pod: Found) -> None:
        """Collect a node's bundle, unpacked, and the logs of its agent."""
        folder = f"nodes/{node}"
        await self._noted(folder, self._unpacked, folder, pod)
        for container in pod["spec"]["containers"]:
            await self._logs(folder, pod, container["name"])

    async def _unpacked(self, folder: str, pod: Found) -> None:
        content = await self._run(pod, CONTAINER, ("hive", "debug", "bundle", "--file", "-"))
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is not None:
                    self._parts.add(f"{folder}/{member.name.partition('/')[2]}", file.read())
        self._parts.nodes.append(folder)

    async def _operator(self, name: str, pod: Found) -> None:
        folder = f"operators/{name}"
        container = pod["spec"]["containers"][0]["name"]
        if is_ready(pod):
            await self._noted(f"{folder}/status.json", self._operator_status, folder, pod, container)
        await self._logs(folder, pod, container)

    async def _operator_status(self, folder: str, pod: Found, container: str) -> None:
        answer = await self._run(pod, container, ("hive", "operator", "status", "-o", "json"))
        self._parts.add(f"{folder}/status.json", answer)

    async def _logs(self, folder: str, pod: Found, container: str) -> None:
        """Collect the end of a container's log, and of the previous one after a restart."""
        states = pod.get("status", {}).get("containerStatuses") or ()
        restarted = any(one.get("restartCount") for one in states if one.get("name") == container)
        for previous in (False, True) if restarted else (False,):
            name = f"{folder}/log-{container}{'-previous' if previous else ''}.txt"
            await self._noted(name, self._log, name, pod, container, previous)

    async def _log(self, name: str, pod: Found, container: str, previous: bool) -> None:
        query = {"container": container, "tailLines": LOG_LINES} | ({"previous": "true"} if previous else {})
        path = f"/api/v1/namespaces/{quote(self._namespace, safe='')}/pods/{quote(name_of(pod), safe='')}/log"
        self._parts.add(name, await self._client.raw("GET", path, query))

    async def _run(self, pod: Found, container: str, command: Sequence[str]) -> bytes:
        """Return the output of a command. Raises ValueError if it fails, KubernetesError, TimeoutError."""
        from hive.pod_exec import execute

        done = await execute(
            self._client, self._namespace, name_of(pod), container, command, within=self._timeout
        )
        if done.code:
            raise ValueError(
                f"{' '.join(command)} ends with {done.code}: {done.err.decode(errors='replace')[-300:]}"
            )
        return done.out

    async def _noted(self, what: str, collect: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Collect a part, or note the error."""
        from cells.kubernetes.client.errors import KubernetesError

        try:
            await collect(*arguments)
        except TimeoutError:
            self._parts.errors.append(f"{what}: no answer within {self._timeout:g} s")
        except (KubernetesError, ValueError, tarfile.TarError, EOFError, OSError) as error:
            self._parts.errors.append(f"{what}: {' '.join(str(error).split())}")

    async def _get(self, path: str) -> Found:
        import msgspec

        return msgspec.json.decode(await self._client.raw("GET", path), type=Found)
