"""The services of an agent over maps in memory."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

import structlog

from cells import kubernetes
from cells.config import AgentConfig, AgentSettings
from cells.config import shared as service_settings
from cells.services import (
    BackendState,
    FrontendKey,
    ServiceAddress,
    control,
)
from cells.services.control import ServedFrontend, ServiceMaps
from cells.services.control.tables import MapFullError
from cells.services.map_entries import (
    Batch,
    Entries,
    MapKey,
    backend_value,
    service_key,
)
from lifecycle import Cell, Hive, Lifecycle, Table, invoke, replace, supply

VIP = FrontendKey(ServiceAddress(ip_address("10.96.0.10"), 80, 6))
SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10]
  ports: [{name: http, port: 80, protocol: TCP}]
"""
SLICE = """
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [10.0.0.1]}, {addresses: [10.0.0.2]}]
ports: [{name: http, port: 8080, protocol: TCP}]
"""


class FakeServiceMaps:
    """Maps that may be full, and that other programs may write to."""

    def __init__(self) -> None:
        self.entries: dict[MapKey, bytes] = {}
        self.full = False
        self.room: int | None = None
        """The total number of entries that fit; None: unlimited."""
        self.broken = False

    async def dump(self) -> Entries:
        found: Entries = {}
        for where, value in self.entries.items():
            found.setdefault(where.map, {})[where.key] = value
        return found

    def write(self, batch: Batch) -> None:
        for where, value in batch.writes():
            if self.broken:
                raise OSError(errno.EIO, "the map cannot be written")
            if value is None:
                self.entries.pop(where, None)
            elif where not in self.entries and (self.full or len(self.entries) == self.room):
                raise MapFullError(f"{where.map} is full: raise bpf-lb-map-max")
            else:
                self.entries[where] = value

    async def write_tables(self, batch: Batch) -> None:
        self.write(batch)

    @property
    def backends(self) -> set[bytes]:
        return {value for where, value in self.entries.items() if "_backends_" in where.map}

    def slots(self) -> int:
        """Return the backend count in slot 0 of the frontend; -1 without the frontend."""
        master = self.entries.get(service_key(VIP, 0))
        return int.from_bytes(master[4:6], "little") if master is not None else -1


@asynccontextmanager
async def agent(
    folder: Path | None, maps: FakeServiceMaps, operations: Sequence[Cell] = (), **settings: str
) -> AsyncIterator[Hive]:
    """Run the services of a node with objects from a folder's files; None: without a source."""
    known = AgentConfig(AgentSettings(), Lifecycle("test"), structlog.get_logger())

    def needed(_: Table[FrontendKey, ServedFrontend]) -> None: ...

    hive = Hive(
        kubernetes.cell,
        service_settings.cell,
        control.cell,
        supply(known),
        replace(ServiceMaps, maps),
        invoke(needed),
        *operations,
        settings=({"manifests-dir": str(folder)} if folder is not None else {})
        | {name.replace("_", "-"): value for name, value in settings.items()},
    )
    async with hive.started():
        yield hive


def backend(ip: str) -> bytes:
    return backend_value(ServiceAddress(ip_address(ip), 8080, 6), BackendState.ACTIVE)
