"""The host endpoint: policies with a nodeSelector restrict the node's own traffic.

``HostEndpoint`` creates the row and the policy map, and sets which policy the programs enforce;
``HostLabels`` sets its labels and enforces the policy once all rules are received.

Why: a policy map outlives the agent and is enforced meanwhile, so restore must not remove it as that of a
deleted pod. Until all rules are received, the previous agent's policy stays, or none is enforced: a restart
neither locks the node nor opens it.

Source: Cilium 1.17, the host endpoint. Setting: enable-host-firewall.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from ipaddress import ip_network
from typing import Final, Protocol

from msgspec.structs import replace

from cells.base.labels import CIDR, Label, cidr_label, texts
from cells.cluster.identity.identities import Identities
from cells.cluster.identity.numbers import HOST, RESERVED_IDENTITIES
from cells.cluster.nodes.node import ClusterNode, wait_own
from cells.cluster.nodes.parse import RulePeers
from cells.datapath.datapath import Datapath, HostPolicy
from cells.endpoint import Code, Endpoint, State, StatusLog, Subject
from cells.maps.node_maps import Maps
from cells.maps.policy_maps import PolicyMaps, PoolEmpty
from cells.policy.maps import EndpointPolicies, KnownRules, NodePolicy, RealizedPolicy
from lifecycle import (
    Change,
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    ReadTable,
    Table,
    invoke,
    module,
    provide,
)

__all__ = ["HostEndpoint", "HostPrograms", "cell", "policy_cell"]

IFNAME: Final = "cilium_host"
NO_MAC: Final = bytes(6)
CREATED: Final = "Endpoint creation"
COMPLETED: Final = "Completed endpoint regeneration with no pending regeneration requests"


class HostPrograms(Protocol):
    """The interface to the node's programs; implemented by cells.datapath.Datapath."""

    @property
    def host_policy(self) -> HostPolicy:
        """The policy that the programs enforce for the node."""
        ...

    def set_host_policy(self, policy: HostPolicy) -> None:
        """Enforce this policy for the node. Raises BpfError."""
        ...


class HostEndpoint:
    """The node's own endpoint; it exists if ``enable-host-firewall`` is set."""

    def __init__(
        self,
        mode: NodePolicy,
        policies: EndpointPolicies,
        pool: PolicyMaps,
        programs: HostPrograms,
        *,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self.enabled = mode.host_firewall
        self.status = StatusLog()
        """The status log, as other endpoints have."""
        self._policies = policies
        self._pool = pool
        self._programs = programs
        self._log = log
        self._row: Endpoint | None = None
        lifecycle.append(Hook("create the host endpoint", self._start))

    @property
    def row(self) -> Endpoint | None:
        """The row to list with other endpoints; None if the host firewall is off."""
        return self._row

    @property
    def shown_state(self) -> State:
        """``ready``, or ``not-ready`` if its policy map could not be written."""
        error = self._row is not None and self._policies.status(self._row.id).error
        return State.NOT_READY if error else State.READY

    @property
    def audited(self) -> bool:
        """Whether denied packets are forwarded and reported (audit mode)."""
        return self._programs.host_policy.audited

    def audit(self, on: bool) -> None:
        """Enable or disable audit mode. Raises BpfError."""
        self._programs.set_host_policy(HostPolicy(self._programs.host_policy.endpoint_id, audited=on))

    def relabel(self, labels: Iterable[str]) -> None:
        """Set the labels of the row."""
        if self._row is not None:
            self._row = replace(self._row, labels=tuple(labels))

    def enforce(self) -> None:
        """Write the policy map, then let the programs enforce it. Raises HiveError, OSError."""
        row = self._row
        if row is None:
            return
        self._policies.follow_host(row.id)
        self._policies.realize(row.id, HOST, row.labels)
        self._programs.set_host_policy(HostPolicy(row.id, audited=self.audited))
        self.status.add(Code.OK, Subject.OTHER, COMPLETED, State.READY)
        self._log.info("host endpoint is ready, host policy enforced", endpoint=row.id, labels=row.labels)

    async def _start(self) -> None:
        previous = self._programs.host_policy
        if not self.enabled:
            self._programs.set_host_policy(HostPolicy())
            return
        number = self._adopt_previous(previous.endpoint_id)
        if not number:  # enforce no policy until all rules are received
            self._programs.set_host_policy(HostPolicy(audited=previous.audited))
            number = await self._acquire()
        self._row = Endpoint(
            id=number,
            container_id="",
            container_ifname="",
            ifname=IFNAME,
            ifindex=0,
            pod_mac=NO_MAC,
            host_mac=NO_MAC,
            ipv4=None,
            pool="",
            identity=HOST,
            labels=RESERVED_IDENTITIES[HOST],
            pod_name="",
            pod_namespace="",
            pod_uid="",
            netns_cookie=0,
            state=State.READY,
            created=time.time(),
        )
        self.status.add(Code.OK, Subject.OTHER, CREATED, State.WAITING_FOR_IDENTITY)

    def _adopt_previous(self, number: int) -> int:
        """Return the previous endpoint id if its policy map has entries; else 0."""
        if not number:
            return 0
        try:
            self._policies.adopt(number)
        except (HiveError, OSError) as error:
            self._log.warning(
                "policy map of the host endpoint not adopted, creating a new one",
                endpoint=number,
                error=str(error),
            )
            return 0
        if any(one.endpoint_id == number and one.entries for one in self._pool.used):
            return number
        self._policies.release(number)
        return 0

    async def _acquire(self) -> int:
        while True:
            try:
                return self._policies.acquire()
            except PoolEmpty:
                await self._pool.ready()


class HostLabels:
    """Sets the host endpoint's labels, and enforces its policy once all rules are received."""

    def __init__(
        self,
        host: HostEndpoint,
        identities: Identities,
        nodes: ReadTable[str, ClusterNode],
        rules: KnownRules | None,
        peers: RulePeers,
        realized: Table[int, RealizedPolicy],
        *,
        jobs: Jobs,
    ) -> None:
        self._host = host
        self._identities = identities
        self._nodes = nodes
        self._rules = rules
        self._nodes_by_labels = peers.nodes_by_labels
        if host.enabled:
            self._realized = realized.initializer("host endpoint")
            jobs.one_shot("enforce the host policy", self._enforce)
        self._nodes_by_cidr = peers.nodes_by_cidr
        if host.enabled or self._nodes_by_labels or self._nodes_by_cidr:
            jobs.observe("labels of the node", nodes.changes, self._follow)

    async def _enforce(self) -> None:
        await wait_own(self._nodes)
        self._relabel(self._nodes.all())
        if self._rules is not None:
            await self._rules.known()
        try:
            self._host.enforce()
        finally:
            self._realized.done()

    async def _follow(self, changes: list[Change[str, ClusterNode]]) -> None:
        self._relabel(change.row for change in changes if change.row is not None)

    def _relabel(self, nodes: Iterable[ClusterNode]) -> None:
        for node in nodes:
            if node.local:
                self._identities.label_host("node", texts(self._labels(node)))
        identity = self._identities.get(HOST)
        if identity is not None:
            self._host.relabel(identity.labels)

    def _labels(self, node: ClusterNode) -> Iterator[Label]:
        """Yield the labels by which policies, fromNodes, toNodes and CIDR rules select the node."""
        if self._host.enabled:
            relevant, _ = self._identities.filter.split(Label("k8s", *one) for one in node.labels.items())
            yield from relevant
        if self._nodes_by_labels:
            yield from (Label("node", *one) for one in node.labels.items())
        if self._nodes_by_cidr:
            yield from (Label(CIDR, cidr_label(ip_network(each.ip))) for each in node.addresses)


def host_programs(datapath: Datapath, maps: Maps, mode: NodePolicy) -> HostPrograms:
    """Provide the datapath; declares maps of both families, as the node has IPv6 even if pods do not."""
    if mode.host_firewall:
        maps.use("ct4_tcp", "ct4_any", "ct6_tcp", "ct6_any", "fragments4", "fragments6", both_families=True)
    return datapath


cell = module("host-endpoint", "The node itself as an endpoint", provide(host_programs, HostEndpoint))
policy_cell = module("host-policy", "The policy of the node itself", provide(HostLabels), invoke(HostLabels))
