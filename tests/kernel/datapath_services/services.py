"""Writes services to the maps, as the agent does, and models which backend serves a packet."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import NamedTuple

from cells.maps.map import Map
from cells.services import BackendState, FrontendKey, ServiceAddress, ServiceFlag
from cells.services.map_entries import (
    BACKENDS,
    MapKey,
    affinity_key,
    backend_number,
    backend_value,
    master_value,
    reverse_nat_key,
    reverse_nat_value,
    service_key,
    slot_values,
)

VIP, VIP6 = "10.96.0.10", "fd00:96::10"
PORT, TARGET = 80, 8080


class Backend(NamedTuple):
    """One backend, by its id in the maps."""

    number: int
    ip: str
    port: int = TARGET
    state: BackendState = BackendState.ACTIVE

    @property
    def key(self) -> MapKey:
        return MapKey(BACKENDS[ip_address(self.ip).version], backend_number(self.number))


class Services:
    """Writes frontends with their backends."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self._maps = maps

    def serve(
        self,
        ip: str,
        backends: Sequence[Backend],
        *,
        port: int = PORT,
        number: int = 1,
        protocol: int = 0,
        scope: int = 0,
        flags: ServiceFlag = ServiceFlag.ROUTABLE,
        timeout: int = 0,
    ) -> None:
        """Set a frontend's backends; those that are not active get no new connections."""
        frontend = ServiceAddress(ip_address(ip), port, protocol)
        key = FrontendKey(frontend, scope)
        for each in backends:
            self.set_backend(each)
            self._write(affinity_key(number, each.number), b"\0")
        active = [each for each in backends if each.state is BackendState.ACTIVE]
        for slot, each in enumerate(active, 1):
            self._write(service_key(key, slot), slot_values([each.number], number, 1))
        self._write(reverse_nat_key(number, frontend.ip.version), reverse_nat_value(frontend))
        master = master_value(count=len(active), quarantined=0, number=number, flags=flags, timeout=timeout)
        self._write(service_key(key, 0), master)

    def set_backend(self, backend: Backend) -> None:
        """Write only the backend: its address and state."""
        address = ServiceAddress(ip_address(backend.ip), backend.port)
        self._write(backend.key, backend_value(address, backend.state))

    def remove_backend(self, backend: Backend) -> None:
        """Remove the backend, though slots may still name it."""
        self._maps[backend.key.map].delete(backend.key.key)

    def part(self, number: int, backend: Backend) -> None:
        """End the affinity of the frontend's clients to the backend."""
        where = affinity_key(number, backend.number)
        self._maps[where.map].delete(where.key)

    def age_clients(self, seconds: int) -> None:
        """Move the times of session affinity entries back."""
        for name in ("cilium_lb4_affinity", "cilium_lb6_affinity"):
            for key, value in list(self._maps[name].items()):
                last, rest = struct.unpack("<Q8s", value)
                self._maps[name].update(key, struct.pack("<Q8s", last - seconds, rest))

    def _write(self, where: MapKey, value: bytes) -> None:
        self._maps[where.map].update(where.key, value)


@dataclass
class ServiceModel:
    """Backends with their states, and the backend of each open connection."""

    backends: dict[int, BackendState] = field(default_factory=dict)
    served: dict[tuple[str, int], int] = field(default_factory=dict)

    def serves(self, connection: tuple[str, int], *, begins: bool) -> set[int]:
        """Return the allowed backends for a packet: its own while usable, else any active one."""
        number = self.served.get(connection)
        if number in self.backends and (self.backends[number] is BackendState.ACTIVE or not begins):
            return {number}
        return {each for each, state in self.backends.items() if state is BackendState.ACTIVE}
