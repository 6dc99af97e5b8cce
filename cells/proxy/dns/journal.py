"""What the DNS proxy has seen, on disk: the next agent goes on with it, however this one ends.

For:    NameStore. Needs: a path in the state directory. Gives: Journal, Seen, Asked.
A record is appended as soon as something is learnt, in one write(2), so that kill -9 loses nothing; now and
then the file is written anew. It is not synced: a reboot ends the pods, too. A torn last line is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

FILE: Final = "dns-names.jsonl"
"""In the state directory."""


class Seen(msgspec.Struct, frozen=True, gc=False, tag="seen", rename="kebab", omit_defaults=True):
    """An answer to an endpoint; ``zombie``: its TTL is over, and the endpoint was connected."""

    endpoint: int
    attachment: str
    """Of the endpoint: its number may be another pod's by now."""
    name: str
    addresses: tuple[str, ...]
    ttl: int
    at: float
    expires: float
    zombie: bool = False


class Asked(msgspec.Struct, frozen=True, gc=False, tag="asked", rename="kebab", omit_defaults=True):
    """A server that an endpoint has asked, and for which names it may."""

    endpoint: int
    attachment: str
    server: str
    protocol: int
    port: int
    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    """``*`` allows everything."""


class Changed(msgspec.Struct, frozen=True, gc=False, tag="changed", rename="kebab", omit_defaults=True):
    """The endpoint's rules have changed: what was Asked before means nothing."""

    endpoint: int


Record = Seen | Asked | Changed
_decoder = msgspec.json.Decoder(Record)
_encoder = msgspec.json.Encoder()


class Journal:
    """The file. All methods raise OSError."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._fd = -1

    def read(self) -> Iterator[Record]:
        """Every record there is; lines that are none are left out."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        for line in data.splitlines():
            try:
                yield _decoder.decode(line)
            except msgspec.MsgspecError:
                continue

    def append(self, record: Record) -> None:
        """Note it."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(self._fd, _encoder.encode(record) + b"\n")

    def rewrite(self, records: Iterable[Record]) -> None:
        """Have these and no others."""
        temporary = self._path.with_suffix(".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_encoder.encode_lines(records))
        temporary.rename(self._path)
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
