"""Flow logs: which events are written to a file, their lines, and the rotation of files.

Source: Cilium 1.17, pkg/hubble/exporter.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

import msgspec
import yaml

from cells.hubble.codec import FieldMask, InvalidFieldMask, encode, from_json, to_json
from cells.hubble.filters import InvalidFilter, Predicate, compile_filters
from cells.hubble.flow import AgentEvent, DebugEvent, Flow, FlowFilter
from cells.hubble.observer import SeenEvent
from cells.hubble.rpc.observer import ExportEvent
from cells.hubble.scalars import DecodeError, parse_rfc3339


def parse_filters(setting: str, text: str) -> Iterator[FlowFilter]:
    """Parse one or more JSON objects as filters. Raises ValueError that names the setting."""
    decoder, rest = json.JSONDecoder(), text.lstrip(" ,\n")
    while rest:
        try:
            tree, end = decoder.raw_decode(rest)
            yield from_json(FlowFilter, tree)
        except (json.JSONDecodeError, DecodeError) as error:
            raise ValueError(
                f"{setting}: {error}; expected JSON objects of filters with blanks between"
            ) from None
        rest = rest[end:].lstrip(" ,\n")


class FlowLog(msgspec.Struct, frozen=True):
    """One file of events, with filters."""

    name: str
    path: str
    field_mask: tuple[str, ...] = ()
    include: tuple[FlowFilter, ...] = ()
    exclude: tuple[FlowFilter, ...] = ()
    end: int | None = None
    """When writing to it ends, in nanoseconds since 1970; None: never."""

    def equals(self, other: FlowLog) -> bool:
        """Whether it is the same log; the order of fields and filters does not matter."""
        return self._normalized() == other._normalized()  # of its own class

    def _normalized(self) -> tuple[object, ...]:
        filters = (frozenset(map(encode, each)) for each in (self.include, self.exclude))
        return self.name, self.path, self.end, frozenset(self.field_mask), *filters

    def check(self) -> Lines:
        """Raise ValueError for invalid filters and masks. Returns what makes its lines."""
        try:
            matches = compile_filters(self.include, self.exclude)
        except InvalidFilter as error:
            raise ValueError(f"{self.name}: {error}") from error
        for path in self.field_mask:
            try:
                FieldMask.parse([path], Flow)
            except InvalidFieldMask:
                raise ValueError(
                    f"{self.name}: the field mask has {path!r}, which is not a field of a flow"
                ) from None
        return Lines(matches, FieldMask.parse(self.field_mask, Flow))


class Lines:
    """The line of an event that matches."""

    def __init__(self, matches: Predicate, mask: FieldMask) -> None:
        self._matches = matches
        self._mask = mask

    def line(self, seen: SeenEvent) -> bytes:
        """The event as JSON with a newline; empty if it does not match."""
        event = seen.event
        if not self._matches(event):
            return b""
        if isinstance(event, Flow):
            flow = self._mask.apply(event)
            message = ExportEvent(flow=flow, node_name=flow.node_name, time=flow.time)
        else:
            node = seen.node_name.rpartition("/")[2]
            message = ExportEvent(node_name=node, time=seen.time)
            if isinstance(event, AgentEvent):
                message.agent_event = event
            elif isinstance(event, DebugEvent):
                message.debug_event = event
            else:
                message.lost_events = event
        return msgspec.json.encode(to_json(message)) + b"\n"


def parse_flow_logs(text: str) -> list[FlowLog]:
    """The entries of a file of flow logs. Raises ValueError, one line."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if tree is None:
        return []
    entries = tree.get("flowLogs") if isinstance(tree, dict) else tree
    if not isinstance(tree, dict) or not isinstance(entries, list | None):
        raise ValueError("expected a mapping with a list flowLogs")  # noqa: TRY004  # it is about a text
    found = [_flow_log(entry) for entry in entries or []]
    for what, values in (("name", [one.name for one in found]), ("filePath", [one.path for one in found])):
        for value, count in Counter(values).items():
            if count > 1:
                raise ValueError(f"flowLogs: {what} {value} is used by {count} entries")
    return found


def _flow_log(entry: object) -> FlowLog:
    if not isinstance(entry, Mapping) or not entry.get("name") or not entry.get("filePath"):
        raise ValueError("flowLogs: an entry has no name or no filePath")
    end = entry.get("end")
    try:
        return FlowLog(
            str(entry["name"]),
            str(entry["filePath"]),
            tuple(map(str, entry.get("fieldMask") or ())),
            tuple(from_json(FlowFilter, one) for one in entry.get("includeFilters") or ()),
            tuple(from_json(FlowFilter, one) for one in entry.get("excludeFilters") or ()),
            None if end is None else _moment(end),
        )
    except (DecodeError, TypeError) as error:
        raise ValueError(f"flowLogs: {entry['name']}: {error}") from error


def _moment(end: object) -> int:
    """A time in YAML, which the parser may have converted already."""
    if isinstance(end, datetime):
        return int((end if end.tzinfo else end.replace(tzinfo=UTC)).timestamp()) * 1_000_000_000
    return parse_rfc3339(str(end))


class RotatingFile:
    """A file that is renamed when it is full; the newest renamed files are retained."""

    def __init__(self, path: Path, *, size: int, backups: int, compress: bool) -> None:
        self._path = path
        self._size = size
        self._backups = backups
        self._compress = compress
        self._file: FileIO | None = None
        self._written = 0
        self._latest = 0
        """When a file was last renamed, in milliseconds, so that names differ."""

    def write(self, lines: list[bytes]) -> None:
        """Append lines and empty the list; a line is never split between files.

        Raises OSError: then lines that are not written stay in the list.
        """
        while lines:
            if self._file is None:
                self._open()
            count, size = 0, self._written
            for line in lines:
                if size + len(line) > self._size and size:
                    break
                count, size = count + 1, size + len(line)
            if count:
                self._append(b"".join(lines[:count]))
                del lines[:count]
            else:
                self._rotate()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, data: bytes) -> None:
        """Append all of the data or, without room for it, nothing. Raises OSError."""
        if self._file is None:
            return
        done = 0
        try:
            while done < len(data):
                done += self._file.write(data[done:])
        except OSError:
            with suppress(OSError):  # a pipe, say: what it has taken stays there
                if done:  # by the file's own size: others may have truncated it
                    self._file.truncate(os.fstat(self._file.fileno()).st_size - done)
            raise
        self._written += len(data)

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        self._written = os.fstat(descriptor).st_size

    def _rotate(self) -> None:
        self.close()
        backup = self._backup()
        self._path.rename(backup)
        if self._compress:
            with backup.open("rb") as full, gzip.open(f"{backup}.gz", "wb") as small:
                shutil.copyfileobj(full, small)
            backup.unlink()
        if self._backups:
            for old in self.backups()[: -self._backups]:
                old.unlink(missing_ok=True)
        self._open()

    def _backup(self) -> Path:
        """A name for the full file that sorts after all others."""
        self._latest = max(time.time_ns() // 1_000_000, self._latest + 1)
        moment = datetime.fromtimestamp(self._latest // 1000, UTC).strftime("%Y-%m-%dT%H-%M-%S")
        return self._path.with_name(
            f"{self._path.stem}-{moment}.{self._latest % 1000:03d}{self._path.suffix}"
        )

    def backups(self) -> list[Path]:
        """The renamed files, oldest first."""
        name = re.compile(
            re.escape(self._path.stem)
            + r"-\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d{3}"
            + re.escape(self._path.suffix)
            + r"(\.gz)?"
        )
        return sorted(each for each in self._path.parent.iterdir() if name.fullmatch(each.name))


class StandardOutput:
    """The process's standard output, with the interface of a file."""

    def write(self, lines: list[bytes]) -> None:
        """Write lines and empty the list. Raises OSError."""
        sys.stdout.buffer.write(b"".join(lines))
        lines.clear()
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """A no-op, as the stream belongs to the process."""
