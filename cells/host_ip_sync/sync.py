"""Keeps the node's own addresses, and the world, in the datapath's maps.

Needs: Table[Device], Router, the maps (HostMaps, a Protocol).   Gives: HostIPSync, wanted().
Source: Cilium 1.17, the agent's host address sync (SyncHostIPs), for IPv4.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Network
from typing import Final, Protocol

from cells.devices import Device
from cells.host_ip_sync.settings import HostIPSettings
from cells.router import Router
from lifecycle import (
    BatchError,
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    ReconcileError,
    Reconciler,
    Table,
    Tables,
    minutes,
)

UNKNOWN: Final = 0
"""No identity: what packets have that no prefix covers."""
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


def wanted(
    devices: Iterable[Device], router: IPv4Address, excluded: Collection[IPv4Network | IPv6Network] = ()
) -> dict[IPv4Network, int]:
    """The identity of each prefix this node answers for.

    The world, the router's address, and those of every device but 127.0.0.0/8 and what is excluded.
    """
    found = {address.ip for device in devices for address in device.addresses if address.version == 4}
    ours = sorted(
        {ip for ip in found if not (ip.is_loopback or any(ip in each for each in excluded))} | {router}
    )
    return {EVERYWHERE: WORLD} | {IPv4Network(ip): HOST for ip in ours}


class HostEntries:
    """Both maps as one reconciler's target: prefix to identity, addresses flagged as the node's own.

    Entries of endpoints are left alone, but where a pod has an address of the node: the node's wins.
    """

    def __init__(self, maps: HostMaps, log: Logger) -> None:
        self._maps = maps
        self._log = log

    async def dump(self) -> Mapping[IPv4Network, int]:
        """The world's entry, and whatever is flagged as the node's own."""
        ours = [IPv4Network(ip) for ip, is_host in self._maps.local().items() if is_host]
        held = {prefix: self._maps.identity(prefix) or UNKNOWN for prefix in (EVERYWHERE, *ours)}
        return held if held[EVERYWHERE] else {prefix: held[prefix] for prefix in ours}

    async def put(self, batch: Mapping[IPv4Network, int]) -> None:
        """Write what is not so already. Raises BatchError."""
        local = self._maps.local()
        self._each(batch, lambda prefix: self._put(prefix, batch[prefix], local))

    async def drop(self, batch: Collection[IPv4Network]) -> None:
        """Take out addresses that were the node's. Raises BatchError."""
        self._each(batch, self._drop)

    def _put(self, prefix: IPv4Network, identity: int, local: Mapping[IPv4Address, bool]) -> None:
        ip = prefix.network_address
        if identity == HOST and not local.get(ip, False):
            if ip in local:
                self._log.warning(
                    "an address of this node belonged to an endpoint, which loses it", ip=str(ip)
                )
            self._maps.put_host(ip)
        if self._maps.identity(prefix) != identity:
            self._maps.put_identity(prefix, identity)

    def _drop(self, prefix: IPv4Network) -> None:
        # The row that says it is ours goes last: broken off in between, the next sweep comes back to it.
        if self._maps.identity(prefix) == HOST:
            self._maps.drop_identity(prefix)
        self._maps.drop_host(prefix.network_address)
        self._log.info("address is no longer this node's", ip=str(prefix.network_address))

    @staticmethod
    def _each(batch: Iterable[IPv4Network], do: Callable[[IPv4Network], None]) -> None:
        failures: dict[IPv4Network, Exception] = {}
        for prefix in batch:
            try:
                do(prefix)
            except OSError as error:
                failures[prefix] = error
        if failures:
            raise BatchError(failures)


class HostIPSync:
    """Makes the maps hold :func:`wanted`. The first run is part of the start: if it fails, so does the start.

    Nothing is written before the devices are known: an address that is missing then means nothing.
    """

    def __init__(
        self,
        maps: HostMaps,
        devices: Table[Device],
        router: Router,
        settings: HostIPSettings,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        excluded = settings.excluded()
        addresses = devices.derive(lambda rows: wanted(rows, router.ip, excluded), name="host-addresses")
        self._reconciler = Reconciler(addresses, HostEntries(maps, log), full_every=INTERVAL)
        tables.add(addresses, self._reconciler.statuses)
        lifecycle.append(Hook("sync host addresses", self._first))
        jobs.observe("sync", self._reconciler)

    async def _first(self) -> None:
        try:
            await self._reconciler.sweep()
        except (OSError, ReconcileError) as error:
            cause = next(iter(error.failures.values())) if isinstance(error, ReconcileError) else error
            raise HiveError(f"Failed to sync host IPs: {cause}") from error
