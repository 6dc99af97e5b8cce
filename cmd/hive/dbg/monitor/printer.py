"""Events in the lines of Cilium's monitor: text, JSON, or all headers of their packets.

In: samples of the monitor socket. Out: lines for ``cilium-dbg monitor``.

Source: Cilium 1.17, pkg/monitor (datapath_*.go, format, api).
"""

import json
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import click

from cells.hubble.enums import DebugEventType
from cells.hubble.parser.node_events import debug_text
from cells.hubble.parser.packet import ip_text
from cells.observe.events import (
    MATCH_TYPES,
    OBSERVATION_POINTS,
    SOCKET_POINTS,
    SOCKET_PROTOCOLS,
    AgentNotification,
    Lost,
    Sample,
    decode,
    gob,
    notification_name,
)
from hive.dbg.bpf.features import FILES
from hive.dbg.go_text import json_line
from hive.dbg.monitor.packets import connection_summary, dissected_lines, hex_dump, summary
from hive.dbg.monitor.requests import request_line, request_record
from hive.observe.hubble_printer import RESERVED, drop_reason

DROP, DEBUG, CAPTURE, TRACE, VERDICT, RECORDER, TRACE_SOCK, L7, AGENT = 1, 2, 3, 4, 5, 6, 7, 129, 130
TYPES: Final = {
    "agent": AGENT,
    "capture": CAPTURE,
    "debug": DEBUG,
    "drop": DROP,
    "l7": L7,
    "policy-verdict": VERDICT,
    "recorder": RECORDER,
    "trace": TRACE,
    "trace-sock": TRACE_SOCK,
}
_SEPARATOR: Final = "-" * 78
_HEAD: Final = struct.Struct("<BBHIIHH")  # type, subtype, source, mark, length, captured length, version
_DROP: Final = struct.Struct("<IIIHBbI")
_TRACE: Final = struct.Struct("<IIHBBI")
_VERDICT: Final = struct.Struct("<IiHBBB3x")
_DEBUG: Final = struct.Struct("<BBHIIII")
_CAPTURE: Final = struct.Struct("<BBHIIIII")
_SOCK: Final = struct.Struct("<BB16sHQQBB")
_REASONS: Final = {
    0: "new",
    1: "established",
    2: "reply",
    3: "related",
    4: "reopened",
    5: "unknown",
    6: "srv6-encap",
    7: "srv6-decap",
    8: "encrypt-overlay",
}
_ENCRYPTED: Final = 0x80
_TO_PROXY: Final = 1
_PATHS: Final = {
    2: "-> host from",
    3: "-> stack",
    4: "-> overlay",
    6: "<- proxy",
    7: "<- host",
    8: "<- stack",
    9: "<- overlay",
    10: "<- network",
    11: "-> network",
}
_AUTH: Final = {0: "disabled", 1: "spire", 2: "test-always-fail"}
_CAPTURED: Final = {
    4: "Delivery to ifindex {0}",
    5: "Incoming packet to load balancer on ifindex {0}",
    6: "Packet after nat46 ifindex {0}",
    7: "Packet after nat64 ifindex {0}",
    8: "Packet to proxy port {1} (Pre)",
    9: "Packet to proxy port {1} (Post)",
    10: "Packet going into snat engine on ifindex {0}",
    11: "Packet coming from snat engine on ifindex {0}",
}


class _TooShortError(ValueError):
    """An event that is shorter than its header, or of an unknown version."""


class Printer:
    """How events are printed, and which: those of all types and endpoints, unless some are named."""

    def __init__(
        self,
        *,
        types: Iterable[int] = (),
        sources: Iterable[int] = (),
        destinations: Iterable[int] = (),
        related: Iterable[int] = (),
        verbosity: int = 0,
        as_json: bool = False,
        as_hex: bool = False,
        numeric: bool = False,
    ) -> None:
        self.types, self.sources = frozenset(types), frozenset(sources)
        self.destinations, self.related = frozenset(destinations), frozenset(related)
        self.verbosity, self.as_json, self.as_hex, self.numeric = verbosity, as_json, as_hex, numeric
        self._dissecting = False
        self._cpu = 0

    def event(self, event: Sample | Lost) -> Iterator[str]:
        """The lines of an event: none for one that is not to be shown.

        An event of CPU 0 has the CPU of the event before it, as in Cilium: its client decodes all events into
        one struct, and gob leaves out zeros.
        """
        self._cpu = event.cpu or self._cpu
        prefix = f"CPU {self._cpu:02}:"
        if isinstance(event, Lost):
            yield f"{prefix} Lost {event.count} events"
            return
        show = _SHOWN.get(event.data[0]) if event.data else None
        if show is None:
            yield f"{prefix} Unknown event: [{' '.join(map(str, event.data))}]"
            return
        what, lines = show
        try:
            yield from lines(self, event.data, prefix)
        except (_TooShortError, ValueError) as error:
            yield f"Error while {what}: {error}"

    def _wants(self, kind: int, source: int = 0, destination: int = 0) -> bool:
        return (
            (not self.types or kind in self.types)
            and (not self.sources or source in self.sources)
            and (not self.destinations or destination in self.destinations)
            and (not self.related or source in self.related or destination in self.related)
        )

    def _identity(self, number: int) -> str:
        return str(number) if self.numeric else RESERVED.get(number, str(number))

    def _summary(self, packet: bytes) -> str:
        self._begin_dissection()
        return connection_summary(packet)

    def _begin_dissection(self) -> None:
        if not self._dissecting:
            self._dissecting = True
            log_line("info", "Initializing dissection cache...", "monitor")

    def _packet(self, packet: bytes) -> Iterator[str]:
        if self.as_hex:
            yield from hex_dump(packet)
        else:
            self._begin_dissection()
            yield from dissected_lines(packet)

    def _record(self, prefix: str, packet: bytes, **fields: Any) -> str:
        """A line of JSON, with the headers of a packet, if there is one."""
        record = {"cpu": prefix, **fields}
        if packet:
            self._begin_dissection()
            record["summary"] = summary(packet)
        return json_line({name: value for name, value in record.items() if value != ""})

    def drop(self, data: bytes, prefix: str) -> Iterator[str]:
        """A dropped packet."""
        _, reason, source, mark, length, captured, version = _head(data, 36, "DropNotify")
        from_, to, destination, line, file, extended, ifindex = _DROP.unpack_from(data, 16)
        if version > 2:
            raise _TooShortError(f"Unrecognized drop event (version {version})")
        packet = data[40 if version == 2 else 36 :]
        if not self._wants(DROP, source, destination & 0xFFFF):
            return
        why = drop_reason(reason, extended)
        if self.as_json:
            yield self._record(
                prefix,
                packet if captured else b"",
                type="drop",
                mark=f"{mark:#x}",
                reason=why,
                source=source,
                bytes=length,
                srcLabel=from_,
                dstLabel=to,
                dstID=destination,
                Line=line,
                File=file,
                ExtError=extended,
                Ifindex=ifindex,
            )
            return
        identities = f", identity {self._identity(from_)}->{self._identity(to)}"
        if self.verbosity < 2:
            where = f"{FILES.get(file, f'unknown({file})')}:{line}"
            yield (
                f"xx drop ({why}) flow {mark:#x} to endpoint {destination}, ifindex {ifindex}, file {where}, "
                f"{identities}: {self._summary(packet)}"
            )
            return
        yield _SEPARATOR
        known = identities if from_ or to else ""
        to_endpoint = f", to endpoint {destination}" if destination else ""
        yield f"{prefix} MARK {mark:#x} FROM {source} DROP: {length} bytes, reason {why}{known}{to_endpoint}"
        if captured and packet:
            yield from self._packet(packet)

    def trace(self, data: bytes, prefix: str) -> Iterator[str]:
        """A packet that was seen at a point of the datapath."""
        _, point, source, mark, length, captured, version = _head(data, 32, "TraceNotify")
        from_, to, destination, reason, flags, ifindex = _TRACE.unpack_from(data, 16)
        if version > 1:
            raise _TooShortError(f"Unrecognized trace event (version {version})")
        start = 48 if version else 32
        if len(data) < start:
            raise _TooShortError(_too_short("TraceNotify", f" (version {version})", start, len(data)))
        packet, original = data[start:], data[32:48] if version else bytes(16)
        if not self._wants(TRACE, source, destination):
            return
        path = _path_of(point, source, destination)
        state = _REASONS.get(reason & ~_ENCRYPTED, str(reason))
        link = _link_name(ifindex)
        if self.as_json:
            yield self._record(
                prefix,
                packet if captured else b"",
                type="trace",
                mark=f"{mark:#x}",
                ifindex=link,
                state=state,
                observationPoint=OBSERVATION_POINTS.get(point, str(point)),
                traceSummary=path,
                source=source,
                bytes=length,
                srcLabel=from_,
                dstLabel=to,
                dstID=destination,
            )
            return
        identities = f", identity {self._identity(from_)}->{self._identity(to)}"
        original_ip = ip_text(original if flags & 1 else original[:4])
        if self.verbosity < 2:
            encrypted = " encrypted " if reason & _ENCRYPTED else ""
            yield (
                f"{path}{encrypted} flow {mark:#x} {identities} state {state} ifindex {link}"
                f" orig-ip {original_ip}: {self._summary(packet)}"
            )
            return
        yield _SEPARATOR
        end = "proxy-port" if point == _TO_PROXY else "endpoint"
        where = OBSERVATION_POINTS.get(point, str(point))
        yield (
            f"{prefix} MARK {mark:#x} FROM {source} {where}: {length} bytes"
            f" ({captured} captured), state {state}"
            + (f", interface {link}" if ifindex else "")
            + (f", {identities}" if from_ or to else "")
            + f", orig-ip {original_ip}"
            + (f", to {end} {destination}" if destination else "")
        )
        if captured and packet:
            yield from self._packet(packet)

    def verdict(self, data: bytes, _: str) -> Iterator[str]:
        """A verdict of the policy: always a line of text."""
        _, _, source, mark, *_rest = _head(data, 32, "PolicyVerdictNotify")
        remote, verdict, _port, protocol, flags, auth = _VERDICT.unpack_from(data, 16)
        if not self._wants(VERDICT, source, remote & 0xFFFF):
            return
        action = "deny" if verdict < 0 else "redirect" if verdict else "allow"
        authentication = _AUTH.get(auth, f"Unknown-auth-type-{auth}")
        yield (
            f"Policy verdict log: flow {mark:#x} local EP ID {source}, remote ID {self._identity(remote)},"
            f" proto {protocol}, {'ingress' if flags & 3 == 1 else 'egress'},"
            f" action {'audit' if flags & 0x40 else action}, auth: {authentication},"
            f" match {MATCH_TYPES.get(flags >> 3 & 7, 'unknown')}, {self._summary(data[32:])}"
        )

    def debug(self, data: bytes, prefix: str) -> Iterator[str]:
        """A message of the datapath, with -v."""
        _, kind, source, mark, first, second, third = _unpack(_DEBUG, data, "DebugMsg")
        if not self._wants(DEBUG, source) or (not self.verbosity and not self.as_json):
            return
        text = debug_text(kind, first, second, third)
        if kind == DebugEventType.DBG_LXC_FOUND:
            text = text.replace("ifindex ", f"ifindex {_link_name(first)}")
        if self.as_json:
            yield f'{{"cpu":{json_line(prefix)},"type":"debug","message":{json.dumps(text)}}}'
        else:
            yield f"{prefix} MARK {mark:#x} FROM {source} DEBUG: {text}"

    def capture(self, data: bytes, prefix: str) -> Iterator[str]:
        """A packet that the datapath captured."""
        _, kind, source, mark, length, _, first, _ = _unpack(_CAPTURE, data, "DebugCapture")
        packet, port = data[24:], (first & 0xFF) << 8 | first >> 8 & 0xFF
        if not self._wants(CAPTURE, source):
            return
        where = {
            4: f"-> {_link_name(first)}",
            5: f"<- load-balancer {_link_name(first)}",
            6: f"== v4->v6 {first}",
            7: f"== v6->v4 {first}",
            9: f"-> proxy port {port}",
        }.get(kind, "")
        what = _CAPTURED.get(kind, f"Unknown message type={kind} arg1={first}").format(first, port)
        if self.as_json:
            record = {
                "cpu": prefix,
                "type": "capture",
                "mark": f"{mark:#x}",
                "message": what,
                "prefix": where,
            }
            record = {name: value for name, value in record.items() if value}
            yield json_line(record | {"source": source, "bytes": length, "summary": self._summary(packet)})
        elif self.verbosity < 2:
            if where:
                yield f"{where}: {self._summary(packet)}"
        else:
            yield _SEPARATOR
            yield f"{prefix} MARK {mark:#x} FROM {source} DEBUG: {length} bytes, {what}"
            if length and packet:
                yield from self._packet(packet)

    def trace_sock(self, data: bytes, prefix: str) -> Iterator[str]:
        """A translated socket, with -v."""
        _, point, address, port, cookie, cgroup, protocol, flags = _unpack(_SOCK, data, "TraceSockNotify")
        if self.verbosity != 1 or self.as_json:
            return
        yield (
            f"{prefix} [{SOCKET_POINTS.get(point, 'unknown')}] cgroup_id: {cgroup} sock_cookie: {cookie},"
            f" dst [{ip_text(address if flags & 1 else address[:4])}]:{port}"
            f" {SOCKET_PROTOCOLS.get(protocol, 'unknown')} "
        )

    def request(self, data: bytes, _: str) -> Iterator[str]:
        """A request that a proxy has logged."""
        record = gob.decode(data[1:]).get("LogRecord", {})
        source, destination = (record.get(f"{end}Endpoint", {}) for end in ("Source", "Destination"))
        if self._wants(L7, source.get("ID", 0) & 0xFFFF, destination.get("ID", 0) & 0xFFFF):
            yield json_line(request_record(record)) if self.as_json else request_line(record)

    def notification(self, data: bytes, _: str) -> Iterator[str]:
        """A change in the agent."""
        found = decode(data)
        if not isinstance(found, AgentNotification):
            raise _TooShortError("the data is not gob")
        if not self._wants(AGENT):
            return
        name = notification_name(found)
        if self.as_json:
            yield f'{{"type":"agent","subtype":"{name}","message":{found.text}}}'
        else:
            yield f">> {name}: {found.text}"


_SHOWN: Final[dict[int, tuple[str, Callable[[Printer, bytes, str], Iterator[str]]]]] = {
    DROP: ("parsing drop notification message", Printer.drop),
    DEBUG: ("parsing debug message", Printer.debug),
    CAPTURE: ("parsing debug capture message", Printer.capture),
    TRACE: ("parsing trace notification message", Printer.trace),
    VERDICT: ("parsing policy notification message", Printer.verdict),
    TRACE_SOCK: ("parsing socket trace notification message", Printer.trace_sock),
    L7: ("decoding LogRecord notification message", Printer.request),
    AGENT: ("decoding agent notification message", Printer.notification),
}


def _head(data: bytes, least: int, name: str) -> tuple[Any, ...]:
    """The first 16 bytes of an event that has at least so many."""
    if len(data) < least:
        raise _TooShortError(_too_short(name, "", least, len(data)))
    return _HEAD.unpack_from(data)


def _unpack(form: struct.Struct, data: bytes, name: str) -> tuple[Any, ...]:
    if len(data) < form.size:
        raise _TooShortError(_too_short(name, "", form.size, len(data)))
    return form.unpack_from(data)


def _too_short(name: str, version: str, expected: int, length: int) -> str:
    return f"unexpected {name} data length{version}, expected at least {expected} but got {length}"


def _path_of(point: int, source: int, destination: int) -> str:
    match point:
        case 0:
            return f"-> endpoint {destination}"
        case 1:
            return f"-> proxy port {destination}" if destination else "-> proxy"
        case 5:
            return f"<- endpoint {source}"
    return _PATHS.get(point, "unknown trace")


def _link_name(number: int) -> str:
    try:
        return socket.if_indextoname(number)
    except OSError:
        return str(number)


def log_line(level: str, text: str, subsystem: str, *, error: str = "") -> None:
    """Print a line of the log, as logrus does, to stderr."""
    shown = f" error={error}" if error else ""
    click.echo(f'level={level} msg="{text}"{shown} subsys={subsystem}', err=True)
