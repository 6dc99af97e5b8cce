"""Queries the agents of a cluster through the API server: by one command in each pod, for all queries.

A command for each query would start an interpreter on every node every two seconds.
"""

from __future__ import annotations

import base64
import json
import os
import select
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from urllib.parse import quote

import anyio
import click

from hive.kube import (
    AGENT,
    CONTAINER,
    Found,
    access_of,
    is_ready,
    list_objects,
    name_of,
    node_of,
    why_not_ready,
)

if TYPE_CHECKING:
    from cells.kubernetes.client.client import Client
    from hive.pod_exec import Running

T = TypeVar("T")
COMMAND: Final = ("hive", "ui", "--stdio")
IDLE: Final = 120.0
"""Seconds without a query after which the command exits."""
FRESH: Final = 5.0
"""Seconds for which the list of nodes is cached."""
RETRY: Final = 10.0
"""Seconds until an agent that did not answer is queried again."""
_STDIN, _STDOUT = 0, 1
_PART: Final = 65536

Answer = tuple[int, Any]
"""HTTP status and body."""


class AgentError(Exception):
    """Raised when an agent cannot be queried or rejects a query; ``status`` is 0, or the agent's."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class AgentPod(NamedTuple):
    """A node and its agent's pod."""

    node: str
    pod: str
    """Name of the pod; empty without one."""
    problem: str
    """Why it cannot be queried; empty if it can."""


class Agents:
    """Queries the agents of all nodes. Raises KubernetesError if the API server itself does not answer."""

    def __init__(self, client: Client, namespace: str, timeout: float) -> None:
        """``timeout``: seconds for each agent."""
        self._client = client
        self._namespace = namespace
        self._timeout = timeout
        self._pods: dict[str, AgentPod] = {}
        self._listed = 0.0
        self._listing = anyio.Lock()
        self._lines: dict[str, _Line] = {}

    async def pods(self) -> Mapping[str, AgentPod]:
        """Return the agents by node, sorted; also nodes without one."""
        async with self._listing:
            if not self._listed or time.monotonic() - self._listed > FRESH:
                here = f"/api/v1/namespaces/{quote(self._namespace, safe='')}/pods"
                nodes = await list_objects(self._client, "/api/v1/nodes")
                found = {node_of(one): one for one in await list_objects(self._client, here, AGENT)}
                self._pods = {
                    node: _agent_pod(node, found.get(node), self._namespace)
                    for node in sorted(map(name_of, nodes))
                }
                self._listed = time.monotonic()
        return self._pods

    async def ask(self, node: str, name: str, query: Mapping[str, str]) -> Any:
        """Return an agent's answer to a query of the page. Raises AgentError."""
        place = (await self.pods()).get(node)
        if place is None or place.problem:
            raise AgentError(place.problem if place is not None else f"there is no node {node}")
        line = self._lines.get(node)
        if line is None or line.pod != place.pod:
            replaced, line = line, _Line(self._client, self._namespace, place.pod, self._timeout)
            self._lines[node] = line  # a concurrent question must not start a second command
            if replaced is not None:
                await replaced.aclose()
        return await line.ask(name, query)

    async def ask_all(self, name: str, query: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the answers by node, and the errors of the others."""
        answers: dict[str, Any] = {}
        problems: dict[str, str] = {}

        async def one(node: str) -> None:
            try:
                answers[node] = await self.ask(node, name, query)
            except AgentError as error:
                problems[node] = str(error)

        async with anyio.create_task_group() as tasks:
            for node in await self.pods():
                tasks.start_soon(one, node)
        if not answers and not problems:
            problems[""] = "the cluster has no nodes"
        return dict(sorted(answers.items())), dict(sorted(problems.items()))

    async def pod(self, name: str) -> Found | None:
        """Return a pod by namespace and name."""
        from cells.kubernetes.client.errors import NotFoundError

        namespace, _, short = name.partition("/")
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(short, safe='')}"
        try:
            found: Found = json.loads(await self._client.raw("GET", path))
        except NotFoundError:
            return None
        return found

    async def pod_at(self, address: str) -> Found | None:
        """Return a pod by its address; of several, one that runs and is not in the host network."""
        query = {"fieldSelector": f"status.podIP={address}"}
        found = json.loads(await self._client.raw("GET", "/api/v1/pods", query))["items"]
        meant = [one for one in found if one["spec"].get("nodeName") and not one["spec"].get("hostNetwork")]
        return min(
            meant, key=lambda one: one["status"].get("phase") not in {"Running", "Pending"}, default=None
        )

    async def aclose(self) -> None:
        """Stop the commands."""
        for line in self._lines.values():
            await line.aclose()


def _agent_pod(node: str, pod: Found | None, namespace: str) -> AgentPod:
    if pod is None:
        return AgentPod(node, "", f"no agent runs there (no pod with {AGENT} in namespace {namespace})")
    return AgentPod(
        node, name_of(pod), "" if is_ready(pod) else f"agent {name_of(pod)}: {why_not_ready(pod)}"
    )


class _Line:
    """The command in one agent's pod, which answers one query at a time."""

    def __init__(self, client: Client, namespace: str, pod: str, timeout: float) -> None:
        self.pod = pod
        self._client = client
        self._namespace = namespace
        self._timeout = timeout
        self._running: Running | None = None
        self._lock = anyio.Lock()
        self._problem = ""
        self._failed = 0.0

    async def ask(self, name: str, query: Mapping[str, str]) -> Any:
        """Return the answer to a query. Raises AgentError."""
        if self._problem and time.monotonic() - self._failed < RETRY:
            raise AgentError(self._problem)
        async with self._lock:
            status, found = await self._asked(json.dumps({"ask": name, "query": dict(query)}).encode())
        if status >= 400:
            raise AgentError(str(found.get("error", "")) if isinstance(found, dict) else str(found), status)
        return found

    async def _asked(self, line: bytes) -> Answer:
        from cells.kubernetes.client.errors import KubernetesError
        from hive.pod_exec import Running

        sound = False
        found: Answer = 0, None
        try:
            with anyio.fail_after(self._timeout):
                if self._running is None:
                    self._running = await Running.start(
                        self._client, self._namespace, self.pod, CONTAINER, COMMAND, has_input=True
                    )
                answer = await self._running.answer_to(line)
            found = _unpacked(answer)
            sound, self._problem = True, ""
        except TimeoutError:
            self._problem = f"agent {self.pod} does not answer within {self._timeout:g} s"
        except (KubernetesError, ValueError, zlib.error) as error:
            self._problem = f"agent {self.pod}: {' '.join(str(error).split())}"
        finally:
            if not sound:  # the next line would be the answer to another question
                with anyio.CancelScope(shield=True):
                    await self.aclose()
        if self._problem:
            self._failed = time.monotonic()
            raise AgentError(self._problem)
        return found

    async def aclose(self) -> None:
        """Stop the command."""
        running, self._running = self._running, None
        if running is not None:
            await running.aclose()


def _packed(answer: Answer) -> bytes:
    return base64.b64encode(zlib.compress(json.dumps(answer).encode(), 1))


def _unpacked(line: bytes) -> Answer:
    status, found = json.loads(zlib.decompress(base64.b64decode(line)))
    return int(status), found


def ask_agents(
    kubeconfig: Path | None,
    context: str,
    namespace: str,
    timeout: float,
    use: Callable[[Agents], Awaitable[T]],
) -> T:
    """Run a function that queries the agents. Raises click.ClickException for errors of the API server."""
    from cells.kubernetes.client import connect
    from cells.kubernetes.client.errors import KubernetesError

    access = access_of(kubeconfig, context)

    async def run() -> T:
        client = connect(access, agent="hive-cluster", qps=0, timeout=timeout)
        agents = Agents(client, namespace, timeout)
        try:
            return await use(agents)
        finally:
            with anyio.CancelScope(shield=True):
                await agents.aclose()
                await client.reset()

    try:
        return anyio.run(run)
    except KubernetesError as error:
        raise click.ClickException(str(error)) from error


def serve_queries(answer: Callable[[str, Mapping[str, str]], Answer]) -> None:
    """Answer each line of standard input with a line, until it ends or no query arrives any more."""
    held = b""
    while select.select([_STDIN], [], [], IDLE)[0] and (data := os.read(_STDIN, _PART)):
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            asked = json.loads(line)
            out = memoryview(_packed(answer(asked["ask"], asked["query"])) + b"\n")
            while out:
                out = out[os.write(_STDOUT, out) :]
