"""Connects to the API server and gives every cell of the operator its client.

ObjectWriter is the base of the reconciler targets that patch the cluster's objects.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, TypeVar

from msgspec import Meta

from cells.kubernetes.api_server import access_of
from cells.kubernetes.client import connect
from cells.kubernetes.client.client import Client
from cells.kubernetes.client.errors import ConflictError, KubernetesError, NotFoundError
from cells.kubernetes.settings import KubernetesSettings
from lifecycle import (
    Duration,
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    NotStartedError,
    Settings,
    config,
    module,
    provide,
    seconds,
)
from lifecycle.tables import BatchFailures, PatchTarget

__all__ = ["ApiServerSettings", "ClusterAPI", "ObjectWriter", "cell"]

Key = TypeVar("Key")
Patch = TypeVar("Patch")


# The API server's client, which all cells of the operator share.

USER_AGENT = "cilium-operator/1.17.0"
"""User agent of the requests, and field manager of written objects."""


class ApiServerSettings(Settings, frozen=True):
    """Addresses of the API server, and limits of the request rate."""

    k8s_api_server: str = ""
    """URL of the API server; empty: the kubeconfig's, or in a pod that of the cluster."""

    k8s_api_server_urls: tuple[str, ...] = ()
    """URLs of several API servers; if one does not answer, the next is tried."""

    k8s_kubeconfig_path: str = ""
    """Path of a kubeconfig; its current context is used."""

    operator_k8s_client_qps: Annotated[float, Meta(ge=0)] = 100.0
    """Average number of requests per second; 0: no limit."""

    operator_k8s_client_burst: Annotated[int, Meta(ge=1)] = 200
    """Number of requests in a burst above that rate."""

    k8s_client_connection_timeout: Annotated[Duration, Meta(ge=0)] = seconds(30)
    """Timeout of connecting, and of a request; 0: 30s."""

    k8s_client_connection_keep_alive: Annotated[Duration, Meta(ge=0)] = seconds(30)
    """How long an idle connection stays open, and the interval of TCP keepalive probes; 0: 30s."""

    k8s_heartbeat_timeout: Annotated[Duration, Meta(ge=0)] = seconds(30)
    """Time without an answer after which the API server is probed; if the probe fails, connections are
    replaced. 0: never.
    """

    def faults(self) -> Iterator[str]:
        return self.where().faults()

    def where(self) -> KubernetesSettings:
        """Return the agent's form of these settings."""
        return KubernetesSettings(
            k8s_api_server=self.k8s_api_server,
            k8s_api_server_urls=self.k8s_api_server_urls,
            k8s_kubeconfig_path=self.k8s_kubeconfig_path,
        )


class ClusterAPI:
    """Connects to the API server; the start fails if none is configured."""

    def __init__(self, settings: ApiServerSettings, *, lifecycle: Lifecycle, jobs: Jobs, log: Logger) -> None:
        self._settings = settings
        self._jobs = jobs
        self._log = log
        self._client: Client | None = None
        lifecycle.append(Hook("find the API server", self._start, self._stop))

    @property
    def client(self) -> Client:
        """The client. Raises NotStartedError before the start hook has run."""
        if self._client is None:
            raise NotStartedError("ClusterAPI: the API server is known once its hook has run")
        return self._client

    async def _start(self) -> None:
        settings = self._settings
        access = access_of(settings.where())
        if access is None:
            raise HiveError(
                "no API server: set k8s-kubeconfig-path or k8s-api-server, or run as a pod of the cluster"
            )
        self._client = connect(
            access,
            agent=USER_AGENT,
            qps=settings.operator_k8s_client_qps,
            burst=settings.operator_k8s_client_burst,
            timeout=settings.k8s_client_connection_timeout,
            keep_alive=settings.k8s_client_connection_keep_alive,
        )
        self._jobs.one_shot("k8s-probe", self._client.probe)
        if settings.k8s_heartbeat_timeout:
            beat = partial(self._client.heartbeat, settings.k8s_heartbeat_timeout)
            self._jobs.timer("k8s-heartbeat", beat, settings.k8s_heartbeat_timeout)
        self._log.info("found the API server", servers=list(access.servers))

    async def _stop(self) -> None:
        if self._client is not None:
            await self._client.reset()


class ObjectWriter(PatchTarget[Key, Patch]):
    """A reconciler's target that writes one patch per object of the API server."""

    def __init__(self, server: ClusterAPI) -> None:
        self.server = server

    async def put(self, batch: Mapping[Key, Patch]) -> None:
        """Write each patch. Raises BatchError."""
        with BatchFailures(KubernetesError) as failures:
            for key, patch in batch.items():
                with failures.of(key):
                    await self.write_existing(patch)

    async def write_existing(self, patch: Patch) -> None:
        """Write a patch; ignore an object that was deleted or recreated, since the watch reports it."""
        try:
            await self.write(patch)
        except NotFoundError:
            return
        except ConflictError as error:
            if "uid" not in str(error).lower():
                raise

    @abstractmethod
    async def write(self, patch: Patch) -> None:
        """Write a patch. Raises KubernetesError."""


cell = module("api-server", "Connection to the API server", config(ApiServerSettings), provide(ClusterAPI))
