"""L2 announcement policies: parsing, the candidate services of this node, and status conditions.

Policies, Services and devices come in; ``L2Candidates`` stores the candidates, for which ``elections``
acquires leases.

Source: Cilium 1.17; k8s.io/apimachinery/pkg/apis/meta/v1 LabelSelectorAsSelector.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from ipaddress import IPv4Address
from typing import Any, Final, NamedTuple

import msgspec

from cells.base.regexp import Regexp, RegexpError, compile_regexp
from cells.config.shared import AnnouncementSettings
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.objects.cilium_pools import CILIUM_L2_ANNOUNCEMENTS, CiliumL2AnnouncementPolicy
from cells.kubernetes.objects.core import Service, served_by
from cells.kubernetes.objects.kind import Condition, Key, LabelSelector
from cells.kubernetes.resources import Resources
from cells.netlink.rows import mac_text
from cells.node.devices import Device
from cells.services import IPAddress, ServiceName
from cells.services.model.claims import EXTERNAL_IPS, INGRESS, RefusedAddress
from lifecycle import Change, Jobs, Logger

BAD_NODES: Final = "io.cilium/bad-node-selector"
BAD_SERVICES: Final = "io.cilium/bad-service-selector"
BAD_INTERFACE: Final = "io.cilium/bad-interface-regex"
FAULTS: Final = (BAD_NODES, BAD_SERVICES, BAD_INTERFACE)
"""Types of conditions."""

_NAME: Final = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]")
_PREFIX: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


class L2Policy(NamedTuple):
    """A valid, parsed policy."""

    name: str
    nodes: LabelSelector | None
    services: LabelSelector | None
    interfaces: tuple[Regexp, ...]
    external: bool
    balancers: bool

    def is_for(self, node_labels: Mapping[str, str]) -> bool:
        """Whether the policy selects a node with these labels."""
        return self.nodes is None or self.nodes.matches(node_labels)

    def announces(self, service_labels: dict[str, str]) -> bool:
        """Whether the policy selects a service with these labels."""
        return self.services is None or self.services.matches(service_labels)

    def uses(self, device: str) -> bool:
        """Whether the policy selects the device: an expression matches its name, or there are none."""
        return not self.interfaces or any(each.search(device) for each in self.interfaces)


def read_policy(policy: CiliumL2AnnouncementPolicy) -> tuple[L2Policy | None, Mapping[str, str]]:
    """Parse a policy; return None if it is invalid, and its errors by condition type."""
    spec = policy.spec
    faults: dict[str, str] = {}
    for kind, selector in ((BAD_NODES, spec.node_selector), (BAD_SERVICES, spec.service_selector)):
        if fault := next(_faults_of(selector), ""):
            faults[kind] = fault
    expressions: list[Regexp] = []
    for text in spec.interfaces or ():
        try:
            expressions.append(compile_regexp(text))
        except RegexpError as error:
            faults[BAD_INTERFACE] = str(error)
    if faults:
        return None, faults
    found = L2Policy(
        policy.name,
        spec.node_selector,
        spec.service_selector,
        tuple(expressions),
        spec.external_ips,
        spec.load_balancer_ips,
    )
    return found, {}


def _faults_of(selector: LabelSelector | None) -> Iterator[str]:
    if selector is None:
        return
    for key, value in (selector.match_labels or {}).items():
        yield from _faults_of_key(key)
        yield from _faults_of_value(key, value)
    for one in selector.match_expressions or ():
        yield from _faults_of_key(one.key)
        values = one.values or ()
        if one.operator in {"In", "NotIn"}:
            if not values:
                yield f"key {one.key!r}: for 'in', 'notin' operators, values set can't be empty"
            for value in values:
                yield from _faults_of_value(one.key, value)
        elif one.operator in {"Exists", "DoesNotExist"}:
            if values:
                yield f"key {one.key!r}: values set must be empty for exists and does not exist"
        else:
            yield f"{one.operator!r} is not a valid label selector operator"


def _faults_of_key(key: str) -> Iterator[str]:
    prefix, slash, name = key.rpartition("/")
    if not _NAME.fullmatch(name) or (slash and not (_PREFIX.fullmatch(prefix) and len(prefix) <= 253)):
        yield f"key {key!r}: expected a label's name, with or without a prefix such as example.com/"


def _faults_of_value(key: str, value: str) -> Iterator[str]:
    if value and not _NAME.fullmatch(value):
        yield f"value {value!r} of key {key!r}: expected at most 63 letters, digits, '-', '_' and '.'"


# Candidates: the services that this node may announce, by policies, services, the node and its devices.
#
# Source: Cilium 1.17. Services of other classes are ignored, and IPv6 addresses are not announced.

L2_CLASS: Final = "io.cilium/l2-announcer"
NAME, NAMESPACE = "io.kubernetes.service.name", "io.kubernetes.service.namespace"
"""Labels that selectors see on every service."""


class L2AddressDevice(NamedTuple):
    """An address and the device that answers ARP requests for it."""

    ip: IPv4Address
    ifindex: int
    device: str
    mac: str


class L2Candidate(msgspec.Struct, frozen=True):
    """A row of the table ``l2-candidates``: a service, and its addresses by device of this node."""

    service: Key
    policies: tuple[str, ...]
    places: tuple[L2AddressDevice, ...]
    local: bool
    """Whether its externalTrafficPolicy is Local."""


def announceable(service: Service, proxy: str) -> bool:
    """Whether a policy may select the service: external addresses, and no other class or proxy."""
    return (
        served_by(service.labels, proxy)
        and service.spec.load_balancer_class in {None, L2_CLASS}
        and bool(
            service.spec.external_ips
            or any(each.is_of_nodes for each in service.status.load_balancer.ingress or ())
        )
    )


def candidates(
    policies: Iterable[CiliumL2AnnouncementPolicy],
    services: Iterable[Service],
    node_labels: Mapping[str, str],
    devices: Sequence[Device],
    refused: Iterable[RefusedAddress] = (),
) -> dict[Key, L2Candidate]:
    """Return the candidates by namespace and name.

    ``devices``: those with programs; ``refused``: addresses that are not served.
    """
    unserved = {(one.service, one.part, one.address) for one in refused}
    read = (read_policy(each)[0] for each in policies)
    followed = sorted(each for each in read if each is not None and each.is_for(node_labels))
    found: dict[Key, L2Candidate] = {}
    for service in services if followed else ():
        labels = {**service.labels, NAME: service.name, NAMESPACE: service.namespace}
        names: list[str] = []
        places: dict[L2AddressDevice, None] = {}
        for policy in followed:
            if policy.announces(labels) and (own_places := list(_places(policy, service, devices, unserved))):
                names.append(policy.name)
                places |= dict.fromkeys(own_places)
        if places:
            local = service.spec.external_traffic_policy == "Local"
            found[service.key] = L2Candidate(service.key, tuple(names), tuple(sorted(places)), local)
    return found


_RefusedAddresses = Container[tuple[ServiceName, str, IPAddress]]


def _places(
    policy: L2Policy, service: Service, devices: Sequence[Device], unserved: _RefusedAddresses
) -> Iterator[L2AddressDevice]:
    for ip in _addresses(policy, service, unserved):
        for device in devices:
            if policy.uses(device.name):
                yield L2AddressDevice(ip, device.ifindex, device.name, mac_text(device.mac))


def _addresses(policy: L2Policy, service: Service, unserved: _RefusedAddresses) -> Iterator[IPv4Address]:
    """Yield the service's addresses that the policy announces, except refused ones."""
    texts: list[tuple[str, str]] = []
    if policy.balancers:
        ingress = service.status.load_balancer.ingress or ()
        texts += [(INGRESS, each.ip) for each in ingress if each.is_of_nodes]
    if policy.external:
        texts += [(EXTERNAL_IPS, text) for text in service.spec.external_ips or ()]
    name = ServiceName(*service.key)
    for part, text in texts:
        with suppress(ValueError):  # a host name or an IPv6 address
            ip = IPv4Address(text)
            if (name, part, ip) not in unserved:
                yield ip


# Faults of a CiliumL2AnnouncementPolicy, written to its ``status.conditions``.
#
# Controller: the table of policies in, conditions out. A condition is created for a fault, and becomes False
#             when the fault is removed.
# Source:     Cilium 1.17: types io.cilium/bad-…, reason error. Agents may only patch this status.

REASON = "error"


class PolicyConditions:
    """Writes the conditions of policies. Every node may write them; unchanged ones are not written."""

    def __init__(
        self,
        settings: AnnouncementSettings,
        api: KubernetesAPI,
        resources: Resources,
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._api = api
        self._log = log
        if settings.enable_l2_announcements:
            jobs.observe("conditions", resources.table(CILIUM_L2_ANNOUNCEMENTS).changes, self._follow)

    async def _follow(self, changes: list[Change[tuple[str, str], CiliumL2AnnouncementPolicy]]) -> None:
        for change in changes:
            if change.row is not None:
                await self._write(change.row)

    async def _write(self, policy: CiliumL2AnnouncementPolicy) -> None:
        from cells.kubernetes.client.errors import NotFoundError  # needed only with an API server

        _, faults = read_policy(policy)
        for kind, text in faults.items():
            fault = f"{kind}: {text}"
            self._log.warning("an announcement policy cannot be applied", policy=policy.name, error=fault)
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        wanted = conditions(policy, faults, now)
        if wanted is None:
            return
        await self._api.reachable()
        body = {"status": {"conditions": wanted}}
        try:
            await self._api.client.patch(CILIUM_L2_ANNOUNCEMENTS, policy.name, body, subresource="status")
        except NotFoundError:
            return


def conditions(
    policy: CiliumL2AnnouncementPolicy, faults: Mapping[str, str], now: str
) -> list[dict[str, Any]] | None:
    """Return all desired conditions; None if unchanged. ``faults``: by type; ``now``: RFC 3339."""
    held = {each.type: each for each in policy.status.conditions or ()}
    wanted = dict(held)
    for kind in FAULTS:
        before = held.get(kind)
        if before is None and kind not in faults:
            continue
        status, text = ("True" if kind in faults else "False"), faults.get(kind, "")
        if before is None or (before.status, before.message) != (status, text):
            since = before.last_transition_time if before is not None and before.status == status else now
            wanted[kind] = Condition(kind, status, REASON, text, since, policy.metadata.generation)
    if wanted == held:
        return None
    return [
        {
            "type": each.type,
            "status": each.status,
            "reason": each.reason,
            "message": each.message,
            "lastTransitionTime": each.last_transition_time or now,
            "observedGeneration": each.observed_generation,
        }
        for each in wanted.values()
    ]
