"""cni.sock: connections that bring one packet, with descriptors, and get one back.

Callbacks of the event loop rather than tasks: a pod's ADD is a millisecond of work, and each hop of a task
would be a tenth of that.
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
from lifecycle.http import clear_socket, turns_of

BACKLOG: Final = 1024
_PATH_LIMIT: Final = 107
TURN: Final = 0.001  # seconds of calls, about one, before the loop's others get their turn
_ASKED: Final = 1.0  # seconds since the last request of the API for which it counts as being asked
MOST_SILENT: Final = 256
"""Connections that have sent nothing; of more, the oldest is closed. A plugin sends when it has connected."""
_PAUSE: Final = 0.05  # seconds without accepting when the process has no descriptors left
_QUIET: Final = 60.0  # seconds between two lines in the log about that
_CREDENTIALS: Final = struct.Struct("3i")
_MAX_FDS: Final = 2
_CUT: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)  # as numbers: the enumeration takes 2 µs each time
_PEEK: Final = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)


def listen(path: Path) -> socket.socket:
    """Listen at ``path``, mode 0600. A stale socket file is replaced.

    Raises UsageError for a path too long for a socket and HiveError, one line, when another process serves
    it, when something else is in the way, or when it cannot be made.
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
    """One plugin waiting for its answer."""

    __slots__ = ("_socket", "began", "fds", "refused")

    def __init__(self, connected: socket.socket, fds: Sequence[int]) -> None:
        self._socket = connected
        self.fds = fds
        """What came with the request: nothing, or namespace and rtnetlink socket."""
        self.began = time.perf_counter()
        """When the request came."""
        self.refused = False
        """Whether the answer is an error, or the client has disconnected."""

    def send(self, packet: bytes) -> bool:
        """Send the reply; False when the plugin has disconnected."""
        try:
            self._socket.send(packet, _NO_SIGNAL)
        except OSError:
            return False
        return True

    def disconnected(self) -> bool:
        """Whether the plugin has closed its end."""
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
    """Accepts connections and hands each, with its packet, to ``handle``, which must close it."""

    def __init__(
        self,
        handle: Callable[[PluginConnection, memoryview], None],
        log: Logger,
        *,
        uids: Collection[int] = (0,),
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        """``settle`` is called when no other request waits: to finish what ``handle`` left unfinished."""
        self._handle = handle
        self._log = log
        self._uids = frozenset(uids)
        self._settle = settle
        self.unsettled = False
        """Whether there is one; ``handle`` answers."""
        self.others = False
        """Whether others have connected behind the one that is being handled."""
        self._next: socket.socket | None = None
        """Accepted, to be heard next."""
        self._pumping = False
        self._buffer = bytearray(MAX_PACKET)
        self.silent: dict[socket.socket, None] = {}
        """Connected and yet to send, the oldest first."""
        self._quiet_until = 0.0
        self._again: asyncio.TimerHandle | None = None
        self._turn_ends: float | None = None
        self._turn_over = asyncio.Event()
        self._rested = False

    def start(self, listener: socket.socket) -> None:
        """Serve on the running event loop until :meth:`stop`."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._loop.add_reader(listener.fileno(), self._accept)

    def stop(self) -> None:
        """Close the listener and who has not sent yet; connections handed over go on.

        A plugin that was not heard gets ECONNRESET, knows that nothing was done, and tries again.
        """
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._settle()
        if self._next is not None:
            self._next.close()
            self._next = None
        for connected in list(self.silent):
            self._drop(connected)

    def _accept(self) -> None:
        while self._has_turn():
            connected, self._next = self._next or self._take(), None
            if connected is None:
                self._settle()
                return
            self._next = self._take()
            self.others = self._next is not None or bool(self.silent)
            if not self._receive(connected):
                self.silent[connected] = None
                self._loop.add_reader(connected.fileno(), self._readable, connected)
                if len(self.silent) > MOST_SILENT:
                    self._drop(next(iter(self.silent)))
        self._come_back()

    def _take(self) -> socket.socket | None:
        """Who has connected, or None."""
        try:
            connected, _ = self._listener.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            self._wait_for_descriptors(error)
            return None
        connected.setblocking(False)
        return connected

    def _come_back(self) -> None:
        """Continue in the next iteration of the loop, for work that no event announces."""
        if not self._pumping and (self.unsettled or self._next is not None):
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        if self._listener.fileno() >= 0:  # else stopped meanwhile
            self._accept()

    def _wait_for_descriptors(self, error: OSError) -> None:
        """The socket stays readable (accept(2)): look again in a moment instead of turning in circles."""
        if self._loop.time() >= self._quiet_until:
            self._quiet_until = self._loop.time() + _QUIET
            self._log.error("connection on cni.sock not accepted yet", error=str(error))
        if self._again is None:
            self._loop.remove_reader(self._listener.fileno())
            self._again = self._loop.call_later(_PAUSE, self._go_on)

    def _go_on(self) -> None:
        self._again = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    async def turn(self) -> None:
        """Return in a round of the loop that has time for a call: many may have been woken by one thing."""
        while not self._has_turn():
            await self._turn_over.wait()

    def _has_turn(self) -> bool:
        """Whether there is time for a call in this round of the loop; if not, the loop calls again."""
        now = self._loop.time()
        if self._turn_ends is None:
            self._turn_ends = now + TURN
            self._turn_over.clear()
            self._loop.call_soon(self._end_turn)  # comes first in the next round
        return now < self._turn_ends

    def _end_turn(self) -> None:
        """In the next round; in the one after that while the API is asked: a request waits for one turn."""
        if not self._rested and self._loop.time() - turns_of(self._loop).taken_at < _ASKED:
            self._rested = True
            self._loop.call_soon(self._end_turn)
            return
        self._rested = False
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
        self._come_back()

    def _receive(self, connected: socket.socket) -> bool:
        """Read and hand over the packet; False when there is none yet."""
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
        if not length or flags & _CUT or len(fds) not in {0, 2}:
            if length:
                self._log.warning("packet on cni.sock refused", bytes=length, descriptors=len(fds))
            connection.close()
            return True
        if (uid := _peer_uid(connected)) not in self._uids:  # whatever the file's mode allows
            self._log.warning("connection on cni.sock refused", uid=uid)
            refusal = CniError(f"cni.sock changes the node: it needs uid 0, the caller has uid {uid}")
            connection.send(encode_reply(1, error_json(refusal, FALLBACK_VERSION)))
            connection.close()
            return True
        with memoryview(self._buffer) as buffer, buffer[:length] as packet:
            self._handle(connection, packet)
        turns_of(self._loop).preceded_at = self._loop.time()
        return True

    def _drop(self, connected: socket.socket) -> None:
        with contextlib.suppress(ValueError, OSError):
            self._loop.remove_reader(connected.fileno())
        self.silent.pop(connected, None)
        connected.close()


def _peer_uid(connected: socket.socket) -> int:
    """The peer's uid (SO_PEERCRED, unix(7))."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid
