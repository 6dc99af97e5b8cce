"""The API server as the source of objects, and the client for other modules.

A Reflector for each kind fills the tables of objects. Other modules write objects through KubernetesAPI.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec.structs import replace

from cells.config import AgentConfig
from cells.kubernetes.objects.core import PODS
from cells.kubernetes.objects.kind import Kind
from cells.kubernetes.resources import Resources
from cells.kubernetes.settings import KubernetesSettings, checked_url
from cells.kubernetes.sink import SourceStatus
from lifecycle import Hook, Jobs, Lifecycle, Logger, NotStartedError, Table

if TYPE_CHECKING:
    from cells.kubernetes.client.access import Access
    from cells.kubernetes.client.calls import Calls
    from cells.kubernetes.client.client import Client

__all__ = ["KubernetesAPI", "access_of"]


USER_AGENT: Final = "cilium-agent/1.17.0"
"""User agent of requests; its first part is the field manager of writes."""

VERSION_RETRY: Final = 10.0
"""Seconds between requests for the server's version, until one succeeds."""


class ServerState(msgspec.Struct, frozen=True):
    """State of the API server, as in ``cilium-dbg status``."""

    state: Literal["Disabled", "Ok", "Warning", "Failure"]
    message: str = ""


class Version(msgspec.Struct, frozen=True, rename="camel"):
    """The answer to GET /version."""

    major: str = ""
    minor: str = ""
    git_version: str = ""
    platform: str = ""

    def __str__(self) -> str:
        return f"{self.major}.{self.minor} ({self.git_version}) [{self.platform}]"


def state_of(sources: Sequence[SourceStatus], version: str) -> ServerState:
    """Return the server's state, derived from its sources: Failure if no kind is watched."""
    failing = [one for one in sources if one.state == "failing"]
    if not any(one.state == "watching" for one in sources):
        return (
            ServerState("Failure", failing[0].error) if failing else ServerState("Warning", "not heard yet")
        )
    if failing:
        return ServerState("Warning", f"{failing[0].kind}: {failing[0].error}")
    return ServerState("Ok", version)


def watched_kinds(kinds: Iterable[Kind[Any]], sources: Iterable[SourceStatus], now: float) -> list[str]:
    """Return the watched kinds in Cilium's notation: ``core/v1::Pods``.

    A kind with a failing watch has the age of its last event: ``core/v1::Pods (last event 5m12s ago)``.
    """
    by_kind = {one.kind: one for one in sources}
    found = []
    for kind in kinds:
        source = by_kind.get(kind.qualified)
        if source is not None and source.state == "watching":
            found.append(status_name(kind))
        elif source is not None and source.state == "failing" and source.synced:
            found.append(f"{status_name(kind)} (last event {_go_duration(now - source.changed)} ago)")
    return sorted(found)


def _go_duration(seconds: float) -> str:
    """Format seconds as Go does: ``5m12s``."""
    minutes, left = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{left}s"


def access_of(settings: KubernetesSettings) -> Access | None:
    """Return how to reach the API servers, by settings, kubeconfig or service account; None without one.

    Raises AccessError.
    """
    urls = tuple(
        checked_url(url, "k8s-api-server")
        for url in (settings.k8s_api_server, *settings.k8s_api_server_urls)
        if url
    )
    if not settings.asks_api_server:
        return None
    from cells.kubernetes.client.access import (  # imported only if there is a server
        Access,
        EnvironmentProxies,
        from_kubeconfig,
        in_cluster,
    )

    found: Access | None
    if settings.k8s_kubeconfig_path:
        found = from_kubeconfig(Path(settings.k8s_kubeconfig_path))
    elif any(url.startswith("http://") for url in urls):
        found = None  # a service account token is never sent in clear text
    else:
        found = in_cluster(os.environ)
    if found is None:
        return Access(servers=urls, proxies=EnvironmentProxies.of(os.environ)) if urls else None
    return replace(found, servers=urls) if urls else found


def status_name(kind: Kind[Any]) -> str:
    """Return a kind in the notation of Cilium's status; an API group has its short name."""
    group = {"": "core", "discovery.k8s.io": "discovery", "cilium.io": "cilium"}.get(kind.group, kind.group)
    return f"{group}/{kind.version}::{'Pods' if kind is PODS else kind.kind}"


def list_query(kind: Kind[Any], node: str) -> dict[str, str]:
    """Return the query of a kind's lists and watches: pods are limited to this node."""
    return {"fieldSelector": f"spec.nodeName={node}"} if kind is PODS else {}


class KubernetesAPI:
    """The API server, if one is configured: follows every kind, and provides its client to writers."""

    def __init__(
        self,
        settings: KubernetesSettings,
        agent: AgentConfig,
        resources: Resources,
        statuses: Table[str, SourceStatus],
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._agent = agent
        self._resources = resources
        self._statuses = statuses
        self._version = ""
        self._jobs = jobs
        self._log = log
        self._client: Client | None = None
        self._started = False
        lifecycle.append(Hook("find the API server", self._start, self._stop))

    @property
    def enabled(self) -> bool:
        """Whether an API server is configured. Raises NotStartedError before the start hook has run."""
        if not self._started:
            raise NotStartedError(
                "KubernetesAPI: whether there is an API server is known once its hook has run"
            )
        return self._client is not None

    @property
    def configured(self) -> tuple[str, str]:
        """The server URL and the kubeconfig path of the settings; empty if not set."""
        return self._settings.k8s_api_server, self._settings.k8s_kubeconfig_path

    @property
    def client(self) -> Client:
        """The client. Raises NotStartedError without a server, or before the start hook has run."""
        if self._client is None:
            raise NotStartedError("KubernetesAPI: no API server is configured, or its hook has not run")
        return self._client

    async def reachable(self) -> None:
        """Wait while no server answers.

        Writers call it first, so they continue as soon as a server is back.
        """
        await self.client.reachability.pause()

    async def wait_lost(self) -> None:
        """Wait until a request gets no answer."""
        await self.client.reachability.wait_lost()

    async def create_or_update(
        self,
        kind: Kind[Any],
        wanted: Mapping[str, Any],
        change: Callable[[dict[str, Any]], Mapping[str, Any] | None],
    ) -> bool:
        """Create a cluster-scoped object as ``wanted``, or update it; return whether it was written.

        ``change`` returns the new object, or None to leave it unchanged. Raises KubernetesError.
        """
        from cells.kubernetes.client.errors import ConflictError, NotFoundError

        name = wanted["metadata"]["name"]
        await self.reachable()
        try:
            return await self.client.update(kind, name, change) is not None
        except NotFoundError:
            pass
        try:
            await self.client.create(kind, wanted)
        except ConflictError:  # another writer was faster
            return await self.client.update(kind, name, change) is not None
        return True

    def followed(self) -> list[str]:
        """Return the watched kinds; see watched_kinds()."""
        if self._client is None:
            return []
        return watched_kinds(self._resources.kinds, self._statuses.all(), time.time())

    @property
    def calls(self) -> Calls | None:
        """Statistics of requests; None without a server."""
        return self._client.calls if self._client is not None else None

    def state(self) -> ServerState:
        """Return the server's state; Disabled without a server."""
        if self._client is None:
            return ServerState("Disabled")
        return state_of(self._statuses.all(), self._version)

    async def _start(self) -> None:
        settings = self._settings
        access = access_of(settings)
        self._started = True
        if access is None:
            if not settings.manifests_dir:
                self._resources.nothing()
            return
        from cells.kubernetes.client import connect
        from cells.kubernetes.reflector import Reflector

        self._client = connect(
            access,
            agent=USER_AGENT,
            qps=settings.k8s_client_qps,
            burst=settings.k8s_client_burst,
            timeout=settings.k8s_client_connection_timeout,
            keep_alive=settings.k8s_client_connection_keep_alive,
        )
        self._log.info("reading objects from an API server", servers=list(access.servers))
        for sink in self._resources.sinks():
            sink.begin()
            query = list_query(sink.kind, self._agent.node_name)
            reflector = Reflector(self._client, sink.kind, sink, query=query, namespace=sink.namespace)
            self._jobs.one_shot(f"follow-{sink.kind.plural}", reflector.run)
        self._resources.missing_objects.node = self._agent.node_name
        self._jobs.one_shot("k8s-missing", self._resources.missing_objects.run)
        self._jobs.one_shot("k8s-probe", self._client.probe)
        self._jobs.one_shot("k8s-version", self._read_version)
        if settings.k8s_heartbeat_timeout:
            interval = settings.k8s_heartbeat_timeout
            self._jobs.timer("k8s-heartbeat", self._heartbeat, interval)

    async def _stop(self) -> None:
        if self._client is not None:
            await self._client.reset()

    async def _read_version(self) -> None:
        from cells.kubernetes.client.errors import KubernetesError

        while not self._version:
            try:
                body = await self.client.raw("GET", "/version")
                self._version = str(msgspec.json.decode(body, type=Version))
            except (KubernetesError, ValueError) as error:  # msgspec's errors are ValueErrors
                self._log.warning("the API server does not report its version", error=str(error))
                await self.client.reachability.pause(VERSION_RETRY)

    async def _heartbeat(self) -> None:
        """Probe the server if it has been silent for too long."""
        from cells.kubernetes.client.errors import KubernetesError

        try:
            await self.client.heartbeat(self._settings.k8s_heartbeat_timeout)
        except KubernetesError as error:
            self._log.warning("the API server does not answer, replacing connections", error=str(error))
            raise
