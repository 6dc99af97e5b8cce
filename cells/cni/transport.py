"""The socket cni.sock: each connection sends one packet, with descriptors, and receives one.

It uses event loop callbacks instead of tasks: a pod's ADD takes about a millisecond, and each switch between
tasks would add a tenth of that.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from cells.cni.protocol import FALLBACK_VERSION, MAX_PACKET, CniError, encode_reply, error_json
from lifecycle import HiveError, Logger, UsageError
from lifecycle.http import clear_socket, fair_queue_of

BACKLOG: Final = 1024
_PATH_LIMIT: Final = 107
TURN_SECONDS: Final = 0.001  # seconds of calls (about one) per iteration of the event loop
_API_BUSY_SECONDS: Final = 1.0  # seconds after an API request in which the API counts as busy
MAX_SILENT: Final = 256
"""Maximum number of connections that have not sent a packet; beyond it, the oldest is closed."""
_ACCEPT_PAUSE: Final = 0.05  # seconds without accepting after accept() failed for lack of descriptors
_LOG_INTERVAL: Final = 60.0  # seconds between log lines about it
_CREDENTIALS: Final = struct.Struct("3i")
_MAX_FDS: Final = 2
_TRUNCATED: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)  # as int: each IntFlag operation takes 2 µs
_PEEK: Final = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)


def listen(path: Path) -> socket.socket:
    """Listen at ``path`` with mode 0600. A stale socket file is replaced.

    Raises UsageError for a path too long for a socket, and HiveError if another process serves it, another
    kind of file exists there, or it cannot be created.
    """
    if len(os.fsencode(path)) > _PATH_LIMIT:
        raise UsageError(
            f"CNI socket {path} is too long: expected at most {_PATH_LIMIT} bytes; shorten state-dir"
        )
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        clear_socket(path)
        server.bind(str(path))
        path.chmod(0o600)  # connections are possible only after listen()
        server.listen(BACKLOG)
    except OSError as error:
        server.close()
        raise HiveError(f"CNI socket {path} cannot be made: {error.strerror or error}") from error
    except BaseException:
        server.close()
        raise
    return server


class PluginConnection:
    """A connection of a plugin that waits for its reply."""

    __slots__ = ("_socket", "began", "fds", "refused")

    def __init__(self, connected: socket.socket, fds: Sequence[int]) -> None:
        self._socket = connected
        self.fds = fds
        """The received descriptors: none, or the namespace and an rtnetlink socket."""
        self.began = time.perf_counter()
        """When the request was received."""
        self.refused = False
        """Whether the reply is an error, or the client has disconnected."""

    def send(self, packet: bytes) -> bool:
        """Send the reply; return False if the plugin has disconnected."""
        try:
            self._socket.send(packet, _NO_SIGNAL)
        except OSError:
            return False
        return True

    def disconnected(self) -> bool:
        """Whether the plugin has closed the connection."""
        try:
            return not self._socket.recv(1, _PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the socket and the descriptors."""
        self._socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = ()


class PacketServer:
    """Accepts connections and passes each, with its packet, to ``handle``, which must close it."""

    def __init__(
        self,
        handle: Callable[[PluginConnection, memoryview], None],
        log: Logger,
        *,
        uids: Collection[int] = (0,),
        finish_pending: Callable[[], object] = lambda: None,
    ) -> None:
        """``finish_pending`` finishes work that ``handle`` left pending, when no other request waits."""
        self._handle = handle
        self._log = log
        self._uids = frozenset(uids)
        self._finish_pending = finish_pending
        self.pending = False
        """Whether ``handle`` has left work pending; set by ``handle``."""
        self.others = False
        """Whether other connections wait while one is handled."""
        self._next: socket.socket | None = None
        """The next accepted connection."""
        self._pumping = False
        self._buffer = bytearray(MAX_PACKET)
        self.silent: dict[socket.socket, None] = {}
        """Connections that have not sent a packet, the oldest first."""
        self._next_log = 0.0
        """Time of the next log line about failed accepts."""
        self._accept_timer: asyncio.TimerHandle | None = None
        self._turn_ends: float | None = None
        """End of the time for calls in this iteration of the event loop; None before its first call."""
        self._turn_over = asyncio.Event()
        self._yielded_once = False

    def start(self, listener: socket.socket) -> None:
        """Serve on the running event loop until :meth:`stop`."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._loop.add_reader(listener.fileno(), self._accept)

    def stop(self) -> None:
        """Close the listener and connections that have not sent; handled connections continue.

        A plugin with a closed connection gets ECONNRESET, so it can retry, as nothing was done.
        """
        if self._accept_timer is not None:
            self._accept_timer.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._finish_pending()
        if self._next is not None:
            self._next.close()
            self._next = None
        for connected in list(self.silent):
            self._drop(connected)

    def _accept(self) -> None:
        while self._has_turn():
            connected, self._next = self._next or self._accept_one(), None
            if connected is None:
                self._finish_pending()
                return
            self._next = self._accept_one()
            self.others = self._next is not None or bool(self.silent)
            if not self._receive(connected):
                self.silent[connected] = None
                self._loop.add_reader(connected.fileno(), self._readable, connected)
                if len(self.silent) > MAX_SILENT:
                    self._drop(next(iter(self.silent)))
        self._schedule_pump()

    def _accept_one(self) -> socket.socket | None:
        """Accept a connection, or return None."""
        try:
            connected, _ = self._listener.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            self._wait_for_descriptors(error)
            return None
        connected.setblocking(False)
        return connected

    def _schedule_pump(self) -> None:
        """Continue in the next iteration of the loop, if work is pending that no event signals."""
        if not self._pumping and (self.pending or self._next is not None):
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        if self._listener.fileno() >= 0:  # else it has been stopped
            self._accept()

    def _wait_for_descriptors(self, error: OSError) -> None:
        """Pause accepting. The socket stays readable (accept(2)), so the loop would spin."""
        if self._loop.time() >= self._next_log:
            self._next_log = self._loop.time() + _LOG_INTERVAL
            self._log.error("connection on cni.sock not accepted yet", error=str(error))
        if self._accept_timer is None:
            self._loop.remove_reader(self._listener.fileno())
            self._accept_timer = self._loop.call_later(_ACCEPT_PAUSE, self._resume_accepting)

    def _resume_accepting(self) -> None:
        self._accept_timer = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    async def wait_for_turn(self) -> None:
        """Wait for an iteration of the loop with time for a call; one event may have resumed many calls."""
        while not self._has_turn():
            await self._turn_over.wait()

    def _has_turn(self) -> bool:
        """Whether this iteration of the loop has time for a call; else the loop calls again."""
        now = self._loop.time()
        if self._turn_ends is None:
            self._turn_ends = now + TURN_SECONDS
            self._turn_over.clear()
            self._loop.call_soon(self._end_turn)  # runs first in the next iteration
        return now < self._turn_ends

    def _end_turn(self) -> None:
        """End the turn in the next iteration, or in the one after while API requests arrive.

        An API request then waits for at most one turn.
        """
        if (
            not self._yielded_once
            and self._loop.time() - fair_queue_of(self._loop).requested_at < _API_BUSY_SECONDS
        ):
            self._yielded_once = True
            self._loop.call_soon(self._end_turn)
            return
        self._yielded_once = False
        self._turn_ends = None
        self._turn_over.set()

    def _readable(self, connected: socket.socket) -> None:
        if not self._has_turn():
            return
        self._loop.remove_reader(connected.fileno())
        self.silent.pop(connected, None)
        self.others = self._next is not None or bool(self.silent)
        if not self._receive(connected):
            connected.close()
        self._schedule_pump()

    def _receive(self, connected: socket.socket) -> bool:
        """Receive and pass on the packet; return False if there is none yet."""
        try:
            length, ancillary, flags, _ = connected.recvmsg_into(
                [self._buffer], socket.CMSG_SPACE(_MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError:
            connected.close()
            return True
        fds = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % 4])
        connection = PluginConnection(connected, fds.tolist())
        if not length or flags & _TRUNCATED or len(fds) not in {0, 2}:
            if length:
                self._log.warning("packet on cni.sock refused", bytes=length, descriptors=len(fds))
            connection.close()
            return True
        if (uid := _peer_uid(connected)) not in self._uids:  # regardless of the file's mode
            self._log.warning("connection on cni.sock refused", uid=uid)
            refusal = CniError(f"cni.sock requires uid 0, the caller has uid {uid}")
            connection.send(encode_reply(1, error_json(refusal, FALLBACK_VERSION)))
            connection.close()
            return True
        with memoryview(self._buffer) as buffer, buffer[:length] as packet:
            self._handle(connection, packet)
        fair_queue_of(self._loop).priority_work_at = self._loop.time()
        return True

    def _drop(self, connected: socket.socket) -> None:
        with contextlib.suppress(ValueError, OSError):
            self._loop.remove_reader(connected.fileno())
        self.silent.pop(connected, None)
        connected.close()


def _peer_uid(connected: socket.socket) -> int:
    """Return the peer's uid (SO_PEERCRED, unix(7))."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid
