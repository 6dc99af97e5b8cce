"""What policies take from objects beside rules: kinds that count, status, named ports, services."""

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


# What became of each policy object: in force, or refused and why, as a table and as events.


class PolicyObject(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``policies``."""

    kind: str
    namespace: str
    name: str
    valid: bool
    """Whether it is in force as it is written."""
    refused: bool = False
    """Whether its latest version is refused, and the previous one is in force, if there was one."""
    message: str
    """``Policy validation succeeded``, or why the object is refused and its previous version is in force, or
    what of it is in force otherwise than it is written."""
    path: str = ""
    """The field that is wrong."""
    unenforced: str = ""
    """Why connections that its rules.http select are dropped, or may go by rules of before; else empty."""
    revision: int = 0
    """Of the rules, when the object was last taken in."""

    @property
    def text(self) -> str:
        """The message, and where in the object."""
        return f"{self.message} (at {self.path})" if self.path else self.message


def policy_objects() -> Table[tuple[str, str, str], PolicyObject]:
    """The ``policies`` table, by kind, namespace and name."""
    return Table("policies", key=lambda one: (one.kind, one.namespace, one.name))


def policy_kinds(settings: PolicyRuleSettings) -> Iterator[Kind[Any]]:
    """The kinds of objects that count."""
    if settings.enable_k8s_networkpolicy:
        yield NETWORK_POLICIES
    if settings.enable_cilium_network_policy:
        yield CILIUM_NETWORK_POLICIES
    if settings.enable_cilium_clusterwide_network_policy:
        yield CILIUM_CLUSTERWIDE_NETWORK_POLICIES


def policy_events(
    policies: Table[tuple[str, str, str], PolicyObject], settings: PolicyRuleSettings, resources: Resources
) -> Member[EventSource]:
    """Policies that are refused, or in force otherwise than they are written."""
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


# A table that is followed, and whether what was in it at the start has been taken in.

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")


class RuleSources:
    """The tables that policies follow from, and which of them have been taken in."""

    def __init__(self) -> None:
        self._followed: list[Followed[Any, Any]] = []

    def follow(self, table: Table[Key, Row]) -> Followed[Key, Row]:
        """Batches of its changes; policies wait for what it has at first."""
        followed = Followed(table)
        self._followed.append(followed)
        return followed

    @property
    def missing(self) -> str:
        """The tables that are not known yet, or not taken in; empty when there are none."""
        return ", ".join(one.name for one in self._followed if not one.caught_up)

    async def known(self) -> None:
        """Return once all rules and identities that there were at the start have been taken in."""
        for one in self._followed:
            await one.known()


class Followed(Generic[Key, Row]):
    """Batches of a table's changes; a batch counts as taken in when the next one is asked for."""

    def __init__(self, table: Table[Key, Row]) -> None:
        self._table = table
        self._taken = -1
        self._wanted: int | None = None
        """The revision at which the table was complete."""
        self._news = anyio.Event()
        self._changes: Changes[Key, Row]
        self._given: int | None = None
        """The table's revision as of the batch that is worked on."""

    @property
    def name(self) -> str:
        """The table's."""
        return self._table.name

    @property
    def caught_up(self) -> bool:
        """Whether all there was when the table was complete has been taken in."""
        if self._wanted is None and self._table.initialized:
            self._wanted = self._table.revision
        return self._wanted is not None and self._taken >= self._wanted

    def batches(self) -> Self:
        """Everything there is, then what changes."""
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
        """Give the batch again: it is not taken in."""
        self._changes.put_back(batch)
        self._given = None

    def _take_in(self, revision: int) -> None:
        self._taken = revision
        news, self._news = self._news, anyio.Event()
        news.set()

    async def known(self) -> None:
        """Return once the table was complete, and has been taken in. Any number may wait."""
        await self._table.wait_initialized()
        while not self.caught_up:
            await self._news.wait()


# The named ports of pods, as policies mean them.
#
# Source: Cilium 1.17: at ingress a name is a port of the endpoint's own pod, at egress of any pod of the
#         cluster that the node knows of; a name of two numbers is not a port there.

NONE: frozenset[NamedPodPort] = frozenset()


class PodPorts:
    """Looks up what this node's pods name: as fresh as their labels, so an ADD has both."""

    def __init__(self, resources: Resources) -> None:
        self._pods = resources.table(PODS)

    def of(self, pod: PodKey) -> frozenset[NamedPodPort]:
        """The ports of a pod, by namespace and name; none of one that there is no object of."""
        row = self._pods.get(pod)
        return of_pod(row) if row is not None else NONE


class ClusterPorts:
    """The ports that pods name anywhere, each for as long as a source has it."""

    def __init__(self) -> None:
        self._reported: dict[Any, frozenset[NamedPodPort]] = {}
        self._tellers: Counter[NamedPodPort] = Counter()

    def report(self, teller: object, ports: frozenset[NamedPodPort]) -> None:
        """What a source has now; nothing once it is deleted."""
        self._tellers.subtract(self._reported.pop(teller, ()))
        if ports:
            self._reported[teller] = ports
            self._tellers.update(ports)

    def all(self) -> frozenset[NamedPodPort]:
        """Every port with a name."""
        self._tellers = +self._tellers  # removes those that no teller has
        return frozenset(self._tellers)


def of_pod(pod: Pod) -> frozenset[NamedPodPort]:
    """What a pod's containers name; nothing of a pod in the host's network or one that has ended."""
    if pod.spec.host_network or pod.finished:
        return NONE
    ports = ((one.name, one.protocol, one.container_port) for one in pod.named_ports)
    return frozenset(_known(ports))


def of_remote(endpoint: RemoteEndpoint) -> frozenset[NamedPodPort]:
    """What a pod of another node names."""
    return frozenset(_known((one.name, one.protocol, one.port) for one in endpoint.ports))


def _known(ports: Iterable[tuple[str, str, int]]) -> Iterator[NamedPodPort]:
    """Those of a protocol that policies can name."""
    for name, protocol, port in ports:
        if name and (number := PROTOCOLS.get(protocol.upper())):
            yield NamedPodPort(name, number, port)


# The services of the cluster's objects, as ``toServices`` means them.
#
# Source: Cilium 1.17, toServices: services without a selector stand for their backends' addresses.

SERVICE_NAME = "kubernetes.io/service-name"


class ClusterServices:
    """Looks services up in the tables of objects."""

    def __init__(self, resources: Resources) -> None:
        self._services = resources.table(SERVICES)
        self._slices = resources.table(ENDPOINT_SLICES)

    def prefixes(self, reference: ServiceReference) -> Iterator[Prefix]:
        """The addresses behind the services meant."""
        meant = {
            service.key
            for service in self._services.all()
            if not service.spec.selector
            and means_service(reference, service.namespace, service.name, service.labels)
        }
        for slice_ in self._slices.all() if meant else ():
            if (slice_.namespace, slice_.labels.get(SERVICE_NAME, "")) in meant:
                yield from addresses(slice_)


def addresses(slice_: EndpointSlice) -> Iterator[Prefix]:
    """The backends' addresses, as /32 or /128; none where they are names."""
    if slice_.address_type != "FQDN":
        for endpoint in slice_.endpoints or ():
            yield from (ip_network(address) for address in endpoint.addresses or ())
