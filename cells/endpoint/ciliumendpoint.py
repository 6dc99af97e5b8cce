"""A CiliumEndpoint for every pod of this node: its address and identity, for all other nodes.

Controller and reconciler: endpoints, pods, policies and this node in, the table ``ciliumendpoint`` out, which
        objects of an API server are made equal to. From manifests it is only shown.

Why: other nodes know a pod's packets by it. It goes with its pod, and is written only when it differs.
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
    KNOWN_ENDPOINTS,
    NODE_NAME,
    CiliumEndpoint,
    CiliumEndpointStatus,
    KnownEndpoint,
    NamedPort,
    digest,
    owner_of,
)
from cells.kubernetes.objects.core import Pod
from cells.kubernetes.objects.kind import Key
from cells.kubernetes.resources import Resources
from cells.kubernetes.settings import ObjectSource
from cells.kubernetes.sink import ForgottenObject
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


# The contents of a pod's CiliumEndpoint.
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
"""States that come and go with every build: telling each would be a write each."""


class PodEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``ciliumendpoint``: what the object of a pod is to say."""

    namespace: str
    name: str
    pod: str
    """The owner, with its UID; both are empty where the pod's object has none."""
    pod_uid: str
    node_name: str
    """The node of the agent that writes it."""
    labels: Mapping[str, str]
    status: CiliumEndpointStatus

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def digest(self) -> int:
        """All of it as a number, to compare with KnownEndpoint."""
        return digest(self.labels, self.pod, self.pod_uid, self.node_name, self.status)


def pod_endpoint(
    endpoint: Endpoint, pod: Pod, policy: RealizedPolicy | None, node: ClusterNode | None
) -> PodEndpoint | None:
    """The object to write for an endpoint; None while it has no identity, or if it is not a pod."""
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
    """The ports that a pod's containers name."""
    for port in pod.named_ports:
        yield NamedPort(name=port.name, port=port.container_port, protocol=port.protocol)


def body(wanted: PodEndpoint) -> dict[str, Any]:
    """The whole object, for who creates it; it goes with its pod."""
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
    """The pod, if it has a UID: a static pod's call may come before its object."""
    if not wanted.pod_uid:
        return []
    return [{"apiVersion": "v1", "kind": "Pod", "name": wanted.pod, "uid": wanted.pod_uid}]


def status(wanted: PodEndpoint) -> dict[str, Any]:
    """The status as it is written; ``enforcing`` must be there, also when it is false."""
    wire: dict[str, Any] = msgspec.to_builtins(wanted.status)
    for direction in wire.get("policy", {}).values():
        direction.setdefault("enforcing", False)
    return wire


def of_object(row: CiliumEndpoint) -> PodEndpoint:
    """An object's contents, to compare."""
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
    """The ``ciliumendpoint`` table, by namespace and name."""
    return Table("ciliumendpoint", key=lambda one: one.key)


@after(ExposedEndpoints)
class PodEndpoints:
    """Keeps the table; it is complete once restored endpoints, pods and this node are known."""

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
        self._own = ""
        """The name of this node's row."""
        self._first = table.initializer("endpoints and their pods")
        self._names: dict[int, tuple[str, str]] = {}
        """The objects to write, by endpoint."""
        self._claims: dict[tuple[str, str], dict[int, PodEndpoint]] = {}
        """Objects by endpoint: of two of one pod (its old sandbox got no DEL) the newer is written."""
        jobs.observe("endpoints", partial(endpoints.changes, only=self._matters), self._follow)
        jobs.observe("policies", partial(policies.changes, only=self._differs), self._follow)
        jobs.observe("pods", pods.changes, self._follow_pods)
        jobs.observe("node", self._own_row, self._follow_node)

    async def _own_row(self) -> AsyncIterator[None]:
        await self._pods.wait_initialized()
        await wait_own(self._nodes)
        self._own = next((node.full_name for node in self._nodes.all() if node.local), "")
        seen = self._nodes.get(self._own)
        yield
        while True:
            seen = await self._nodes.wait_changed(self._own, seen)
            yield

    async def _follow_node(self, _: None) -> None:
        self._publish(one.id for one in self._endpoints.all())
        self._first.done()

    def _matters(self, number: Hashable, old: Endpoint | None, row: Endpoint | None) -> bool:
        """Whether an object (there is none without pods) has to say something else, or may be made."""
        alike = (
            old is not None
            and row is not None
            and {old.state, row.state} <= SHOWN_AS_READY
            and replace(old, state=row.state) == row
        )
        return not alike and (number in self._names or len(self._pods) > 0)

    def _differs(self, number: Hashable, old: RealizedPolicy | None, row: RealizedPolicy | None) -> bool:
        """Whether an object has to say something else; one that is yet to be made will read the policy."""
        return number in self._names and _enforced(old) != _enforced(row)

    async def _follow(self, changes: Sequence[Change[Any, Any]]) -> None:
        self._publish(change.key for change in changes)

    async def _follow_pods(self, changes: Sequence[Change[tuple[str, str], Pod]]) -> None:
        changed: set[Any] = {change.key for change in changes}
        self._publish(one.id for one in self._endpoints.all() if (one.pod_namespace, one.pod_name) in changed)

    def _publish(self, numbers: Iterable[int]) -> None:
        changed = set()
        for number in numbers:
            row = self._row(number)
            if (before := self._names.pop(number, None)) is not None:
                changed.add(before)
                del self._claims[before][number]
            if row is not None:
                changed.add(row.key)
                self._names[number] = row.key
                self._claims.setdefault(row.key, {})[number] = row
        with self._table.txn() as rows:
            for key in changed:
                if claims := self._claims[key]:
                    rows.put(claims[max(claims, key=self._created)])
                else:
                    del self._claims[key]
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
        return pod_endpoint(endpoint, pod, self._policies.get(number), self._nodes.get(self._own))


def _enforced(policy: RealizedPolicy | None) -> tuple[bool, bool] | None:
    """All of an object's contents that the agent writes."""
    return None if policy is None else (policy.ingress_enforced, policy.egress_enforced)


# Keeps the CiliumEndpoint objects of this node's pods up to date.
#
# Reconciler: Table[tuple[str, str], PodEndpoint] in, objects of an API server out.
# Source:     Cilium 1.17, sync-to-k8s-ciliumendpoint: updates test the UID, lest another object is changed.

SWEEP: Final = minutes(5)
BATCH: Final = 16
"""Objects written before others are looked at again."""


class CiliumEndpointObjects:
    """The reconciler's target: the objects of pods on this node."""

    def __init__(
        self,
        api: KubernetesAPI,
        wanted: Table[tuple[str, str], PodEndpoint],
        table: Table[tuple[str, str], KnownEndpoint],
        nodes: ReadTable[str, ClusterNode],
        forgotten: Table[tuple[str, str, str], ForgottenObject],
    ) -> None:
        self._wanted = wanted
        self._forgotten = forgotten
        self._api = api
        self._table = table
        self._nodes = nodes

    async def observe(self) -> Mapping[Key, KnownEndpoint]:
        """The objects that say they are of this node."""
        own = self._own_addresses()
        lost = {
            (one.namespace, one.name) for one in self._forgotten.by("kind").get(CILIUM_ENDPOINTS.qualified)
        }
        return {row.key: row for row in self._table.all() if row.node in own and row.key not in lost}

    def matches(self, row: PodEndpoint, observed: KnownEndpoint) -> bool:
        """Whether the object has those contents."""
        return row.digest == observed.digest

    def _own_addresses(self) -> set[str]:
        return {str(each.ip) for node in self._nodes.all() if node.local for each in node.addresses}

    async def put(self, batch: Mapping[Key, PodEndpoint]) -> None:
        """Create objects, or change their status. Raises BatchError."""
        await self._each(batch, batch)

    async def drop(self, batch: Collection[Key]) -> None:
        """Delete them; only the object that was seen. Raises BatchError."""
        await self._each(batch, {})

    async def _each(self, keys: Collection[Key], wanted: Mapping[Key, PodEndpoint]) -> None:
        from cells.kubernetes.client.errors import KubernetesError  # loaded where there is a server

        with BatchFailures(KubernetesError) as failures:
            for key in keys:
                await self._api.reachable()
                with failures.of(key):
                    if (one := wanted.get(key)) is not None:
                        await self._write(one)
                    else:
                        await self._drop(key)

    async def _write(self, wanted: PodEndpoint) -> None:
        from cells.kubernetes.client.errors import ConflictError, NotFoundError

        client = self._api.client
        if wanted.key not in self._table:
            try:
                await client.create(CILIUM_ENDPOINTS, body(wanted), wanted.namespace)
            except ConflictError:  # the watch is late, or an earlier pod of the name left it
                pass
            else:
                return
        try:
            there = await client.get(CILIUM_ENDPOINTS, wanted.name, wanted.namespace)
        except NotFoundError:
            await client.create(CILIUM_ENDPOINTS, body(wanted), wanted.namespace)
            return
        held = of_object(there)
        if held == wanted:
            return
        if held.pod_uid and held.pod_uid != wanted.pod_uid:
            await self._delete(wanted.key, there.metadata.uid)
            await client.create(CILIUM_ENDPOINTS, body(wanted), wanted.namespace)
            return
        changes: list[dict[str, Any]] = [
            {"op": "test", "path": "/metadata/uid", "value": there.metadata.uid},
            {"op": "add", "path": "/status", "value": status(wanted)},
        ]
        if held.node_name != wanted.node_name:
            marked = {**there.annotations, NODE_NAME: wanted.node_name}
            changes.append({"op": "add", "path": "/metadata/annotations", "value": marked})
        if (held.labels, held.pod_uid) != (wanted.labels, wanted.pod_uid):
            changes += [
                {"op": "add", "path": "/metadata/labels", "value": dict(wanted.labels)},
                {"op": "add", "path": "/metadata/ownerReferences", "value": owners(wanted)},
            ]
        try:
            await client.patch(CILIUM_ENDPOINTS, wanted.name, changes, wanted.namespace, how="json")
        except NotFoundError:
            await client.create(CILIUM_ENDPOINTS, body(wanted), wanted.namespace)

    async def _drop(self, key: Key) -> None:
        """Delete the object, if it still names this node."""
        from cells.kubernetes.client.errors import NotFoundError

        try:
            there = await self._api.client.get(CILIUM_ENDPOINTS, key[1], key[0])
        except NotFoundError:
            return
        networking = there.status.networking
        if networking is not None and networking.node in self._own_addresses():
            await self._delete(key, there.metadata.uid)

    async def _delete(self, key: Key, uid: str) -> None:
        from cells.kubernetes.client.errors import ConflictError

        try:
            await self._api.client.delete(CILIUM_ENDPOINTS, key[1], key[0], uid=uid)
        except ConflictError:  # another one has the name by now: nothing of ours
            return


@after(PodEndpoints)
class CiliumEndpointSync:
    """Has objects follow, where there is an API server; nothing is deleted before all of them are known."""

    def __init__(
        self,
        source: ObjectSource,
        api: KubernetesAPI,
        wanted: Table[tuple[str, str], PodEndpoint],
        resources: Resources,
        nodes: ReadTable[str, ClusterNode],
        forgotten: Table[tuple[str, str, str], ForgottenObject],
        published: EndpointObjects | None,
        *,
        jobs: Jobs,
        tables: Tables,
    ) -> None:
        self._wanted = wanted
        if published is not None and not published.served:
            return
        self._table: Table[tuple[str, str], KnownEndpoint] = resources.table(KNOWN_ENDPOINTS)
        if source is not ObjectSource.API_SERVER:
            return
        objects = CiliumEndpointObjects(api, wanted, self._table, nodes, forgotten)
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
        jobs.observe("changed by others", self._changes, self._look)
        jobs.observe("lost objects", forgotten.changes, self._write_lost)

    async def _changes(self) -> AsyncIterator[Sequence[Change[tuple[str, str], KnownEndpoint]]]:
        await self._table.wait_initialized()
        async for changes in self._table.changes(self._table.revision):
            yield changes

    async def _write_lost(self, _: object) -> None:
        """What the server has lost is written again."""
        self._reconciler.trigger()

    async def _look(self, changes: Sequence[Change[tuple[str, str], KnownEndpoint]]) -> None:
        """Objects of ours that were changed are corrected."""
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
