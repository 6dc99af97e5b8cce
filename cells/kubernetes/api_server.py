"""An API server as the source of objects, and the client by which others write.

Source: a reflector per kind fills the tables of objects.
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


AGENT: Final = "cilium-agent/1.17.0"
"""What requests say they are from: the field manager of what is written, too."""

ASK_AGAIN: Final = 10.0
"""Seconds until a server without a known version is asked again."""


class ServerState(msgspec.Struct, frozen=True):
    """How the API server is, as in ``cilium-dbg status``."""

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
    """How a server is by what is heard of it: a failure when nothing is."""
    failing = [one for one in sources if one.state == "failing"]
    if not any(one.state == "watching" for one in sources):
        return (
            ServerState("Failure", failing[0].error) if failing else ServerState("Warning", "not heard yet")
        )
    if failing:
        return ServerState("Warning", f"{failing[0].kind}: {failing[0].error}")
    return ServerState("Ok", version)


def followed_of(kinds: Iterable[Kind[Any]], sources: Iterable[SourceStatus], now: float) -> list[str]:
    """The kinds that are followed, as Cilium writes them: ``core/v1::Pods``.

    Of one that cannot be followed for now, how long ago its last event was:
    ``core/v1::Pods (last event 5m12s ago)``.
    """
    by_kind = {one.kind: one for one in sources}
    found = []
    for kind in kinds:
        source = by_kind.get(kind.qualified)
        if source is not None and source.state == "watching":
            found.append(shown_as(kind))
        elif source is not None and source.state == "failing" and source.synced:
            found.append(f"{shown_as(kind)} (last event {_age(now - source.changed)} ago)")
    return sorted(found)


def _age(seconds: float) -> str:
    """A time as Go writes it: ``5m12s``."""
    minutes, left = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{left}s"


def access_of(settings: KubernetesSettings) -> Access | None:
    """How to reach the API servers: by the settings, the kubeconfig, or as a pod; None for not at all.

    Raises AccessError.
    """
    urls = tuple(
        checked_url(url, "k8s-api-server")
        for url in (settings.k8s_api_server, *settings.k8s_api_server_urls)
        if url
    )
    if not settings.asks_api_server:
        return None
    from cells.kubernetes.client.access import (  # loaded where there is a server
        Access,
        EnvironmentProxies,
        from_kubeconfig,
        in_cluster,
    )

    found: Access | None
    if settings.k8s_kubeconfig_path:
        found = from_kubeconfig(Path(settings.k8s_kubeconfig_path))
    elif any(url.startswith("http://") for url in urls):
        found = None  # a service account's token does not go over the network in clear text
    else:
        found = in_cluster(os.environ)
    if found is None:
        return Access(servers=urls, proxies=EnvironmentProxies.of(os.environ)) if urls else None
    return replace(found, servers=urls) if urls else found


def shown_as(kind: Kind[Any]) -> str:
    """A kind as Cilium's status shows it; groups go by their first name."""
    group = {"": "core", "discovery.k8s.io": "discovery", "cilium.io": "cilium"}.get(kind.group, kind.group)
    return f"{group}/{kind.version}::{'Pods' if kind is PODS else kind.kind}"


def asked_for(kind: Kind[Any], node: str) -> dict[str, str]:
    """What of a kind is asked for: of pods those of this node."""
    return {"fieldSelector": f"spec.nodeName={node}"} if kind is PODS else {}


class KubernetesAPI:
    """The API server, if there is one: follows every kind, and lends its client to those who write."""

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
        """Whether there is an API server. Raises NotStartedError before the hook has run."""
        if not self._started:
            raise NotStartedError(
                "KubernetesAPI: whether there is an API server is known once its hook has run"
            )
        return self._client is not None

    @property
    def configured(self) -> tuple[str, str]:
        """The URL and the kubeconfig's path that settings have; empty ones without."""
        return self._settings.k8s_api_server, self._settings.k8s_kubeconfig_path

    @property
    def client(self) -> Client:
        """Its client. Raises NotStartedError when there is none, or not yet."""
        if self._client is None:
            raise NotStartedError("KubernetesAPI: no API server is configured, or its hook has not run")
        return self._client

    async def reachable(self) -> None:
        """Wait while no server answers. Writers do before they write: they go on as soon as one is back."""
        await self.client.reach.pause()

    async def wait_lost(self) -> None:
        """Until a server was asked in vain."""
        await self.client.reach.wait_lost()

    async def keep(
        self,
        kind: Kind[Any],
        wanted: Mapping[str, Any],
        change: Callable[[dict[str, Any]], Mapping[str, Any] | None],
    ) -> bool:
        """Create a cluster-scoped object as ``wanted``, or update the existing one; whether it wrote.

        ``change`` gives the object as it should be, None to leave it. Raises KubernetesError.
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
        """The kinds that are followed at the server; see followed_of()."""
        if self._client is None:
            return []
        return followed_of(self._resources.kinds, self._statuses.all(), time.time())

    @property
    def calls(self) -> Calls | None:
        """What is counted of requests; None without a server."""
        return self._client.calls if self._client is not None else None

    def state(self) -> ServerState:
        """How the server is; Disabled when there is none."""
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
            agent=AGENT,
            qps=settings.k8s_client_qps,
            burst=settings.k8s_client_burst,
            timeout=settings.k8s_client_connection_timeout,
            keep_alive=settings.k8s_client_connection_keep_alive,
        )
        self._log.info("reading objects from an API server", servers=list(access.servers))
        for sink in self._resources.sinks():
            sink.begin()
            query = asked_for(sink.kind, self._agent.node_name)
            reflector = Reflector(self._client, sink.kind, sink, query=query, namespace=sink.namespace)
            self._jobs.one_shot(f"follow-{sink.kind.plural}", reflector.run)
        self._resources.forgotten.node = self._agent.node_name
        self._jobs.one_shot("k8s-forgotten", self._resources.forgotten.run)
        self._jobs.one_shot("k8s-probe", self._client.probe)
        self._jobs.one_shot("k8s-version", self._ask_version)
        if settings.k8s_heartbeat_timeout:
            interval = settings.k8s_heartbeat_timeout
            self._jobs.timer("k8s-heartbeat", self._heartbeat, interval)

    async def _stop(self) -> None:
        if self._client is not None:
            await self._client.reset()

    async def _ask_version(self) -> None:
        from cells.kubernetes.client.errors import KubernetesError

        while not self._version:
            try:
                body = await self.client.raw("GET", "/version")
                self._version = str(msgspec.json.decode(body, type=Version))
            except (KubernetesError, ValueError) as error:  # msgspec's errors are ValueErrors
                self._log.warning("the API server does not report its version", error=str(error))
                await self.client.reach.pause(ASK_AGAIN)

    async def _heartbeat(self) -> None:
        """Ask a server that has been silent how it is."""
        from cells.kubernetes.client.errors import KubernetesError

        try:
            await self.client.heartbeat(self._settings.k8s_heartbeat_timeout)
        except KubernetesError as error:
            self._log.warning("the API server does not answer, replacing connections", error=str(error))
            raise
