"""Objects of policies: enabled kinds, their status and events, named ports of pods, services."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from ipaddress import ip_network
from typing import Any, Generic, Self, TypeVar

import anyio
import msgspec

from cells.cluster.remote_endpoints import RemoteEndpoint
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
from cells.policy.rules.peers import means_service
from cells.policy.rules.schema import ServiceReference
from lifecycle import Change, Member, Settings, Table
from lifecycle.tables import Changes


class PolicyRuleSettings(Settings, frozen=True):
    """Which kinds of policy objects count."""

    enable_k8s_networkpolicy: bool = True
    """Whether NetworkPolicies count."""

    enable_cilium_network_policy: bool = True
    """Whether CiliumNetworkPolicies count."""

    enable_cilium_clusterwide_network_policy: bool = True
    """Whether CiliumClusterwideNetworkPolicies count."""


class L7ProxySettings(Settings, frozen=True):
    """Whether proxies read what pods send."""

    enable_l7_proxy: bool = True
    """Whether the DNS proxy serves toFQDNs and rules for names; without it they are refused."""


class L7Proxy(msgspec.Struct, frozen=True):
    """Whether proxies may read what pods send."""

    enabled: bool


def l7_proxy(settings: L7ProxySettings) -> L7Proxy:
    """As the settings have it."""
    return L7Proxy(settings.enable_l7_proxy)


class RuleSettings(Settings, frozen=True):
    """Which rules of policy objects count."""

    enable_icmp_rules: bool = True
    """Whether rules of ICMP count; without it they are refused."""

    enable_non_default_deny_policies: bool = True
    """Whether policies with enableDefaultDeny false leave open what they do not allow; without it, every
    policy closes the directions it has rules for."""


# The status of each policy object, as a table and as events.


class PolicyObject(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``policies``."""

    kind: str
    namespace: str
    name: str
    valid: bool
    """Whether its latest version is in force as written."""
    refused: bool = False
    """Whether its latest version is refused; the previous version, if any, stays in force."""
    message: str
    """``Policy validation succeeded``, or why the object is refused or not in force as written."""
    path: str = ""
    """The invalid field."""
    unenforced: str = ""
    """Why its HTTP rules are not enforced: connections are dropped, or previous rules apply."""
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
    """Events about policies that are refused or not in force as written."""
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
        self._followed: list[Followed[Any, Any]] = []

    def follow(self, table: Table[Key, Row]) -> Followed[Key, Row]:
        """Follow a table; known() waits for its initial contents."""
        followed = Followed(table)
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


class Followed(Generic[Key, Row]):
    """Batches of a table's changes; a batch is processed when the next one is requested."""

    def __init__(self, table: Table[Key, Row]) -> None:
        self._table = table
        self._taken = -1
        self._wanted: int | None = None
        """The table's revision when it was initialized."""
        self._changed = anyio.Event()
        self._changes: Changes[Key, Row]
        self._given: int | None = None
        """The table's revision of the batch in progress."""

    @property
    def name(self) -> str:
        """Name of the table."""
        return self._table.name

    @property
    def caught_up(self) -> bool:
        """Whether the table's initial contents are processed."""
        if self._wanted is None and self._table.initialized:
            self._wanted = self._table.revision
        return self._wanted is not None and self._taken >= self._wanted

    def batches(self) -> Self:
        """Iterate over the present rows, then over changes."""
        self._changes = self._table.changes()
        self._given = None
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Change[Key, Row]]:
        if self._given is not None:
            self._take_in(self._given)
        while True:
            revision = self._table.revision
            if batch := self._changes.take():
                self._given = revision
                return batch
            self._take_in(revision)
            await self._changes.wait()

    def put_back(self, batch: list[Change[Key, Row]]) -> None:
        """Return the batch in progress: the next iteration yields it again."""
        self._changes.put_back(batch)
        self._given = None

    def _take_in(self, revision: int) -> None:
        self._taken = revision
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def known(self) -> None:
        """Wait until the table's initial contents are processed; for any number of waiters."""
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
    return frozenset(_known(ports))


def of_remote(endpoint: RemoteEndpoint) -> frozenset[NamedPodPort]:
    """Named ports of a pod on another node."""
    return frozenset(_known((one.name, one.protocol, one.port) for one in endpoint.ports))


def _known(ports: Iterable[tuple[str, str, int]]) -> Iterator[NamedPodPort]:
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
            and means_service(reference, service.namespace, service.name, service.labels)
        }
        for slice_ in self._slices.all() if selected else ():
            if (slice_.namespace, slice_.labels.get(SERVICE_NAME, "")) in selected:
                yield from addresses(slice_)


def addresses(slice_: EndpointSlice) -> Iterator[Prefix]:
    """Backend addresses of a slice, as /32 or /128; none if they are DNS names."""
    if slice_.address_type != "FQDN":
        for endpoint in slice_.endpoints or ():
            yield from (ip_network(address) for address in endpoint.addresses or ())
