"""StateDB tables in the form of Cilium's clients, e.g. for ``cilium-dbg statedb devices``.

Each row is a line of the response. Devices and routes are read from the kernel for each request, because no
table of this agent has all of them.

Source: Cilium 1.17, GET /statedb/query with its JSON body.
"""

from __future__ import annotations

import binascii
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Mapping
from typing import Any, Final

import msgspec
from anyio import to_thread

from cells.api.models.hive import (
    CiliumRow,
    DeviceAddrRow,
    DeviceRow,
    Failure,
    HealthID,
    HealthStatusRow,
    L2AnnounceRow,
    NodeAddressRow,
    NodeRouteRow,
    OriginRow,
    Query,
    ReconcilerStatus,
    SysctlRow,
)
from cells.api.operations import ApiPart, Route
from cells.api.operations.endpoint_models import NEVER, rfc3339
from cells.api.operations.status import LEVELS
from cells.api.wire import JSON, answer, read_body
from cells.netlink.connection import NetlinkError
from cells.netlink.rows import LinkRow, list_addresses, list_links, list_routes, mac_text
from cells.node.addresses import NodeAddresses, device_addresses, node_addresses
from cells.node.devices import Device
from lifecycle import HealthStatus, HealthTree, Member, Table, Tables
from lifecycle.http import Request, Response
from lifecycle.tables import ObjectStatus

BY_ID, BY_REVISION = "identifier", "__revision__"
MODULE_PARTS = 2
"""Number of elements of an ID such as ``agent.ipam.expire`` that name the module."""
_GO_FLAGS: Final = ((0x1, 1), (0x2, 2), (0x8, 4), (0x10, 8), (0x1000, 16), (0x40, 32))
"""Flags of linux/if.h and of Go's net: up, broadcast, loopback, point-to-point, multicast, running."""
_OURS: Final = ("lxc", "cilium_")
_KINDS: Final = {"pending": "pending", "done": "done", "failed": "error"}
_NOT_BUILT: Final = {
    "nat-stats": "NAT entries are not counted by source port",
    "bandwidth-qdiscs": "the bandwidth manager is not built",
    "ipsets": "masquerading uses no ipsets",
}

Rows = Mapping[Hashable, object]


class CiliumTables:
    """Answers queries of the tables that ``cilium-dbg`` shows."""

    def __init__(
        self,
        health: HealthTree,
        tables: Tables,
        devices: Table[int, Device],
        addresses: NodeAddresses | None = None,
    ) -> None:
        self._health = health
        self._tables = tables
        self._devices = devices
        self._addresses = addresses
        self._revisions: dict[str, Revisions] = {}
        self._readers: dict[str, Callable[[], Awaitable[Rows]]] = {
            "health": self._read_health,
            "devices": self._read_devices,
            "routes": self._read_routes,
            "node-addresses": self._read_node_addresses,
            "l2-announce": self._read_l2_announcements,
            "sysctl": self._read_sysctls,
        }

    async def query(self, request: Request) -> Response:
        """GET /statedb/query: 404 for an unknown table, 400 for an unknown index or key."""
        requested = read_body(request, Query, "query")
        if requested.table not in self._readers:
            reason = _NOT_BUILT.get(requested.table, f"there are: {', '.join(sorted(self._readers))}")
            return answer(404, Failure(err=f"table {requested.table!r} not found: {reason}"))
        indexes = (BY_ID, BY_REVISION) if requested.table == "health" else (BY_REVISION,)
        if requested.index not in indexes:
            return answer(400, Failure(err=f"no index {requested.index!r}: expected {' or '.join(indexes)}"))
        try:
            key = binascii.a2b_base64(requested.key, strict_mode=True) if requested.key else b""
        except (binascii.Error, ValueError) as error:
            return answer(400, Failure(err=f"key is not base64: {error}"))
        try:
            rows = await self._readers[requested.table]()
        except (NetlinkError, OSError) as error:
            return answer(500, Failure(err=f"cannot read the node's {requested.table}: {error}"))
        revisions = self._revisions.setdefault(requested.table, Revisions())
        lines = []
        for revision, name, row in revisions.of(rows, by_name=requested.index == BY_ID):
            own = str(name).encode() if requested.index == BY_ID else revision.to_bytes(8, "big")
            if own == key or (requested.lowerbound and own > key):
                lines.append(msgspec.json.encode(CiliumRow(rev=revision, obj=row)))
        return Response(200, b"".join(line + b"\n" for line in lines), JSON)

    async def _read_health(self) -> Rows:
        reports = self._health.snapshot()
        return {each.module: _health_row(each) for each in reports if each.level != "unknown"}

    async def _read_devices(self) -> Rows:
        links = await to_thread.run_sync(list_links)
        addresses: dict[int, list[DeviceAddrRow]] = {}
        for each in await to_thread.run_sync(list_addresses):
            row = DeviceAddrRow(addr=str(each.address), secondary=each.secondary, scope=each.scope)
            addresses.setdefault(each.ifindex, []).append(row)
        native = self._native_devices()
        return {
            link.ifindex: DeviceRow(
                index=link.ifindex,
                mtu=link.mtu,
                name=link.name,
                hardware_addr=mac_text(link.mac) if any(link.mac) else "",
                flags=sum(go for flag, go in _GO_FLAGS if link.flags & flag),
                addrs=addresses.get(link.ifindex, []),
                raw_flags=link.flags,
                type=link.kind or "device",
                master_index=link.master,
                selected=link.ifindex in native,
                not_selected_reason="" if link.ifindex in native else self._not_selected_reason(link),
            )
            for link in links
        }

    async def _read_routes(self) -> Rows:
        rows = [
            NodeRouteRow(
                table=each.table,
                link_index=each.ifindex,
                scope=each.scope,
                dst=str(each.destination),
                src=str(each.source or ""),
                gw=str(each.gateway or ""),
            )
            for each in await to_thread.run_sync(list_routes)
        ]
        return {row: row for row in rows}

    async def _read_node_addresses(self) -> Rows:
        devices = self._devices.all()
        native = self._native_devices()
        known = list(self._addresses.all().values()) if self._addresses is not None else []
        served = {(row.ip, row.device) for row in self._table("node-port-addresses")}
        uses = node_addresses(
            [device_addresses(each, [one for one in devices if one.ifindex in native]) for each in devices],
            known,
        )
        return {
            (one.device, one.address): NodeAddressRow(
                addr=str(one.address),
                node_port=(one.address, one.device) in served,
                primary=one.primary,
                device_name=one.device,
            )
            for one in uses
        }

    async def _read_l2_announcements(self) -> Rows:
        found: dict[Hashable, object] = {}
        for row in self._table("l2-announce"):
            services = [
                OriginRow(namespace=a, name=b) for a, _, b in (s.partition("/") for s in row.services)
            ]
            found[row.ip, row.device] = L2AnnounceRow(
                ip=str(row.ip), network_interface=row.device, origins=services
            )
        return found

    async def _read_sysctls(self) -> Rows:
        statuses: dict[Hashable, ObjectStatus] = {row.key: row for row in self._table("sysctls-status")}
        return {
            row.name: SysctlRow(
                name=row.name.split("/"),
                val=row.value,
                ignore_err=False,
                warn="",
                status=_status(statuses.get(row.name)),
            )
            for row in self._table("sysctls")
        }

    def _native_devices(self) -> Collection[int]:
        """Return the ifindexes of devices with the programs of native devices."""
        return {row.ifindex for row in self._table("native-devices")}

    def _not_selected_reason(self, link: LinkRow) -> str:
        """Return why a link is not a native device."""
        device = self._devices.get(link.ifindex)
        ours = next((prefix for prefix in _OURS if link.name.startswith(prefix)), None)
        if ours is not None:
            return f'has excluded prefix "{ours}"'
        if not link.flags & 1:
            return "link is down"
        if device is None or not device.addresses:
            return "has no address"
        if not device.selected:
            return "is not among the setting devices"
        return "no feature in use needs programs there"

    def _table(self, name: str) -> list[Any]:
        """Read the rows of a table; none if no feature of this agent fills it."""
        found = [each for each in self._tables.all() if each.name == name]
        return found[0].all() if found else []


class Revisions:
    """Numbers changes of rows that are read per query, so that clients can request only newer ones."""

    def __init__(self) -> None:
        self._last = 0
        self._seen: dict[Hashable, tuple[int, object]] = {}

    def of(self, rows: Rows, *, by_name: bool) -> Iterator[tuple[int, Hashable, object]]:
        """Return (revision, key, row) in order of revision or key; a changed row gets a new revision."""
        seen: dict[Hashable, tuple[int, object]] = {}
        for name, row in rows.items():
            known = self._seen.get(name)
            if known is None or known[1] != row:
                self._last += 1
                known = self._last, row
            seen[name] = known
        self._seen = seen
        order = sorted(seen, key=str) if by_name else sorted(seen, key=lambda name: seen[name][0])
        return ((seen[name][0], name, seen[name][1]) for name in order)


def _health_row(status: HealthStatus) -> HealthStatusRow:
    parts, when = status.module.split("."), rfc3339(status.since)
    stopped = status.level == "stopped"
    return HealthStatusRow(
        id=HealthID(module=parts[:MODULE_PARTS], component=parts[MODULE_PARTS:]),
        level=LEVELS[status.level],
        message=status.message,
        error=status.error or "",
        last_ok=when if status.level == "ok" else NEVER,
        updated=when,
        stopped=when if stopped else NEVER,
        final=status.message if stopped else "",
        count=1,
    )


def _status(status: ObjectStatus | None) -> ReconcilerStatus:
    if status is None:
        return ReconcilerStatus(kind="pending", updated_at=NEVER, error="", id=0)
    return ReconcilerStatus(
        kind=_KINDS[status.state], updated_at=rfc3339(status.since), error=status.error or "", id=1
    )


def part(tables: CiliumTables) -> Member[ApiPart]:
    """Provide the operations."""
    return ApiPart("cilium-tables", [Route("GET", "/statedb/query", tables.query)])
