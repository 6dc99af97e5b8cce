"""Flow logs: parsing of their configuration, selection and encoding of events, and rotation of files.

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
    """Parse one or more JSON objects as filters. Raises ValueError with the setting's name."""
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
    """The configuration of one flow log."""

    name: str
    path: str
    field_mask: tuple[str, ...] = ()
    include: tuple[FlowFilter, ...] = ()
    exclude: tuple[FlowFilter, ...] = ()
    end: int | None = None
    """Time at which the log ends, in nanoseconds since 1970; None: never."""

    def equals(self, other: FlowLog) -> bool:
        """Whether the configurations are equal; the order of fields and filters does not matter."""
        return self._normalized() == other._normalized()

    def _normalized(self) -> tuple[object, ...]:
        filters = (frozenset(map(encode, each)) for each in (self.include, self.exclude))
        return self.name, self.path, self.end, frozenset(self.field_mask), *filters

    def check(self) -> Lines:
        """Compile filters and field mask. Raises ValueError if one is invalid."""
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
    """Encodes matching events as lines."""

    def __init__(self, matches: Predicate, mask: FieldMask) -> None:
        self._matches = matches
        self._mask = mask

    def line(self, seen: SeenEvent) -> bytes:
        """Encode an event as a line of JSON; empty if it does not match."""
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
    """Parse the YAML file of flow logs. Raises ValueError (one line)."""
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
            None if end is None else _time(end),
        )
    except (DecodeError, TypeError) as error:
        raise ValueError(f"flowLogs: {entry['name']}: {error}") from error


def _time(end: object) -> int:
    """Return the time in nanoseconds since 1970; the YAML parser may have converted it to a datetime."""
    if isinstance(end, datetime):
        return int((end if end.tzinfo else end.replace(tzinfo=UTC)).timestamp()) * 1_000_000_000
    return parse_rfc3339(str(end))


class RotatingFile:
    """A file that is renamed at its maximum size; the newest renamed files are retained."""

    def __init__(self, path: Path, *, size: int, backups: int, compress: bool) -> None:
        self._path = path
        self._size = size
        self._backups = backups
        self._compress = compress
        self._file: FileIO | None = None
        self._written = 0
        self._latest = 0
        """Time of the last rotation in milliseconds, so that names are unique."""

    def write(self, lines: list[bytes]) -> None:
        """Append lines and remove them from the list; a line is never split between files.

        Raises OSError; the list then contains the lines that are not written.
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
        """Append all of the data, or nothing if there is no space. Raises OSError."""
        if self._file is None:
            return
        done = 0
        try:
            while done < len(data):
                done += self._file.write(data[done:])
        except OSError:
            with suppress(OSError):  # a pipe cannot be truncated
                if done:  # relative to the current size: others may have truncated the file
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
        """Return a name for the full file that sorts after all other backups."""
        self._latest = max(time.time_ns() // 1_000_000, self._latest + 1)
        moment = datetime.fromtimestamp(self._latest // 1000, UTC).strftime("%Y-%m-%dT%H-%M-%S")
        return self._path.with_name(
            f"{self._path.stem}-{moment}.{self._latest % 1000:03d}{self._path.suffix}"
        )

    def backups(self) -> list[Path]:
        """Return the renamed files, oldest first."""
        name = re.compile(
            re.escape(self._path.stem)
            + r"-\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d{3}"
            + re.escape(self._path.suffix)
            + r"(\.gz)?"
        )
        return sorted(each for each in self._path.parent.iterdir() if name.fullmatch(each.name))


class StandardOutput:
    """The process's standard output with the interface of RotatingFile."""

    def write(self, lines: list[bytes]) -> None:
        """Write lines and empty the list. Raises OSError."""
        sys.stdout.buffer.write(b"".join(lines))
        lines.clear()
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """Do nothing: the stream belongs to the process."""
