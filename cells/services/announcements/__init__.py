"""Addresses of services on the local network: one node answers ARP for each, so that clients find it.

Source:     CiliumL2AnnouncementPolicies, Services, this node's CiliumNode and devices. The table
            ``l2-candidates`` is computed from them: the services that this node may announce.
Controller: an election by Lease for each candidate; the table ``l2-leases`` has the holders.
Reconciler: the table ``l2-announce``, addresses of services with a lease of this node, in; the map
            ``cilium_l2_responder_v4`` and gratuitous ARP out. The programs on native devices answer.
Why:        without a load balancer, no host on a network has the address: one node at a time must answer.
            An agent that cannot renew its leases stops answering; so do the programs of a node without an
            agent, as they read the agent's heartbeat.
Source:     Cilium 1.17, L2 announcements: only IPv4. A policy's status lists its faults.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from ipaddress import IPv4Address
from typing import Final

import msgspec
from anyio import to_thread

from cells.base.metrics import Collector, features
from cells.config import AgentConfig
from cells.config.shared import AgentLiveness, AnnouncementSettings, ServiceProxyName
from cells.kubernetes.objects.cilium_node import CILIUM_NODES, CiliumNode
from cells.kubernetes.objects.cilium_pools import CILIUM_L2_ANNOUNCEMENTS, CiliumL2AnnouncementPolicy
from cells.kubernetes.objects.core import SERVICES, Service
from cells.kubernetes.objects.kind import Key
from cells.kubernetes.resources import Resources
from cells.kubernetes.settings import ObjectSource
from cells.maps.records.cluster import L2ResponderKey
from cells.node.devices import Device, native_uplinks
from cells.services.announcements.elections import Elections, Frame, KernelResponder, L2Lease, ResponderKernel
from cells.services.announcements.policies import L2Candidate, PolicyConditions, announceable, candidates
from cells.services.model.claims import RefusedAddress
from lifecycle import (
    BatchError,
    Derived,
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Member,
    Reconciler,
    Table,
    Tables,
    UsageError,
    config,
    invoke,
    module,
    provide,
    provide_private,
    seconds,
)
from lifecycle.tables import BatchFailures

__all__ = [
    "Announcements",
    "Elections",
    "L2Announcement",
    "L2Candidate",
    "L2Lease",
    "ResponderKernel",
    "cell",
]


# Addresses for which this node's programs answer ARP; gratuitous ARP announces new ones to neighbours.


class L2Announcement(msgspec.Struct, frozen=True):
    """A row of the table ``l2-announce``: this node answers for the address on the device."""

    ip: IPv4Address
    ifindex: int
    device: str
    mac: str
    """The MAC in answers."""
    services: tuple[str, ...]
    """The services with this address: ``namespace/name``."""


def announced(
    candidates: Iterable[L2Candidate], leases: Iterable[L2Lease]
) -> dict[L2ResponderKey, L2Announcement]:
    """The addresses, by device, of services with a lease of this node."""
    held = {lease.service for lease in leases if lease.held}
    found: dict[L2ResponderKey, L2Announcement] = {}
    for candidate in sorted(candidates, key=lambda row: row.service):
        for place in candidate.places if candidate.service in held else ():
            key = L2ResponderKey(place.ip, place.ifindex)
            before = found[key].services if key in found else ()
            services = (*before, "/".join(candidate.service))
            found[key] = L2Announcement(place.ip, place.ifindex, place.device, place.mac, services)
    return found


class Responder:
    """The programs' map as a reconciler's target."""

    def __init__(self, kernel: ResponderKernel) -> None:
        self._kernel = kernel
        self._announced: dict[L2ResponderKey, str] = {}
        """The MAC that was last announced by this agent.

        Addresses of an earlier agent are announced again: meanwhile, another node may have announced them.
        """

    async def observe(self) -> Mapping[L2ResponderKey, None]:
        """The present keys."""
        return dict.fromkeys(self._kernel.held())

    def matches(self, row: L2Announcement, observed: None) -> bool:
        """Whether this agent announced this MAC to the network."""
        del observed
        return self._announced.get(L2ResponderKey(row.ip, row.ifindex)) == row.mac

    async def put(self, batch: Mapping[L2ResponderKey, L2Announcement]) -> None:
        """Answer for addresses, and announce new ones by gratuitous ARP. Raises BatchError."""
        failures: dict[L2ResponderKey, Exception] = {}
        frames: dict[L2ResponderKey, Frame] = {}
        for key, row in batch.items():
            try:
                added = self._kernel.add(key)
            except (OSError, HiveError) as error:
                failures[key] = error
                continue
            if added or self._announced.get(key) != row.mac:
                self._announced[key] = ""
                frames[key] = row.device, row.ip, row.mac
        failed = await to_thread.run_sync(self._kernel.announce, frames) if frames else {}
        for key, (device, ip, mac) in frames.items():
            if key in failed:
                text = f"{ip} cannot be announced on {device}: {failed[key]}"
                failures[key] = HiveError(text)
            else:
                self._announced[key] = mac
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[L2ResponderKey]) -> None:
        """Stop answering for addresses. Raises BatchError."""
        with BatchFailures(OSError) as failures:
            for key in batch:
                with failures.of(key):
                    self._announced.pop(key, None)
                    self._kernel.delete(key)


# Candidates and announcements, from policies, services, this node and its devices.

INTERVAL: Final = seconds(30)


class L2Candidates:
    """Computes the services that this node may announce."""

    def __init__(
        self,
        settings: AnnouncementSettings,
        proxy: ServiceProxyName,
        agent: AgentConfig,
        resources: Resources,
        devices: Table[int, Device],
        refused: Table[tuple[str, str, str], RefusedAddress],
        tables: Tables,
    ) -> None:
        nodes = resources.table(CILIUM_NODES).filter(lambda row: row.name == agent.node_name, name="l2-node")
        ours = partial(announceable, proxy=proxy.name)
        announced_services = resources.table(SERVICES).filter(ours, name="l2-services")
        policies = resources.table(CILIUM_L2_ANNOUNCEMENTS)
        self.table: Derived[tuple[str, str], L2Candidate] = Derived(
            "l2-candidates", self._candidates, policies, announced_services, nodes, devices, refused
        )
        """Candidates by namespace and name."""
        if settings.enable_l2_announcements:
            tables.add(self.table)

    def _candidates(
        self,
        policies: list[CiliumL2AnnouncementPolicy],
        services: list[Service],
        nodes: list[CiliumNode],
        devices: list[Device],
        refused: list[RefusedAddress],
    ) -> Mapping[Key, L2Candidate]:
        if not nodes:  # policies select nodes by labels
            return {}
        found = [each for each in native_uplinks(devices) if each.has_ethernet]
        return candidates(policies, services, nodes[0].labels, found, refused)


class Announcements:
    """Announces addresses of services on the network, with ``enable-l2-announcements``."""

    def __init__(
        self,
        settings: AnnouncementSettings,
        agent: AgentConfig,
        source: ObjectSource,
        found: L2Candidates,
        elections: Elections,
        kernel: ResponderKernel,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
    ) -> None:
        self._agent = agent
        self._source = source
        if not settings.enable_l2_announcements:
            return
        self.candidates = found.table
        """The services that this node may announce."""
        self.announced: Derived[L2ResponderKey, L2Announcement] = Derived(
            "l2-announce", announced, self.candidates, elections.leases
        )
        """The announced addresses, by address and index of the device."""
        reconciler: Reconciler[L2ResponderKey, L2Announcement] = Reconciler(
            self.announced, Responder(kernel), full_every=INTERVAL
        )
        tables.add(self.announced, reconciler.statuses)
        lifecycle.append(Hook("announce addresses of services", self._start))
        jobs.observe("reconcile", reconciler)
        elections.follow(self.candidates)

    async def _start(self) -> None:
        option = "enable-l2-announcements=true"
        if self._source is not ObjectSource.API_SERVER:
            raise UsageError(
                f"{option}: nodes elect the one that answers by Leases, which need an API server;"
                " set k8s-api-server or k8s-kubeconfig-path, or leave it out"
            )
        if not self._agent.ipv4:
            raise UsageError(
                f"{option}: only IPv4 addresses are announced, and enable-ipv4 is false; leave it out"
            )


def agent_liveness(settings: AnnouncementSettings) -> AgentLiveness:
    """The programs' limit for the age of the heartbeat: the lease duration, as other nodes wait so long."""
    answers = settings.enable_l2_announcements
    return AgentLiveness(int(settings.lease_times.duration * 1000) if answers else 0)


def announcement_features(settings: AnnouncementSettings) -> Member[Collector]:
    """Whether addresses of services are announced, as a feature in use."""
    enabled = settings.enable_l2_announcements
    return features("l2-features", lambda: {"adv_connect_and_lb_l2_lb_enabled": enabled})


cell = module(
    "l2-announcements",
    "Addresses of services on the local network",
    config(AnnouncementSettings),
    provide(agent_liveness, announcement_features),
    provide(Announcements, Elections, PolicyConditions, KernelResponder.provided),
    provide_private(L2Candidates),
    invoke(Announcements, PolicyConditions),
)
