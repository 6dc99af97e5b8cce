"""The tunnel in the kernel: the target of its reconciler.

For:    Tunnel.   Needs: TunnelLinks, TunnelMaps, TunnelAttach (Protocols), how to write settings.
Gives:  TunnelKernel.

Repeating any of it on what is right touches nothing: a restart must not be felt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import msgspec

from cells.datapath import TUNNEL_LINK
from cells.maps import TUNNEL_OWN_IDENTITIES, TunnelConfig
from cells.node.netlink import FoundVxlan, NetlinkError
from cells.tunnel.edges import TunnelLinks, TunnelMaps
from cells.tunnel.objects import ORDER, TunnelDevice, TunnelFacts, TunnelObject, TunnelPrograms
from lifecycle import BatchError, BatchFailures, HiveError, Logger


class TunnelAttach(Protocol):
    """The node's programs; cells.datapath.Datapath. Methods raise OSError."""

    def attach_tunnel(self, ifindex: int) -> None:
        """Attach to the device."""
        ...

    def serves_tunnel(self, ifindex: int) -> bool:
        """Whether they are attached to it."""
        ...


class TunnelKernel:
    """Compares, makes and removes the objects of the tunnel."""

    def __init__(
        self,
        links: TunnelLinks,
        programs: TunnelAttach,
        maps: TunnelMaps,
        log: Logger,
        *,
        write_settings: Callable[[], None],
    ) -> None:
        """``write_settings`` is called for each new device: it has the node's defaults."""
        self._links = links
        self._programs = programs
        self._maps = maps
        self._log = log
        self._write_settings = write_settings

    async def dump(self) -> Mapping[str, TunnelObject]:
        """What there is of it; a device that is down, or not ours by its kind, as one with MTU 0."""
        found: list[TunnelObject] = []
        link = await self._links.find(TUNNEL_LINK)
        if link is not None:
            right = link.up and _usable(link)
            found.append(TunnelDevice(link.port, link.source_ports, link.mtu if right else 0))
            if right and self._programs.serves_tunnel(link.ifindex):
                found.append(TunnelPrograms())
        facts = self._maps.facts()
        if facts != TunnelConfig():
            known = link is not None and facts.ifindex == link.ifindex
            own = bool(facts.flags & TUNNEL_OWN_IDENTITIES)
            found.append(TunnelFacts(facts.mtu if known else 0, facts.port, facts.source, own))
        return {each.key: each for each in found}

    async def put(self, batch: Mapping[str, TunnelObject]) -> None:
        """Make them, those first that others need. Raises BatchError."""
        with BatchFailures(OSError, HiveError) as failures:
            for each in sorted(batch.values(), key=lambda one: ORDER.index(type(one))):
                with failures.of(each.key):
                    await self._make(each)

    async def drop(self, batch: Collection[str]) -> None:
        """Have the programs forget the tunnel, then remove its device. Raises BatchError."""
        failures: dict[str, Exception] = {}
        if TunnelFacts(0, 0).key in batch:
            try:
                self._tell(TunnelConfig())
            except OSError as error:
                raise BatchError(dict.fromkeys(batch, error)) from error
        device = TunnelDevice(0, (0, 0), 0).key
        if device in batch and (link := await self._links.find(TUNNEL_LINK)) is not None:
            try:
                await self._links.delete(link.ifindex)
                self._log.info("tunnel removed", device=TUNNEL_LINK)
            except OSError as error:
                failures[device] = error
        if failures:
            raise BatchError(failures)

    async def _make(self, wanted: TunnelObject) -> None:
        match wanted:
            case TunnelDevice():
                await self._device(wanted)
            case TunnelPrograms():
                self._programs.attach_tunnel((await self._link()).ifindex)
            case TunnelFacts():
                flags = TUNNEL_OWN_IDENTITIES * wanted.own_identities
                ifindex = (await self._link()).ifindex
                self._tell(TunnelConfig(ifindex, wanted.mtu, wanted.port, wanted.source, flags))

    def _tell(self, facts: TunnelConfig) -> None:
        self._maps.tell(facts)
        self._maps.void_verdicts()  # flows that went another way

    async def _link(self) -> FoundVxlan:
        link = await self._links.find(TUNNEL_LINK)
        if link is None:
            raise HiveError(f"{TUNNEL_LINK} is not there")
        return link

    async def _device(self, wanted: TunnelDevice) -> None:
        """In place where the kernel can: only another port takes another device."""
        link = await self._links.find(TUNNEL_LINK)
        if link is not None and not (_usable(link) and _same_ports(link, wanted)):
            self._log.warning(
                "the tunnel's device is not as configured, creating it again",
                device=TUNNEL_LINK,
                kind=link.kind,
                port=link.port,
                wanted_port=wanted.port,
            )
            await self._links.delete(link.ifindex)
            link = None
        if link is None:
            link = await self._new_device(wanted)
            if (facts := self._maps.facts()) != TunnelConfig():
                self._tell(msgspec.structs.replace(facts, ifindex=link.ifindex))
        elif not link.up or link.mtu != wanted.mtu:
            await self._links.set_up(link.ifindex, TUNNEL_LINK, wanted.mtu)

    async def _new_device(self, wanted: TunnelDevice) -> FoundVxlan:
        """Attach the programs before any packet arrives."""
        try:
            await self._links.create(TUNNEL_LINK, wanted)
            link = await self._link()
            try:
                self._write_settings()
                self._programs.attach_tunnel(link.ifindex)
                await self._links.set_up(link.ifindex, TUNNEL_LINK, wanted.mtu)
            except BaseException:
                await self._links.delete(link.ifindex)
                raise
        except NetlinkError as error:
            raise HiveError(f"the tunnel cannot be made on UDP port {wanted.port}: {error}") from error
        self._log.info("tunnel made", device=TUNNEL_LINK, port=wanted.port, mtu=wanted.mtu)
        return link


def _usable(link: FoundVxlan) -> bool:
    return link.kind == "vxlan" and link.metadata


def _same_ports(one: FoundVxlan, other: TunnelDevice) -> bool:
    return (one.port, one.source_ports) == (other.port, other.source_ports)
