"""A node with socket load balancing in a cgroup of its own, and the clients' view of it."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cells import config, maps
from cells.config import shared as service_settings
from cells.datapath.settings import DatapathSettings, service_programs
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.flows import ReverseSk, ReverseSkKey
from cells.observe import events
from cells.observe.events import Events
from cells.services import FrontendKey, sockets
from cells.services.control import ServedFrontend
from cells.services.control.tables import served_frontends
from cells.services.sockets import SocketLB
from lifecycle import Hive, Table, invoke, provide
from lifecycle import config as settings_of
from tests.kernel.datapath_services.services import Services
from tests.support.all_maps import every_map
from tests.support.cgroups import join

SO_COOKIE = 57
HOST, REMOTE_NODE = 1, 6
SMALL = {
    "bpf-ct-global-tcp-max": "1024",
    "bpf-ct-global-any-max": "1024",
    "bpf-nat-global-max": "1024",
    "bpf-sock-rev-map-max": "1024",
    "policy-map-pool": "1",
}
PINS = Path("/sys/fs/bpf/cilium/socketlb/links/cgroup")


@dataclass(frozen=True, slots=True)
class Served:
    """The parts of a started hive that tests use."""

    sockets: SocketLB
    maps: Maps
    services: Services
    table: Table[FrontendKey, ServedFrontend]
    events: Events

    def remembered(self, client: socket.socket, backend: str, port: int) -> ReverseSk | None:
        """Return the frontend that the socket requested when it was sent to the backend."""
        key = ReverseSkKey(cookie_of(client), ip_address(backend), port)
        table = self.maps.reverse_sk4 if key.ip.version == 4 else self.maps.reverse_sk6
        value = table.lookup(key.pack())
        return None if value is None else ReverseSk.unpack(value)

    def backends_of(self, client: socket.socket) -> set[tuple[str, int]]:
        """Return the backends that the socket was sent to."""
        cookie = cookie_of(client)
        keys = [
            ReverseSkKey.unpack(key)
            for table in (self.maps.reverse_sk4, self.maps.reverse_sk6)
            for key, _ in table.items()
        ]
        return {(str(key.ip), key.port) for key in keys if key.cookie == cookie}

    def report(self, *frontends: ServedFrontend) -> None:
        """Set the frontends that the agent serves; all others are removed."""
        with self.table.txn() as rows:
            rows.replace_all(frontends)

    def belongs_to(self, ip: str, identity: int) -> None:
        """Set the owner of the address."""
        self.maps.ipcache.update(
            IpcacheKey.host(ip_address(ip)).pack(), IpcacheValue(identity=identity).pack()
        )


@asynccontextmanager
async def serving(group: Path, **settings: str) -> AsyncIterator[Served]:
    """Run a node that serves its maps' frontends to this process and its children."""
    join(group)

    def use(
        used: SocketLB, tables: Maps, rows: Table[FrontendKey, ServedFrontend], heard: Events
    ) -> None: ...

    hive = Hive(
        config.cell,
        maps.cell,
        events.cell,
        settings_of(DatapathSettings),
        service_settings.cell,
        sockets.cell,
        provide(service_programs),
        provide(served_frontends),
        invoke(use, every_map),
        settings=SMALL
        | {"bpf-lb-sock": "true", "cgroup-root": str(group)}
        | {name.replace("_", "-"): value for name, value in settings.items()},
    )
    async with hive.started():
        tables = hive.get(Maps)
        written = Services({table.spec.name: table for table in tables.all()})
        rows, heard = hive.get(Table[FrontendKey, ServedFrontend]), hive.get(Events)
        yield Served(hive.get(SocketLB), tables, written, rows, heard)


def cookie_of(client: socket.socket) -> int:
    """Return the socket's cookie."""
    (cookie,) = struct.unpack("=Q", client.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8))
    return int(cookie)
