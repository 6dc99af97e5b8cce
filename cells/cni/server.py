"""Serves the plugin: ADD, DEL, CHECK, STATUS and GC, each container's calls one after the other."""

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

from cells.base.addresses import IPAddress
from cells.base.metrics import Histogram, MetricFamily, histogram
from cells.cni.add import INTERNAL, AddRequest, AddTools
from cells.cni.attach import Attacher, PodSide, netns_cookie
from cells.cni.attachment import AttachEndpoints, AttachPolicyPool, PodEnd
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
from cells.cni.request import PluginCall, PrevResult, chain_of, prev_result_of, read_call
from cells.cni.transport import PacketServer, PluginConnection, listen
from cells.endpoint import State
from cells.maps.policy_maps import PolicyIdsExhausted
from cells.netlink.connection import NetlinkError
from lifecycle import HiveError, Lifecycle, Logger

# How long plugins waited for the answers to their calls.

_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""In seconds: an ADD is a millisecond of work."""


class CallTimes:
    """Seconds from the arrival of a call to its answer, by command and outcome."""

    def __init__(self) -> None:
        self.took: dict[tuple[str, str], Histogram] = {}

    def count(self, command: str, outcome: str, seconds: float) -> None:
        """Count a call; ``outcome`` is success or fail."""
        if (spread := self.took.get((command, outcome))) is None:
            spread = self.took[command, outcome] = Histogram(_BOUNDS)
        spread.observe(seconds)

    def families(self) -> list[MetricFamily]:
        """As a metric; the name is ours, Cilium has none for it."""
        text = "Time from a call of the CNI plugin to its answer, waiting for its turn included"
        return [histogram("hive_cni_call_seconds", text, self.took, "command outcome")]


# CHECK: is the attachment as its ADD left it?
#
# Source: CNI spec 0.4.0 to 1.1.0, CHECK; order, texts and codes as recorded from Cilium's plugin: first the
#         endpoint's health, then the interface and each address the previous result gave it.

_BROKEN = frozenset({State.DISCONNECTED, State.INVALID})
"""Others are on their way to working, or work though something about them went wrong."""


class Checker:
    """Compares attachments with their results; changes nothing."""

    def __init__(self, endpoints: AttachEndpoints) -> None:
        self._endpoints = endpoints

    def check(self, call: PluginCall, pod: PodEnd | None) -> None:
        """Return when all is well, raise CniError when it is not.

        ``pod`` is None when the call came without a namespace: then there are no addresses to look at.
        """
        try:
            previous = prev_result_of(call)
        except CniError as error:
            raise _invalid(error.message) from error
        if previous is None:
            raise _invalid("CHECK without a prevResult: the runtime has to pass the result of the ADD")
        wanted = _addresses_of(previous, call.ifname)
        chained = bool(chain_of(call.conf))
        self._check_health(call)
        if not chained and pod is not None:
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


def _addresses_of(previous: PrevResult, ifname: str) -> list[tuple[str, IPAddress]]:
    """The addresses, as written and as such, that the result gives to the pod's interface."""
    ours = {
        position
        for position, interface in enumerate(previous.interfaces or ())
        if interface.name == ifname and interface.sandbox
    }
    try:
        return [
            (each.address, ip_interface(each.address).ip)
            for each in previous.ips or ()
            if each.interface in ours
        ]
    except ValueError as error:
        raise _invalid(f"could not parse prevResult: {error}") from error


def _check_interface(ifname: str, wanted: list[tuple[str, IPAddress]], pod: PodEnd) -> None:
    try:
        found = pod.addresses(ifname)
    except NetlinkError as error:
        raise CniError(f"unable to look at interface {ifname}: {error}") from error
    if found is None:
        raise CniError(f"cannot find container link {ifname}")
    for text, address in wanted:
        if address not in found:
            raise CniError(f"expected ip {text} on interface {ifname}")


def _invalid(details: str) -> CniError:
    return CniError("InvalidNetworkConfig", code=INVALID_CONFIG, details=details)


_STATUS_SECONDS = 5.0

Finish = Callable[[], Awaitable[object]]


class CniServer:
    """Listens on cni.sock from its hook on; see the module."""

    def __init__(
        self,
        path: Path,
        attacher: Attacher,
        detacher: Detacher,
        checker: Checker,
        pool: AttachPolicyPool,
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
        self._server = PacketServer(self._handle, log, uids=uids, settle=self._settle)
        self._tasks: TaskGroup | None = None
        self._lanes: dict[str, deque[tuple[PluginConnection, PluginCall]]] = {}
        self._tools = AddTools(attacher, pool, log, self._server.turn, self._settle)
        self._ahead: AddRequest | None = None
        """The ADD that waits for its link while the loop serves the one before."""
        self._waiting: dict[str, AddRequest] = {}
        """ADDs that wait for an identity, an address or a policy map, by container."""
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

    def _handle(self, connection: PluginConnection, packet: memoryview) -> None:
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
            self._abandon(call.container_id, lane)

    def _abandon(self, container_id: str, lane: deque[tuple[PluginConnection, PluginCall]]) -> None:
        """End what an ADD waits for, if a DEL of the container waits behind it."""
        addition = self._waiting.get(container_id)
        if addition is not None and any(call.command == "DEL" for _, call in lane):
            addition.abandon()

    def _begin(self, connection: PluginConnection, call: PluginCall) -> None:
        """Serve a call as far as it goes at once; the rest, if any, is a task in the container's lane."""
        if connection.disconnected():
            connection.close()
            return
        self._run(connection, call, partial(self._serve, connection, call))

    def _run(self, connection: PluginConnection, call: PluginCall, step: Callable[[], Finish | None]) -> None:
        """Take a step of a call; what it returns goes on in a task, and without that the call is over."""
        rest: Finish | None = None
        try:
            rest = step()
        except CniError as error:
            self._refuse(connection, error, call.conf.cni_version)
        except Exception as error:  # noqa: BLE001  # a bug in one call must not stop the others
            self._log.error("call failed", command=call.command, container=call.container_id, exc_info=error)
            self._refuse(connection, CniError(INTERNAL), call.conf.cni_version)
        if self._ahead is not None and self._ahead.connection is connection:
            self._lanes[call.container_id] = deque()
            return
        if rest is None or self._tasks is None:
            self._end(connection, call)
            return
        self._lanes[call.container_id] = deque()
        self._tasks.start_soon(self._finish, rest, connection, call)

    async def _finish(self, rest: Finish, connection: PluginConnection, call: PluginCall) -> None:
        try:
            await rest()
        except CniError as error:
            self._refuse(connection, error, call.conf.cni_version)
        except Exception as error:  # noqa: BLE001  # as in _run
            self._log.error("call failed", command=call.command, container=call.container_id, exc_info=error)
            self._refuse(connection, CniError(INTERNAL), call.conf.cni_version)
        finally:
            self._waiting.pop(call.container_id, None)
            self._end(connection, call)
            self._resume(call.container_id, self._lanes.pop(call.container_id))

    async def _drain(self, container_id: str) -> None:
        self._resume(container_id, self._lanes.pop(container_id))

    def _resume(self, container_id: str, waiting: deque[tuple[PluginConnection, PluginCall]]) -> None:
        """Serve the calls that waited in the container's lane, until one of them takes longer."""
        while waiting:
            if (lane := self._lanes.get(container_id)) is not None:
                lane.extend(waiting)
                self._abandon(container_id, lane)
                return
            self._begin(*waiting.popleft())

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
                self._collect(connection, call)
                return None
        raise CniError(f"unknown CNI_COMMAND: {call.command}", code=INVALID_ENVIRONMENT)

    # ADD

    def _add(self, connection: PluginConnection, call: PluginCall) -> Finish | None:
        if not connection.fds:
            raise CniError(f"request without a network namespace for CNI_NETNS {call.netns}")
        if not call.container_id or not call.ifname:  # no DEL could ever name what was made
            missing = "CNI_IFNAME" if call.container_id else "CNI_CONTAINERID"
            raise CniError(f"required env variables [{missing}] missing", code=INVALID_ENVIRONMENT)
        if "%" in call.ifname:  # the kernel takes it for a pattern, and names the interface otherwise
            raise CniError("interface name contains %", code=INVALID_ENVIRONMENT)
        netns_fd, netlink_fd = connection.fds
        side = PodSide(netns_fd, netns_cookie(netlink_fd), self._open_pod(netlink_fd))
        # The runtime never got an attachment that is made again, and how far its interface got is unknown.
        again = call.repeated and self._detacher.detach_attachment(call.container_id, call.ifname)
        settled = self._detacher.settled if again else None
        addition = AddRequest(self._tools, connection, call, side, before_retry=settled)
        if again:
            self._log.info(
                "repeating an ADD that a killed agent left unfinished", attachment=call.attachment_id
            )
        elif addition.prepare() and (self._server.others or self._ahead is not None):
            if self._go_ahead(addition):
                return None
        else:
            addition.attach()
        return self._rest(addition)

    def _rest(self, addition: AddRequest) -> Finish | None:
        """What is left to be waited for; a DEL of the container ends that."""
        if (rest := addition.rest()) is not None:
            self._waiting[addition.call.container_id] = addition
        return rest

    def _go_ahead(self, addition: AddRequest) -> bool:
        """Start to make this link, and finish the ADD before it meanwhile; whether it could be started."""
        before, self._ahead = self._ahead, None
        if before is not None:
            before.await_link()
        started = addition.begin_link()
        if started:
            self._ahead = addition
        self._server.unsettled = started
        if before is not None:
            self._finish_ahead(before)
        return started

    def _settle(self) -> None:
        """Finish the ADD that waits for its link, if any."""
        while (addition := self._ahead) is not None:
            self._ahead, self._server.unsettled = None, False
            addition.await_link()
            self._finish_ahead(addition)

    def _finish_ahead(self, addition: AddRequest) -> None:
        def finish() -> Finish | None:
            addition.attach()
            return self._rest(addition)

        container_id = addition.call.container_id
        waiting = self._lanes.pop(container_id, deque())
        self._run(addition.connection, addition.call, finish)
        if waiting and (lane := self._lanes.get(container_id)) is not None:
            lane.extend(waiting)
            self._abandon(container_id, lane)
        elif waiting and self._tasks is not None:  # another ADD is half started: they come after that
            self._lanes[container_id] = waiting
            self._tasks.start_soon(self._drain, container_id)

    # DEL

    def _delete(self, connection: PluginConnection, call: PluginCall) -> Finish | None:
        ours = self._detacher.owns_interface(call)
        found = self._detacher.detach_container(call.container_id)
        if found and call.conf.ipam.type and ours:
            return partial(self._settle_deletion, connection)
        if found or not ours or not connection.fds:
            connection.send(encode_reply(0, b""))
            return None
        return partial(self._delete_stray, connection, call)

    async def _settle_deletion(self, connection: PluginConnection) -> None:
        """Answer once the links and their flows are deleted: then the plugin frees the addresses."""
        await self._detacher.settled()
        connection.send(encode_reply(0, b""))

    async def _delete_stray(self, connection: PluginConnection, call: PluginCall) -> None:
        """The container is unknown: only its interface, if there is one, is left to delete."""
        netlink_fd = connection.fds[1]
        cookie = netns_cookie(netlink_fd)
        await self._detacher.remove_stray(call.ifname, self._open_pod(netlink_fd), cookie)
        connection.send(encode_reply(0, b""))

    # CHECK, STATUS, GC

    def _check(self, connection: PluginConnection, call: PluginCall) -> None:
        self._checker.check(call, self._open_pod(connection.fds[1]) if connection.fds else None)
        connection.send(encode_reply(0, b""))

    async def _send_status(self, connection: PluginConnection) -> None:
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

    def _collect(self, connection: PluginConnection, call: PluginCall) -> None:
        listed = call.conf.valid_attachments
        if isinstance(listed, UnsetType):
            raise CniError(
                f"network configuration {call.conf.name}: cni.dev/valid-attachments is missing: without it,"
                " the attachments to leave in place are unknown",
                code=INVALID_CONFIG,
            )
        valid = {(each.container_id, each.ifname) for each in listed or ()}
        count = self._detacher.collect(call.conf.name, valid, self._lanes.keys())
        self._log.info(
            "attachments of the network garbage-collected",
            network=call.conf.name,
            valid=len(valid),
            removed=count,
        )
        connection.send(encode_reply(0, b""))

    def _refuse(self, connection: PluginConnection, error: CniError, version: str) -> None:
        connection.refused = error.action is not PluginAction.ADDRESSES  # which is how each of these begins
        if connection.refused:
            text = f"{error.message}: {error.details}" if error.details else error.message
            self._log.warning("call refused", code=error.code, error=text)
        connection.send(encode_reply(1, error_json(error, version), error.action))
