"""The allocator of this node: finds its range at start, releases what expires.

For:    cni_server, api, endpoint, endpoint_restore, router. Needs: IpamSettings, Table[Device], Clock.
Gives:  Ipam.
"""

from ipaddress import IPv4Address

import anyio

from cells.devices import Device
from cells.ipam.allocator import Allocator
from cells.ipam.expiration import Clock
from cells.ipam.settings import IpamSettings, automatic_range
from lifecycle import Hook, Jobs, Lifecycle, Logger, Table, UsageError


class Ipam(Allocator):
    """Hands out the addresses of the node's range. Synchronous: for the event loop only.

    Whoever takes an Ipam starts after its hook, and so knows the range.
    """

    def __init__(
        self,
        settings: IpamSettings,
        devices: Table[Device],
        clock: Clock,
        lifecycle: Lifecycle,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        super().__init__(settings.ipam_default_ip_pool, clock)
        self._settings = settings
        self._devices = devices
        self._clock = clock
        self._log = log
        self._armed: anyio.Event | None = None
        lifecycle.append(Hook("find the range of pod addresses", self._start))
        jobs.one_shot("release expired addresses", self._expire)

    def arm_expiration(self, ip: IPv4Address, pool: str) -> str:
        """Release the address in 10 minutes; the uuid that prevents it. IpamError: a timer runs already."""
        token = super().arm_expiration(ip, pool)
        if self._armed is not None:
            self._armed.set()
        return token

    async def _start(self) -> None:
        network = self._settings.explicit_range()
        if network is None:
            await self._devices.wait_initialized()
            network = automatic_range(self._devices.all())
        if network is None:
            raise UsageError(
                "IPv4 allocation CIDR is not configured. Please specify --ipv4-range: "
                "auto needs a global IPv4 address on one of the node's devices, there is none"
            )
        self.use(network)
        self._log.info("pod address range", range=str(network), pool=self.default_pool)

    async def _expire(self) -> None:
        while True:
            pause = self.next_expiration()
            if pause is None:
                self._armed = anyio.Event()
                await self._armed.wait()
                continue
            await self._clock.sleep(pause)  # timers armed meanwhile are due later
            for lost in self.release_expired():
                ip, owner, uuid = str(lost.ip), lost.owner, lost.expiration_uuid
                self._log.warning("Released IP after expiration", ip=ip, owner=owner, uuid=uuid)
