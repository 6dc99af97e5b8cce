"""Follows policies, services, this node and its devices to what it answers for.

Needs: see the cell.   Gives: Announcements; the tables ``l2-candidates``, ``l2-announce`` and its status.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from cells.config import AgentConfig
from cells.kubernetes import (
    CILIUM_L2_ANNOUNCEMENTS,
    CILIUM_NODES,
    SERVICES,
    CiliumL2AnnouncementPolicy,
    CiliumNode,
    Key,
    KubernetesSettings,
    Resources,
    Service,
)
from cells.maps import L2ResponderKey
from cells.node.devices import Device, DeviceSettings, native_uplinks
from cells.services.announcements.candidates import Candidate, announceable, candidates
from cells.services.announcements.elections import Elections
from cells.services.announcements.kernel import ResponderKernel
from cells.services.announcements.responder import L2Announcement, Responder, announced
from cells.services.model import RefusedAddress
from cells.services.settings import AnnouncementSettings, ServiceSettings
from lifecycle import (
    Derived,
    Hook,
    Jobs,
    Lifecycle,
    Reconciler,
    Table,
    Tables,
    UsageError,
    seconds,
)

INTERVAL: Final = seconds(30)


class Announcements:
    """What this node answers for. Without ``enable-l2-announcements`` there is nothing."""

    def __init__(
        self,
        settings: AnnouncementSettings,
        services: ServiceSettings,
        *,
        agent: AgentConfig,
        selection: DeviceSettings,
        source: KubernetesSettings,
        resources: Resources,
        devices: Table[Device],
        elections: Elections,
        refused: Table[RefusedAddress],
        kernel: ResponderKernel,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
    ) -> None:
        self._agent = agent
        self._source = source
        self._chosen = bool(selection.devices)
        if not settings.enable_l2_announcements:
            return
        nodes = resources.table(CILIUM_NODES).filter(lambda row: row.name == agent.node_name, name="l2-node")
        ours = partial(announceable, proxy=services.k8s_service_proxy_name)
        announced_services = resources.table(SERVICES).filter(ours, name="l2-services")
        policies = resources.table(CILIUM_L2_ANNOUNCEMENTS)
        self.candidates: Derived[Candidate] = Derived(
            "l2-candidates", self._candidates, policies, announced_services, nodes, devices, refused
        )
        """The services this node may answer for."""
        self.announced: Derived[L2Announcement] = Derived(
            "l2-announce", announced, self.candidates, elections.leases
        )
        """What it does answer for, by address and index of the device."""
        reconciler: Reconciler[L2ResponderKey, L2Announcement] = Reconciler(
            self.announced, Responder(self.announced, kernel), full_every=INTERVAL
        )
        tables.add(self.candidates, self.announced, reconciler.statuses)
        lifecycle.append(Hook("announce addresses of services", self._start))
        jobs.observe("reconcile", reconciler)
        elections.follow(self.candidates)

    def _candidates(
        self,
        policies: list[CiliumL2AnnouncementPolicy],
        services: list[Service],
        nodes: list[CiliumNode],
        devices: list[Device],
        refused: list[RefusedAddress],
    ) -> Mapping[Key, Candidate]:
        if not nodes:  # by its labels policies choose it
            return {}
        found = [each for each in native_uplinks(devices, chosen=self._chosen) if each.has_ethernet]
        return candidates(policies, services, nodes[0].labels, found, refused)

    async def _start(self) -> None:
        asked = "enable-l2-announcements=true"
        if not self._source.asks_api_server:
            raise UsageError(
                f"{asked}: nodes agree by Leases upon who answers, which takes an API server;"
                " set k8s-api-server or k8s-kubeconfig-path, or leave it out"
            )
        if not self._agent.ipv4:
            raise UsageError(
                f"{asked}: only IPv4 addresses are announced, and enable-ipv4 is false; leave it out"
            )
