"""``cilium-dbg statedb``: tables of the agent, with Cilium's names and columns.

Source: Cilium 1.17, cilium-dbg/cmd/statedb.go and the TableRow() of each table's objects.
"""

import base64
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import click

from hive.dbg.go_text import ago, aligned, socket_text
from hive.dbg.main import Group
from hive.dbg.requests import RequestFailedError, decoded, send

Row = dict[str, Any]

_FIRST: Final = base64.b64encode(bytes(8)).decode()
"""The key of revision 0: all rows."""
_LINK_FLAGS: Final = ("up", "broadcast", "loopback", "pointtopoint", "multicast", "running")


def _status(row: Row) -> str:
    status = row.get("Status") or {}
    kind, since = status.get("Kind", ""), ago(status.get("UpdatedAt"))
    return f"{kind} ({since})" if not status.get("Error") else f"{kind}: {status['Error']} ({since})"


def _seconds(text: object) -> str:
    return re.sub(r"\.\d+(?=Z|[+-])", "", str(text or ""))


def _flags(row: Row) -> str:
    number = int(row.get("Flags") or 0)
    return "|".join(name for bit, name in enumerate(_LINK_FLAGS) if number >> bit & 1) or "0"


def _addresses(row: Row) -> str:
    return ", ".join(one.get("Addr", "") for one in row.get("Addrs") or ())


def _name(part: str) -> Callable[[Row], str]:
    return lambda row: ".".join((row.get("ID") or {}).get(part) or ())


Cell = str | Callable[[Row], object]

TABLES: Final[dict[str, dict[str, Cell]]] = {
    "bandwidth-qdiscs": {
        **{name: name for name in ("LinkIndex", "LinkName", "FqHorizon", "FqBuckets")},
        "Status": _status,
    },
    "devices": {
        **{name: name for name in ("Name", "Index", "Selected", "Type", "MTU")},
        "HWAddr": "HardwareAddr",
        "Flags": _flags,
        "Addresses": _addresses,
    },
    "health": {
        "Module": _name("Module"),
        "Component": _name("Component"),
        **{name: name for name in ("Level", "Message", "Error")},
        "LastOK": lambda row: _seconds(row.get("LastOK")),
        "UpdatedAt": lambda row: _seconds(row.get("Updated")),
        "Count": "Count",
    },
    "ipsets": {**{name: name for name in ("Name", "Family", "Addr")}, "Status": _status},
    "l2-announce": {name: name for name in ("IP", "NetworkInterface")},
    "nat-stats": {
        "IPFamily": "Type",
        "Proto": "Proto",
        "EgressIP": "EgressIP",
        "RemoteAddr": lambda row: socket_text(row.get("EndpointIP", ""), row.get("RemotePort", 0)),
        "Count": "Count",
    },
    "node-addresses": {"Address": "Addr", **{n: n for n in ("NodePort", "Primary", "DeviceName")}},
    "routes": {
        "Destination": "Dst",
        "Source": "Src",
        "Gateway": "Gw",
        **{name: name for name in ("LinkIndex", "Table", "Scope")},
    },
    "sysctl": {"Name": lambda row: ".".join(row.get("Name") or ()), "Value": "Val", "Status": _status},
}
"""Tables with a command, and their columns: a key of the row, or a function that returns the cell."""
_WATCH: Final = click.option(
    "-w", "--watch", default="", help="Watch for new changes after the given interval"
)


@click.group(cls=Group)
def command() -> None:
    """Inspect StateDB"""


@command.command()
def dump() -> None:
    """Dump StateDB contents as JSON"""
    try:
        status, content = send("GET", "/statedb/dump")
    except RequestFailedError as error:
        raise click.ClickException(str(error)) from error
    if status != 200:
        raise click.ClickException(f"GET /statedb/dump was answered with {status}")
    click.echo(content.decode(errors="replace"), nl=False)


def _add(name: str, columns: dict[str, Cell]) -> None:
    @_WATCH
    def show(watch: str) -> int:
        if watch:
            raise click.ClickException("--watch is not available with this agent: use hive db watch")
        return _print(name, columns)

    command.add_command(click.command(name, help=f'Show contents of table "{name}"')(show))


def _print(name: str, columns: dict[str, Cell]) -> int:
    lines = ["# " + "\t".join(columns)]
    failure = None
    try:
        lines += ["\t".join(_cell(row, cell) for cell in columns.values()) for row in _rows(name)]
    except RequestFailedError as error:
        failure = error
    click.echo(aligned("\n".join(lines)))
    if failure is not None:
        raise click.ClickException(f"LowerBound: {failure}")
    return 0


def _cell(row: Row, cell: Cell) -> str:
    value = row.get(cell, "") if isinstance(cell, str) else cell(row)
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def _rows(name: str) -> Iterator[Row]:
    """Return all rows of a table. Raises RequestFailedError with the agent's reason."""
    query = {"key": _FIRST, "table": name, "index": "__revision__", "lowerbound": True}
    status, content = send("GET", "/statedb/query", query)
    for one in [decoded(line) for line in content.splitlines() if line.strip()]:
        if reason := one.get("err"):
            raise RequestFailedError(reason, status)
        if "obj" in one:
            yield one["obj"]


for _table, _columns in TABLES.items():
    _add(_table, _columns)
