"""Addresses that are released unless their use is confirmed in time.

For:    Ipam. Needs: Clock. Gives: Expirations.
A plugin that asks for an address and dies would lose it for ever; so it gets a timer, known by a uuid that
the creation of the endpoint presents.
"""

import time
import uuid
from typing import Final

import anyio

from cells.ipam.addresses import IPAddress

EXPIRATION: Final = 600.0
"""Seconds an address waits for its endpoint (Cilium's defaults.IPAMExpiration)."""


class Clock:
    """Time that only goes forward, in seconds."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""
        await anyio.sleep(seconds)


class Expirations:
    """Timers by address. All run equally long, so the oldest is the first due."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timers: dict[IPAddress, tuple[str, float]] = {}

    def __contains__(self, ip: IPAddress) -> bool:
        return ip in self._timers

    def arm(self, ip: IPAddress) -> str:
        """Start a timer and return its uuid. The address must have none."""
        token = str(uuid.uuid4())
        self._timers[ip] = token, self._clock.now() + EXPIRATION
        return token

    def uuid_of(self, ip: IPAddress) -> str | None:
        """The uuid of the timer that runs for the address."""
        timer = self._timers.get(ip)
        return timer[0] if timer else None

    def stop(self, ip: IPAddress) -> None:
        """Forget the timer, if there is one."""
        self._timers.pop(ip, None)

    def wait(self) -> float | None:
        """Seconds until the first timer is due (0 if it is); None if none runs."""
        for _, deadline in self._timers.values():
            return max(deadline - self._clock.now(), 0.0)
        return None

    def pop_due(self) -> list[tuple[IPAddress, str]]:
        """The timers that are due, which then are no more, with their uuids."""
        now = self._clock.now()
        due = []
        for ip, (token, deadline) in self._timers.items():
            if deadline > now:
                break
            due.append((ip, token))
        for ip, _ in due:
            del self._timers[ip]
        return due
