"""The agent's status, and the HTTP port for the kubelet's probes.

``StatusCollector`` computes the status from the hive's health, controllers, status probes and external
dependencies; the REST API and ``HealthServer`` return it. The port opens last, so earlier probes are refused.

Source: Cilium 1.17, the status collector and agent-health-port.
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


# Status probes: periodic checks whether parts of the node still respond.
#
# Source: Cilium 1.17, the status collector: 5 s between two runs, a warning after 15 s, stale after 60 s. The
#         agent is not ready before each probe has completed or is stale.

INTERVAL: Final = 5.0
"""Seconds from the end of a run to the next one."""
WARN: Final = 15.0
STALE: Final = 60.0
"""Seconds without an answer after which a probe is stale."""


class Probe(msgspec.Struct, frozen=True):
    """A status probe of a dependency that may stop responding, such as a file system."""

    name: str
    check: Callable[[], Awaitable[object]]
    """Raises the failure. It is never cancelled, however long it takes."""


class Probes:
    """Runs each probe as a controller; a probe that does not return in time is stale.

    The start hook waits until each probe has completed or is stale.
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
        self._checked = {probe.name: anyio.Event() for probe in probes}
        lifecycle.append(Hook("run every probe once", self._wait_first_checks, start_timeout=2 * STALE))
        for probe in probes:
            rules = Rules(interval=INTERVAL, retries=False)
            controllers.update(
                f"status-probe-{probe.name}", partial(self._check, probe), rules, group="status-probe"
            )

    @property
    def stale(self) -> Mapping[str, float]:
        """Probes without an answer, and the start of their runs in Unix seconds."""
        return self._stale

    async def _wait_first_checks(self) -> None:
        for checked in self._checked.values():
            await checked.wait()

    async def _check(self, probe: Probe) -> None:
        began, loop, late = time.time(), asyncio.get_running_loop(), False

        def warn() -> None:
            self._log.warning("no response from probe yet", probe=probe.name, seconds=WARN)

        def mark_stale() -> None:
            nonlocal late
            late = True
            self._stale[probe.name] = began
            self._checked[probe.name].set()
            text = f"no response from {probe.name} probe within {STALE:g} seconds"
            self._health.child(probe.name).degraded(text)
            self._log.error("probe is stale", probe=probe.name, error=text)

        timers = loop.call_later(WARN, warn), loop.call_later(STALE, mark_stale)
        try:
            await probe.check()
        finally:
            for timer in timers:
                timer.cancel()
            self._checked[probe.name].set()
            if not late and self._stale.pop(probe.name, None) is not None:
                self._health.child(probe.name).remove()  # the first run in time after a stale one


# Probes of the bpf file system and the state directory.


def maps_probe(agent: AgentConfig) -> Member[Probe]:
    """Provide the probe of the directory with the pinned maps."""
    return Probe("bpf-maps", partial(_check, _check_maps, agent.globals_dir))


def state_probe(agent: AgentConfig) -> Member[Probe]:
    """Provide the probe of the state directory: that it responds and is writable."""
    return Probe("state-directory", partial(_check, _check_state_directory, agent.state))


async def _check(check: Callable[[Path], None], path: Path) -> None:
    """Run the check in a thread, which is abandoned if it never returns."""
    await anyio.to_thread.run_sync(check, path, abandon_on_cancel=True)


def _check_maps(directory: Path) -> None:
    """Raise HiveError if the pinned maps are missing: a restart would begin with empty maps."""
    if not directory.is_dir():
        raise HiveError(f"{directory}: the maps' pins are missing; is the bpf file system still mounted?")


def _check_state_directory(directory: Path) -> None:
    """Raise HiveError if endpoints cannot be saved."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        raise HiveError(f"{directory}: {os.strerror(error.errno or 0)}; pods cannot be added") from error
    if found.f_flag & os.ST_RDONLY:
        raise HiveError(f"{directory}: read-only; pods cannot be added")
    if found.f_bavail == 0 and found.f_blocks:
        raise HiveError(f"{directory}: no space left; pods cannot be added")


# The agent's status, which GET /healthz on the socket and on port 9879 return.

State = Literal["Ok", "Warning", "Failure", "Disabled"]

HEALTHY: Final[frozenset[State]] = frozenset({"Ok", "Disabled"})

CNI_CONFIG_MODULE = "cni-config"
"""Id of the module that writes the CNI configuration; failures of its jobs do not count."""


class Dependency(msgspec.Struct, frozen=True):
    """An external dependency, such as the key-value store; its failure is the agent's."""

    title: str
    """Its name in the status."""
    state: Callable[[], tuple[State, str]]
    """Returns its state and the error."""


class AgentStatus(msgspec.Struct, frozen=True):
    """The agent's status and its inputs."""

    state: State
    message: str
    """The failure; empty if there is none."""
    modules: tuple[HealthStatus, ...]
    """Health of all modules, in the order of the tree."""
    cni_config: HealthStatus | None
    """Health of the writer of the CNI configuration file; None without one."""
    controllers: tuple[ControllerState, ...] = ()
    """By name."""
    stale: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Stale probes, and the start of their runs in Unix seconds."""
    outside: bool = False
    """Whether only an external dependency has failed."""

    @property
    def serves(self) -> bool:
        """Whether the kubelet's probe succeeds: the state is Ok or Disabled, or a restart would not help."""
        return self.state in HEALTHY or self.outside

    @property
    def degraded(self) -> tuple[HealthStatus, ...]:
        """Degraded modules."""
        return tuple(module for module in self.modules if module.level == "degraded")

    @property
    def uncontrolled(self) -> tuple[HealthStatus, ...]:
        """Degraded modules that do not belong to a controller."""
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
    """Compute the status from the health of modules, controllers, probes and dependencies.

    The first failure decides, in Cilium's order: a stale probe, as other data may be stale; the key-value
    store; a CNI configuration that cannot be written, as the node then gets no pods. Other degraded modules
    are listed, but restarting the agent would not help: the state stays Ok.
    """
    listed = tuple(modules)
    cni = [module for module in listed if module.module.rpartition(".")[2] == CNI_CONFIG_MODULE]
    failed = next((module for module in cni if module.level == "degraded"), None)
    cni_status = failed or next((module for module in cni if module.level != "unknown"), None)
    unready = next(
        ((one.title, *found) for one in dependencies if (found := one.state())[0] not in HEALTHY), None
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
    return AgentStatus(state, message, listed, cni_status, controllers, dict(stale or {}), outside)


class StatusCollector:
    """Computes the agent's status on demand, without a cache: all inputs are in memory."""

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
        """Return the current status."""
        stale, modules = self._probes.stale, self._health.snapshot()
        return agent_status(modules, self._controllers.all(), stale, self._dependencies)


@cache
def agent_version() -> str:
    """Return the version of the installed agent; ``0.0.0`` from a source tree.

    Reads the name of the package's .dist-info, as importing importlib.metadata takes 20 ms and 2 MB.
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
    """A barrier: all parts of a healthy agent have started.

    Provided by the composition of the agent, from the parts that start last.
    """


@after(AgentReady)
class HealthServer:
    """Answers ``/healthz`` with any method: 200 if the agent serves, otherwise 503; without a body.

    Differs from Cilium: 200 while only the key-value store has failed, as the kubelet would otherwise kill
    the agent, and a restart would not help. The API reports the failure. The header
    ``require-k8s-connectivity`` is not read.
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
        # Cancelled here, asyncio would leave a listening server that cannot be closed.
        with anyio.CancelScope(shield=True):
            for listener in listeners:
                server = HttpServer(self._answer, grace=1.0, limits=SCRAPED, log=self._log)
                await server.serve(listener)
                self._servers.append(server)
        self._log.info("serving health", addresses=", ".join(self._hosts), port=self._port)

    def _listen(self, host: str) -> socket.socket | None:
        """Create a listener; None if the node does not have the address."""
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
    "The agent's status, and the port for the kubelet's probes",
    config(HealthServerSettings),
    provide(maps_probe, state_probe, Probes, StatusCollector, HealthServer),
    invoke(HealthServer),
)
