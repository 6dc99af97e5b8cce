"""Flow logs: parsing of their configuration, selection and encoding of events, and rotation of files.

Source: Cilium 1.17, pkg/hubble/exporter.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from cells.hubble.codec import FieldMask, InvalidFieldMask, encode, from_json, to_json
from cells.hubble.filters import InvalidFilter, Predicate, compile_filters
from cells.hubble.flow import AgentEvent, DebugEvent, Flow, FlowFilter
from cells.hubble.observer import SeenEvent
from cells.hubble.rpc.observer import ExportEvent
from cells.hubble.scalars import DecodeError, parse_rfc3339

_COMPRESSED: Final = ".gz"


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


class _FlowLogLoader(yaml.SafeLoader):
    """Leaves timestamps as text, as Cilium's YAML parser does: ``end`` must be an RFC 3339 time."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # PyYAML declares it
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def parse_flow_logs(text: str) -> list[FlowLog]:
    """Parse the first document of the YAML file of flow logs. Raises ValueError (one line).

    Keys match in any case and unknown ones are ignored, as in Go's JSON decoder. Filters and field masks are
    not compiled: FlowLog.check() does that for each entry.
    """
    try:
        tree = next(yaml.load_all(text, _FlowLogLoader), None)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if tree is None:
        return []
    entries = _keys(tree).get("flowlogs") if isinstance(tree, dict) else tree
    if not isinstance(tree, dict) or not isinstance(entries, list | None):
        raise ValueError("expected a mapping with a list flowLogs")  # noqa: TRY004  # it is about a text
    found = []
    for number, entry in enumerate(entries or []):
        try:
            found.append(_flow_log(entry))
        except DecodeError as error:
            raise ValueError(f"flowLogs[{number}]: {error}") from error
    for what, values in (("name", [one.name for one in found]), ("filePath", [one.path for one in found])):
        for value, count in Counter(values).items():
            if count > 1:
                raise ValueError(f"flowLogs: {what} {value} is used by {count} entries")
    return found


def _keys(tree: Mapping[object, Any]) -> dict[str, Any]:
    return {str(key).lower(): value for key, value in tree.items()}


def _flow_log(entry: object) -> FlowLog:
    """Raises DecodeError."""
    fields = _keys(entry) if isinstance(entry, Mapping) else {}
    name, path = _text(fields.get("name")), _text(fields.get("filepath"))
    if not name or not path:
        raise DecodeError("expected a name and a filePath")
    return FlowLog(
        name,
        path,
        tuple(map(_text, _list(fields, "fieldMask"))),
        tuple(map(_filter, _list(fields, "includeFilters"))),
        tuple(map(_filter, _list(fields, "excludeFilters"))),
        _end(fields.get("end")),
    )


def _text(value: object) -> str:
    """Return a scalar as text: numbers and booleans need no quotes. Raises DecodeError."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float | None):
        return "" if value is None else str(value)
    raise DecodeError(f"invalid value {value!r}: expected a text")


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name.lower())
    if not isinstance(value, list | None):
        raise DecodeError(f"{name}: expected a list, got {value!r}")
    return value or []


def _filter(tree: object) -> FlowFilter:
    return FlowFilter() if tree is None else from_json(FlowFilter, tree)


def _end(value: object) -> int | None:
    """Return the time in nanoseconds since 1970. Raises DecodeError unless it is RFC 3339 or absent."""
    if isinstance(value, str):
        return parse_rfc3339(value)
    if value is not None:
        raise DecodeError(f"invalid time {value!r}: not RFC 3339")
    return None


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

    def _open(self, replaced: os.stat_result | None = None) -> None:
        """Open or create the file; a new one gets mode and owner of the renamed one, else mode 0600."""
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        if replaced is not None:
            _copy_access(replaced, descriptor)
        self._written = os.fstat(descriptor).st_size
        self._clean_up()

    def _rotate(self) -> None:
        self.close()
        status = self._path.stat()
        self._path.rename(self._backup())
        self._open(status)

    def _clean_up(self) -> None:
        """Remove the oldest backups and compress the others, also those of an earlier process."""
        found = self.backups()
        if self._backups:
            names = sorted({_uncompressed(each) for each in found})
            removed = set(names[: -self._backups])
            for each in found:
                if _uncompressed(each) in removed:
                    each.unlink(missing_ok=True)
            found = [each for each in found if _uncompressed(each) not in removed]
        if self._compress:
            for each in found:
                if each == _uncompressed(each):
                    _compress(each)

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


def _uncompressed(backup: Path) -> Path:
    return backup.with_suffix("") if backup.suffix == _COMPRESSED else backup


def _compress(backup: Path) -> None:
    """Replace a backup by a compressed file with the same mode and owner. Raises OSError."""
    partial, target = backup.with_name(f"{backup.name}{_COMPRESSED}.tmp"), f"{backup}{_COMPRESSED}"
    with backup.open("rb") as full:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            _copy_access(os.fstat(full.fileno()), descriptor)
            with gzip.GzipFile(backup.name, "wb", fileobj=file) as small:
                shutil.copyfileobj(full, small)
            file.flush()
            os.fsync(descriptor)
    partial.replace(target)
    backup.unlink()


def _copy_access(source: os.stat_result, descriptor: int) -> None:
    os.fchmod(descriptor, stat.S_IMODE(source.st_mode))
    os.fchown(descriptor, source.st_uid, source.st_gid)


class StandardOutput:
    """The process's standard output with the interface of RotatingFile."""

    def write(self, lines: list[bytes]) -> None:
        """Write lines and empty the list. Raises OSError."""
        sys.stdout.buffer.write(b"".join(lines))
        lines.clear()
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """Do nothing: the stream belongs to the process."""
