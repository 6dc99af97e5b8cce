"""Serves the plugin's calls: ADD, DEL, CHECK, STATUS and GC. Calls of a container run one after another."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import ip_interface
from pathlib import Path

import anyio
from anyio.abc import TaskGroup
from msgspec import UnsetType

from cells.base.metrics import Histogram, MetricFamily, histogram
from cells.cni.add import INTERNAL, AddRequest, AddTools
from cells.cni.attach import Attacher, PodNetns, netns_cookie
from cells.cni.attachment import AttachEndpoints, AttachPolicyPool, PodNetlink
from cells.cni.detach import Detacher
from cells.cni.protocol import (
    FALLBACK_VERSION,
    HEALTH_UNKNOWN,
    INVALID_CONFIG,
    INVALID_ENVIRONMENT,
    NOT_AVAILABLE,
    UNHEALTHY,
    CniError,
    PluginAction,
    decode_request,
    encode_reply,
    error_json,
)
from cells.cni.request import PluginCall, PrevResult, chain_of, pod_of, prev_result_of, read_call
from cells.cni.transport import PacketServer, PluginConnection, listen
from cells.endpoint import State
from cells.maps.policy_maps import PolicyIdsExhausted
from cells.netlink.connection import NetlinkError
from cells.netlink.messages import IPInterface
from lifecycle import HiveError, Lifecycle, Logger

# Durations of calls.

_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Histogram bounds in seconds; an ADD takes about a millisecond."""


class CallTimes:
    """Histograms of the time from the arrival of a call to its reply, by command and outcome."""

    def __init__(self) -> None:
        self.durations: dict[tuple[str, str], Histogram] = {}

    def count(self, command: str, outcome: str, seconds: float) -> None:
        """Observe a call; ``outcome`` is success or fail."""
        if (durations := self.durations.get((command, outcome))) is None:
            durations = self.durations[command, outcome] = Histogram(_BOUNDS)
        durations.observe(seconds)

    def families(self) -> list[MetricFamily]:
        """Return the metric. Cilium has no equivalent."""
        text = "Time from a call of the CNI plugin to its answer, including its time in the queue"
        return [histogram("hive_cni_call_seconds", text, self.durations, "command outcome")]


# CHECK.
#
# Source: CNI spec 0.4.0 to 1.1.0, CHECK; order, error texts and codes as recorded from Cilium's plugin: first
#         the endpoint's health, then the interface and each of its addresses in the previous result.

_BROKEN = frozenset({State.DISCONNECTED, State.INVALID})
"""States that fail a CHECK. Endpoints in other states work, or will after their regeneration."""


class Checker:
    """Carries out CHECK: compares an attachment with its previous result."""

    def __init__(self, endpoints: AttachEndpoints) -> None:
        self._endpoints = endpoints

    def check(self, call: PluginCall, pod: PodNetlink | None) -> None:
        """Raise CniError if the attachment differs from its previous result, or its endpoint is broken.

        ``pod`` is None if the call has no namespace; then addresses are not checked.
        """
        previous = prev_result_of(call)
        try:
            pod_of(call.args)
        except CniError as error:
            raise CniError("InvalidArgs", code=INVALID_CONFIG, details=error.message) from error
        if chain_of(call.conf):
            self._check_health(call)
            return
        if previous is None:
            raise _invalid("CHECK without a prevResult: the runtime has to pass the result of the ADD")
        wanted = _addresses_of(previous, call.ifname)
        self._check_health(call)
        if pod is not None:
            _check_interface(call.ifname, wanted, pod)

    def _check_health(self, call: PluginCall) -> None:
        endpoint = self._endpoints.by_attachment(call.container_id, call.ifname)
        if endpoint is None:
            raise CniError(
                "HealthzFailed",
                code=HEALTH_UNKNOWN,
                details="failed to retrieve container health: there is no endpoint for CNI attachment ID"
                f" {call.attachment_id}",
            )
        if self._endpoints.shown_state(endpoint) in _BROKEN:
            raise CniError("Unhealthy", code=UNHEALTHY, details="container is unhealthy in agent")


def _addresses_of(previous: PrevResult, ifname: str) -> list[IPInterface]:
    """Return the addresses of the pod's interface in the result, with their prefix lengths."""
    ours = {
        position
        for position, interface in enumerate(previous.interfaces or ())
        if interface.name == ifname and interface.sandbox
    }
    try:
        return [ip_interface(each.address) for each in previous.ips or () if each.interface in ours]
    except ValueError as error:
        raise _invalid(f"could not parse prevResult: {error}") from error


def _check_interface(ifname: str, wanted: list[IPInterface], pod: PodNetlink) -> None:
    try:
        found = pod.addresses(ifname)
    except NetlinkError as error:
        raise CniError(f"unable to read addresses of interface {ifname}: {error}") from error
    if found is None:
        raise CniError(f"cannot find container link {ifname}")
    for address in wanted:
        if address not in found:
            raise CniError(f"expected ip {address} on interface {ifname}")


def _invalid(details: str) -> CniError:
    return CniError("InvalidNetworkConfig", code=INVALID_CONFIG, details=details)


_STATUS_SECONDS = 5.0

Finish = Callable[[], Awaitable[object]]


class CniServer:
    """Listens on cni.sock and dispatches calls."""

    def __init__(
        self,
        path: Path,
        attacher: Attacher,
        detacher: Detacher,
        checker: Checker,
        pool: AttachPolicyPool,
        open_pod: Callable[[int], PodNetlink],
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
        self._server = PacketServer(self._handle, log, uids=uids, finish_pending=self._finish_creating)
        self._tasks: TaskGroup | None = None
        self._queues: dict[str, deque[tuple[PluginConnection, PluginCall]]] = {}
        """Queued calls, by container with a call in progress."""
        self._tools = AddTools(attacher, pool, log, self._server.wait_for_turn, self._finish_creating)
        self._creating: AddRequest | None = None
        """The ADD with a link in creation, while the event loop serves the previous ADD."""
        self._waiting: dict[str, AddRequest] = {}
        """ADDs that wait for an identity, an address or a policy map, by container."""
        lifecycle.enter("serve cni.sock", self.serving)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve the socket in the context; on exit, finish calls in progress."""
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

    def _handle(self, connection: PluginConnection, packet: memoryview) -> None:
        try:
            call = read_call(decode_request(packet))
        except CniError as error:
            self._refuse(connection, error, FALLBACK_VERSION)
            connection.close()
            return
        queue = self._queues.get(call.container_id)
        if queue is None:
            self._start(connection, call)
        else:
            queue.append((connection, call))
            self._abandon(call.container_id, queue)

    def _abandon(self, container_id: str, queue: deque[tuple[PluginConnection, PluginCall]]) -> None:
        """Stop the waiting ADD of a container if a DEL of the container is queued."""
        request = self._waiting.get(container_id)
        if request is not None and any(call.command == "DEL" for _, call in queue):
            request.abandon()

    def _start(self, connection: PluginConnection, call: PluginCall) -> None:
        """Serve a call. If it must wait, a task continues it, and calls of the container are queued."""
        if connection.disconnected():
            connection.close()
            return
        self._run(connection, call, partial(self._serve, connection, call))

    def _run(self, connection: PluginConnection, call: PluginCall, step: Callable[[], Finish | None]) -> None:
        """Run a step of a call. If it returns a coroutine function, a task runs that; else the call ends."""
        remaining: Finish | None = None
        try:
            remaining = step()
        except CniError as error:
            self._refuse(connection, error, call.conf.cni_version)
        except Exception as error:  # noqa: BLE001  # a bug in one call must not stop the others
            self._log.error("call failed", command=call.command, container=call.container_id, exc_info=error)
            self._refuse(connection, CniError(INTERNAL), call.conf.cni_version)
        if self._creating is not None and self._creating.connection is connection:
            self._queues[call.container_id] = deque()
            return
        if remaining is None or self._tasks is None:
            self._end(connection, call)
            return
        self._queues[call.container_id] = deque()
        self._tasks.start_soon(self._finish, remaining, connection, call)

    async def _finish(self, remaining: Finish, connection: PluginConnection, call: PluginCall) -> None:
        try:
            await remaining()
        except CniError as error:
            self._refuse(connection, error, call.conf.cni_version)
        except Exception as error:  # noqa: BLE001  # as in _run
            self._log.error("call failed", command=call.command, container=call.container_id, exc_info=error)
            self._refuse(connection, CniError(INTERNAL), call.conf.cni_version)
        finally:
            self._waiting.pop(call.container_id, None)
            self._end(connection, call)
            self._resume(call.container_id, self._queues.pop(call.container_id))

    async def _drain(self, container_id: str) -> None:
        self._resume(container_id, self._queues.pop(container_id))

    def _resume(self, container_id: str, waiting: deque[tuple[PluginConnection, PluginCall]]) -> None:
        """Serve the queued calls of a container, until one must wait."""
        while waiting:
            if (queue := self._queues.get(container_id)) is not None:
                queue.extend(waiting)
                self._abandon(container_id, queue)
                return
            self._start(*waiting.popleft())

    def _end(self, connection: PluginConnection, call: PluginCall) -> None:
        connection.close()
        outcome = "fail" if connection.refused else "success"
        self._times.count(call.command, outcome, time.perf_counter() - connection.began)

    def _serve(self, connection: PluginConnection, call: PluginCall) -> Finish | None:
        match call.command:
            case "ADD":
                return self._add(connection, call)
            case "DEL":
                return self._delete(connection, call)
            case "CHECK":
                self._check(connection, call)
                return None
            case "STATUS":
                return partial(self._send_status, connection)
            case "GC":
                self._garbage_collect(connection, call)
                return None
        raise CniError(f"unknown CNI_COMMAND: {call.command}", code=INVALID_ENVIRONMENT)

    # ADD

    def _add(self, connection: PluginConnection, call: PluginCall) -> Finish | None:
        if not connection.fds:
            raise CniError(f"request without a network namespace for CNI_NETNS {call.netns}")
        if not call.container_id or not call.ifname:  # no DEL could refer to the attachment
            missing = "CNI_IFNAME" if call.container_id else "CNI_CONTAINERID"
            raise CniError(f"required env variables [{missing}] missing", code=INVALID_ENVIRONMENT)
        if "%" in call.ifname:  # the kernel would use it as a pattern for another name
            raise CniError("interface name contains %", code=INVALID_ENVIRONMENT)
        netns_fd, netlink_fd = connection.fds
        pod_netns = PodNetns(netns_fd, netns_cookie(netlink_fd), self._open_pod(netlink_fd))
        # The runtime never received this attachment, and its links may be incomplete: replace it.
        again = call.repeated and self._detacher.detach_attachment(call.container_id, call.ifname)
        before_retry = self._detacher.wait_links_deleted if again else None
        request = AddRequest(self._tools, connection, call, pod_netns, before_retry=before_retry)
        if again:
            self._log.info(
                "repeating an ADD that a killed agent left unfinished", attachment=call.attachment_id
            )
        elif request.prepare() and (self._server.others or self._creating is not None):
            if self._start_creating(request):
                return None
        else:
            request.attach()
        return self._remaining(request)

    def _remaining(self, request: AddRequest) -> Finish | None:
        """Return what the ADD must still wait for; a DEL of the container ends that wait."""
        if (remaining := request.remaining()) is not None:
            self._waiting[request.call.container_id] = request
        return remaining

    def _start_creating(self, request: AddRequest) -> bool:
        """Start to create this ADD's link, and finish the previous ADD meanwhile.

        Returns whether the creation was started.
        """
        before, self._creating = self._creating, None
        if before is not None:
            before.await_link()
        started = request.start_link()
        if started:
            self._creating = request
        self._server.pending = started
        if before is not None:
            self._finish_created(before)
        return started

    def _finish_creating(self) -> None:
        """Finish the ADD with a link in creation, if any."""
        while (request := self._creating) is not None:
            self._creating, self._server.pending = None, False
            request.await_link()
            self._finish_created(request)

    def _finish_created(self, request: AddRequest) -> None:
        def finish() -> Finish | None:
            request.attach()
            return self._remaining(request)

        container_id = request.call.container_id
        waiting = self._queues.pop(container_id, deque())
        self._run(request.connection, request.call, finish)
        if waiting and (queue := self._queues.get(container_id)) is not None:
            queue.extend(waiting)
            self._abandon(container_id, queue)
        elif waiting and self._tasks is not None:  # another ADD is in creation: resume these calls after it
            self._queues[container_id] = waiting
            self._tasks.start_soon(self._drain, container_id)

    # DEL

    def _delete(self, connection: PluginConnection, call: PluginCall) -> Finish | None:
        ours = self._detacher.owns_interface(call)
        found = self._detacher.detach_container(call.container_id)
        if found and call.conf.ipam.type and ours:
            return partial(self._reply_when_deleted, connection)
        if found or not ours or not connection.fds:
            connection.send(encode_reply(0, b""))
            return None
        return partial(self._delete_stray, connection, call)

    async def _reply_when_deleted(self, connection: PluginConnection) -> None:
        """Reply once links and conntrack entries are deleted: then the plugin releases addresses."""
        await self._detacher.wait_links_deleted()
        connection.send(encode_reply(0, b""))

    async def _delete_stray(self, connection: PluginConnection, call: PluginCall) -> None:
        """Delete the interface of an unknown container."""
        netlink_fd = connection.fds[1]
        cookie = netns_cookie(netlink_fd)
        await self._detacher.delete_unknown_interface(call.ifname, self._open_pod(netlink_fd), cookie)
        connection.send(encode_reply(0, b""))

    # CHECK, STATUS, GC

    def _check(self, connection: PluginConnection, call: PluginCall) -> None:
        self._checker.check(call, self._open_pod(connection.fds[1]) if connection.fds else None)
        connection.send(encode_reply(0, b""))

    async def _send_status(self, connection: PluginConnection) -> None:
        """Reply to STATUS whether ADDs can succeed.

        A node without free addresses or endpoint ids is not an error: a kubelet would set the whole node
        NotReady, and its running pods would be evicted.
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

    def _garbage_collect(self, connection: PluginConnection, call: PluginCall) -> None:
        listed = call.conf.valid_attachments
        if isinstance(listed, UnsetType):
            raise CniError(
                f"network configuration {call.conf.name}: cni.dev/valid-attachments is missing: without it,"
                " the attachments to leave in place are unknown",
                code=INVALID_CONFIG,
            )
        valid = {(each.container_id, each.ifname) for each in listed or ()}
        count = self._detacher.collect(call.conf.name, valid, self._queues.keys())
        self._log.info(
            "attachments of the network garbage-collected",
            network=call.conf.name,
            valid=len(valid),
            removed=count,
        )
        connection.send(encode_reply(0, b""))

    def _refuse(self, connection: PluginConnection, error: CniError, version: str) -> None:
        connection.refused = (
            error.action is not PluginAction.ADDRESSES
        )  # the first reply to every delegated ADD
        if connection.refused:
            text = f"{error.message}: {error.details}" if error.details else error.message
            self._log.warning("call refused", code=error.code, error=text)
        connection.send(encode_reply(1, error_json(error, version), error.action))
