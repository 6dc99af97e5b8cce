"""A Kubernetes cluster as a site of checks: pods on its nodes, reached through its API server."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from functools import partial
from secrets import token_hex
from typing import Any, Final, TypeVar
from urllib.parse import quote

import anyio
import click
import msgspec
from anyio.from_thread import start_blocking_portal

from cells.kubernetes.client import connect
from cells.kubernetes.client.access import Access
from cells.kubernetes.client.errors import ApiError, KubernetesError, NotFoundError
from hive.check.objects import (
    HOST_PORT,
    LABEL,
    OPEN,
    ROLES,
    RUN,
    SHUT,
    name_of,
    namespace_object,
    pod_object,
    service_object,
)
from hive.check.probe import Answer, Try
from hive.check.run import Facts, Place, Role, Service
from hive.kube import AGENT, CONTAINER, Found, is_ready, list_objects, node_of, why_not_ready
from hive.kube import name_of as own_name
from hive.pod_exec import execute
from hive.signals import signals_ignored

T = TypeVar("T")
PATHS: Final = {
    "Pod": "api/v1/{}/pods",
    "Service": "api/v1/{}/services",
    "NetworkPolicy": "apis/networking.k8s.io/v1/{}/networkpolicies",
    "CiliumNetworkPolicy": "apis/cilium.io/v2/{}/ciliumnetworkpolicies",
}
AT_ONCE: Final = 16
"""Number of commands in pods in parallel."""
REQUEST: Final = 30.0
"""Timeout in seconds of a request, and of a command in addition to its tries."""
ENDS_WITHIN: Final = 120.0
"""Seconds in which a namespace is deleted."""
_PAUSE: Final = 0.2


class CannotCheckError(click.ClickException):
    """No check can run: no access, or the namespace belongs to others."""

    exit_code = 2


class ClusterSite:
    """A cluster; leaving the block deletes the namespace and waits for its end."""

    def __init__(self, access: Access, agents: str, namespace: str, image: str, start_within: float) -> None:
        """``agents``: the namespace of the agents; ``image``: empty for that of each node's agent."""
        self.namespace = namespace
        self.host_port = HOST_PORT
        self.untried: dict[str, str] = {}
        self._client = connect(access, agent="hive-check", qps=0, timeout=REQUEST)
        self._agents = agents
        self._image = image
        self._start_within = start_within
        self._images: dict[str, str] = {}
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._services: dict[str, Service] = {}
        self._run = token_hex(4)
        self._made = False
        self._open = ExitStack()

    def __enter__(self) -> ClusterSite:
        self._portal = self._open.enter_context(start_blocking_portal())
        return self

    def __exit__(self, *_: object) -> None:
        with self._open, signals_ignored():
            try:
                if self._made:
                    self._call(partial(self._remove_namespace, self._run))
            finally:
                self._portal.call(self._client.reset)

    # ---- see Site

    def facts(self) -> Facts:
        """See Site."""
        return self._call(self._facts, stopper=CannotCheckError)

    def start(self, nodes: Sequence[str]) -> tuple[list[Place], dict[str, str]]:
        """See Site."""
        # An aborted request could create the namespace after the cleanup has looked for it.
        self._call(self._make_namespace, stopper=CannotCheckError, to_the_end=True)
        return self._call(partial(self._start, nodes))

    def ask(self, tries: Mapping[Place, Sequence[Try]]) -> Mapping[Place, Sequence[Answer]]:
        """See Site."""
        return self._call(partial(self._ask, tries))

    def services(self) -> Mapping[str, Service]:
        """See Site."""
        return self._services

    def apply(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """See Site."""
        for one in objects:
            self._call(partial(self._create, one))

    def remove(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """See Site."""
        for one in objects:
            self._call(partial(self._delete, one))

    # ---- the namespace

    def remove_namespace(self) -> bool:
        """Delete the namespace of a check; return whether it existed. Raises click.ClickException."""
        return self._call(self._remove_namespace, stopper=CannotCheckError)

    async def _remove_namespace(self, run: str = "") -> bool:
        """Delete the namespace; with a run, only that of this run."""
        path = f"/api/v1/namespaces/{quote(self.namespace, safe='')}"
        try:
            found = await self._get(path)
            if run and found["metadata"].get("labels", {}).get(RUN) != run:
                return False
            self._check_ours(found)
            await self._client.raw("DELETE", path, None, b'{"propagationPolicy":"Background"}')
        except NotFoundError:
            return False
        until = time.monotonic() + ENDS_WITHIN
        while time.monotonic() < until:
            try:
                await self._get(path)
            except NotFoundError:
                return True
            await anyio.sleep(_PAUSE)
        raise click.ClickException(
            f"namespace {self.namespace} is still terminating after {ENDS_WITHIN:g} s: "
            f"kubectl describe namespace {self.namespace} shows what holds it"
        )

    async def _make_namespace(self) -> None:
        body = json.dumps(namespace_object(self.namespace, self._run)).encode()
        self._made = True
        try:
            await self._client.raw("POST", "/api/v1/namespaces", None, body)
        except ApiError as error:
            if error.code != 409:
                raise
            self._check_ours(await self._get(f"/api/v1/namespaces/{quote(self.namespace, safe='')}"))
            raise CannotCheckError(
                f"namespace {self.namespace} is there: another check runs, or one was killed; "
                "remove what it left with: hive check --clean"
            ) from error

    def _check_ours(self, found: Found) -> None:
        """Raise CannotCheckError for a namespace that no check has created."""
        if (found["metadata"].get("labels") or {}).get(LABEL) != "namespace":
            raise CannotCheckError(
                f"namespace {self.namespace} is not of a check (it has no label {LABEL}=namespace): "
                "choose another with --check-namespace"
            )

    # ---- looking around

    async def _facts(self) -> Facts:
        version = await self._get("/version")
        nodes = [one for one in await list_objects(self._client, "/api/v1/nodes") if _is_linux(one)]
        here = f"/api/v1/namespaces/{quote(self._agents, safe='')}"
        agents = {node_of(one): one for one in await list_objects(self._client, f"{here}/pods", AGENT)}
        if not agents:
            raise CannotCheckError(
                f"no pods with {AGENT} in namespace {self._agents}: is it installed there? (--namespace)"
            )
        without = {}
        for name in map(own_name, nodes):
            if name not in agents:
                without[name] = "no agent runs there"
            elif not is_ready(agents[name]):
                without[name] = f"agent {own_name(agents[name])}: {why_not_ready(agents[name])}"
        self._images = {node: self._image or _image(pod) for node, pod in agents.items()}
        self._addresses = {own_name(one): _addresses(one) for one in nodes}
        await self._skip_unavailable_checks()
        server = f"{self._client.server} {version.get('gitVersion', '')}".rstrip()
        return Facts(server, tuple(sorted(map(own_name, nodes))), without, await self._routing(here))

    async def _routing(self, here: str) -> str:
        try:
            data = (await self._get(f"{here}/configmaps/cilium-config")).get("data") or {}
        except NotFoundError:
            return "unknown"
        mode = str(data.get("routing-mode") or "tunnel")
        return str(data.get("tunnel-protocol") or "vxlan") if mode == "tunnel" else mode

    async def _skip_unavailable_checks(self) -> None:
        dns = await list_objects(self._client, "/api/v1/namespaces/kube-system/services", "k8s-app=kube-dns")
        if not dns:
            self.untried["dns"] = "there is no Service with k8s-app=kube-dns in kube-system"
        try:
            await self._client.raw("GET", "/apis/cilium.io/v2/ciliumnetworkpolicies", {"limit": "1"})
        except NotFoundError:
            for direction in ("ingress", "egress"):
                self.untried[f"cilium-policy-{direction}"] = "there is no CRD of CiliumNetworkPolicies"

    # ---- pods and services

    async def _start(self, nodes: Sequence[str]) -> tuple[list[Place], dict[str, str]]:
        failed: dict[str, str] = {}
        for node in nodes:
            service = await self._create(service_object(node, self.namespace))
            self._services[node] = _service(service)
            for role in ROLES:
                ports = (self.host_port,) if role == "host" else (OPEN, SHUT)
                await self._create(pod_object(role, node, self.namespace, self._images[node], ports))
        pods = await self._pods_ready([name_of(role, node) for node in nodes for role in ROLES])
        for node in nodes:
            for name in (name_of(role, node) for role in ROLES):
                pod = pods.get(name)
                if pod is None or not is_ready(pod):
                    failed[node] = f"pod {name}: {await self._why(name, pod)}"
        places = []
        for node in nodes:
            for role in ROLES:
                name = name_of(role, node)
                if node not in failed:
                    places.append(Place(name, node, _role(role), self._of(pods[name], role, node)))
        return places, failed

    def _of(self, pod: Found, role: str, node: str) -> tuple[str, ...]:
        """Return the addresses of a pod; of one in the host network those of the node."""
        if role == "host":
            return self._addresses[node]
        state = pod.get("status", {})
        several = tuple(str(one["ip"]) for one in state.get("podIPs") or ())
        return several or (str(state["podIP"]),)

    async def _pods_ready(self, names: Sequence[str]) -> dict[str, Found]:
        """Return the pods once they are ready, or after the timeout."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        until = time.monotonic() + self._start_within
        while True:
            found = {own_name(one): one for one in await list_objects(self._client, path)}
            ready = all(name in found and is_ready(found[name]) for name in names)
            if ready or time.monotonic() > until:
                return found
            await anyio.sleep(_PAUSE)

    async def _why(self, name: str, pod: Found | None) -> str:
        """Return why a pod does not start: its last warning, or the kubelet's words."""
        if pod is None:
            return "it is not there: something removed it"
        path = f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events"
        events = await list_objects(self._client, path)
        warnings = [
            str(one.get("note", ""))
            for one in events
            if one.get("type") == "Warning" and (one.get("regarding") or {}).get("name") == name
        ]
        return " ".join(warnings[-1].split()) if warnings else why_not_ready(pod)

    # ---- requests

    async def _ask(self, tries: Mapping[Place, Sequence[Try]]) -> dict[Place, list[Answer]]:
        answers: dict[Place, list[Answer]] = {}
        limit = anyio.CapacityLimiter(AT_ONCE)

        async def one(place: Place, wanted: Sequence[Try]) -> None:
            async with limit:
                answers[place] = await self._probe(place, wanted)

        async with anyio.create_task_group() as tasks:
            for place, wanted in tries.items():
                tasks.start_soon(one, place, wanted)
        return answers

    async def _probe(self, place: Place, wanted: Sequence[Try]) -> list[Answer]:
        """Run the probe in a pod; if that fails, every try has this error."""
        command = ("hive", "probe", "try", json.dumps(list(wanted)))
        within = max(one["within"] for one in wanted) + REQUEST
        try:
            done = await execute(self._client, self.namespace, place.name, "probe", command, within=within)
        except TimeoutError:
            why = f"pod {place.name}: no end of the probe within {within:g} s"
        except KubernetesError as error:
            why = f"pod {place.name}: the probe cannot be run: {error}"
        else:
            if not done.code:
                return msgspec.json.decode(done.out, type=list[Answer])
            ended = done.err.decode(errors="replace")[-200:].strip()
            why = f"pod {place.name}: the probe ends with {done.code}: {ended}"
        return [Answer(False, why=why) for _ in wanted]

    async def _get(self, path: str) -> Found:
        return msgspec.json.decode(await self._client.raw("GET", path), type=Found)

    async def _create(self, one: Mapping[str, Any]) -> Found:
        body = json.dumps(one).encode()
        return msgspec.json.decode(
            await self._client.raw("POST", self._path(one["kind"]), None, body), type=Found
        )

    async def _delete(self, one: Mapping[str, Any]) -> None:
        try:
            await self._client.raw("DELETE", f"{self._path(one['kind'])}/{one['metadata']['name']}")
        except NotFoundError:
            return

    def _path(self, kind: str) -> str:
        return "/" + PATHS[kind].format(f"namespaces/{quote(self.namespace, safe='')}")

    def _call(
        self,
        ask: Callable[[], Awaitable[T]],
        stopper: type[click.ClickException] = click.ClickException,
        *,
        to_the_end: bool = False,
    ) -> T:
        """Run in the event loop; errors of the API server become one line. An interrupt cancels it."""
        running = self._portal.start_task_soon(ask)
        try:
            return running.result()
        except (KeyboardInterrupt, SystemExit):
            if to_the_end:
                with signals_ignored():
                    wait([running], REQUEST)
            else:
                running.cancel()
            raise
        except KubernetesError as error:
            raise stopper(str(error)) from error


def _is_linux(node: Found) -> bool:
    labels = node["metadata"].get("labels") or {}
    return str(labels.get("kubernetes.io/os", "linux")) == "linux"


def _image(pod: Found) -> str:
    """Return the image of a node's agent, which that node has already."""
    containers = pod["spec"]["containers"]
    found = next((one for one in containers if one["name"] == CONTAINER), containers[0])
    return str(found["image"])


def _addresses(node: Found) -> tuple[str, ...]:
    """Return the internal addresses, or the external ones if there are none."""
    found = node.get("status", {}).get("addresses") or ()
    for kind in ("InternalIP", "ExternalIP"):
        if addresses := tuple(str(one["address"]) for one in found if one.get("type") == kind):
            return addresses
    return ()


def _service(created: Found) -> Service:
    spec = created["spec"]
    addresses = tuple(spec.get("clusterIPs") or (spec["clusterIP"],))
    return Service(addresses, int(spec["ports"][0]["port"]), int(spec["ports"][0].get("nodePort", 0)))


def _role(role: str) -> Role:
    return "client" if role == "client" else "server" if role == "server" else "host"
