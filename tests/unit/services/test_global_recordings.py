"""Global services as Cilium's service cache merges them, from remote etcds' values."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import msgspec
import pytest

from cells.cluster.identity.numbers import ClusterNumbers
from cells.clustermesh.keys import RemoteValues
from cells.clustermesh.tables import MeshSettings, MeshTables, RemoteServiceKey, mesh_services
from cells.config import AgentConfig
from cells.kubernetes.objects.core import EndpointSlice, Service
from cells.services import BackendState, LoadBalancerOptions, ServiceName, ServingNode
from cells.services.model.frontends import is_global
from lifecycle import Tables
from tests.support.catalog import LoneCatalog
from tests.support.recordings import recordings

OPTIONS: Final = LoadBalancerOptions(global_services=True)
RECORDED: Final = sorted(
    path.stem for kind in ("merge", "services") for path in recordings("clustermesh").glob(f"{kind}_*.json")
)

Json = Any


class Replay:
    """The tables that a recording changes, and what is served then."""

    def __init__(self) -> None:
        agent = cast("AgentConfig", SimpleNamespace(cluster_id=1))
        self.mesh = MeshTables(agent, MeshSettings(clustermesh_config=Path("/mesh")), Tables())
        self.remote = mesh_services(self.mesh, Tables())
        self.catalog = LoneCatalog(OPTIONS, ServingNode("home"), self.remote)
        self._values: dict[str, RemoteValues] = {}
        self._services: dict[ServiceName, Service] = {}

    def do(self, step: Json) -> None:
        key = step.get("key", "")
        match step["op"]:
            case "put" if key.startswith("cilium/cluster-config/"):
                name = key.rpartition("/")[2]
                self._values[name] = RemoteValues(name, step["json"]["id"], ClusterNumbers(1))
            case "put" if "/services/v1/" in key:
                self._put(key, json.dumps(step["json"]) if "json" in step else step["value"])
            case "delete" if "/services/v1/" in key:
                cluster, namespace, name = key.split("/")[-3:]
                self._delete((cluster, namespace, name))
            case "remove_config":
                for row in self.mesh.services.all():
                    if row.cluster == step["cluster"]:
                        self._delete(row.key)
            case kind if kind.startswith("k8s_"):
                self._follow(kind, step["object"])

    def _follow(self, kind: str, body: Json) -> None:
        match kind:
            case "k8s_service":
                found = self._services[_name(body)] = msgspec.convert(body, Service)
                both = ("172.20.1.1", "fd00:20::1")  # events have backends of both families
                spec = msgspec.structs.replace(found.spec, cluster_ips=both)
                self.catalog.upsert_service(msgspec.structs.replace(found, spec=spec))
            case "k8s_service_delete":
                self._services.pop(_name(body), None)
                self.catalog.delete_service(_name(body))
            case "k8s_endpointslice":
                self.catalog.upsert_slice(msgspec.convert(body, EndpointSlice))
            case "k8s_endpointslice_delete":
                slice_ = msgspec.convert(body, EndpointSlice)
                self.catalog.delete_slice(ServiceName(slice_.namespace, slice_.service), slice_.name)

    def _put(self, key: str, value: str) -> None:
        cluster, namespace, name = key.split("/")[-3:]
        with suppress(ValueError):  # what was valid before stays
            self.mesh.services.put(self._values[cluster].service(f"{namespace}/{name}", value.encode()))
        self.catalog.remote_changed(ServiceName(namespace, name))

    def _delete(self, key: RemoteServiceKey) -> None:
        with self.mesh.services.txn() as rows:
            rows.delete(key)
        self.catalog.remote_changed(ServiceName(*key[1:]))

    @property
    def global_services(self) -> set[str]:
        """The names of local services that are global."""
        return {str(name) for name, one in self._services.items() if is_global(one)}

    @property
    def served(self) -> dict[str, list[Json]]:
        """The backends of each service, as recorded events have them."""
        found: dict[str, list[Json]] = {}
        for frontend in self.catalog.frontends.all():
            found.setdefault(str(frontend.service), []).extend(
                {
                    "address": str(one.address.ip),
                    "ports": [f"{one.port_name}={one.address.port}/TCP"],
                    "preferred": one.preferred,
                    "terminating": one.state is BackendState.TERMINATING,
                }
                for one in frontend.backends
            )
        return found


def _name(object_: Json) -> ServiceName:
    return ServiceName(object_["metadata"]["namespace"], object_["metadata"]["name"])


@pytest.mark.parametrize("name", RECORDED)
def test_backends_are_merged_as_recorded(name: str) -> None:
    """Services that are not global are served before their first slice, too, where Cilium waits for it."""
    replay = Replay()
    wanted: dict[str, list[Json]] = {}
    for step in json.loads((recordings("clustermesh") / f"{name}.json").read_text())["steps"]:
        for one in step["do"]:
            replay.do(one)
        for event in step["events"]:
            if event["event"] == "service-updated":
                wanted[event["service"]] = event["backends"]
            elif event["event"] == "service-deleted":
                wanted.pop(event["service"], None)
        served = replay.served
        early = served.keys() - wanted.keys() - replay.global_services
        assert {service: some for service, some in served.items() if service not in early} == wanted, step
        assert not any(served[service] for service in early)
        names = {(row.namespace, row.name) for row in replay.remote.all()}
        assert len(names) == step["num_global_services"]
