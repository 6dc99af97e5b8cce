"""Objects of policies: enabled kinds, their status and events, named ports of pods, services."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from ipaddress import ip_network
from typing import Any, Generic, Protocol, Self, TypeVar

import anyio
import msgspec

from cells.kubernetes.object_events import EventDraft, EventSource, Regarding
from cells.kubernetes.objects.cilium_policy import (
    CILIUM_CLUSTERWIDE_NETWORK_POLICIES,
    CILIUM_NETWORK_POLICIES,
)
from cells.kubernetes.objects.core import (
    ENDPOINT_SLICES,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    EndpointSlice,
    Pod,
)
from cells.kubernetes.objects.kind import Kind
from cells.kubernetes.resources import Resources
from cells.policy.compute.policies import NamedPodPort
from cells.policy.labels import Prefix
from cells.policy.maps import PodKey
from cells.policy.rules import PROTOCOLS
from cells.policy.rules.peers import references_service
from cells.policy.rules.schema import ServiceReference
from lifecycle import Change, Member, Settings, Table
from lifecycle.tables import Changes


class PolicyRuleSettings(Settings, frozen=True):
    """Which kinds of policy objects are enabled."""

    enable_k8s_networkpolicy: bool = True
    """Enforce NetworkPolicies."""

    enable_cilium_network_policy: bool = True
    """Enforce CiliumNetworkPolicies."""

    enable_cilium_clusterwide_network_policy: bool = True
    """Enforce CiliumClusterwideNetworkPolicies."""


class L7ProxySettings(Settings, frozen=True):
    """Settings of L7 proxies."""

    enable_l7_proxy: bool = True
    """Enable L7 proxies. If disabled, L7 rules are rejected, and toFQDNs allows nothing."""


class L7Proxy(msgspec.Struct, frozen=True):
    """Whether L7 proxies are enabled."""

    enabled: bool


def l7_proxy(settings: L7ProxySettings) -> L7Proxy:
    """Return whether L7 proxies are enabled, from the settings."""
    return L7Proxy(settings.enable_l7_proxy)


class RuleSettings(Settings, frozen=True):
    """Which features of policy rules are enabled."""

    enable_icmp_rules: bool = True
    """Enforce ICMP rules. If disabled, they are rejected."""

    enable_non_default_deny_policies: bool = True
    """Let policies with enableDefaultDeny false leave other traffic allowed. If disabled, every policy denies
    other traffic in its directions.
    """


# The status of each policy object, as a table and as events.


class PolicyObject(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``policies``."""

    kind: str
    namespace: str
    name: str
    valid: bool
    """Whether its latest version is in force as written."""
    refused: bool = False
    """Whether its latest version is rejected; the previous version, if any, stays in force."""
    message: str
    """``Policy validation succeeded``, or why the object is rejected or not enforced as written."""
    path: str = ""
    """The invalid field."""
    unenforced: str = ""
    """Why its HTTP rules are not enforced: their traffic is dropped, or previous rules apply."""
    revision: int = 0
    """Revision of the rules when the object was last processed."""

    @property
    def text(self) -> str:
        """The message, with the path of the field."""
        return f"{self.message} (at {self.path})" if self.path else self.message


def policy_objects() -> Table[tuple[str, str, str], PolicyObject]:
    """The ``policies`` table, by kind, namespace and name."""
    return Table("policies", key=lambda one: (one.kind, one.namespace, one.name))


def policy_kinds(settings: PolicyRuleSettings) -> Iterator[Kind[Any]]:
    """The enabled kinds of policy objects."""
    if settings.enable_k8s_networkpolicy:
        yield NETWORK_POLICIES
    if settings.enable_cilium_network_policy:
        yield CILIUM_NETWORK_POLICIES
    if settings.enable_cilium_clusterwide_network_policy:
        yield CILIUM_CLUSTERWIDE_NETWORK_POLICIES


def policy_events(
    policies: Table[tuple[str, str, str], PolicyObject], settings: PolicyRuleSettings, resources: Resources
) -> Member[EventSource]:
    """Return the source of events about policies that are rejected or not enforced as written."""
    tables = {kind.kind: (kind, resources.table(kind)) for kind in policy_kinds(settings)}

    def drafts(row: PolicyObject) -> Iterator[EventDraft]:
        if row.kind not in tables or (row.valid and not row.unenforced):
            return
        kind, table = tables[row.kind]
        held = table.get((row.namespace, row.name))
        about = Regarding(kind, row.name, row.namespace, held.metadata.uid if held is not None else "")
        if not row.valid:
            reason = "PolicyRefused" if row.refused else "NotEnforcedAsWritten"
            yield EventDraft(about, reason, row.text, "Enforce")
        if row.unenforced:
            yield EventDraft(about, "RequestsNotAllowed", row.unenforced, "Enforce", shared=False)

    return EventSource("policies", policies, drafts)


# Whether the initial contents of followed tables are processed.

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")


class RuleSources:
    """The tables from which policies are computed, and whether their initial contents are processed."""

    def __init__(self) -> None:
        self._followed: list[ProcessedChanges[Any, Any]] = []

    def follow(self, table: Table[Key, Row]) -> ProcessedChanges[Key, Row]:
        """Follow a table; known() waits for its initial contents."""
        followed = ProcessedChanges(table)
        self._followed.append(followed)
        return followed

    @property
    def missing(self) -> str:
        """Names of tables with initial contents that are not processed yet; empty if none."""
        return ", ".join(one.name for one in self._followed if not one.caught_up)

    async def known(self) -> None:
        """Wait until the initial contents of all tables are processed."""
        for one in self._followed:
            await one.known()


class ProcessedChanges(Generic[Key, Row]):
    """Batches of a table's changes. A batch counts as processed when the next one is requested."""

    def __init__(self, table: Table[Key, Row]) -> None:
        self._table = table
        self._processed_revision = -1
        self._initial_revision: int | None = None
        """The table's revision when it was initialized."""
        self._changed = anyio.Event()
        self._changes: Changes[Key, Row]
        self._batch_revision: int | None = None
        """The table's revision of the batch in progress."""

    @property
    def name(self) -> str:
        """Name of the table."""
        return self._table.name

    @property
    def caught_up(self) -> bool:
        """Whether the table's initial contents are processed."""
        if self._initial_revision is None and self._table.initialized:
            self._initial_revision = self._table.revision
        return self._initial_revision is not None and self._processed_revision >= self._initial_revision

    def batches(self) -> Self:
        """Start the iteration: first the present rows, then changes."""
        self._changes = self._table.changes()
        self._batch_revision = None
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Change[Key, Row]]:
        if self._batch_revision is not None:
            self._mark_processed(self._batch_revision)
        while True:
            revision = self._table.revision
            if batch := self._changes.take():
                self._batch_revision = revision
                return batch
            self._mark_processed(revision)
            await self._changes.wait()

    def put_back(self, batch: list[Change[Key, Row]]) -> None:
        """Return the batch in progress: the next iteration yields it again."""
        self._changes.put_back(batch)
        self._batch_revision = None

    def _mark_processed(self, revision: int) -> None:
        self._processed_revision = revision
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def known(self) -> None:
        """Wait until the table's initial contents are processed. Safe for several waiters."""
        await self._table.wait_initialized()
        while not self.caught_up:
            await self._changed.wait()


# The named ports of pods.
#
# Source: Cilium 1.17: at ingress, a name refers to a port of the endpoint's own pod; at egress, to a port of
#         any pod of the cluster, unless pods use the name for different numbers.

NONE: frozenset[NamedPodPort] = frozenset()


class PodPorts:
    """The named ports of pods on this node, from the table that also has their labels."""

    def __init__(self, resources: Resources) -> None:
        self._pods = resources.table(PODS)

    def of(self, pod: PodKey) -> frozenset[NamedPodPort]:
        """Named ports of a pod, by namespace and name; empty if the pod has no object."""
        row = self._pods.get(pod)
        return of_pod(row) if row is not None else NONE


class ClusterPorts:
    """The named ports of all pods, with reference counts."""

    def __init__(self) -> None:
        self._reported: dict[Any, frozenset[NamedPodPort]] = {}
        self._counts: Counter[NamedPodPort] = Counter()

    def report(self, pod: object, ports: frozenset[NamedPodPort]) -> None:
        """Set the named ports of a pod; empty if it is deleted."""
        self._counts.subtract(self._reported.pop(pod, ()))
        if ports:
            self._reported[pod] = ports
            self._counts.update(ports)

    def all(self) -> frozenset[NamedPodPort]:
        """The named ports of all pods."""
        self._counts = +self._counts  # drops counts of zero
        return frozenset(self._counts)


def of_pod(pod: Pod) -> frozenset[NamedPodPort]:
    """Named ports of a pod's containers; empty for host-network pods and pods that have ended."""
    if pod.spec.host_network or pod.finished:
        return NONE
    ports = ((one.name, one.protocol, one.container_port) for one in pod.named_ports)
    return frozenset(_supported_ports(ports))


class PodWithPorts(Protocol):
    """A pod of another node or cluster."""

    @property
    def ports(self) -> Iterable[Any]:
        """Its named ports, each with a name, a protocol and a port."""
        ...


def of_remote(endpoint: PodWithPorts) -> frozenset[NamedPodPort]:
    """Named ports of a pod on another node."""
    return frozenset(_supported_ports((one.name, one.protocol, one.port) for one in endpoint.ports))


def _supported_ports(ports: Iterable[tuple[str, str, int]]) -> Iterator[NamedPodPort]:
    """Named ports with a protocol that policies support."""
    for name, protocol, port in ports:
        if name and (number := PROTOCOLS.get(protocol.upper())):
            yield NamedPodPort(name, number, port)


# The services that ``toServices`` selects.
#
# Source: Cilium 1.17, toServices: services without a selector stand for their backends' addresses.

SERVICE_NAME = "kubernetes.io/service-name"


class ClusterServices:
    """Addresses of services, from the tables of Services and EndpointSlices."""

    def __init__(self, resources: Resources) -> None:
        self._services = resources.table(SERVICES)
        self._slices = resources.table(ENDPOINT_SLICES)

    def prefixes(self, reference: ServiceReference) -> Iterator[Prefix]:
        """Backend addresses of the selected services."""
        selected = {
            service.key
            for service in self._services.all()
            if not service.spec.selector
            and references_service(reference, service.namespace, service.name, service.labels)
        }
        for slice_ in self._slices.all() if selected else ():
            if (slice_.namespace, slice_.labels.get(SERVICE_NAME, "")) in selected:
                yield from addresses(slice_)


def addresses(slice_: EndpointSlice) -> Iterator[Prefix]:
    """Backend addresses of a slice, as /32 or /128; none if they are DNS names."""
    if slice_.address_type != "FQDN":
        for endpoint in slice_.endpoints or ():
            yield from (ip_network(address) for address in endpoint.addresses or ())
