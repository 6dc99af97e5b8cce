"""Decides whether the agent is well: one verdict, and the port the kubelet probes.

Controller: reads the hive's health tree, gives the verdict that the REST API and the port share.
Why:        the port listens only once everything serves, so that a probe before that is refused.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Final, Literal

import anyio
import anyio.to_thread
import msgspec
from msgspec import Meta

from cells.config import AgentConfig
from cells.observe.controllers import Controllers, ControllerState, Rules
from lifecycle import (
    Health,
    HealthStatus,
    HealthTree,
    HiveError,
    Hook,
    Lifecycle,
    Logger,
    Member,
    Settings,
    after,
    config,
    invoke,
    module,
    provide,
)
from lifecycle.http import SCRAPED, HttpServer, Request, Response

__all__ = [
    "AgentReady",
    "AgentStatus",
    "Dependency",
    "HealthServer",
    "HealthServerSettings",
    "Probe",
    "Probes",
    "State",
    "StatusCollector",
    "agent_status",
    "agent_version",
    "cell",
]


# Asks parts of the node, again and again, whether they still answer.
#
# Source: Cilium 1.17, the status collector: 5 s between two runs, a warning after 15 s, stale after 60 s. The
#         agent is not ready before each part was asked once.

INTERVAL: Final = 5.0
"""Seconds from the end of a run to the next one."""
WARN: Final = 15.0
STALE: Final = 60.0
"""Seconds without an answer after which the part counts as stale."""


class Probe(msgspec.Struct, frozen=True):
    """Something that may stop answering, such as a file system."""

    name: str
    ask: Callable[[], Awaitable[object]]
    """Raises what is wrong. It runs until it answers: nothing cancels it."""


class Probes:
    """Runs every probe as a controller; what is wrong is its failure, and one that hangs is stale.

    Its hook waits until each has given any answer, or is stale.
    """

    def __init__(
        self,
        probes: list[Member[Probe]],
        controllers: Controllers,
        *,
        lifecycle: Lifecycle,
        health: Health,
        log: Logger,
    ) -> None:
        self._health = health
        self._log = log
        self._stale: dict[str, float] = {}
        self._asked = {probe.name: anyio.Event() for probe in probes}
        lifecycle.append(Hook("ask every probe once", self._first, start_timeout=2 * STALE))
        for probe in probes:
            rules = Rules(interval=INTERVAL, retries=False)
            controllers.update(f"status-probe-{probe.name}", partial(self._ask, probe), rules)

    @property
    def stale(self) -> Mapping[str, float]:
        """Since when (Unix seconds) each probe that does not answer has been asked."""
        return self._stale

    async def _first(self) -> None:
        for asked in self._asked.values():
            await asked.wait()

    async def _ask(self, probe: Probe) -> None:
        began, loop, late = time.time(), asyncio.get_running_loop(), False

        def warn() -> None:
            self._log.warning("no response from probe yet", probe=probe.name, seconds=WARN)

        def give_up() -> None:
            nonlocal late
            late = True
            self._stale[probe.name] = began
            self._asked[probe.name].set()
            text = f"no response from {probe.name} probe within {STALE:g} seconds"
            self._health.child(probe.name).degraded(text)
            self._log.error("probe does not answer", probe=probe.name, error=text)

        timers = loop.call_later(WARN, warn), loop.call_later(STALE, give_up)
        try:
            await probe.ask()
        finally:
            for timer in timers:
                timer.cancel()
            self._asked[probe.name].set()
            if not late and self._stale.pop(probe.name, None) is not None:
                self._health.child(probe.name).remove()  # a late answer did not count: this one does


# What of the node may go away under a running agent: its maps' file system, its state directory.


def maps_probe(agent: AgentConfig) -> Member[Probe]:
    """The directory of the maps answers, and is there."""
    return Probe("bpf-maps", partial(_ask, _maps_there, agent.globals_dir))


def state_probe(agent: AgentConfig) -> Member[Probe]:
    """The state directory answers, and can be written."""
    return Probe("state-directory", partial(_ask, _room_left, agent.state))


async def _ask(question: Callable[[Path], None], path: Path) -> None:
    """In a thread, which is left behind if it never comes back."""
    await anyio.to_thread.run_sync(question, path, abandon_on_cancel=True)


def _maps_there(directory: Path) -> None:
    """Raise HiveError when the maps' pins are missing: a restart would begin with empty maps."""
    if not directory.is_dir():
        raise HiveError(f"{directory}: the maps' pins are missing; is the bpf file system still mounted?")


def _room_left(directory: Path) -> None:
    """Raise HiveError when endpoints cannot be saved."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        raise HiveError(f"{directory}: {os.strerror(error.errno or 0)}; pods cannot be added") from error
    if found.f_flag & os.ST_RDONLY:
        raise HiveError(f"{directory}: read-only; pods cannot be added")
    if found.f_bavail == 0 and found.f_blocks:
        raise HiveError(f"{directory}: no space left; pods cannot be added")


# How the agent is, in one value: what GET /healthz on the socket and port 9879 both answer.

State = Literal["Ok", "Warning", "Failure", "Disabled"]

WELL: Final[frozenset[State]] = frozenset({"Ok", "Disabled"})

CNI_CONFIG_MODULE = "cni-config"
"""Id of the module without which pods cannot be made here. Its jobs, below it, only watch."""


class Dependency(msgspec.Struct, frozen=True):
    """Something outside the agent that makes the agent's status a failure when it fails."""

    title: str
    """As the status names it."""
    state: Callable[[], tuple[State, str]]
    """How it is, and what is wrong."""


class AgentStatus(msgspec.Struct, frozen=True):
    """The verdict over the agent, and what it rests on."""

    state: State
    message: str
    """What is wrong, empty when nothing is."""
    modules: tuple[HealthStatus, ...]
    """Health of every module, in the order of the tree."""
    cni_config: HealthStatus | None
    """The last report of the writer of the CNI configuration file; None without one."""
    controllers: tuple[ControllerState, ...] = ()
    """By name."""
    stale: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Probes that do not answer, and since when (Unix seconds)."""
    outside: bool = False
    """Whether only something outside of the agent has failed."""

    @property
    def serves(self) -> bool:
        """Whether a probe should succeed: state Ok or Disabled, or what failed no restart would mend."""
        return self.state in WELL or self.outside

    @property
    def degraded(self) -> tuple[HealthStatus, ...]:
        """The modules that report trouble."""
        return tuple(module for module in self.modules if module.level == "degraded")

    @property
    def uncontrolled(self) -> tuple[HealthStatus, ...]:
        """Degraded modules with trouble that no controller shows."""
        listed = {controller.name for controller in self.controllers}
        return tuple(
            module
            for module in self.degraded
            if module.module not in listed and module.module.rpartition(".")[2] not in listed
        )


def agent_status(
    modules: Iterable[HealthStatus],
    controllers: tuple[ControllerState, ...] = (),
    stale: Mapping[str, float] | None = None,
    dependencies: Iterable[Dependency] = (),
) -> AgentStatus:
    """The verdict over these modules, and what the agent depends on.

    The first reason counts, in Cilium's order: a probe that does not answer, for then nothing is sure; the
    key-value store; a CNI configuration that cannot be written, since the node then gets no pods. Any other
    degraded module is listed, but restarting the agent would not help: the state stays Ok.
    """
    listed = tuple(modules)
    cni = [module for module in listed if module.module.rpartition(".")[2] == CNI_CONFIG_MODULE]
    failed = next((module for module in cni if module.level == "degraded"), None)
    spoken = failed or next((module for module in cni if module.level != "unknown"), None)
    unready = next(
        ((one.title, *found) for one in dependencies if (found := one.state())[0] not in WELL), None
    )
    state: State = "Ok"
    message = ""
    if stale:
        state, message = "Warning", "Stale status data"
    elif unready is not None:
        title, state, why = unready
        message = f"{title} is not ready: {why}"
    elif failed is not None:
        state, message = "Failure", f"Could not write CNI config file: {failed.message or failed.error}"
    outside = unready is not None and not stale and failed is None
    return AgentStatus(state, message, listed, spoken, controllers, dict(stale or {}), outside)


class StatusCollector:
    """Gives the agent's status at any time; nothing is cached, since all of it is in memory."""

    def __init__(
        self,
        health: HealthTree,
        controllers: Controllers,
        probes: Probes,
        dependencies: list[Member[Dependency]],
    ) -> None:
        self._health = health
        self._controllers = controllers
        self._probes = probes
        self._dependencies = dependencies

    def status(self) -> AgentStatus:
        """The agent's status now."""
        stale, modules = self._probes.stale, self._health.snapshot()
        return agent_status(modules, self._controllers.all(), stale, self._dependencies)


@cache
def agent_version() -> str:
    """Version of the installed agent, ``0.0.0`` when it runs from an uninstalled tree.

    By the name of the package's .dist-info: importlib.metadata takes 20 ms and 2 MB to import.
    """
    for folder in sys.path:
        for found in Path(folder).glob("hive_agent-*.dist-info"):
            return found.stem.removeprefix("hive_agent-")
    return "0.0.0"


# The probe endpoint: HTTP on the loopback address of each family, ``/healthz`` answers 200 or 503, no body.

HOST, HOST6 = "127.0.0.1", "::1"


class HealthServerSettings(Settings, frozen=True):
    """Settings of the health cell."""

    agent_health_port: Annotated[int, Meta(ge=1, le=65535)] = 9879
    """TCP port on 127.0.0.1, or ::1, that answers the kubelet's probes."""


class AgentReady(msgspec.Struct, frozen=True):
    """Announces that everything a healthy agent does has started.

    The composition provides it from the last things to start, so that a probe succeeds only after them.
    """


@after(AgentReady)
class HealthServer:
    """Answers ``/healthz`` with any method: 200 when the agent serves, else 503; no body.

    Unlike Cilium's it goes on with 200 while only the key-value store has failed: the kubelet would kill the
    agent for it, and a restart mends nothing. The API reports it.

    Without Kubernetes the header ``require-k8s-connectivity`` changes nothing, so it is not read.
    """

    def __init__(
        self,
        *,
        settings: HealthServerSettings,
        agent: AgentConfig,
        collector: StatusCollector,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self._port = settings.agent_health_port
        self._hosts = [host for host, family in ((HOST, agent.ipv4), (HOST6, agent.ipv6)) if family]
        self._collector = collector
        self._log = log
        self._servers: list[HttpServer] = []
        lifecycle.append(Hook("serve health", self._start, self._stop))

    async def _start(self) -> None:
        with ExitStack() as opened:
            found = (self._listen(host) for host in self._hosts)
            listeners = [opened.enter_context(each) for each in found if each is not None]
            opened.pop_all()
        if not listeners:
            raise HiveError(
                f"agent-health-port: this node has no loopback address ({' or '.join(self._hosts)})"
            )
        # Interrupted here, asyncio would leave a listening server that cannot be closed.
        with anyio.CancelScope(shield=True):
            for listener in listeners:
                server = HttpServer(self._answer, grace=1.0, limits=SCRAPED, log=self._log)
                await server.serve(listener)
                self._servers.append(server)
        self._log.info("serving health", addresses=", ".join(self._hosts), port=self._port)

    def _listen(self, host: str) -> socket.socket | None:
        """A listener; None where the node has no such address."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((host, self._port), family=family)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return None
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise HiveError(
                f"agent-health-port: {host}:{self._port} cannot be served ({reason}): "
                "stop what listens there, or choose another port"
            ) from error

    async def _stop(self) -> None:
        while self._servers:
            await self._servers.pop().close()

    async def _answer(self, request: Request) -> Response:
        if request.path != "/healthz":
            return Response(404)
        return Response(200 if self._collector.status().serves else 503)


cell = module(
    "health",
    "The agent's status, and the port that probes ask",
    config(HealthServerSettings),
    provide(maps_probe, state_probe, Probes, StatusCollector, HealthServer),
    invoke(HealthServer),
)
