"""An API server that replays a recorded watch, byte by byte."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

from cells.kubernetes.objects import KINDS
from cells.kubernetes.objects.kind import Kind, Object
from tests.unit.apiserver.replay import RECORDINGS

BASE: Final = 1000
"""The version of an empty list; ``<RV:1>`` is one more."""
END: Final = "k8s.io/initial-events-end"
_VERSION = re.compile(r"<RV:(\d+)>")
_PORT = re.compile(r'"<NODEPORT:(\d+)>"')
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
CUTS: Final = ("a chunk an event", "all in one chunk", "chunks of seven bytes")


class Thing(Object, frozen=True, gc=False):
    """An object of a kind that the agent does not use."""


class Recorded(NamedTuple):
    """A watch of a recording."""

    name: str
    """The name of the file and of the exchange."""
    path: str
    events: list[dict[str, Any]]
    ends: str

    @property
    def streamed(self) -> bool:
        """Return whether it begins with a streaming list."""
        return any(_is_end(one) for one in self.events)

    @property
    def kind(self) -> Kind[Any]:
        """Return the kind of its objects: the agent's own definition, if it has one."""
        parts = self.path.strip("/").split("/")
        group = 2 if parts[0] == "api" else 3
        version, plural = "/".join(parts[1:group]), parts[-1]
        namespaced = "namespaces" in parts[group:-1] or any(
            one["object"].get("metadata", {}).get("namespace") for one in self.events
        )
        known = [one for one in KINDS if (one.api_version, one.plural) == (version, plural)]
        return known[0] if known else Kind(Thing, version, plural, namespaced=namespaced)

    def after(self, version: int) -> list[dict[str, Any]]:
        """Return the events that a watch from this version receives."""
        begin = 0
        for index, event in enumerate(self.events):
            if _is_end(event) and int(event["object"]["metadata"]["resourceVersion"]) == version:
                begin = index + 1
        return self.events[begin:]

    def outcome(self) -> tuple[set[tuple[str, str]], str, int]:
        """Return the remaining objects, the last version, and the final error's code, or 0."""
        left: set[tuple[str, str]] = set()
        version = str(BASE)
        for event in self.events:
            if event["type"] == "ERROR":
                return left, version, event["object"]["code"]
            metadata = event["object"]["metadata"]
            version = metadata["resourceVersion"]
            key = (metadata.get("namespace", ""), metadata.get("name", ""))
            if event["type"] == "DELETED":
                left.discard(key)
            elif event["type"] != "BOOKMARK":
                left.add(key)
        return left, version, 0


def _is_end(event: dict[str, Any]) -> bool:
    annotations = event["object"].get("metadata", {}).get("annotations") or {}
    return event["type"] == "BOOKMARK" and annotations.get(END) == "true"


def recorded_watches() -> Iterator[Recorded | str]:
    """Return every recorded watch, or why it cannot be replayed."""
    for path in sorted(RECORDINGS.glob("*.json")):
        found = json.loads(path.read_bytes())
        for step in found.get("exchanges", ()) if path.name != "index.json" else ():
            if step.get("watch"):
                yield _read(path, step)


def _read(path: Path, step: dict[str, Any]) -> Recorded | str:
    name = f"{path.stem}-{step['id']}"
    text = _VERSION.sub(lambda found: str(BASE + int(found[1])), json.dumps(step))
    text = _PORT.sub(lambda found: str(30000 + int(found[1])), text)
    step = json.loads(text)
    request = step["request"]
    asked = request.get("headers", {}).get("Accept", "application/json")
    events = [one.get("event") for one in step["stream"]]
    if ";as=" in asked or "protobuf" in asked or "yaml" in asked or "cbor" in asked:
        return f"{name}: the client asks for JSON of whole objects"
    if "/watch/" in request["path"]:
        return f"{name}: a path the client does not use"
    if any(not isinstance(one, dict) or not isinstance(one.get("object"), dict) for one in events):
        return f"{name}: an event that is shortened"
    return Recorded(name, request["path"], events, step.get("end", {}).get("how", ""))


class Player:
    """Serves empty lists, and the watch once, then no more events."""

    def __init__(self, recorded: Recorded, cut: str) -> None:
        self._recorded = recorded
        self._cut = cut
        self.lists = 0
        self.reported_all = False
        self.resumed: list[str] = []
        """Versions of watches that were started after it had ended."""
        self.relisted = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            target = urlsplit(head.split(b" ", 2)[1].decode())
            query = {key: values[0] for key, values in parse_qs(target.query).items()}
            if target.path.startswith("/healthz"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            elif "watch" not in query:  # whether the store has come as far
                body = b'{"metadata":{"resourceVersion":"%d"},"items":[]}' % BASE
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            elif "sendInitialEvents" in query:
                await self._list(writer)
            else:
                await self._watch(writer, query["resourceVersion"])
            await writer.drain()

    async def _list(self, writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD)
        if self.reported_all:
            self.relisted.set()
            await asyncio.Event().wait()
        self.lists += 1
        if self._recorded.streamed:
            await self._say(writer, self._recorded.events)
        else:
            metadata = {"resourceVersion": str(BASE), "annotations": {END: "true"}}
            await self._say(writer, [{"type": "BOOKMARK", "object": {"metadata": metadata}}])
        writer.write(b"0\r\n\r\n")

    async def _watch(self, writer: asyncio.StreamWriter, version: str) -> None:
        writer.write(_HEAD)
        if self.reported_all:
            self.resumed.append(version)
            await asyncio.Event().wait()
        self.reported_all = True
        await self._say(writer, self._recorded.after(int(version)))
        if "closed by the client" in self._recorded.ends:
            await asyncio.Event().wait()
        writer.write(b"0\r\n\r\n")
        if "then the server closed" in self._recorded.ends:
            raise ConnectionError

    async def _say(self, writer: asyncio.StreamWriter, events: list[dict[str, Any]]) -> None:
        lines = [json.dumps(one).encode() + b"\n" for one in events]
        whole = b"".join(lines)
        chunks = {
            CUTS[0]: lines,
            CUTS[1]: [whole] if whole else [],
            CUTS[2]: [whole[at : at + 7] for at in range(0, len(whole), 7)],
        }
        for chunk in chunks[self._cut]:
            writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            await writer.drain()
