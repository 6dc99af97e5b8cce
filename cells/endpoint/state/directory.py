"""The state directory: one ``<id>/ep_config.json`` for each endpoint, replaced atomically.

``kernel`` writes and removes endpoints; restore scans the directory at the start; the DNS proxy saves names.
"""

import binascii
import ctypes
import errno
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from cells.endpoint.model import Endpoint
from cells.endpoint.state.saved import (
    NO_NAMES,
    NamesJSON,
    SavedEndpoint,
    SavedNames,
    UnreadableError,
    decode,
    encode,
)
from lifecycle.settings import read_regular

# The legacy format: JSON in a comment of the C header of an endpoint's programs.
#
# Source: Cilium before 1.16, ep_config.h: a line `` * CILIUM_BASE64_<base64 version>:<base64 JSON>``.

_MARK: Final = b"CILIUM_BASE64_"


def json_in_header(header: bytes) -> bytes:
    """Extract the JSON, in the format of decode(). Raises UnreadableError."""
    line = next((line for line in header.splitlines() if _MARK in line), None)
    if line is None:
        raise UnreadableError(f"no line with {_MARK.decode()}")
    parts = line.split(b":")
    if len(parts) != 2:
        raise UnreadableError(
            f"the line with {_MARK.decode()} should have a single ':', it has {len(parts) - 1}"
        )
    try:
        return binascii.a2b_base64(parts[1].strip(), strict_mode=True)
    except binascii.Error as error:
        raise UnreadableError(f"the line with {_MARK.decode()} is not base64: {error}") from error


# The state directory: one directory for each endpoint, replaced atomically.
#
# Source: Cilium 1.17, the endpoints' state directories.
#
# Files are not synced to disk: a reboot makes the state invalid anyway, and the page cache survives kill -9.

JSON_NAME: Final = "ep_config.json"
HEADER_NAME: Final = "ep_config.h"
_DIRECTORY = re.compile(r"([1-9][0-9]{0,4})(_next|_next_fail)?")
_LARGEST: Final = 64 << 20
"""Maximum size of a file in bytes: 10000 addresses with many names need several MiB."""
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2  # linux/fs.h


class Scan(msgspec.Struct):
    """Result of reading a state directory."""

    endpoints: dict[int, SavedEndpoint] = msgspec.field(default_factory=dict)
    """Readable endpoints, by endpoint id."""
    unreadable: dict[int, str] = msgspec.field(default_factory=dict)
    """Errors of unreadable state, by endpoint id; these directories stay."""
    removed: list[str] = msgspec.field(default_factory=list)
    """Directories of interrupted writes or deletions, which are removed."""
    ignored: list[str] = msgspec.field(default_factory=list)
    """Directories of endpoints that also have a directory named by their id; these directories stay."""


class StateFiles:
    """Maintains ``<directory>/<id>/ep_config.json`` for every endpoint."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._base = str(directory)
        self._names: dict[int, NamesJSON] = {}

    def names(self, endpoint_id: int) -> SavedNames:
        """Return the endpoint's saved DNS names. Raises ValueError if they are invalid."""
        return self._names.get(endpoint_id, NO_NAMES).read()

    def keep_names(self, endpoint: Endpoint, names: SavedNames) -> None:
        """Save the endpoint's DNS names, now and with later writes. Raises OSError."""
        self._names[endpoint.id] = NamesJSON.of(names)
        if (self.directory / str(endpoint.id)).exists():  # otherwise write() follows
            self.refresh(endpoint)

    def write(self, endpoint: Endpoint) -> None:
        """Save the endpoint atomically: a reader sees the previous state or the new one.

        Writes ``<id>_next`` and renames it; an existing directory is exchanged with it, and its other files
        stay. Raises OSError, with the previous state unchanged.
        """
        final = f"{self._base}/{endpoint.id}"
        building = final + "_next"
        try:
            os.mkdir(building, 0o750)  # noqa: PTH102  (hot path)
        except FileExistsError:
            _remove_tree(building)
            os.mkdir(building, 0o750)  # noqa: PTH102
        try:
            _write(f"{building}/{JSON_NAME}", self._encoded(endpoint))
            if _rename(building, final):
                return
            _link_files(final, building)
            _exchange(building, final)
        except OSError:
            _remove_tree(building, ignore_errors=True)
            raise
        _remove_tree(building)
        _remove_tree(final + "_next_fail", ignore_errors=True)

    def refresh(self, endpoint: Endpoint) -> None:
        """Save the endpoint if its saved state differs. Raises OSError."""
        try:
            saved = read_regular(self.directory / str(endpoint.id) / JSON_NAME, _LARGEST)
        except FileNotFoundError:
            saved = b""
        if saved != self._encoded(endpoint):
            self.write(endpoint)

    def _encoded(self, endpoint: Endpoint) -> bytes:
        return encode(endpoint, self._names.get(endpoint.id, NO_NAMES))

    def remove(self, endpoint_id: int) -> None:
        """Remove the endpoint's state; a missing one is a no-op. Raises OSError."""
        self._names.pop(endpoint_id, None)
        base = f"{self._base}/{endpoint_id}"
        with suppress(FileNotFoundError):
            os.unlink(f"{base}/{JSON_NAME}")  # noqa: PTH108  (hot path)
        for directory in (base, base + "_next_fail", base + "_next"):
            try:
                os.rmdir(directory)  # noqa: PTH106  (hot path)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in _NOT_EMPTY:
                    raise
                _remove_tree(directory)

    def scan(self) -> Scan:
        """Read all endpoints' directories, and complete or remove interrupted writes.

        A ``_next`` without its endpoint is that endpoint's only state: it is renamed if it is readable, and
        removed if it is incomplete. Directories with other names are ignored.
        """
        scan = Scan()
        names = {entry.name for entry in os.scandir(self.directory) if entry.is_dir(follow_symlinks=False)}
        found = [match for name in sorted(names) if (match := _DIRECTORY.fullmatch(name))]
        for match in sorted(found, key=lambda match: match[2] is not None):
            self._read_directory(match[0], int(match[1]), bool(match[2]), scan)
        return scan

    def _read_directory(self, name: str, number: int, incomplete: bool, scan: Scan) -> None:
        directory = self.directory / name
        if not 1 <= number <= 65535:
            return
        if incomplete and (self.directory / str(number)).exists():
            self._discard(directory, scan)
            return
        try:
            saved = _read(directory)
        except FileNotFoundError:  # neither format
            self._discard(directory, scan)
            return
        except (OSError, UnreadableError) as error:
            if incomplete:
                self._discard(directory, scan)
            else:
                scan.unreadable[number] = f"{directory}: {error}"
            return
        self._claim(directory, saved, scan)

    def _claim(self, directory: Path, saved: SavedEndpoint, scan: Scan) -> None:
        """Add the endpoint to the scan, and rename its directory to its id."""
        number = saved.endpoint.id
        proper = self.directory / str(number)
        if directory != proper:
            if proper.exists():
                scan.ignored.append(directory.name)
                return
            try:
                directory.rename(proper)
            except OSError as error:
                scan.unreadable[number] = f"{directory}: {error}"
                return
        scan.endpoints[number] = saved
        self._names[number] = saved.names

    def _discard(self, directory: Path, scan: Scan) -> None:
        _remove_tree(directory, ignore_errors=True)
        scan.removed.append(directory.name)


def _remove_tree(path: str | Path, *, ignore_errors: bool = False) -> None:
    import shutil  # it imports three decompressors: 2 ms of a start that removes nothing

    shutil.rmtree(path, ignore_errors=ignore_errors)


_NOT_EMPTY: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST})


def _read(directory: Path) -> SavedEndpoint:
    """Read the current format, else the legacy one. Raises FileNotFoundError without either."""
    path = directory / JSON_NAME
    try:
        data = read_regular(path, _LARGEST)
    except FileNotFoundError:
        path = directory / HEADER_NAME
        data = json_in_header(read_regular(path, _LARGEST))
    try:
        return decode(data, path.stat().st_mtime)
    except UnreadableError as error:
        raise UnreadableError(f"{path.name}: {error}") from error


def _write(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    finally:
        os.close(fd)


def _rename(source: str, target: str) -> bool:
    """Rename a directory; return False if ``target`` exists and is not empty."""
    try:
        os.rename(source, target)  # noqa: PTH104  (hot path)
    except OSError as error:
        if error.errno in _NOT_EMPTY:
            return False
        raise
    return True


def _link_files(source: str, target: str) -> None:
    """Hard-link into ``target`` the files that only ``source`` has."""
    for entry in os.scandir(source):
        if entry.is_file(follow_symlinks=False):
            with suppress(FileExistsError):
                Path(target, entry.name).hardlink_to(entry.path)


def _exchange(one: str, other: str) -> None:
    """Swap two paths atomically (renameat2(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), one, None, other)
