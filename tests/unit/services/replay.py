"""Replays a recorded run of Cilium's service control plane on our catalogue and load balancer."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import cache
from ipaddress import ip_address
from typing import Any, Final, TypeVar

import msgspec

from cells.api.models.node import ServiceRequest
from cells.api.operations.services import requested, requested_backends, service_model
from cells.cluster.identity.numbers import ClusterNumbers
from cells.clustermesh.keys import RemoteValues
from cells.clustermesh.tables import BY_NAME, RemoteService, RemoteServiceKey
from cells.kubernetes.objects.cilium_policy import CiliumLocalRedirectPolicy
from cells.kubernetes.objects.core import EndpointSlice, Pod, Service
from cells.services import (
    DEFAULT_SEED,
    EXPOSURE_LABEL,
    ZONE_LABEL,
    Backend,
    BackendState,
    LoadBalancerOptions,
    Seed,
    ServiceName,
    ServingNode,
)
from cells.services.control import ServedFrontend
from cells.services.control.balancer import LoadBalancer
from cells.services.control.manual import check_frontend, check_states, frontend_of
from cells.services.control.numbers import IdsExhaustedError
from cells.services.control.tables import served_frontends
from cells.services.control.target import ServicesTarget
from cells.services.maglev import MaglevTables
from cells.services.map_entries import TABLE, Batch, Entries, read
from cells.services.model.backends import health_answers
from cells.services.model.redirect import read_redirect
from lifecycle import BatchError, Table
from lifecycle.http import Refusal
from tests.support.catalog import LoneCatalog
from tests.support.recordings import recordings

DATA: Final = recordings("services")
SERVED_EARLY: Final = {"ClusterIP", "LoadBalancer", "ExternalIPs", "NodePort"}
"""Types of frontends that a service has before its slices arrive."""
NUMBER: Final[dict[str, Callable[[str, str], bytes]]] = {
    "services_v2": lambda key, value: bytes.fromhex(value)[6:8],
    "reverse_nat": lambda key, value: bytes.fromhex(key),
    "source_range": lambda key, value: bytes.fromhex(key)[4:6],
}
"""Where maps have the number of a frontend."""
STATES: Final = {one: one.name.lower() for one in BackendState}

Json = Any
Outcome = TypeVar("Outcome")


def finished(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run a coroutine that never blocks; return its result."""
    try:
        work.send(None)
    except StopIteration as done:
        outcome: Outcome = done.value
        return outcome
    raise AssertionError("it waits")


@cache
def load(name: str) -> Json:
    """Load a recording."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def names(folder: str) -> list[str]:
    """Return every recording of a folder."""
    return sorted(f"{folder}/{path.stem}" for path in (DATA / folder).glob("*.json"))


def options_of(config: Json, *, protocols: bool = False) -> LoadBalancerOptions:
    """Return the recorded options, without protocol differentiation, which the recorded tree lacked."""
    known = {one.name for one in msgspec.structs.fields(LoadBalancerOptions)}
    given = {key.replace("-", "_"): value for key, value in config.items()}
    if "kube_proxy_replacement" in given:
        switches = ("enable_node_port", "enable_external_ips", "enable_host_port", "enable_session_affinity")
        given = dict.fromkeys(switches, given["kube_proxy_replacement"]) | given
    return msgspec.convert(
        {key: value for key, value in given.items() if key in known} | {"bpf_lb_proto_diff": protocols},
        LoadBalancerOptions,
    )


class RecordedMaps:
    """Maps in a recording's form, checked after every write."""

    def __init__(self, entries: dict[str, dict[str, str]]) -> None:
        self.entries = entries
        self._broken_before = set(broken_pointers(entries))

    async def dump(self) -> Entries:
        return self.raw()

    def raw(self) -> Entries:
        """Return the entries as bytes."""
        return {
            name: dict.fromkeys((int(key).to_bytes(2, "big") for key in entries), TABLE)
            if name.endswith("maglev")
            else {bytes.fromhex(key): bytes.fromhex(value) for key, value in entries.items()}
            for name, entries in self.entries.items()
        }

    def write(self, batch: Batch) -> None:
        for where, value in batch.writes():
            entries = self.entries.setdefault(where.map, {})
            text = str(int.from_bytes(where.key, "big")) if where.map.endswith("maglev") else where.key.hex()
            if value is None:
                entries.pop(text, None)
                if not entries:
                    del self.entries[where.map]
            else:
                entries[text] = value.hex()
            assert set(broken_pointers(self.entries)) <= self._broken_before

    async def write_tables(self, batch: Batch) -> None:
        self.write(batch)


class Run:
    """One run of an agent: events in, map contents out.

    As in an agent, nothing is written before the sources are synced: until then the recorded state does not
    change.
    """

    def __init__(
        self, recorded: Json, maps: dict[str, dict[str, str]] | None = None, *, protocols: bool = False
    ) -> None:
        self.options = options_of(recorded["config"], protocols=protocols)
        self._labels = recorded["node"].get("labels") or {}
        self._name = recorded["node"]["name"]
        self._addresses = recorded["node_addresses"]
        self._cluster = recorded["config"].get("cluster-name", "default")
        self._remote: Table[RemoteServiceKey, RemoteService] = Table(
            "global-services",
            key=lambda one: one.key,
            indexes={BY_NAME: lambda one: ((one.namespace, one.name),)},
        )
        events = [event for step in recorded["steps"] for event in step["events"]]
        if any(event.get("local_only") for event in events):  # remote clusters are listed later
            self._remote.initializer("clusters")
        self.catalog = LoneCatalog(self.options, self._node(), self._remote)
        maglev = None
        if self.options.bpf_lb_algorithm == "maglev":
            maglev = MaglevTables(self.options.bpf_lb_maglev_table_size, Seed.parse(DEFAULT_SEED))
        last = recorded["id_space"][1] - 1 if "id_space" in recorded else 65534
        self.table, self.served = self.catalog.frontends, served_frontends()
        balancer = LoadBalancer(self.options, self.served, maglev, last_service_id=last)
        self.maps: dict[str, dict[str, str]] = maps if maps is not None else {}
        self._kernel = RecordedMaps(self.maps)
        self._target = ServicesTarget(self.table, balancer, self._kernel, self.served)
        self._sliced: set[str] = set()
        """Services that have had a slice."""
        self.results: list[Json] = []
        self.synced = not recorded.get("restore")
        if self.synced:  # nothing is restored, which agents here always do
            self.maps.clear()
            finished(self._target.observe())

    def _node(self) -> ServingNode:
        return ServingNode(
            name=self._name,
            zone=self._labels.get(ZONE_LABEL, ""),
            exposure=self._labels.get(EXPOSURE_LABEL, ""),
            node_port_addresses=tuple(
                ip_address(one["address"]) for one in self._addresses if one.get("node_port")
            ),
        )

    def handle(self, event: Json) -> None:
        """Process one event."""
        object_ = event.get("object")
        match event["op"]:
            case "service-upsert" | "endpointslice-upsert" | "pod-upsert":
                self._upsert(object_)
            case "service-delete" | "endpointslice-delete" | "pod-delete":
                self._delete(object_)
            case "local-redirect-policy-add" | "local-redirect-policy-delete":
                self._redirect(event["op"], object_)
            case "remote-cluster-service-upsert" | "remote-cluster-service-delete":
                self._export(event["op"], object_)
            case "api-put-service":
                self.results.append(self._put(event["body"]))
            case "api-delete-service":
                self.results.append(self._delete_manually(event["id"]))
            case "http-get":
                self.results.append(self._answer(event))
            case "k8s-synced":
                self._sync()
            case other:
                raise AssertionError(f"unknown event {other}")
        self._write()

    def _sync(self) -> None:
        """Mark this cluster's objects as listed, and the second time those of remote clusters."""
        if not self.synced:
            finished(self._target.observe())
            self.synced = True
            return
        for name in self.catalog.remote_listed():
            self.catalog.refresh(name)

    def _export(self, op: str, object_: Json) -> None:
        """Apply a remote cluster's service as in its etcd; agents ignore their own cluster's."""
        cluster, namespace, name = object_["cluster"], object_["namespace"], object_["name"]
        if cluster == self._cluster:
            return
        with self._remote.txn() as rows:
            if op.endswith("delete"):
                rows.delete((cluster, namespace, name))
            else:
                values = RemoteValues(cluster, object_["clusterID"], ClusterNumbers(1))
                rows.put(values.service(f"{namespace}/{name}", json.dumps(object_).encode()))
        self.catalog.remote_changed(ServiceName(namespace, name))

    def _put(self, body: Json) -> Json:
        """Handle PUT as the API does. A refused call changes nothing; upstream's 460 follows the change."""
        asked = msgspec.convert(body, ServiceRequest)
        try:
            if asked.update_services:
                for one in check_states(requested_backends(asked), self._reported()):
                    self.catalog.set_state(one.address, one.state)
                return {"status": 200, "body": ""}
            frontend = frontend_of(requested(asked), self._name, self.options)
            try:
                created = check_frontend(frontend, self._reported())
            except Refusal as error:
                if error.status == 460:
                    self.catalog.override(frontend.key, frontend)
                raise
            self.catalog.override(frontend.key, frontend)
        except Refusal as error:
            return {"status": error.status, "body": json.dumps(error.text)}
        return {"status": 201 if created else 200, "body": ""}

    def _delete_manually(self, number: int) -> Json:
        found = next((one.key for one in self._reported() if one.id == number), None)
        if found is None:
            return {"status": 404, "body": ""}
        self.catalog.override(found, None)
        return {"status": 200, "body": ""}

    def _reported(self) -> list[ServedFrontend]:
        return [ServedFrontend(one.id, one.in_maps) for one in self.served.all()]

    def _redirect(self, op: str, object_: Json) -> None:
        if op.endswith("delete"):
            metadata = object_["metadata"]
            self.catalog.delete_redirect(ServiceName(metadata["namespace"], metadata["name"]))
            return
        policy = msgspec.convert(object_, CiliumLocalRedirectPolicy)
        with suppress(ValueError):  # refused, as recorded
            self.catalog.upsert_redirect(read_redirect(policy))

    def _upsert(self, object_: Json) -> None:
        match object_["kind"]:
            case "Service":
                self.catalog.upsert_service(msgspec.convert(object_, Service))
            case "EndpointSlice":
                labels = object_["metadata"].get("labels") or {}
                self._sliced.add(
                    f"{object_['metadata']['namespace']}/{labels.get('kubernetes.io/service-name')}"
                )
                self.catalog.upsert_slice(msgspec.convert(object_, EndpointSlice))
            case _:
                self.catalog.upsert_pod(msgspec.convert(object_, Pod))

    def _delete(self, object_: Json) -> None:
        metadata = object_["metadata"]
        match object_["kind"]:
            case "Service":
                self.catalog.delete_service(ServiceName(metadata["namespace"], metadata["name"]))
            case "EndpointSlice":
                slice_ = msgspec.convert(object_, EndpointSlice)
                name = ServiceName(slice_.metadata.namespace, slice_.service)
                self.catalog.delete_slice(name, slice_.metadata.name)
            case _:
                self.catalog.delete_pod(metadata["namespace"], metadata["name"])

    def _write(self) -> None:
        for change in self.catalog.news():
            if not self.synced:
                continue
            try:
                if change.row is not None:
                    finished(self._target.put({change.key: change.row}))
                else:
                    finished(self._target.drop([change.key]))
            except BatchError as error:
                for each in error.failures.values():
                    assert isinstance(each, IdsExhaustedError)

    def _unmarked(self, map_name: str, value: str) -> str:
        """Return a backend's value without the protocol number, which was not recorded."""
        if "backends_v3" not in map_name or not self.options.bpf_lb_proto_diff:
            return value
        at = 2 * (6 if "lb4" in map_name else 18)
        return f"{value[:at]}00{value[at + 2 :]}"

    def _looks_at(self, map_name: str) -> bool:
        """Return whether a map is compared: those of a disabled family or algorithm are not."""
        if "lb6" in map_name and not self.options.enable_ipv6:
            return False
        return not map_name.endswith("maglev") or self.options.bpf_lb_algorithm == "maglev"

    def _answer(self, event: Json) -> Json:
        answers = {}
        if self.options.enable_health_check_nodeport:
            answers = health_answers(one.in_maps for one in self.served.all())
        answer = answers.get(event["port"])
        if answer is None:
            return None
        body = "" if event["method"] == "HEAD" else answer.body.decode()
        return {"status": answer.status, "body": body, "headers": dict(answer.headers)}

    def _early(self) -> set[int]:
        """Return the numbers of frontends that the recorded tree did not serve yet."""
        return {
            one.id
            for one in self.served.all()
            if str(one.frontend.service) not in self._sliced
            and one.frontend.type.text in SERVED_EARLY
            and not one.frontend.backends
        }

    def api(self) -> list[Json]:
        """Return the specs of GET /service."""
        early = self._early()
        return [
            msgspec.to_builtins(service_model(one).spec) for one in self.served.all() if one.id not in early
        ]

    def state(self) -> Json:
        """Return the state in a recording's form.

        It lacks services that have never had a slice: the recorded tree did not serve those, releases do.
        """
        early = self._early()
        maps = {}
        for name, entries in self.maps.items():
            number = NUMBER.get(name[len("cilium_lb4_") :])
            retained = {
                key: self._unmarked(name, value)
                for key, value in entries.items()
                if number is None or int.from_bytes(number(key, value), "big") not in early
            }
            if retained and self._looks_at(name):
                maps[name] = retained
        backends = read(self._kernel.raw(), (4, 6)).backends
        ids = {backend.address: number for number, backend in backends.items()}
        return {
            "frontends": [_shown(one, ids) for one in self.served.all() if one.id not in early],
            "backends": [{"id": number, "addr": str(address)} for address, number in ids.items()],
            "maps_after": maps,
        }


def _shown(served: ServedFrontend, ids: dict[Any, int]) -> Json:
    frontend = served.in_maps
    shown: dict[str, Any] = {
        "id": served.id,
        "addr": str(frontend.key),
        "type": frontend.type.text,
        "service": str(frontend.service),
        "ext_policy": "Local" if frontend.ext_local else "Cluster",
        "int_policy": "Local" if frontend.int_local else "Cluster",
        "backends": [_shown_backend(one, ids[one.address]) for one in frontend.backends],
    }
    if frontend.affinity_timeout:
        shown |= {"session_affinity": True, "affinity_timeout": frontend.affinity_timeout}
    if frontend.source_ranges:
        shown["source_ranges"] = list(frontend.source_ranges)
    if frontend.loopback:
        shown["loopback_hostport"] = True
    return shown


def _shown_backend(backend: Backend, number: int) -> Json:
    shown = {
        "id": number,
        "addr": str(backend.address),
        "state": STATES[backend.state],
        "weight": backend.weight,
    }
    if backend.node:
        shown["node"] = backend.node
    if backend.port_name:
        shown["port_name"] = backend.port_name
    if backend.preferred:
        shown["preferred"] = True
    return shown


def broken_pointers(maps: dict[str, dict[str, str]]) -> Iterator[str]:
    """Return slots that name no backend or are missing; checked after every write."""
    for version in (4, 6):
        services = maps.get(f"cilium_lb{version}_services_v2", {})
        backends = {
            *maps.get("cilium_lb4_backends_v3", {}),
            *maps.get("cilium_lb6_backends_v3", {}),
        }
        for key, value in services.items():
            raw = bytes.fromhex(key)
            slot = int.from_bytes(raw[-6:-4], "little")
            if slot and value[:8] not in backends:
                yield key
            count = 0 if slot else int.from_bytes(bytes.fromhex(value)[4:6], "little")
            for number in range(1, count + 1):
                wanted = (raw[:-6] + number.to_bytes(2, "little") + raw[-4:]).hex()
                if wanted not in services:
                    yield wanted
