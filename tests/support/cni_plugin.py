"""Runs the real plugin against a stub agent: compiled once per test run, with short timeouts."""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from tests.support import plugin

ADD_PATIENCE_SECONDS = 2
HEADER = struct.Struct("<4sHHII")


class Patience(Enum):
    """The plugin's timeouts in ms: for an agent (ADD, DEL), for the queue's lock, for a reply."""

    USUAL = 1000 * ADD_PATIENCE_SECONDS, 100, 400, 30_000
    """Short for a missing agent, and long enough for a present one on a busy machine."""
    ENDLESS = 30_000, 30_000, 30_000, 30_000
    """For an agent that comes back."""
    WAITING_FOR_THE_LOCK = 1000 * ADD_PATIENCE_SECONDS, 100, 30_000, 30_000
    """For a lock that is released."""
    OF_THE_SILENT = 1000 * ADD_PATIENCE_SECONDS, 100, 400, 1500
    """Short also for an agent that accepts and never replies."""


def compiled_plugin(patience: Patience = Patience.USUAL) -> Path:
    """Return the path of a plugin with these timeouts."""
    names = ("ADD", "DEL", "LOCK", "ANSWER")
    return plugin.compiled_plugin(
        *(f"-D{name}_PATIENCE_MS={value}" for name, value in zip(names, patience.value, strict=True))
    )


@dataclass(frozen=True)
class Ended:
    """The result of an invocation of the plugin."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """Return standard output, decoded from JSON."""
        return json.loads(self.stdout)


def environment(command: str, **changes: str | None) -> dict[str, str]:
    """Return the environment that a runtime sets; a change to None removes the variable."""
    variables: dict[str, str | None] = {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": "cid1",
        "CNI_NETNS": "",
        "CNI_IFNAME": "eth0",
        "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0",
        "CNI_PATH": "/opt/cni/bin",
        **changes,
    }
    return {name: value for name, value in variables.items() if value is not None}


def run_plugin(env: Mapping[str, str], stdin: object, patience: Patience = Patience.USUAL) -> Ended:
    """Run the plugin with exactly this environment; ``stdin`` is bytes, or something to encode as JSON."""
    given = stdin if isinstance(stdin, bytes) else json.dumps(stdin).encode()
    done = subprocess.run(
        [compiled_plugin(patience)], env=env, input=given, capture_output=True, timeout=90, check=False
    )
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


def reply(exit_code: int, stdout: bytes, *, version: int = 1, patch: int = 0, ports: bytes = b"") -> bytes:
    """Return a reply packet; with patch 3 it has ports to reserve."""
    return HEADER.pack(b"HCNI", version, patch, exit_code, len(stdout)) + stdout + ports


@dataclass
class Seen:
    """A request as the stub agent received it."""

    version: int
    environment: dict[str, str]
    stdin: bytes
    fds: list[int]
    flags: int
    addresses: bytes


Answer = Callable[[socket.socket, Seen], None]


def answer(packet: bytes) -> Answer:
    """Reply with this packet."""

    def act(connected: socket.socket, _seen: Seen) -> None:
        connected.send(packet)

    return act


def hang_up(_connected: socket.socket, _seen: Seen) -> None:
    """Read the request and close without a reply."""


@dataclass
class StubAgent:
    """Serves one connection after another as scripted, then closes; records the requests."""

    path: Path
    requests: list[Seen] = field(default_factory=list)

    @contextmanager
    def answering(self, *answers: Answer) -> Iterator[StubAgent]:
        """Listen, and serve this number of connections."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            self.path.unlink(missing_ok=True)
            listener.bind(str(self.path))
            listener.listen()
            listener.settimeout(30)
            thread = threading.Thread(target=self._serve, args=(listener, answers))
            thread.start()
            try:
                yield self
            finally:
                thread.join()
                self.path.unlink(missing_ok=True)

    def _serve(self, listener: socket.socket, answers: tuple[Answer, ...]) -> None:
        for act in answers:
            connected, _ = listener.accept()
            with connected:
                connected.settimeout(30)
                packet, ancillary, _, _ = connected.recvmsg(1 << 18, socket.CMSG_SPACE(64))
                seen = _parse(packet, ancillary)
                self.requests.append(seen)
                act(connected, seen)
        listener.close()


def _parse(packet: bytes, ancillary: list[tuple[int, int, bytes]]) -> Seen:
    magic, version, flags, env_length, stdin_length = HEADER.unpack_from(packet)
    assert magic == b"HCNI"
    end = HEADER.size + env_length + stdin_length
    assert len(packet) == end or flags & 2
    text = packet[HEADER.size : HEADER.size + env_length].decode()
    assert text.endswith("\0")
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data)
    variables = dict(entry.split("=", 1) for entry in text[:-1].split("\0"))
    return Seen(version, variables, packet[HEADER.size + env_length : end], fds.tolist(), flags, packet[end:])


def close_all(seen: Seen) -> None:
    """Close the descriptors of a request."""
    for fd in seen.fds:
        os.close(fd)
