"""Operations on the node: configuration, identities, ipcache, maps, nodes and debug information."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import anyio
import msgspec

from cells.api import models
from cells.api.models import node as wire
from cells.api.models.node import Policy
from cells.api.operations import ApiPart, Route, config_mapping
from cells.api.operations import endpoint_models as endpoint_mapping
from cells.api.operations import status as status_mapping
from cells.api.operations.endpoint_models import rfc3339
from cells.api.operations.node_view import NodeWatchers
from cells.api.operations.policy import EndpointPolicyModels, PolicyOperations
from cells.api.operations.status import NodeSummary, StatusSummary
from cells.api.wire import JSON, answer, empty, parse_bool, parse_cidr, parse_int, read_body
from cells.base.addresses import Family, IPAddress
from cells.cluster.identity.identities import Identities, Identity
from cells.cluster.ipcache.rows import IpcacheEntry, prefix_of
from cells.cluster.node_ids import NodeAddressID
from cells.endpoint import Endpoints, PolicyEnforcement
from cells.maps.map import Map
from cells.maps.map_log import MapChange, MapLog
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import row_text
from cells.observe.health import StatusCollector
from lifecycle import Member, ReadTable, Table
from lifecycle.http import Request, Response
from lifecycle.jobs import TimeSlice

# The node's maps.


class NodeMaps:
    """Implements MapReader on the agent's maps."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    @property
    def directory(self) -> Path:
        """The bpffs directory with the pinned maps."""
        return self._maps.directory

    def names(self) -> Sequence[str]:
        """Return the names of all pinned maps, including policy maps."""
        return sorted(path.name for path in self.directory.iterdir() if not path.name.startswith("."))

    def cached(self, name: str) -> Map | None:
        """Return cilium_lxc or cilium_ipcache; None for all others."""
        found = (table for table in (self._maps.lxc, self._maps.ipcache) if table.spec.name == name)
        return next(found, None)


# GET and PATCH /config.


class ConfigOperations:
    """GET and PATCH /config."""

    def __init__(self, enforcement: PolicyEnforcement, facts: NodeSummary) -> None:
        self._enforcement = enforcement
        self._facts = facts

    def routes(self) -> list[Route]:
        """Return the part's routes."""
        return [
            Route("GET", "/v1/config", self.get_config),
            Route("PATCH", "/v1/config", self.patch_config),
        ]

    async def get_config(self, _request: Request) -> Response:
        """GET /config; not rate-limited, because the CNI plugin polls it twice a second."""
        facts = self._facts
        model = config_mapping.configuration_model(facts.node(), facts.settings(), self._enforcement.now)
        return answer(200, model)

    async def patch_config(self, request: Request) -> Response:
        """PATCH /config: change options, and answer after all endpoints' maps are updated."""
        body = read_body(request, models.DaemonConfigurationSpec, "configuration")
        try:
            node = self._facts.node()
            wanted, notifications = config_mapping.requested_configuration(
                body, self._enforcement.now, node.notifications
            )
            debug = config_mapping.requested_debug(body, node.debug)
        except ValueError as error:
            return answer(400, str(error))
        if refusal := self._enforcement.refusal(wanted):
            return answer(500, refusal)
        try:
            self._facts.set_notifications(notifications)
        except OSError as error:
            return answer(500, f"the datapath cannot be configured: {error}")
        self._facts.log_debug(debug)
        failed = await self._enforcement.change(wanted)
        if failed:
            return answer(500, f"endpoints {failed} have failed to regenerate, retrying")
        return empty(200)


def config_part(operations: ConfigOperations) -> Member[ApiPart]:
    """Provide the operations."""
    return ApiPart("config", operations.routes())


# Operations for debugging.
#
# Source: Cilium 1.17, api/v1/openapi.yaml; subsystems that are not built are in cells.api.operations.

COMPATIBLE = "1.17.0"
"""The Cilium version that the API is compatible with; tools select requests by it."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
KEEPALIVE = 30.0


class CachedMap(Protocol):
    """A map that only the agent writes; implemented by cells.maps.Map."""

    log: MapLog | None

    def items(self) -> Iterable[tuple[bytes, bytes]]:
        """Return all entries."""
        ...


class MapReader(Protocol):
    """Interface to the node's maps, by the names of their pins."""

    @property
    def directory(self) -> Path:
        """The bpffs directory with the pinned maps."""
        ...

    def names(self) -> Sequence[str]:
        """Return the names of all maps."""
        ...

    def cached(self, name: str) -> CachedMap | None:
        """Return a map that only the agent writes; None for other maps and unknown names."""
        ...


def version_text(version: str, revision: str) -> str:
    """Return Cilium's version with ours as build metadata, in the seven words that clients expect."""
    arch = _ARCHITECTURES.get(platform.machine(), platform.machine())
    runtime = f"python version {platform.python_version()} linux/{arch}"
    return f"{COMPATIBLE}+hive-{version} {revision} unknown {runtime}"


class IdentityOperations:
    """Lists identities and ipcache entries."""

    def __init__(
        self,
        endpoints: Endpoints,
        identities: Identities,
        ipcache: Table[str, IpcacheEntry],
        facts: StatusSummary,
    ) -> None:
        self._endpoints = endpoints
        self._identities = identities
        self._ipcache = ipcache
        self._facts = facts

    def routes(self) -> list[Route]:
        """Return the part's routes."""
        return [
            Route("GET", "/v1/identity", self.list_identities),
            Route("GET", "/v1/identity/endpoints", self.count_identities),
            Route("GET", "/v1/identity/{id}", self.get_identity),
            Route("GET", "/v1/ip", self.list_ips, texts=frozenset({400})),
        ]

    async def list_identities(self, request: Request) -> Response:
        """GET /identity: all identities, or those with all labels of the body; 404 if none has."""
        wanted = set(read_body(request, list[str], "labels")) if request.body else set()
        found = [each for each in self._identities.all() if wanted <= set(each.labels)]
        return answer(200, [_identity(each) for each in found]) if found else empty(404)

    async def count_identities(self, _request: Request) -> Response:
        """GET /identity/endpoints: identities of endpoints, and their numbers of endpoints."""
        counted = Counter(endpoint.identity for endpoint in self._endpoints.all())
        known = ((self._identities.get(number), count) for number, count in sorted(counted.items()))
        return answer(
            200, [wire.IdentityEndpoints(identity=_identity(i), ref_count=n) for i, n in known if i]
        )

    async def get_identity(self, request: Request) -> Response:
        """GET /identity/{id}."""
        text = request.match_info["id"]
        if not text.isdecimal():
            return empty(400)
        found = self._identities.get(int(text))
        return empty(404) if found is None else answer(200, _identity(found))

    async def list_ips(self, request: Request) -> Response:
        """GET /ip: all ipcache entries; 404 if there are none.

        ``cidr`` selects prefixes within it, labels in the body select identities with all of these labels.
        """
        inside = parse_cidr(request.query.get("cidr", ""))
        labels = read_body(request, list[str], "labels") if request.body else []
        pods = {prefix_of(ip): endpoint for endpoint in self._endpoints.all() for ip in endpoint.addresses}
        known = self._facts.status().node_ips
        host_ip = str(known.get(Family.IPV4) or known.get(Family.IPV6) or "")
        found = []
        time_slice = TimeSlice()
        for row in self._ipcache.all():
            await time_slice.pause()
            if inside is not None and not (
                (network := row.network).version == inside.version and network.subnet_of(inside)  # type: ignore[arg-type]
            ):
                continue
            if labels and not self._has_labels(row.identity, labels):
                continue
            pod = pods.get(row.prefix)
            namespace, name = row.pod or ("", "")
            metadata = wire.IPListMetadata(source=row.source.value, namespace=namespace, name=name)
            if pod is not None:
                metadata = wire.IPListMetadata(source="k8s", namespace=pod.pod_namespace, name=pod.pod_name)
            found.append(
                wire.IPListEntry(
                    cidr=row.prefix,
                    identity=row.identity,
                    metadata=metadata,
                    host_ip=host_ip if pod is not None else _tunnel(row),
                    encrypt_key=row.encrypt_key,
                )
            )
        return answer(200, sorted(found, key=lambda entry: entry.cidr)) if found else empty(404)

    def _has_labels(self, number: int, wanted: Iterable[str]) -> bool:
        identity = self._identities.get(number)
        return identity is not None and endpoint_mapping.has_labels(identity.labels, wanted)


def identities_part(operations: IdentityOperations) -> Member[ApiPart]:
    """Provide the operations."""
    return ApiPart("identities", operations.routes())


class MapOperations:
    """Shows the node's maps, and the agent's changes of them."""

    def __init__(self, maps: MapReader) -> None:
        self._maps = maps
        self._closed = False
        self._followed: set[MapLog] = set()

    def routes(self) -> list[Route]:
        """Return the part's routes."""
        return [
            Route("GET", "/v1/map", self.list_maps),
            Route("GET", "/v1/map/{name}", self.get_map),
            Route("GET", "/v1/map/{name}/events", self.get_map_events),
        ]

    def open(self) -> None:
        """Allow streams, when the server starts."""
        self._closed = False

    def close(self) -> None:
        """End the streams, when the server stops."""
        self._closed = True
        for log in self._followed:
            log.wake()

    async def list_maps(self, _request: Request) -> Response:
        """GET /map: all maps; with entries if only the agent writes the map."""
        return answer(200, wire.BPFMapList(maps=[self._map(name) for name in self._maps.names()]))

    async def get_map(self, request: Request) -> Response:
        """GET /map/{name}."""
        name = request.match_info["name"]
        return answer(200, self._map(name)) if name in self._maps.names() else empty(404)

    def _map(self, name: str) -> wire.BPFMap:
        path, cached = str(self._maps.directory / name), self._maps.cached(name)
        if cached is None:
            return wire.BPFMap(path=path)
        rows = (row_text(name, key, value) for key, value in cached.items())
        return wire.BPFMap(path=path, cache=[wire.BPFMapEntry(key=key, value=value) for key, value in rows])

    async def get_map_events(self, request: Request) -> Response:
        """GET /map/{name}/events: a line per recent change; with ``follow`` also per new one."""
        name = request.match_info["name"]
        cached = self._maps.cached(name)
        if cached is None or cached.log is None:
            return empty(404)
        follow = parse_bool(request.query.get("follow"), default=False)
        return Response(200, self._changes(name, cached.log, follow=follow), JSON)

    async def _changes(self, name: str, log: MapLog, *, follow: bool) -> AsyncGenerator[bytes, None]:
        seen = 0
        self._followed.add(log)
        while not self._closed:
            for change in log.since(seen):
                seen = change.number
                yield msgspec.json.encode(_event(name, change)) + b"\n"
            if not follow:
                return
            with anyio.move_on_after(KEEPALIVE) as waiting:
                await log.wait(seen)
            if waiting.cancelled_caught:
                yield b"\n"  # detects a disconnected client


def maps_part(operations: MapOperations) -> Member[ApiPart]:
    """Provide the operations."""
    return ApiPart("maps", operations.routes(), operations.open, operations.close)


def numbered(own: Iterable[str], others: Iterable[NodeAddressID]) -> list[wire.NodeID]:
    """Return nodes with their addresses by node ID; this node first."""
    found: dict[int, list[str]] = {}
    for row in sorted(others, key=lambda one: (one.id, one.ip.version, one.ip)):
        found.setdefault(row.id, []).append(str(row.ip))
    return [wire.NodeID(id=number, ips=ips) for number, ips in ({0: list(own)} | found).items()]


class NodeOperations:
    """Lists the cluster's nodes, and returns information for a bug report."""

    def __init__(
        self,
        endpoints: Endpoints,
        collector: StatusCollector,
        policies: EndpointPolicyModels,
        rules: PolicyOperations,
        summary: NodeSummary,
        facts: StatusSummary,
        numbers: ReadTable[IPAddress, NodeAddressID] | None,
    ) -> None:
        self._numbers = numbers
        self._endpoints = endpoints
        self._collector = collector
        self._policies = policies
        self._rules = rules
        self._summary = summary
        self._facts = facts
        self._watchers = NodeWatchers()

    def routes(self) -> list[Route]:
        """Return the part's routes."""
        return [
            Route("GET", "/v1/cluster/nodes", self.list_nodes),
            Route("GET", "/v1/node/ids", self.list_node_ids),
            Route("GET", "/v1/cgroup-dump-metadata", self.dump_cgroups),
            Route("GET", "/v1/debuginfo", self.debug_info),
        ]

    async def list_nodes(self, request: Request) -> Response:
        """GET /cluster/nodes: all nodes; to a polling client, the changes since its last request."""
        header = request.headers.get("client-id")
        number = parse_int(header, "client-id in header") if header else None
        facts = self._facts.status()
        name = f"{facts.cluster_name}/{facts.node_name}"
        return answer(200, self._watchers.answer(name, number, facts.nodes))

    async def list_node_ids(self, _request: Request) -> Response:
        """GET /node/ids: all node IDs; this node has 0."""
        ips = [ip for addresses in self._facts.status().uplinks.values() for ip in addresses]
        return answer(200, numbered(ips, () if self._numbers is None else self._numbers.all()))

    async def dump_cgroups(self, _request: Request) -> Response:
        """GET /cgroup-dump-metadata: empty, because the agent does not read cgroups yet."""
        return answer(200, wire.CgroupDumpMetadata())

    async def debug_info(self, _request: Request) -> Response:
        """GET /debuginfo."""
        facts = self._facts.status()
        addressing = config_mapping.host_addressing(self._summary.node())
        shown = self._endpoints
        endpoints = [
            endpoint_mapping.endpoint_model(
                each,
                shown.shown_state(each),
                shown.status(each.id),
                addressing,
                self._policies.of(each),
            )
            for each in shown.all()
        ]
        status = status_mapping.status_response(
            self._collector.status(), facts, status_mapping.StatusModels(), peers=True
        )
        info = wire.DebugInfo(
            cilium_version=version_text(facts.version, facts.revision),
            kernel_version=platform.release(),
            cilium_status=status,
            endpoint_list=endpoints,
            policy=self._rules.policy([]) or Policy(),
            environment_variables=[
                f"{name}: {os.environ[name]}" for name in sorted(os.environ) if _is_public(name)
            ],
            cilium_memory_map=await anyio.Path("/proc/self/maps").read_text(),
            subsystem={name: str(value) for name, value in self._summary.settings().items()},
        )
        return answer(200, info)


def _is_public(variable: str) -> bool:
    """Whether an environment variable may be shown; all others may contain secrets."""
    return variable.startswith(("CILIUM_", "K8S_", "KUBERNETES_SERVICE_"))


def _tunnel(row: IpcacheEntry) -> str:
    """Return the tunnel endpoint of a prefix; empty for local and natively routed prefixes."""
    return str(row.tunnel_endpoint) if int(row.tunnel_endpoint) else ""


def _identity(identity: Identity) -> models.IdentityModel:
    labels = sorted(identity.labels)
    return models.IdentityModel(id=identity.id, labels=labels, labels_sha256=identity.labels_sha256)


def _event(name: str, change: MapChange) -> wire.MapEvent:
    key, value = row_text(name, change.key, change.value)
    done = "update" if change.value is not None else "delete"
    return wire.MapEvent(
        timestamp=rfc3339(change.at),
        key=key,
        value=value,
        action=done,
        desired_action="sync" if not change.error else done,
        last_error=change.error,
    )


def part(operations: NodeOperations) -> Member[ApiPart]:
    """Provide the operations."""
    return ApiPart("node", operations.routes())
