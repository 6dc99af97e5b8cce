"""Publishes a CiliumEndpoint for every pod of this node: its addresses, identity and policy status.

``PodEndpoints`` computes the table ``ciliumendpoint`` from endpoints, pods, policies and this node;
``CiliumEndpointSync`` reconciles it to the API server. With manifests as the source of objects, only the
table is written.

Why: other nodes learn the identities of pods' addresses from these objects. The pod owns the object, so
Kubernetes deletes both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from cells.base.addresses import Family
from cells.cluster.nodes.node import ClusterNode, wait_own
from cells.cluster.remote_endpoints import EndpointObjects
from cells.endpoint import Endpoint, State
from cells.endpoint.restore import ExposedEndpoints
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.objects.cilium_endpoint import (
    CILIUM_ENDPOINTS,
    NODE_NAME,
    SLIM_ENDPOINTS,
    CiliumEndpoint,
    CiliumEndpointStatus,
    NamedPort,
    SlimEndpoint,
    digest,
    owner_of,
)
from cells.kubernetes.objects.core import Pod
from cells.kubernetes.objects.kind import Key
from cells.kubernetes.resources import Resources
from cells.kubernetes.settings import ObjectSource
from cells.kubernetes.sink import MissingObject
from cells.policy.maps import RealizedPolicy
from lifecycle import (
    Backoff,
    Change,
    Jobs,
    ReadTable,
    Reconciler,
    Table,
    Tables,
    after,
    invoke,
    minutes,
    module,
    provide,
    provide_private,
)
from lifecycle.tables import BatchFailures

__all__ = ["PodEndpoint", "cell"]


# The desired CiliumEndpoint of a pod.
#
# Source: Cilium 1.17, CiliumEndpoint: all but metadata is in its status.

SHOWN_AS_READY = frozenset(
    {
        State.RESTORING,
        State.WAITING_TO_REGENERATE,
        State.REGENERATING,
        State.READY,
        State.DISCONNECTING,
        State.DISCONNECTED,
    }
)
"""States published as ``ready``: a write to the API server for each regeneration would be too many."""


class PodEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``ciliumendpoint``: the desired object of a pod."""

    namespace: str
    name: str
    pod: str
    """Name of the owner. Name and UID are empty if the pod's object has no UID."""
    pod_uid: str
    node_name: str
    """The node of the agent that writes the object."""
    labels: Mapping[str, str]
    status: CiliumEndpointStatus

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name

    @property
    def digest(self) -> int:
        """The hash of the row, comparable with that of SlimEndpoint."""
        return digest(self.labels, self.pod, self.pod_uid, self.node_name, self.status)


def pod_endpoint(
    endpoint: Endpoint, pod: Pod, policy: RealizedPolicy | None, node: ClusterNode | None
) -> PodEndpoint | None:
    """Return the desired object of an endpoint; None if it has no identity or is not a pod's."""
    if not endpoint.identity or pod.spec.host_network or node is None:
        return None
    legacy = not endpoint.disable_legacy_identifiers
    wire: dict[str, Any] = {
        "id": endpoint.id,
        "state": (State.READY if endpoint.state in SHOWN_AS_READY else endpoint.state).value,
        "identity": {"id": endpoint.identity, "labels": list(endpoint.labels)},
        "networking": {
            "addressing": [{f"ipv{ip.version}": str(ip) for ip in endpoint.addresses}],
            "node": _node_ip(node),
        },
        "encryption": {"key": node.endpoint_key},
        "external-identifiers": {
            "cni-attachment-id": endpoint.attachment_id,
            "container-id": endpoint.container_id if legacy else "",
            "container-name": endpoint.container_name if legacy else "",
            "k8s-namespace": endpoint.pod_namespace,
            "k8s-pod-name": endpoint.pod_name,
            "pod-name": endpoint.pod if legacy else "",
        },
    }
    if ports := sorted(named_ports(pod), key=lambda one: (one.name, one.port)):
        wire["named-ports"] = [msgspec.to_builtins(one) for one in ports]
    if policy is not None:
        wire["policy"] = {
            "ingress": _direction(enforced=policy.ingress_enforced),
            "egress": _direction(enforced=policy.egress_enforced),
        }
    return PodEndpoint(
        namespace=endpoint.pod_namespace,
        name=endpoint.cep_name,
        pod=endpoint.pod_name if pod.metadata.uid else "",
        pod_uid=pod.metadata.uid,
        node_name=node.name,
        labels=pod.labels,
        status=msgspec.convert(wire, CiliumEndpointStatus),
    )


def named_ports(pod: Pod) -> Iterator[NamedPort]:
    """Yield the named ports of a pod's containers."""
    for port in pod.named_ports:
        yield NamedPort(name=port.name, port=port.container_port, protocol=port.protocol)


def body(wanted: PodEndpoint) -> dict[str, Any]:
    """Return the complete object, for its creation."""
    return {
        "apiVersion": CILIUM_ENDPOINTS.api_version,
        "kind": CILIUM_ENDPOINTS.kind,
        "metadata": {
            "name": wanted.name,
            "namespace": wanted.namespace,
            "labels": dict(wanted.labels),
            "annotations": {NODE_NAME: wanted.node_name},
            "ownerReferences": owners(wanted),
        },
        "status": status(wanted),
    }


def owners(wanted: PodEndpoint) -> list[dict[str, Any]]:
    """Return the owner reference to the pod; empty without a UID, as of a static pod's missing object."""
    if not wanted.pod_uid:
        return []
    return [{"apiVersion": "v1", "kind": "Pod", "name": wanted.pod, "uid": wanted.pod_uid}]


def status(wanted: PodEndpoint) -> dict[str, Any]:
    """Return the status as JSON, always with ``enforcing``, which the CRD requires."""
    wire: dict[str, Any] = msgspec.to_builtins(wanted.status)
    for direction in wire.get("policy", {}).values():
        direction.setdefault("enforcing", False)
    return wire


def of_object(row: CiliumEndpoint) -> PodEndpoint:
    """Return the contents of an object, comparable with a desired row."""
    pod, pod_uid = owner_of(row)
    return PodEndpoint(
        namespace=row.namespace,
        name=row.name,
        pod=pod,
        pod_uid=pod_uid,
        node_name=row.annotations.get(NODE_NAME, ""),
        labels=row.labels,
        status=row.status,
    )


def _node_ip(node: ClusterNode) -> str:
    found = node.node_ip(Family.IPV4) or node.node_ip(Family.IPV6)
    return str(found) if found is not None else ""


def _direction(*, enforced: bool) -> dict[str, Any]:
    return {"enforcing": enforced, "state": "enforcing" if enforced else "non-enforcing"}


def pod_endpoints() -> Table[tuple[str, str], PodEndpoint]:
    """Create the table ``ciliumendpoint``, by namespace and name."""
    return Table("ciliumendpoint", key=lambda one: one.key)


@after(ExposedEndpoints)
class PodEndpoints:
    """Maintains the table; initialized once restored endpoints, pods and this node are listed."""

    def __init__(
        self,
        table: Table[tuple[str, str], PodEndpoint],
        endpoints: Table[int, Endpoint],
        pods: Table[tuple[str, str], Pod],
        policies: Table[int, RealizedPolicy],
        nodes: ReadTable[str, ClusterNode],
        jobs: Jobs,
    ) -> None:
        self._table = table
        self._endpoints = endpoints
        self._pods = pods
        self._policies = policies
        self._nodes = nodes
        self._node_name = ""
        """Key of this node's row in the table of nodes."""
        self._initializer = table.initializer("endpoints and their pods")
        self._keys: dict[int, tuple[str, str]] = {}
        """Key of the object, by endpoint id."""
        self._candidates: dict[tuple[str, str], dict[int, PodEndpoint]] = {}
        """Endpoints with the same object; the newest wins, as an old sandbox may have received no DEL."""
        jobs.observe("endpoints", partial(endpoints.changes, only=self._is_relevant), self._follow)
        jobs.observe("policies", partial(policies.changes, only=self._is_relevant_policy), self._follow)
        jobs.observe("pods", pods.changes, self._follow_pods)
        jobs.observe("node", self._own_row, self._follow_node)

    async def _own_row(self) -> AsyncIterator[None]:
        await self._pods.wait_initialized()
        await wait_own(self._nodes)
        self._node_name = next((node.full_name for node in self._nodes.all() if node.local), "")
        seen = self._nodes.get(self._node_name)
        yield
        while True:
            seen = await self._nodes.wait_changed(self._node_name, seen)
            yield

    async def _follow_node(self, _: None) -> None:
        self._publish(one.id for one in self._endpoints.all())
        self._initializer.done()

    def _is_relevant(self, number: Hashable, old: Endpoint | None, row: Endpoint | None) -> bool:
        """Whether a change of an endpoint may change an object; without pods there are no objects."""
        same_object = (
            old is not None
            and row is not None
            and {old.state, row.state} <= SHOWN_AS_READY
            and replace(old, state=row.state) == row
        )
        return not same_object and (number in self._keys or len(self._pods) > 0)

    def _is_relevant_policy(
        self, number: Hashable, old: RealizedPolicy | None, row: RealizedPolicy | None
    ) -> bool:
        return number in self._keys and _enforced(old) != _enforced(row)

    async def _follow(self, changes: Sequence[Change[Any, Any]]) -> None:
        self._publish(change.key for change in changes)

    async def _follow_pods(self, changes: Sequence[Change[tuple[str, str], Pod]]) -> None:
        changed: set[Any] = {change.key for change in changes}
        self._publish(one.id for one in self._endpoints.all() if (one.pod_namespace, one.pod_name) in changed)

    def _publish(self, numbers: Iterable[int]) -> None:
        changed = set()
        for number in numbers:
            row = self._row(number)
            if (before := self._keys.pop(number, None)) is not None:
                changed.add(before)
                del self._candidates[before][number]
            if row is not None:
                changed.add(row.key)
                self._keys[number] = row.key
                self._candidates.setdefault(row.key, {})[number] = row
        with self._table.txn() as rows:
            for key in changed:
                if claims := self._candidates[key]:
                    rows.put(claims[max(claims, key=self._created)])
                else:
                    del self._candidates[key]
                    rows.delete(key)

    def _created(self, number: int) -> float:
        endpoint = self._endpoints.get(number)
        return endpoint.created if endpoint is not None else 0.0

    def _row(self, number: int) -> PodEndpoint | None:
        endpoint = self._endpoints.get(number)
        if endpoint is None or not endpoint.pod_name:
            return None
        pod = self._pods.get((endpoint.pod_namespace, endpoint.pod_name))
        if pod is None:
            return None
        return pod_endpoint(endpoint, pod, self._policies.get(number), self._nodes.get(self._node_name))


def _enforced(policy: RealizedPolicy | None) -> tuple[bool, bool] | None:
    """Return the part of a policy that the object contains."""
    return None if policy is None else (policy.ingress_enforced, policy.egress_enforced)


# The reconciler of the CiliumEndpoint objects.
#
# Reconciler: the table ``ciliumendpoint`` in, objects of the API server out.
# Source:     Cilium 1.17, sync-to-k8s-ciliumendpoint; updates test the UID: a recreated object stays.

SWEEP: Final = minutes(5)
BATCH: Final = 16
"""Maximum number of objects that one round of the reconciler writes."""


class CiliumEndpointObjects:
    """The reconciler's target: the CiliumEndpoint objects of this node's pods."""

    def __init__(
        self,
        api: KubernetesAPI,
        wanted: Table[tuple[str, str], PodEndpoint],
        table: Table[tuple[str, str], SlimEndpoint],
        nodes: ReadTable[str, ClusterNode],
        missing_objects: Table[tuple[str, str, str], MissingObject],
    ) -> None:
        self._wanted = wanted
        self._missing = missing_objects
        self._api = api
        self._table = table
        self._nodes = nodes

    async def observe(self) -> Mapping[Key, SlimEndpoint]:
        """Return the listed objects of this node, except those missing from the API server."""
        own = self._own_addresses()
        missing = {
            (one.namespace, one.name) for one in self._missing.by("kind").get(CILIUM_ENDPOINTS.qualified)
        }
        return {row.key: row for row in self._table.all() if row.node in own and row.key not in missing}

    def matches(self, row: PodEndpoint, observed: SlimEndpoint) -> bool:
        return row.digest == observed.digest

    def _own_addresses(self) -> set[str]:
        return {str(each.ip) for node in self._nodes.all() if node.local for each in node.addresses}

    async def put(self, batch: Mapping[Key, PodEndpoint]) -> None:
        """Create objects, or update them. Raises BatchError."""
        await self._write_all(batch, batch)

    async def drop(self, batch: Collection[Key]) -> None:
        """Delete objects that still name this node, with a UID precondition. Raises BatchError."""
        await self._write_all(batch, {})

    async def _write_all(self, keys: Collection[Key], wanted: Mapping[Key, PodEndpoint]) -> None:
        from cells.kubernetes.client.errors import KubernetesError  # loaded only with an API server

        with BatchFailures(KubernetesError) as failures:
            for key in keys:
                await self._api.reachable()
                with failures.of(key):
                    if (one := wanted.get(key)) is not None:
                        await self._write(one)
                    else:
                        await self._delete_own(key)

    async def _write(self, wanted: PodEndpoint) -> None:
        from cells.kubernetes.client.errors import ConflictError, NotFoundError

        client = self._api.client
        if wanted.key not in self._table:
            try:
                await client.create(CILIUM_ENDPOINTS, body(wanted), wanted.namespace)
            except ConflictError:  # the watch is late, or an object of an earlier pod exists
                pass
            else:
                return
        try:
            found = await client.get(CILIUM_ENDPOINTS, wanted.name, wanted.namespace)
        except NotFoundError:
            await client.create(CILIUM_ENDPOINTS, body(wanted), wanted.namespace)
            return
        current = of_object(found)
        if current == wanted:
            return
        if current.pod_uid and current.pod_uid != wanted.pod_uid:
            await self._delete(wanted.key, found.metadata.uid)
            await client.create(CILIUM_ENDPOINTS, body(wanted), wanted.namespace)
            return
        changes: list[dict[str, Any]] = [
            {"op": "test", "path": "/metadata/uid", "value": found.metadata.uid},
            {"op": "add", "path": "/status", "value": status(wanted)},
        ]
        if current.node_name != wanted.node_name:
            marked = {**found.annotations, NODE_NAME: wanted.node_name}
            changes.append({"op": "add", "path": "/metadata/annotations", "value": marked})
        if (current.labels, current.pod_uid) != (wanted.labels, wanted.pod_uid):
            changes += [
                {"op": "add", "path": "/metadata/labels", "value": dict(wanted.labels)},
                {"op": "add", "path": "/metadata/ownerReferences", "value": owners(wanted)},
            ]
        try:
            await client.patch(CILIUM_ENDPOINTS, wanted.name, changes, wanted.namespace, how="json")
        except NotFoundError:
            await client.create(CILIUM_ENDPOINTS, body(wanted), wanted.namespace)

    async def _delete_own(self, key: Key) -> None:
        """Delete the object if it still names this node."""
        from cells.kubernetes.client.errors import NotFoundError

        try:
            found = await self._api.client.get(CILIUM_ENDPOINTS, key[1], key[0])
        except NotFoundError:
            return
        networking = found.status.networking
        if networking is not None and networking.node in self._own_addresses():
            await self._delete(key, found.metadata.uid)

    async def _delete(self, key: Key, uid: str) -> None:
        from cells.kubernetes.client.errors import ConflictError

        try:
            await self._api.client.delete(CILIUM_ENDPOINTS, key[1], key[0], uid=uid)
        except ConflictError:  # another object has this name now
            return


@after(PodEndpoints)
class CiliumEndpointSync:
    """Reconciles objects of the API server; deletes none before all objects are listed."""

    def __init__(
        self,
        source: ObjectSource,
        api: KubernetesAPI,
        wanted: Table[tuple[str, str], PodEndpoint],
        resources: Resources,
        nodes: ReadTable[str, ClusterNode],
        missing_objects: Table[tuple[str, str, str], MissingObject],
        published: EndpointObjects | None,
        *,
        jobs: Jobs,
        tables: Tables,
    ) -> None:
        self._wanted = wanted
        if published is not None and not published.served:
            return
        self._table: Table[tuple[str, str], SlimEndpoint] = resources.table(SLIM_ENDPOINTS)
        if source is not ObjectSource.API_SERVER:
            return
        objects = CiliumEndpointObjects(api, wanted, self._table, nodes, missing_objects)
        backoff = Backoff(first=1.0, maximum=60.0)
        self._reconciler: Reconciler[Key, PodEndpoint] = Reconciler(
            wanted,
            objects,
            full_every=SWEEP,
            after=self._table.wait_initialized,
            batch=BATCH,
            backoff=backoff,
        )
        tables.add(self._reconciler.statuses)
        jobs.observe("sync-to-k8s-ciliumendpoint", self._reconciler)
        jobs.observe("drift", self._changes, self._correct)
        jobs.observe("missing objects", missing_objects.changes, self._write_missing)

    async def _changes(self) -> AsyncIterator[Sequence[Change[tuple[str, str], SlimEndpoint]]]:
        await self._table.wait_initialized()
        async for changes in self._table.changes(self._table.revision):
            yield changes

    async def _write_missing(self, _: object) -> None:
        """Recreate objects that are missing from the API server."""
        self._reconciler.trigger()

    async def _correct(self, changes: Sequence[Change[tuple[str, str], SlimEndpoint]]) -> None:
        """Correct objects of this node that other clients changed."""
        for change in changes:
            wanted = self._wanted.get(change.key)
            if wanted is not None and (change.row is None or change.row.digest != wanted.digest):
                self._reconciler.trigger()
                return


cell = module(
    "cilium-endpoint",
    "CiliumEndpoints of this node's pods",
    provide(pod_endpoints),
    provide_private(PodEndpoints, CiliumEndpointSync),
    invoke(CiliumEndpointSync),
)
