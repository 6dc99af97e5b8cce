"""Claims the node's own addresses, for the datapath to identify them, and the world, in the ipcache.

Reconciler: Table[int, Device] and the router's address in, claims by LocalAddresses and Ipcache out.
Why:        only by these entries does the datapath identify addresses of the node, and traffic of the host.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Final

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.cluster.identity.numbers import HOST, WORLD, WORLD_IPV4, WORLD_IPV6
from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import IpcacheEntry, Source
from cells.node.devices import Device
from cells.node.local_addresses import LocalAddresses
from cells.node.router import Router
from lifecycle import (
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Reconciler,
    Settings,
    Table,
    Tables,
    Target,
    config,
    invoke,
    minutes,
    module,
    provide,
)
from lifecycle.tables import BatchFailures, ReconcileError

__all__ = ["HostIPSync", "cell"]


# Settings.


class HostIPSettings(Settings, frozen=True):
    """Settings of the host address sync."""

    exclude_local_address: tuple[str, ...] = ()
    """Networks of addresses that do not count as the host's on this node."""

    def validate(self) -> None:
        """Refuse an invalid network. Raises ValueError."""
        self.excluded()

    def excluded(self) -> list[IPv4Network | IPv6Network]:
        """The networks. Raises ValueError with the name of the setting."""
        found = []
        for text in self.exclude_local_address:
            try:
                found.append(ip_network(text))
            except ValueError as error:
                raise ValueError(
                    f"exclude-local-address={text}: expected a network such as 192.0.2.0/24: {error}"
                ) from None
        return found


# Claims of the node's own addresses and of the world.
#
# Source: Cilium 1.17, the agent's host address sync (SyncHostIPs), and its reserved identities.

RESOURCE: Final = "daemon//reserved"
"""The resource of the claims in the ipcache."""
WORLDS: Final = {Family.IPV6: WORLD_IPV6, Family.IPV4: WORLD_IPV4}
"""Identities of the world if both families are enabled; with one of them it is WORLD."""
EVERYWHERE: Final[Mapping[Family, IPNetwork]] = {
    Family.IPV6: IPv6Network("::/0"),
    Family.IPV4: IPv4Network("0.0.0.0/0"),
}
INTERVAL: Final = minutes(1)


def world_prefixes(routers: Iterable[IPAddress]) -> dict[IPNetwork, int]:
    """The identity of the world, for each family in which the router has an address."""
    on = {Family.of(ip) for ip in routers}
    return {
        prefix: WORLDS[family] if len(on) > 1 else WORLD
        for family, prefix in EVERYWHERE.items()
        if family in on
    }


def wanted(
    devices: Iterable[Device], routers: Collection[IPAddress], excluded: Collection[IPNetwork] = ()
) -> dict[IPNetwork, int]:
    """The identity of each prefix that this node claims: the world, and its own addresses.

    These are the router's addresses of enabled families and, in these families, the addresses of all devices,
    except those of loopback, link-local IPv6 ones, and excluded ones.
    """
    world = world_prefixes(routers)
    found = {address.ip for device in devices for address in device.addresses} | set(routers)
    ours = [ip for ip in found if ip in routers or _counts(ip, world, excluded)]
    return world | {ip_network(ip): HOST for ip in sorted(ours, key=lambda ip: (-ip.version, int(ip)))}


def _counts(ip: IPAddress, world: Collection[IPNetwork], excluded: Collection[IPNetwork]) -> bool:
    """Whether an address of a device is the host's."""
    if EVERYWHERE[Family.of(ip)] not in world or ip.is_loopback or (ip.version == 6 and ip.is_link_local):
        return False
    return not any(ip in each for each in excluded)


class HostEntries(Target[IPNetwork, int, int]):
    """The reconciler's target: the node's claims in the ipcache and in LocalAddresses."""

    def __init__(self, local: LocalAddresses, ipcache: Ipcache, log: Logger) -> None:
        self._local = local
        self._ipcache = ipcache
        self._log = log
        self._claimed: dict[IPNetwork, int] = {}
        """This cell's claims, with identities."""

    async def observe(self) -> Mapping[IPNetwork, int]:
        """This cell's claims in the ipcache."""
        found = {prefix: self._ipcache.claim_of(str(prefix), RESOURCE) for prefix in self._claimed}
        return {prefix: claim.identity for prefix, claim in found.items() if claim is not None}

    async def put(self, batch: Mapping[IPNetwork, int]) -> None:
        """Claim prefixes. Raises BatchError."""
        self._each(batch, lambda prefix: self._put(prefix, batch[prefix]))

    async def drop(self, batch: Collection[IPNetwork]) -> None:
        """Withdraw prefixes. Raises BatchError."""
        self._each(batch, self._drop)

    def _put(self, prefix: IPNetwork, identity: int) -> None:
        if identity == HOST:
            self._local.put_host(prefix.network_address)
        self._ipcache.upsert(
            IpcacheEntry(prefix=str(prefix), identity=identity, source=Source.LOCAL, resource=RESOURCE)
        )
        self._claimed[prefix] = identity

    def _drop(self, prefix: IPNetwork) -> None:
        # _claimed is updated last: if a step fails, the reconciler retries the whole.
        self._ipcache.withdraw(RESOURCE, [str(prefix)])
        if self._claimed.get(prefix) == HOST:
            self._local.drop_host(prefix.network_address)
            self._log.info("address is no longer this node's", ip=str(prefix.network_address))
        self._claimed.pop(prefix, None)

    @staticmethod
    def _each(batch: Iterable[IPNetwork], do: Callable[[IPNetwork], None]) -> None:
        with BatchFailures(OSError) as failures:
            for prefix in batch:
                with failures.of(prefix):
                    do(prefix)


class HostIPSync:
    """Makes the maps equal to :func:`wanted`.

    The first run is part of the start: if it fails, the start fails.

    Nothing is written before the devices are known: until then, an absent address means nothing.
    """

    def __init__(
        self,
        local: LocalAddresses,
        devices: Table[int, Device],
        router: Router,
        ipcache: Ipcache,
        settings: HostIPSettings,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        excluded = settings.excluded()
        addresses = devices.derive(
            lambda rows: wanted(rows, router.gateways, excluded), name="host-addresses"
        )
        entries = HostEntries(local, ipcache, log)
        self._claimed = [each.table.initializer("host-ip-sync") for each in (ipcache, local)]
        self._reconciler = Reconciler(addresses, entries, full_every=INTERVAL)
        tables.add(addresses, self._reconciler.statuses)
        lifecycle.append(Hook("sync host addresses", self._first))
        jobs.observe("sync", self._reconciler)

    async def _first(self) -> None:
        try:
            await self._reconciler.sweep()
        except (OSError, ReconcileError) as error:
            cause = next(iter(error.failures.values())) if isinstance(error, ReconcileError) else error
            raise HiveError(f"Failed to sync host IPs: {cause}") from error
        for claimed in self._claimed:
            claimed.done()


cell = module(
    "host-ip-sync",
    "Addresses of the node in the datapath's maps",
    config(HostIPSettings),
    provide(HostIPSync),
    invoke(HostIPSync),
)
