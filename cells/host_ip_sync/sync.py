"""Keeps the node's own addresses, and the world, in the datapath's maps.

Needs: Table[Device], Router, the maps (HostMaps, a Protocol).   Gives: HostIPSync, wanted().
Source: Cilium 1.17, the agent's host address sync (SyncHostIPs), for IPv4.
"""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network
from typing import Final, Protocol

from cells.devices import Device
from cells.router import Router
from lifecycle import HiveError, Hook, Jobs, Lifecycle, Logger, Table, minutes

HOST: Final = 1
"""Identity reserved:host."""
WORLD: Final = 2
"""Identity reserved:world."""
EVERYWHERE: Final = IPv4Network("0.0.0.0/0")
INTERVAL: Final = minutes(1)


class HostMaps(Protocol):
    """cilium_lxc and cilium_ipcache, as far as this cell touches them. Methods raise OSError."""

    def local(self) -> dict[IPv4Address, bool]:
        """The addresses of cilium_lxc, and whether each is flagged as the node's own."""
        ...

    def put_host(self, ip: IPv4Address) -> None:
        """Write the address flagged as the node's own."""
        ...

    def drop_host(self, ip: IPv4Address) -> None:
        """Remove the address from cilium_lxc."""
        ...

    def identity(self, prefix: IPv4Network) -> int | None:
        """The identity packets of this prefix have by cilium_ipcache; None: none, or one behind a tunnel."""
        ...

    def put_identity(self, prefix: IPv4Network, identity: int) -> None:
        """Write the identity of a prefix."""
        ...

    def drop_identity(self, prefix: IPv4Network) -> None:
        """Remove a prefix from cilium_ipcache."""
        ...


def wanted(devices: Iterable[Device], router: IPv4Address) -> frozenset[IPv4Address]:
    """The node's own addresses: the router's, and those of every device but 127.0.0.0/8."""
    found = {address.ip for device in devices for address in device.addresses}
    return frozenset({ip for ip in found if not ip.is_loopback} | {router})


class HostIPSync:
    """Makes the maps hold :func:`wanted`. The first run is part of the start: if it fails, so does the start.

    Entries of endpoints are left alone, but where a pod has an address of the node: the node's wins.
    """

    def __init__(
        self,
        maps: HostMaps,
        devices: Table[Device],
        router: Router,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._maps = maps
        self._devices = devices
        self._router = router
        self._log = log
        lifecycle.append(Hook("sync host addresses", self._sync))
        self._timer = jobs.timer("sync", self._sync, INTERVAL)
        jobs.observe("watch", devices.changes, self._changed)

    async def _changed(self, _: object) -> None:
        self._timer.trigger()

    async def _sync(self) -> None:
        await self._devices.wait_initialized()  # before that, an address that is missing means nothing
        try:
            sync(self._maps, wanted(self._devices.all(), self._router.ip), self._log)
        except OSError as error:
            raise HiveError(f"Failed to sync host IPs: {error}") from error


def sync(maps: HostMaps, addresses: frozenset[IPv4Address], log: Logger) -> None:
    """One run. An error breaks it off; the next run makes up for it."""
    local = maps.local()
    _put_identity(maps, EVERYWHERE, WORLD)
    for ip in sorted(addresses):
        if not local.get(ip, False):
            if ip in local:
                log.warning("an address of this node belonged to an endpoint, which loses it", ip=str(ip))
            maps.put_host(ip)
        _put_identity(maps, IPv4Network(ip), HOST)
    for ip, is_host in local.items():
        if is_host and ip not in addresses:
            # The row that says it is ours goes last: broken off in between, the next run comes back to it.
            if maps.identity(IPv4Network(ip)) == HOST:
                maps.drop_identity(IPv4Network(ip))
            maps.drop_host(ip)
            log.info("address is no longer this node's", ip=str(ip))


def _put_identity(maps: HostMaps, prefix: IPv4Network, identity: int) -> None:
    if maps.identity(prefix) != identity:
        maps.put_identity(prefix, identity)
