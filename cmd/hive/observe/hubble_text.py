"""Formats times, durations, tables and JSON like Cilium's ``hubble``, and the status of a server.

Source: the hubble CLI of Cilium 1.17.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from cells.hubble.codec import to_json
from cells.hubble.rpc.observer import ServerStatusResponse
from cells.hubble.scalars import is_valid_time
from hive.dbg.go_text import go_duration

_FORMATS: Final = {
    "stampmilli": ("%b %e %H:%M:%S", 3, ""),
    "yearmonthday": ("%Y-%m-%d", 0, ""),
    "yearmonthdayhour": ("%Y-%m-%dT%H", 0, "Z"),
    "yearmonthdayhourminute": ("%Y-%m-%dT%H:%M", 0, "Z"),
    "rfc3339": ("%Y-%m-%dT%H:%M:%S", 0, "Z"),
    "rfc3339milli": ("%Y-%m-%dT%H:%M:%S", 3, "Z"),
    "rfc3339micro": ("%Y-%m-%dT%H:%M:%S", 6, "Z"),
    "rfc3339nano": ("%Y-%m-%dT%H:%M:%S", 9, "Z"),
    "rfc1123z": ("%a, %d %b %Y %H:%M:%S +0000", 0, ""),
}
"""Layout, digits of the fraction (without trailing zeros if a zone follows), and the zone."""


def time_text(nanoseconds: int | None, name: str) -> str:
    """Format a time in UTC with a named format; the default is StampMilli."""
    if nanoseconds is None or not is_valid_time(nanoseconds):
        return "N/A"
    layout, digits, zone = _FORMATS.get(name.lower(), _FORMATS["stampmilli"])
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    fraction = f"{rest:09d}"[:digits]
    if zone:
        fraction = fraction.rstrip("0")
    return moment.strftime(layout) + (f".{fraction}" if fraction else "") + zone


def json_text(tree: object, *, indent: int = 0) -> str:
    """Return JSON like Go: without blanks, with <, > and & escaped."""
    text = msgspec.json.encode(tree)
    if indent:
        text = msgspec.json.format(text, indent=indent)
    found = text.decode()
    for sign in "<>&\u2028\u2029":
        found = found.replace(sign, f"\\u{ord(sign):04x}")
    return found


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Align cells in columns, three blanks apart; after a row with fewer cells the columns start anew."""
    for number, row in enumerate(rows):
        yield "".join(
            cell.ljust(max(_width(rows, number, column) + 3, 2)) if column < len(row) - 1 else cell
            for column, cell in enumerate(row)
        )


def _width(rows: Sequence[Sequence[str]], number: int, column: int) -> int:
    """Return the widest cell of a column, in adjacent rows that have it before their last cell."""
    first = last = number
    while first > 0 and len(rows[first - 1]) > column + 1:
        first -= 1
    while last + 1 < len(rows) and len(rows[last + 1]) > column + 1:
        last += 1
    return max(len(row[column]) for row in rows[first : last + 1])


def status_lines(status: ServerStatusResponse, output: str) -> list[str]:
    """Yield the status of a server. Raises ValueError for an unknown format."""
    seconds = status.uptime_ns / 1e9
    rate = f"{status.flows_rate:.2f}" if status.flows_rate > 0 else "N/A"
    connected, unavailable = status.num_connected_nodes, status.num_unavailable_nodes
    if output in {"json", "jsonpb", "JSON"}:
        return [json_text(to_json(status))]
    if output == "compact":
        if rate == "N/A" and seconds > 0 and status.seen_flows:
            rate = f"{status.seen_flows / seconds:.2f}"
        share = f" ({status.num_flows / status.max_flows:.2%})" if status.max_flows else ""
        lines = [f"Current/Max Flows: {status.num_flows:,}/{status.max_flows:,}{share}", f"Flows/s: {rate}"]
        if connected is not None:
            total = "" if unavailable is None else f"/{connected + unavailable}"
            lines.append(f"Connected Nodes: {connected}{total}")
        if unavailable:
            lines.append(f"Unavailable Nodes: {unavailable}")
            lines += [f"  - {name}" for name in sorted(status.unavailable_nodes)]
            if status.unavailable_nodes and (more := unavailable - len(status.unavailable_nodes)) > 0:
                lines.append(f"  - and {more} more...")
        return lines
    values = {
        "NUM FLOWS": f"{status.num_flows:,}",
        "MAX FLOWS": f"{status.max_flows:,}",
        "SEEN FLOWS": f"{status.seen_flows:,}",
        "FLOWS PER SECOND": rate,
        "UPTIME": go_duration(status.uptime_ns),
        "NUM CONNECTED NODES": "N/A" if connected is None else str(connected),
        "NUM UNAVAILABLE NODES": "N/A" if unavailable is None else str(unavailable),
        "VERSION": status.version,
    }
    if output == "dict":
        short = {"NUM UNAVAILABLE NODES": "NUM UNAVAIL. NODES"}
        return [f"{short.get(name, name):>19}: {text}" for name, text in values.items()]
    if output in {"table", "tab"}:
        return list(aligned([list(values), list(values.values())]))
    raise ValueError(f"invalid output format: {output}")
