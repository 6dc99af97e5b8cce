"""The router of this node: the addresses its pods send to, and the devices behind it.

Needs: RestoredEndpoints, Ipam, IpamSettings, EndpointSettings, HostLinks, Datapath, Sysctls, Table[Device],
PodMtu, AgentConfig.
Gives: Router; the tables ``router`` and ``router-status``.
"""

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from cells.config import AgentConfig
from cells.datapath import Datapath
from cells.endpoint import EndpointSettings
from cells.endpoint.restore import RestoredEndpoints
from cells.ipam import Family, IPAddress, Ipam, IpamSettings, IPNetwork, PodRange
from cells.node.devices import Device, PodMtu, addressed
from cells.node.netlink import HostLinks, NodeNetwork, news
from cells.node.router.address import OWNER, choose_address
from cells.node.router.kernel import RouterKernel
from cells.node.router.objects import RouterObject, wanted
from cells.node.router.pair import HOST, NET, lasting
from cells.node.router.past import FILE, remembered
from cells.node.router.settings import listening, router_settings, router_settings6
from cells.node.router.start import StartWriter
from cells.node.sysctl import Sysctls
from lifecycle import (
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    NotStartedError,
    ReconcileError,
    Reconciler,
    Table,
    Tables,
    UsageError,
    seconds,
)

LOOPBACK: Final = "lo"
INTERVAL: Final = seconds(30)

_RTMGRP_TC: Final = 0x8
_RTMGRP_IPV4_ROUTE: Final = 0x40
_RTMGRP_IPV6_ROUTE: Final = 0x400
_RTM_NEWROUTE, _RTM_DELROUTE = 24, 25
_RTM_DELQDISC, _RTM_DELTFILTER = 37, 45
_PROTOCOL: Final = 21
"""Where an rtmsg says who made the route, behind the header of 16 bytes."""
_BY_PEOPLE: Final = (3, 4)
"""RTPROT_BOOT, which our own have, and RTPROT_STATIC: not what the kernel or a routing daemon makes."""
CHANGED: Final = news.passing(
    (news.kinds(_RTM_DELQDISC, _RTM_DELTFILTER),),
    (news.kinds(_RTM_NEWROUTE, _RTM_DELROUTE), news.Field(news.LOAD_BYTE, _PROTOCOL, _BY_PEOPLE)),
)
"""What may concern the router and does not show in the table of devices."""


@dataclass(frozen=True, slots=True)
class Addressing:
    """The node's addresses of one family in the API (NodeAddressingElement)."""

    ip: IPAddress
    """The router's."""
    alloc_range: IPNetwork | None
    """The primary one of pods; None where another IPAM plugin gives the addresses."""


class Router:
    """Made by its hook, after restored endpoints have claimed their addresses; the devices stay at stop.

    While the agent runs, what is removed or changed is made right again: at once where the kernel tells, else
    within half a minute.
    """

    def __init__(
        self,
        restored: RestoredEndpoints,
        *,
        ipam: Ipam,
        settings: IpamSettings,
        endpoints: EndpointSettings,
        links: HostLinks,
        datapath: Datapath,
        sysctls: Sysctls,
        devices: Table[Device],
        ranges: Table[PodRange],
        mtu: PodMtu,
        agent: AgentConfig,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        self._restored = restored
        self._ipam = ipam
        self._settings = settings
        self._endpoint_routes = endpoints.enable_endpoint_routes
        self._links = links
        self._datapath = datapath
        self._sysctls = sysctls
        self._devices = devices
        self._ranges = ranges
        self._mtu = mtu
        self._ipv6 = agent.ipv6
        self._past = agent.state / FILE
        self._log = log
        self._made: Mapping[Family, Addressing] | None = None
        self._kernel = RouterKernel(
            links, StartWriter(links), datapath, log, write_settings=self._write_settings
        )
        self._objects = devices.derive(self._wanted, name="router")
        self._reconciler = Reconciler(self._objects, self._kernel, full_every=INTERVAL)
        tables.add(self._objects, self._reconciler.statuses)
        lifecycle.append(Hook("set up the router", self._start))
        jobs.observe("reconcile", self._reconciler)
        jobs.observe("watch devices", self._devices.changes, self._look_at_devices)
        jobs.observe("watch ranges of pods", ranges.changes, self._look_at_ranges)
        jobs.observe("watch routes and filters", self._hints, self._look)

    @property
    def gateways(self) -> tuple[IPAddress, ...]:
        """The pods' gateways, one of each family that is on: IPv6, then IPv4."""
        return tuple(each.ip for each in self.addressing().values())

    @property
    def host_ifindex(self) -> int:
        """Index of cilium_host. HiveError when it is not there at the moment."""
        return self._kernel.pair.host.ifindex

    @property
    def net_ifindex(self) -> int:
        """Index of cilium_net. HiveError when it is not there at the moment."""
        return self._kernel.pair.net.ifindex

    def addressing(self) -> Mapping[Family, Addressing]:
        """What pods and plugins must know, by family: IPv6, then IPv4; without those that are off."""
        if self._made is None:
            raise NotStartedError("Router was read before the hook 'set up the router' ran: depend on Router")
        return self._made

    def _wanted(self, devices: object) -> Mapping[str, RouterObject]:
        """The objects; they follow the devices, as the pair has the MTU of the pods' links."""
        del devices
        if self._made is None:
            return {}
        routers = {each.ip: each.alloc_range for each in self._made.values()}
        others = [each.network for each in self._ranges.all()]
        return wanted(routers, self._restored.strays(), self._mtu(), others)

    async def _start(self) -> None:
        local = {family: ip for family in Family if (ip := self._settings.local_router(family)) is not None}
        if local and not self._endpoint_routes:
            raise UsageError(
                f"Cannot specify local-router-{next(iter(local))} without enable-endpoint-routes: set it, too"
            )
        for device in addressed(self._devices.all()):
            for address in device.addresses:
                self._ipam.exclude(address.ip, "node-ip")
        host = self._links.find(HOST)
        on_device = lasting(self._links.addresses().get(host.ifindex, ())) if host is not None else []
        before = remembered(
            self._datapath.known_node(), [each.ip for each in on_device], self._past, self._log
        )
        ranges = self._ipam.ranges
        self._made = {
            family: Addressing(self._address(family, local.get(family), before), ranges.get(family))
            for family in self._ipam.families
        }
        self._ipam.forget_retired()
        self._objects.wake()
        await self._make()
        self._kernel.writer = (
            NodeNetwork()
        )  # what is put right from now on need not wait for what it takes to load
        self._write_settings()
        told = {str(family): str(each.ip) for family, each in self._made.items()}
        self._log.info("router set up", **told, device=HOST)

    def _address(self, family: Family, local: IPAddress | None, before: Iterable[IPAddress]) -> IPAddress:
        """The router's: the one that is set, which no pod gets then, or one of the range."""
        if local is None:
            return choose_address(family, before, self._ipam, self._log)
        self._ipam.exclude(local, OWNER)
        if self._ipam.covers(local):
            self._log.warning(f"local-router-{family} is in this node's range of pods", address=str(local))
        return local

    async def _make(self) -> None:
        """The first run is part of the start: if it fails, so does the start.

        Leftovers that cannot be removed do not count: they are harmless, and removing them is retried.
        """
        try:
            await self._reconciler.sweep()
        except ReconcileError as error:
            needed = [why for key, why in error.failures.items() if key in self._objects]
            if needed:
                if isinstance(needed[0], HiveError):
                    raise needed[0] from error
                raise HiveError(f"Failed to set up the router: {needed[0]}") from needed[0]
            self._log.warning("Failed to remove old router IPs", device=HOST, error=str(error))

    def _write_settings(self) -> None:
        """Write the kernel settings; those of the pair are lost when the pair is created again."""
        self._sysctls.keep(router_settings())
        if self._ipv6:
            others = [each.name for each in self._devices.all() if each.name not in (HOST, NET, LOOPBACK)]
            self._sysctls.write(listening(others, self._sysctls.read))
            self._sysctls.keep(router_settings6())

    async def _look_at_devices(self, changes: object) -> None:
        del changes
        self._reconciler.trigger()

    async def _look_at_ranges(self, _: object) -> None:
        """Route all ranges; the primary one is published, and the router's address stays."""
        if self._made is not None:
            now = self._ipam.ranges
            self._made = {
                family: Addressing(each.ip, now.get(family, each.alloc_range))
                for family, each in self._made.items()
            }
            self._objects.wake()

    async def _hints(self) -> AsyncIterator[None]:
        async for hint in news.hints(_RTMGRP_TC | _RTMGRP_IPV4_ROUTE | _RTMGRP_IPV6_ROUTE, CHANGED):
            yield hint

    async def _look(self, _: None) -> None:
        self._reconciler.trigger()
