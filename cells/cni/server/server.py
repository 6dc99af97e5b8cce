"""Serves the plugin: ADD, DEL, CHECK, STATUS and GC, each container's calls one after the other.

Needs: Attacher, Detacher, Checker, PolicyPool.   Gives: CniServer.
A call that meets nothing unusual is one synchronous piece of work in the event loop's callback. What has to
wait (a policy map, a leftover, a roll-back) goes on in a task; until it is done, further calls for the same
container queue behind it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import TaskGroup
from msgspec import UnsetType

from cells.cni.server.attachment.attach import AddressesLeaving, Attacher, NameTaken, PodSide, netns_cookie
from cells.cni.server.attachment.begin import Attachment
from cells.cni.server.attachment.check import Checker
from cells.cni.server.attachment.detach import Detacher
from cells.cni.server.attachment.edges import PodEnd, PolicyPool
from cells.cni.server.attachment.undo import Undo
from cells.cni.server.protocol.errors import (
    FALLBACK_VERSION,
    INVALID_CONFIG,
    INVALID_ENVIRONMENT,
    NOT_AVAILABLE,
    TRY_AGAIN,
    CniError,
    error_json,
)
from cells.cni.server.protocol.packets import WISH_IPV6, decode_request, encode_reply
from cells.cni.server.protocol.request import Call, read_call
from cells.cni.server.protocol.transport import Connection, PacketServer, listen
from cells.cni.server.times import CallTimes
from cells.ipam import text_of
from cells.maps import PolicyIdsExhausted, PoolEmpty
from lifecycle import HiveError, Lifecycle, Logger

_TRIES = 5
_STATUS_SECONDS = 5.0
_ADDRESS_SECONDS = 30.0
"""How long an ADD waits for the addresses of pods on their way out: as long as the plugin for an agent."""
_INTERNAL = "internal error in the agent: its log tells more"

Finish = Callable[[], Awaitable[object]]


@dataclass(slots=True)
class _Attempt:
    """How one try of an ADD went."""

    undo: Undo
    error: CniError | None = None
    before_retry: Finish | None = None
    """What to wait for before the next try."""
    full: CniError | None = None
    """What to say when no address is freed in time."""
    attachment: Attachment | None = None
    """What waits for an identity before it can be completed."""
    answered: bool = False


class CniServer:
    """Listens on cni.sock from its hook on; see the module."""

    def __init__(
        self,
        path: Path,
        attacher: Attacher,
        detacher: Detacher,
        checker: Checker,
        pool: PolicyPool,
        open_pod: Callable[[int], PodEnd],
        *,
        lifecycle: Lifecycle,
        log: Logger,
        uids: Collection[int] = (0,),
        times: CallTimes | None = None,
    ) -> None:
        self._path = path
        self._attacher = attacher
        self._detacher = detacher
        self._checker = checker
        self._pool = pool
        self._open_pod = open_pod
        self._times = times or CallTimes()
        self._log = log
        self._server = PacketServer(self._handle, log, uids=uids)
        self._tasks: TaskGroup | None = None
        self._lanes: dict[str, deque[tuple[Connection, Call]]] = {}
        lifecycle.enter("serve cni.sock", self.serving)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Inside, plugins are answered; calls under way are finished on the way out."""
        listener = listen(self._path)
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            self._server.start(listener)
            try:
                yield
            finally:
                self._path.unlink(missing_ok=True)
                self._server.stop()
        self._tasks = None

    # Calls

    def _handle(self, connection: Connection, packet: memoryview) -> None:
        try:
            call = read_call(decode_request(packet))
        except CniError as error:
            self._refuse(connection, error, FALLBACK_VERSION)
            connection.close()
            return
        lane = self._lanes.get(call.container_id)
        if lane is None:
            self._begin(connection, call)
        else:
            lane.append((connection, call))

    def _begin(self, connection: Connection, call: Call) -> None:
        """Serve a call as far as it goes at once; the rest, if any, is a task in the container's lane."""
        if connection.gone():
            connection.close()
            return
        rest: Finish | None = None
        try:
            rest = self._serve(connection, call)
        except CniError as error:
            self._refuse(connection, error, call.conf.cni_version)
        except Exception as error:  # noqa: BLE001  # one call's bug must not take cni.sock from the others
            self._log.error("call failed", command=call.command, container=call.container_id, exc_info=error)
            self._refuse(connection, CniError(_INTERNAL), call.conf.cni_version)
        if rest is None or self._tasks is None:
            self._end(connection, call)
            return
        self._lanes[call.container_id] = deque()
        self._tasks.start_soon(self._finish, rest, connection, call)

    async def _finish(self, rest: Finish, connection: Connection, call: Call) -> None:
        try:
            await rest()
        except CniError as error:
            self._refuse(connection, error, call.conf.cni_version)
        except Exception as error:  # noqa: BLE001  # as in _begin
            self._log.error("call failed", command=call.command, container=call.container_id, exc_info=error)
            self._refuse(connection, CniError(_INTERNAL), call.conf.cni_version)
        finally:
            self._end(connection, call)
            waiting = self._lanes.pop(call.container_id)
            while waiting:
                self._begin(*waiting.popleft())
                if (lane := self._lanes.get(call.container_id)) is not None:
                    lane.extend(waiting)
                    break

    def _end(self, connection: Connection, call: Call) -> None:
        connection.close()
        outcome = "fail" if connection.refused else "success"
        self._times.count(call.command, outcome, time.perf_counter() - connection.began)

    def _serve(self, connection: Connection, call: Call) -> Finish | None:
        match call.command:
            case "ADD":
                return self._add(connection, call)
            case "DEL":
                return self._delete(connection, call)
            case "CHECK":
                self._check(connection, call)
                return None
            case "STATUS":
                return partial(self._tell_status, connection)
            case "GC":
                self._collect(connection, call)
                return None
        raise CniError(f"unknown CNI_COMMAND: {call.command}", code=INVALID_ENVIRONMENT)

    # ADD

    def _add(self, connection: Connection, call: Call) -> Finish | None:
        if not connection.fds:
            raise CniError(f"request without a network namespace for CNI_NETNS {call.netns}")
        if not call.container_id or not call.ifname:  # no DEL could ever name what was made
            missing = "CNI_IFNAME" if call.container_id else "CNI_CONTAINERID"
            raise CniError(f"required env variables [{missing}] missing", code=INVALID_ENVIRONMENT)
        if "%" in call.ifname:  # the kernel takes it for a pattern, and names the interface otherwise
            raise CniError("interface name contains %", code=INVALID_ENVIRONMENT)
        netns_fd, netlink_fd = connection.fds
        side = PodSide(netns_fd, netns_cookie(netlink_fd), self._open_pod(netlink_fd))
        if call.repeated and self._detacher.detach_attachment(call.container_id, call.ifname):
            # Nobody was told of it, and how far its interface got in the pod is unknown.
            self._log.info("attachment of a killed agent is made again", attachment=call.attachment_id)
            left = _Attempt(Undo(), before_retry=self._detacher.settled)
            return partial(self._finish_add, connection, call, side, left)
        attempt = self._try_add(connection, call, side)
        if attempt.error is not None and not attempt.undo:
            raise attempt.error
        return None if attempt.answered else partial(self._finish_add, connection, call, side, attempt)

    def _try_add(self, connection: Connection, call: Call, side: PodSide) -> _Attempt:
        attempt = _Attempt(Undo())
        try:
            attachment = self._attacher.attach(call, side, attempt.undo)
            if attachment.identified:
                self._complete(connection, attempt, attachment)
            else:
                attempt.attachment = attachment
        except PoolEmpty:
            attempt.before_retry = self._pool.ready
        except AddressesLeaving as leaving:
            attempt.before_retry, attempt.full = leaving.wait, leaving.error
        except NameTaken:
            attempt.before_retry = partial(self._attacher.clear_the_way, call, side)
        except CniError as error:
            attempt.error = error
        except Exception as error:  # noqa: BLE001  # whatever it is, what was done must be taken back
            self._log.error("pod not added", attachment=call.attachment_id, exc_info=error)
            attempt.error = CniError(_INTERNAL)
        return attempt

    def _complete(self, connection: Connection, attempt: _Attempt, attachment: Attachment) -> None:
        endpoint, stdout = self._attacher.complete(attachment)
        attempt.answered = connection.send(encode_reply(0, stdout))
        if attempt.answered:
            attempt.undo.forget()
            ips = ", ".join(map(text_of, endpoint.addresses))
            self._log.info("pod added", endpoint=endpoint.id, pod=endpoint.title, ips=ips)

    async def _identify(self, connection: Connection, call: Call, attempt: _Attempt) -> None:
        """Wait for the identity of a new endpoint, and complete it."""
        attachment, attempt.attachment = attempt.attachment, None
        if attachment is None:
            return
        try:
            await self._attacher.identify(attachment)
            await self._server.turn()
            if not connection.gone():
                self._complete(connection, attempt, attachment)
        except CniError as error:
            attempt.error = error
        except Exception as error:  # noqa: BLE001  # as in _try_add
            self._log.error("pod not added", attachment=call.attachment_id, exc_info=error)
            attempt.error = CniError(_INTERNAL)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await attempt.undo.roll_back(self._log)
            raise

    async def _finish_add(self, connection: Connection, call: Call, side: PodSide, attempt: _Attempt) -> None:
        """Complete what waits for its identity; else roll back, wait, try again; or say why not."""
        await self._identify(connection, call, attempt)
        if attempt.answered:
            return
        tries, until = 0, anyio.current_time() + _ADDRESS_SECONDS
        while tries < _TRIES:
            tries += attempt.full is None  # others may take what is freed: only time ends waiting for that
            with anyio.CancelScope(shield=True):
                await attempt.undo.roll_back(self._log)
            if attempt.full is not None and anyio.current_time() >= until:
                attempt.error = attempt.full
            if attempt.error is not None:
                raise attempt.error
            if attempt.before_retry is None or connection.gone():
                connection.refused = True
                self._log.warning("pod not added: the plugin went away", attachment=call.attachment_id)
                return
            try:
                with anyio.CancelScope(deadline=until if attempt.full is not None else math.inf):
                    await attempt.before_retry()
                await self._server.turn()
            except HiveError as error:
                raise CniError(f"unable to create endpoint: {error}") from error
            if connection.gone():
                continue
            attempt = self._try_add(connection, call, side)
            await self._identify(connection, call, attempt)
            if attempt.answered:
                return
        with anyio.CancelScope(shield=True):
            await attempt.undo.roll_back(self._log)
        raise attempt.error or CniError(
            f"unable to set up veth on host side: interface {call.ifname} is made again by someone else",
            code=TRY_AGAIN,
        )

    # DEL

    def _delete(self, connection: Connection, call: Call) -> Finish | None:
        ours = self._detacher.owns_interface(call)
        found = self._detacher.detach_container(call.container_id)
        if found or not ours or not connection.fds:
            connection.send(encode_reply(0, b""))
            return None
        return partial(self._delete_stray, connection, call)

    async def _delete_stray(self, connection: Connection, call: Call) -> None:
        """Nobody knows the container: only its interface, if there is one, is left to delete."""
        netlink_fd = connection.fds[1]
        cookie = netns_cookie(netlink_fd)
        await self._detacher.remove_stray(call.ifname, self._open_pod(netlink_fd), cookie)
        connection.send(encode_reply(0, b""))

    # CHECK, STATUS, GC

    def _check(self, connection: Connection, call: Call) -> None:
        self._checker.check(call, self._open_pod(connection.fds[1]) if connection.fds else None)
        connection.send(encode_reply(0, b""))

    async def _tell_status(self, connection: Connection) -> None:
        """Whether an ADD could work, as far as that can be known before it.

        A node without free addresses or endpoint numbers is full, not broken: an error here makes a kubelet
        call the whole node unready, and its running pods would be evicted for it.
        """
        problem = self._attacher.problem()
        if not problem:
            problem = "no policy map can be prepared"
            try:
                with anyio.move_on_after(_STATUS_SECONDS):
                    await self._pool.ready()
                    problem = ""
            except PolicyIdsExhausted:
                problem = ""
            except HiveError as error:
                problem = str(error)
        if problem:
            raise CniError(
                "DaemonHealthzFailed",
                code=NOT_AVAILABLE,
                details=f"Cilium agent cannot add pods: {problem}",
            )
        connection.send(encode_reply(0, b""))

    def _collect(self, connection: Connection, call: Call) -> None:
        listed = call.conf.valid_attachments
        if isinstance(listed, UnsetType):
            raise CniError(
                f"network configuration {call.conf.name}: cni.dev/valid-attachments is missing: without it,"
                " nothing tells which attachments are to stay",
                code=INVALID_CONFIG,
            )
        valid = {(each.container_id, each.ifname) for each in listed or ()}
        count = self._detacher.collect(call.conf.name, valid, self._lanes.keys())
        self._log.info("network collected", network=call.conf.name, valid=len(valid), removed=count)
        connection.send(encode_reply(0, b""))

    def _refuse(self, connection: Connection, error: CniError, version: str) -> None:
        connection.refused = True
        text = f"{error.message}: {error.details}" if error.details else error.message
        self._log.warning("call refused", code=error.code, error=text)
        wish = WISH_IPV6 if error.needs_ipv6 else 0
        connection.send(encode_reply(1, error_json(error, version), wish))
