"""Addresses this node answers for, as the programs know them; the network is told of new ones.

Needs: ResponderKernel.   Gives: L2Announcement, Responder, announced().
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from ipaddress import IPv4Address

import msgspec
from anyio import to_thread

from cells.maps import L2ResponderKey
from cells.services.announcements.candidates import Candidate
from cells.services.announcements.elections import L2Lease
from cells.services.announcements.kernel import Frame, ResponderKernel
from lifecycle import BatchError, BatchFailures, HiveError, ReadTable


class L2Announcement(msgspec.Struct, frozen=True):
    """A row of the table ``l2-announce``: this node answers who asks for the address by the device."""

    ip: IPv4Address
    ifindex: int
    device: str
    mac: str
    """What is answered."""
    services: tuple[str, ...]
    """Whose address it is: ``namespace/name``."""


def announced(
    candidates: Iterable[Candidate], leases: Iterable[L2Lease]
) -> dict[L2ResponderKey, L2Announcement]:
    """The places of services whose lease this node holds."""
    held = {lease.service for lease in leases if lease.held}
    found: dict[L2ResponderKey, L2Announcement] = {}
    for candidate in sorted(candidates, key=lambda row: row.service):
        for place in candidate.places if candidate.service in held else ():
            key = L2ResponderKey(place.ip, place.ifindex)
            before = found[key].services if key in found else ()
            services = (*before, "/".join(candidate.service))
            found[key] = L2Announcement(place.ip, place.ifindex, place.device, place.mac, services)
    return found


class Responder:
    """The programs' map as the target of a reconciler."""

    def __init__(self, table: ReadTable[L2Announcement], kernel: ResponderKernel) -> None:
        self._table = table
        self._kernel = kernel
        self._told: dict[L2ResponderKey, str] = {}
        """Which MAC the network was told of. What an earlier agent answered for is no news."""

    async def dump(self) -> Mapping[L2ResponderKey, L2Announcement]:
        """What it has; what the network was not told of only by its key."""
        found: dict[L2ResponderKey, L2Announcement] = {}
        for key in self._kernel.held():
            wanted = self._table.get(key)
            if wanted is not None and self._told.setdefault(key, wanted.mac) == wanted.mac:
                found[key] = wanted
            else:
                found[key] = L2Announcement(key.ip, key.ifindex, "", "", ())
        return found

    async def put(self, batch: Mapping[L2ResponderKey, L2Announcement]) -> None:
        """Answer for these, and tell the network of those that are new here. Raises BatchError."""
        failures: dict[L2ResponderKey, Exception] = {}
        frames: dict[L2ResponderKey, Frame] = {}
        for key, row in batch.items():
            try:
                added = self._kernel.add(key)
            except (OSError, HiveError) as error:
                failures[key] = error
                continue
            if added or self._told.get(key) != row.mac:
                self._told[key] = ""
                frames[key] = row.device, row.ip, row.mac
        failed = await to_thread.run_sync(self._kernel.tell, frames) if frames else {}
        for key, (device, ip, mac) in frames.items():
            if key in failed:
                text = f"{ip} cannot be announced on {device}: {failed[key]}"
                failures[key] = HiveError(text)
            else:
                self._told[key] = mac
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[L2ResponderKey]) -> None:
        """Answer for these no more. Raises BatchError."""
        with BatchFailures(OSError) as failures:
            for key in batch:
                with failures.of(key):
                    self._told.pop(key, None)
                    self._kernel.delete(key)
