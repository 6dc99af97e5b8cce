"""Masquerading: programs on native devices give pods' packets to external networks the node's address.

External networks have no routes to pods' addresses. The node's own packets keep their source port, unless a
pod's flow uses it. The table ``native-devices`` follows the node's devices; a reconciler attaches the
programs and writes ``hive_devices``. The table ``ip-masq-networks`` follows ip-masq-agent's file and is
written to ``cilium_ipmasq_v4`` and ``cilium_ipmasq_v6``.

Settings: enable-ipv4-masquerade, enable-ipv6-masquerade, enable-bpf-masquerade, ipv4-native-routing-cidr,
ipv6-native-routing-cidr, egress-masquerade-interfaces, derive-masq-ip-addr-from-device, enable-ip-masq-agent,
ip-masq-agent-config-path.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from typing import Final

from msgspec.structs import replace

from cells.api import MasqueradedProtocols, Masquerading, NodeSection, StatusFacts, StatusSection
from cells.base.addresses import Family, IPNetwork
from cells.cluster.encryption import ClusterEncryption
from cells.config import AgentConfig, ChainingMode
from cells.config.shared import AgentLiveness, ServiceReach
from cells.datapath.datapath import Datapath
from cells.maps.node_maps import Maps
from cells.maps.records.flows import DEVICE_PROXIES, DeviceConfig
from cells.masquerade.devices import (
    DeviceTarget,
    MasqueradeSettings,
    NativeDevice,
    ProgramNeeds,
    native_devices,
    native_networks,
)
from cells.masquerade.ip_masq_agent import IpMasqAgent, network_table
from cells.netlink.connection import message_filter, notifications, of_types
from cells.node.addresses import NodeAddress, NodeAddresses
from cells.node.devices import Device
from cells.node.router import Router
from cells.node.sysctl import Sysctls
from cells.policy.control import HTTPRedirect
from cells.policy.maps import NodePolicy
from cells.proxy.dns import TransparentProxy
from cells.tunnel.settings import EgressGatewayUse, PodTunnel
from lifecycle import (
    Derived,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Member,
    Reconciler,
    Table,
    Tables,
    after,
    config,
    invoke,
    module,
    provide,
    provide_private,
    seconds,
)
from lifecycle.tables import ReconcileError

__all__ = ["Masquerade", "cell"]


# Which devices need programs, and why.

INTERVAL: Final = seconds(30)
_RTMGRP_LINK, _RTMGRP_TC = 0x1, 0x8
_RTM_NEWLINK, _RTM_DELQDISC, _RTM_DELTFILTER = 16, 37, 45
_CHANGED: Final = message_filter((of_types(_RTM_DELQDISC, _RTM_DELTFILTER),))
_CHANGED_OR_DETACHED_XDP: Final = message_filter((of_types(_RTM_NEWLINK, _RTM_DELQDISC, _RTM_DELTFILTER),))
"""Also RTM_NEWLINK: the kernel reports a detached XDP program as a change of the link."""


class MasqueradedPods:
    """Which families of pods' packets are masqueraded, and this node's pod CIDRs."""

    def __init__(
        self,
        settings: MasqueradeSettings,
        agent: AgentConfig,
        modes: list[Member[ChainingMode]],
        router: Router,
        sysctls: Sysctls,
        maps: Maps,
    ) -> None:
        own_links = all(mode.own_links for mode in modes)
        self.ipv4 = agent.ipv4 and _enabled(settings.enable_ipv4_masquerade, default=own_links)
        """Whether pods' IPv4 packets are masqueraded."""
        self.ipv6 = agent.ipv6 and _enabled(settings.enable_ipv6_masquerade, default=own_links)
        """Whether pods' IPv6 packets are masqueraded."""
        self._router = router
        self._sysctls = sysctls
        maps.use(*("snat4",) * self.ipv4, *("snat6",) * self.ipv6)

    def ranges(self) -> list[IPNetwork]:
        """Return this node's pod CIDRs; none if another IPAM plugin allocates addresses."""
        found = (each.alloc_range for each in self._router.addressing().values())
        return [network for network in found if network is not None]

    def forward(self) -> None:
        """Enable IPv4 forwarding if IPv4 is masqueraded; the router enables IPv6. Raises HiveError."""
        if self.ipv4:
            self._sysctls.enforce({"net/ipv4/ip_forward": "1"})


class ProgramUses:
    """Features besides masquerading that need programs on native devices."""

    def __init__(
        self,
        datapath: Datapath,
        tunnel: PodTunnel,
        gateways: EgressGatewayUse | None = None,
        services: ServiceReach | None = None,
        policy: NodePolicy | None = None,
        liveness: AgentLiveness | None = None,
        encryption: ClusterEncryption | None = None,
    ) -> None:
        self.tunnelled = tunnel.used
        """Whether pods of other nodes are only reached through tunnels."""
        outside = services is not None and services.outside
        self.serves_outside = (
            outside
            or (policy is not None and policy.host_firewall)
            or (gateways is not None and gateways.served)
        )
        """Whether NodePort, the host policy or egress gateways need programs on all devices."""
        self.announces = liveness.milliseconds if liveness is not None else 0
        """Milliseconds after the agent's last heartbeat during which devices answer ARP for services."""
        self.accelerated = datapath.accelerates and outside
        """Whether external clients are served by XDP."""
        self.encrypted = encryption is not None and bool(encryption.pods)
        """Whether WireGuard encrypts pods' packets."""


class ProxySenders:
    """Whether proxies send packets with pods' source addresses, so that devices must look for replies."""

    def __init__(
        self,
        maps: Maps,
        redirects: Table[str, HTTPRedirect] | None = None,
        proxies: Table[str, TransparentProxy] | None = None,
    ) -> None:
        self._maps = maps
        self.tables = [table for table in (redirects, proxies) if table is not None]
        """Redirects and DNS proxies that do."""
        self._found = False

    def restore(self) -> None:
        """Read from hive_devices whether one did while an earlier agent ran."""
        rows = (DeviceConfig.unpack(value) for _, value in self._maps.devices.items())
        self._found |= any(row.flags & DEVICE_PROXIES for row in rows)

    def since_boot(self) -> bool:
        """Return whether one does, or did since the node booted: its connections may still exist."""
        self._found |= any(map(len, self.tables))
        return self._found


def device_target(maps: Maps, datapath: Datapath, log: Logger) -> DeviceTarget:
    """Create the reconciler's target of native devices."""
    return DeviceTarget(lambda: maps.devices, datapath, log)


class Masquerade:
    """Attaches programs to native devices in its start hook, follows device changes and repairs.

    The table ``native-devices`` has the devices with programs.
    """

    def __init__(
        self,
        settings: MasqueradeSettings,
        pods: MasqueradedPods,
        uses: ProgramUses,
        senders: ProxySenders,
        target: DeviceTarget,
        devices: Table[int, Device],
        own: NodeAddresses,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._pods = pods
        self.ipv4 = pods.ipv4
        """Whether pods' IPv4 packets are masqueraded."""
        self._uses = uses
        self._senders = senders
        self._own = own
        self._log = log
        self._ready = False
        self.devices: Derived[int, NativeDevice] = Derived(
            "native-devices", self._wanted, devices, own.table, *senders.tables
        )
        """The devices with programs, by index."""
        self._reconciler: Reconciler[int, NativeDevice] = Reconciler(
            self.devices, target, full_every=INTERVAL
        )
        tables.add(self.devices, self._reconciler.statuses)
        lifecycle.append(Hook("attach to native devices", self._start))
        jobs.observe("reconcile", self._reconciler)
        jobs.observe("watch filters", self._hints, self._trigger)

    def report(self) -> Masquerading:
        """Return the masquerading section of the agent's status."""
        pods = self._pods
        if not (self.devices.all() and (pods.ipv4 or pods.ipv6)):
            return Masquerading()
        v4, v6 = (
            "" if each is None else str(each) for each in native_networks(self._settings, pods.ranges())
        )
        return Masquerading(
            enabled=True,
            mode="BPF",
            enabled_protocols=MasqueradedProtocols(pods.ipv4, pods.ipv6),
            ip_masq_agent=self._settings.enable_ip_masq_agent,
            snat_exclusion_cidr=v4,
            snat_exclusion_cidr_v4=v4,
            snat_exclusion_cidr_v6=v6,
        )

    def _wanted(
        self,
        devices: list[Device],
        addresses: list[NodeAddress],
        *senders: Collection[HTTPRedirect | TransparentProxy],
    ) -> Mapping[int, NativeDevice]:
        del addresses, senders  # read from their tables; the call only reports a change
        proxied = self._senders.since_boot()
        if not self._ready:
            return {}
        uses = self._uses
        needs = ProgramNeeds(
            *(self._pods.ranges(), self._pods.ipv4, self._pods.ipv6),
            tunnelled=uses.tunnelled,
            serves_outside=uses.serves_outside,
            announces=uses.announces,
            accelerated=uses.accelerated,
            proxied=proxied,
            encrypted=uses.encrypted,
        )
        return native_devices(devices, self._settings, needs, list(self._own.all().values()))

    async def _start(self) -> None:
        """Attach to all devices. A device that fails does not fail the start: it is retried."""
        self._ready = True
        self._senders.restore()
        self.devices.wake()
        self._pods.forward()
        try:
            await self._reconciler.sweep()
        except ReconcileError as error:
            self._log.warning("pods are not masqueraded on every device", error=str(error))
        self._log.info("masquerading", devices=", ".join(each.name for each in self.devices.all()) or "none")

    async def _hints(self) -> AsyncIterator[None]:
        watched = (_RTMGRP_TC, _CHANGED)
        if self._uses.accelerated:
            watched = (_RTMGRP_TC | _RTMGRP_LINK, _CHANGED_OR_DETACHED_XDP)
        async for hint in notifications(*watched):
            yield hint

    async def _trigger(self, _: None) -> None:
        self._reconciler.trigger()


def _enabled(setting: bool | None, *, default: bool) -> bool:
    return default if setting is None else setting


def report(masquerade: Masquerade) -> Member[StatusSection]:
    """Contribute masquerading to the agent's status."""

    def fill(facts: StatusFacts) -> None:
        facts.masquerading = masquerade.report()

    return StatusSection(fill)


def configured(pods: MasqueradedPods) -> Member[NodeSection]:
    """Contribute masquerading to the agent's configuration."""
    on = {Family.IPV4: pods.ipv4, Family.IPV6: pods.ipv6}
    families = frozenset(family for family, masqueraded in on.items() if masqueraded)
    return NodeSection(lambda facts: replace(facts, masqueraded=families))


@after(Masquerade, IpMasqAgent)
def run() -> None:
    """Start both: no other cell depends on them."""


cell = module(
    "masquerade",
    "Masquerading behind the node's address",
    config(MasqueradeSettings),
    provide(Masquerade, IpMasqAgent, network_table, report, configured),
    provide_private(MasqueradedPods, ProgramUses, ProxySenders, device_target),
    invoke(run),
)
