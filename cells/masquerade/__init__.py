"""Pods reach the world behind the node's address: programs on native devices translate their source.

Reconciler: the table ``native-devices`` follows the node's devices; programs are attached to each, and
            ``hive_devices`` names devices where packets arrive. The table ``ip-masq-networks`` follows the
            file of ip-masq-agent and is stored in ``cilium_ipmasq_v4`` and ``cilium_ipmasq_v6``.
Why:        networks outside have no routes to pods' addresses. The node's own packets stay as they are,
            unless a pod was given the port they come from.

Settings: enable-ipv4-masquerade, enable-ipv6-masquerade, enable-bpf-masquerade, ipv4-native-routing-cidr,
          ipv6-native-routing-cidr, egress-masquerade-interfaces, derive-masq-ip-addr-from-device,
          enable-ip-masq-agent, ip-masq-agent-config-path.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from typing import Final

from cells.api import MasqueradedProtocols, Masquerading, StatusFacts, StatusSection
from cells.base.addresses import Family, IPNetwork
from cells.cluster.encryption import ClusterEncryption
from cells.config import AgentConfig, ChainingMode
from cells.config.shared import AgentLiveness, ServiceReach
from cells.datapath.datapath import Datapath
from cells.maps.node_maps import Maps
from cells.maps.records.flows import DEVICE_PROXIES, DeviceConfig
from cells.masquerade.devices import (
    DeviceTarget,
    Families,
    MasqueradeSettings,
    NativeDevice,
    native_devices,
    native_networks,
)
from cells.masquerade.ip_masq_agent import IpMasqAgent, network_table
from cells.netlink import news
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
    seconds,
)
from lifecycle.tables import ReconcileError

__all__ = ["Masquerade", "cell"]


# Keeps programs on the devices that packets leave the node through.

INTERVAL: Final = seconds(30)
_RTMGRP_LINK, _RTMGRP_TC = 0x1, 0x8
_RTM_NEWLINK, _RTM_DELQDISC, _RTM_DELTFILTER = 16, 37, 45
_CHANGED: Final = news.passing((news.kinds(_RTM_DELQDISC, _RTM_DELTFILTER),))
_CHANGED_OR_SLOWED: Final = news.passing((news.kinds(_RTM_NEWLINK, _RTM_DELQDISC, _RTM_DELTFILTER),))
"""A program that is taken off a driver shows as news of the link."""


class Masquerade:
    """Devices are served once the hook ran; then they are followed, and what is taken off comes back."""

    def __init__(
        self,
        settings: MasqueradeSettings,
        *,
        agent: AgentConfig,
        modes: list[Member[ChainingMode]],
        tunnel: PodTunnel,
        gateways: EgressGatewayUse | None = None,
        services: ServiceReach | None = None,
        policy: NodePolicy | None = None,
        liveness: AgentLiveness | None = None,
        redirects: Table[str, HTTPRedirect] | None = None,
        proxies: Table[str, TransparentProxy] | None = None,
        encryption: ClusterEncryption | None = None,
        datapath: Datapath,
        maps: Maps,
        router: Router,
        sysctls: Sysctls,
        devices: Table[int, Device],
        own: NodeAddresses,
        addresses: Table[Family, NodeAddress],
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        own_links = all(mode.own_links for mode in modes)
        self._settings = settings
        self.ipv4 = agent.ipv4 and _asked(settings.enable_ipv4_masquerade, default=own_links)
        """Whether pods' IPv4 packets are masqueraded."""
        self.ipv6 = agent.ipv6 and _asked(settings.enable_ipv6_masquerade, default=own_links)
        """Whether pods' IPv6 packets are masqueraded."""
        maps.use(*("snat4",) * self.ipv4, *("snat6",) * self.ipv6)
        self._tunnelled = tunnel.used
        self._serves = (services is not None and services.outside) or (
            policy is not None and policy.host_firewall
        )
        self._serves |= gateways is not None and gateways.served
        self._announces = liveness.milliseconds if liveness is not None else 0
        self._accelerated = datapath.accelerates and services is not None and services.outside
        self._encrypted = encryption is not None and bool(encryption.pods)
        self._maps = maps
        self._router = router
        self._sysctls = sysctls
        self._own = own
        self._log = log
        self._ready = False
        self._proxied = False
        """Whether a proxy sends in pods' names. Once one did, till the node ends: a restart forgets none."""
        senders = [table for table in (redirects, proxies) if table is not None]
        self.devices: Derived[int, NativeDevice] = Derived(
            "native-devices", self._wanted, devices, addresses, *senders
        )
        """The devices with programs, by index."""
        target = DeviceTarget(lambda: maps.devices, datapath, log)
        self._reconciler: Reconciler[int, NativeDevice] = Reconciler(
            self.devices, target, full_every=INTERVAL
        )
        tables.add(self.devices, self._reconciler.statuses)
        lifecycle.append(Hook("attach to native devices", self._start))
        jobs.observe("reconcile", self._reconciler)
        jobs.observe("watch filters", self._hints, self._look)

    def report(self) -> Masquerading:
        """Its part of the agent's status."""
        if not (self.devices.all() and (self.ipv4 or self.ipv6)):
            return Masquerading()
        ranges = self._ranges()
        v4, v6 = ("" if each is None else str(each) for each in native_networks(self._settings, ranges))
        return Masquerading(
            enabled=True,
            mode="BPF",
            enabled_protocols=MasqueradedProtocols(self.ipv4, self.ipv6),
            ip_masq_agent=self._settings.enable_ip_masq_agent,
            snat_exclusion_cidr=v4,
            snat_exclusion_cidr_v4=v4,
            snat_exclusion_cidr_v6=v6,
        )

    def _ranges(self) -> list[IPNetwork]:
        """This node's own; none where another IPAM plugin gives the addresses."""
        found = (each.alloc_range for each in self._router.addressing().values())
        return [network for network in found if network is not None]

    def _wanted(
        self,
        devices: list[Device],
        addresses: list[NodeAddress],
        *senders: Collection[HTTPRedirect | TransparentProxy],
    ) -> Mapping[int, NativeDevice]:
        del addresses  # they wake us; in their order of precedence they come from who keeps them
        self._proxied |= any(map(len, senders))
        if not self._ready:
            return {}
        ranges = self._ranges()
        families = Families(
            *(ranges, self.ipv4, self.ipv6),
            tunnelled=self._tunnelled,
            serves_outside=self._serves,
            announces=self._announces,
            accelerated=self._accelerated,
            proxied=self._proxied,
            encrypted=self._encrypted,
        )
        node_ips = list(self._own.all().values())
        return native_devices(devices, self._settings, families, node_ips)

    async def _start(self) -> None:
        """A device that cannot be served does not keep the node from starting: it is tried again."""
        self._ready = True
        rows = (DeviceConfig.unpack(value) for _, value in self._maps.devices.items())
        self._proxied |= any(row.flags & DEVICE_PROXIES for row in rows)
        self.devices.wake()
        if self.ipv4:  # of IPv6 the router does it
            self._sysctls.keep({"net/ipv4/ip_forward": "1"})
        try:
            await self._reconciler.sweep()
        except ReconcileError as error:
            self._log.warning("pods are not masqueraded on every device", error=str(error))
        self._log.info("masquerading", devices=", ".join(each.name for each in self.devices.all()) or "none")

    async def _hints(self) -> AsyncIterator[None]:
        watched = (_RTMGRP_TC, _CHANGED)
        if self._accelerated:
            watched = (_RTMGRP_TC | _RTMGRP_LINK, _CHANGED_OR_SLOWED)
        async for hint in news.hints(*watched):
            yield hint

    async def _look(self, _: None) -> None:
        self._reconciler.trigger()


def _asked(setting: bool | None, *, default: bool) -> bool:
    return default if setting is None else setting


def report(masquerade: Masquerade) -> Member[StatusSection]:
    """What is masqueraded, for the agent's status."""

    def fill(facts: StatusFacts) -> None:
        facts.masquerading = masquerade.report()

    return StatusSection(fill)


@after(Masquerade, IpMasqAgent)
def run() -> None:
    """Both are part of the agent though no cell depends on them."""


cell = module(
    "masquerade",
    "Pods behind the node's address",
    config(MasqueradeSettings),
    provide(Masquerade, IpMasqAgent, network_table, report),
    invoke(run),
)
