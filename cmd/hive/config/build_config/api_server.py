"""An API server as the source of build-config's objects, which are fetched once, at the start.

Source: Cilium 1.17, the client of cilium-dbg build-config (it waits a minute for a server).
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hive.config.build_config.cluster import ClusterError
from hive.config.build_config.manifests import Manifests
from hive.config.build_config.sources import Report, Source

if TYPE_CHECKING:
    from cells.kubernetes.client.client import Client
    from cells.kubernetes.settings import KubernetesSettings

NODE_CONFIGS = ("cilium.io/v2", "cilium.io/v2alpha1")
"""Versions of CiliumNodeConfig; the second one is requested if the first has no objects."""
PATIENCE = 60.0
"""Seconds for which an unavailable server is retried; the kubelet restarts the container later."""
PAUSE = 5.0
"""Seconds between retries."""


class ApiServer(Manifests):
    """The objects of these sources on an API server.

    Without an answer, or after a 5xx, requests are retried for ``patience`` seconds.
    """

    def __init__(
        self,
        settings: "KubernetesSettings",
        sources: Sequence[Source],
        node: str,
        report: Report,
        *,
        patience: float = PATIENCE,
    ) -> None:
        super().__init__(Path())
        self._settings = settings
        self._sources = sources
        self._node = node
        self._report = report
        self._patience = patience

    def _load(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        import anyio

        from cells.kubernetes.client.errors import KubernetesError
        from cells.kubernetes.settings import AccessError

        try:
            yield from anyio.run(self._ask)
        except (KubernetesError, AccessError) as error:
            raise ClusterError(str(error)) from error

    async def _ask(self) -> list[tuple[Path, dict[str, Any]]]:
        import anyio

        from cells.kubernetes.api_server import access_of
        from cells.kubernetes.client import connect
        from cells.kubernetes.client.errors import ApiError, UnreachableError

        access = access_of(self._settings)
        if access is None:
            raise ClusterError(
                "no API server: set --k8s-kubeconfig-path or --k8s-api-server, run as a pod of the cluster,"
                " or give --manifests-dir or --source=directory:DIR"
            )
        client = connect(access, agent="hive-build-config", qps=0)
        until = anyio.current_time() + self._patience
        while True:
            try:
                found = {path: one async for path, one in self._objects_of(client)}  # each object once
                return [(Path(path), one) for path, one in found.items()]
            except (UnreachableError, ApiError) as error:
                left = until - anyio.current_time()
                if left <= 0 or (isinstance(error, ApiError) and error.code < 500):
                    raise
                self._report(f"no API server answers yet, asking again for {left:.0f} s: {error}")
            finally:
                await client.reset()
            await anyio.sleep(min(left, PAUSE))

    async def _objects_of(self, client: "Client") -> AsyncIterator[tuple[str, dict[str, Any]]]:
        nodes: set[str] = set()
        for source in self._sources:
            match source.kind:
                case "config-map":
                    path = f"/api/v1/namespaces/{source.namespace}/configmaps/{source.name}"
                    if (found := await _got(client, path)) is not None:
                        yield path, {**found, "kind": "ConfigMap"}
                case "cilium-node-config":
                    for path, found in await _node_configs(client, source.namespace):
                        yield path, found
                    if not source.name:
                        nodes.add(self._node)
                case "node":
                    nodes.add(source.name)
        for name in sorted(nodes):
            if (found := await _got(client, f"/api/v1/nodes/{name}")) is not None:
                yield f"/api/v1/nodes/{name}", {**found, "kind": "Node"}


async def _got(client: "Client", path: str) -> dict[str, Any] | None:
    """Return an object, or None. Raises KubernetesError, ClusterError."""
    import msgspec

    from cells.kubernetes.client.errors import NotFoundError

    try:
        text = await client.raw("GET", path)
    except NotFoundError:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path}: expected an object of Kubernetes: {error}") from error


async def _node_configs(client: "Client", namespace: str) -> list[tuple[str, dict[str, Any]]]:
    """Return objects of the newer version, or of the older one if there are none or the newer one fails.

    None if the server has neither. Raises UnreachableError, or the first KubernetesError if one version fails
    and the other has no objects.
    """
    from cells.kubernetes.client.errors import KubernetesError, UnreachableError

    failed: Exception | None = None
    for version in NODE_CONFIGS:
        path = f"/apis/{version}/namespaces/{namespace}/ciliumnodeconfigs"
        try:
            listed = await _got(client, path)
        except UnreachableError:
            raise
        except KubernetesError as error:
            failed = failed or error
            continue
        if listed is None:
            continue
        items = [one for one in listed.get("items") or () if isinstance(one.get("metadata"), dict)]
        if items or failed is not None:
            return [
                (f"{path}/{one['metadata'].get('name')}", {**one, "kind": "CiliumNodeConfig"})
                for one in items
            ]
    if failed is not None:
        raise failed
    return []
