"""Controllers: named functions that run periodically, or are retried until they succeed.

Each runs as a job of the hive, with Cilium's retry rules and counters; ``cilium-dbg status
--all-controllers`` and the endpoints' statuses show them.

Source: Cilium 1.17, pkg/controller.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from functools import partial
from operator import attrgetter
from uuid import uuid4, uuid5

import anyio
import msgspec

from cells.base.metrics import Collector, Histogram, MetricFamily, counter, gauge, histogram
from lifecycle import Health, HealthTree, JobMetrics, Jobs, Logger, Member, Settings, config, module, provide
from lifecycle.jobs import JobStats

__all__ = ["ControllerState", "Controllers", "Rules", "cell"]


# Rules and status of a controller.
#
# Source: Cilium 1.17, controllers: retries wait linearly longer.


class Rules(msgspec.Struct, frozen=True):
    """When a controller runs again; all times in seconds."""

    interval: float = 0.0
    """Pause after a success; 0: until it is updated or triggered."""
    retry_base: float = 1.0
    """The pause after n consecutive failures is n times this."""
    retry_maximum: float = 0.0
    """Maximum pause after a failure; 0: no maximum."""
    retries: bool = True
    """Whether failures are retried with a backoff; otherwise the interval applies after failures, too."""

    def pause(self, failures: int) -> float:
        """Return the pause after this number of consecutive failures (0: a success).

        Infinite if the controller waits for a trigger.
        """
        if failures and self.retries:
            return min(failures * self.retry_base, self.retry_maximum or math.inf)
        return self.interval or math.inf


class ControllerState(msgspec.Struct, frozen=True):
    """The status of a controller; times are Unix seconds."""

    name: str
    uuid: str
    owner: str
    """The object that the controller belongs to, such as ``endpoint-7``; empty for the node."""
    retries: bool
    retry_base: float
    """Seconds."""
    interval: float
    """Seconds; 0 if it has no interval."""
    successes: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    last_error: str = ""
    """Error of the last run; empty if it succeeded."""
    last_success: float | None = None
    last_failure: float | None = None


class ControllerSettings(Settings, frozen=True):
    """Which controller groups have metrics."""

    controller_group_metrics: tuple[str, ...] = ()
    """Groups of controllers that cilium_controllers_group_runs_total counts: names, all or none."""


# Runs controllers as jobs and shows their status; the hive's other jobs are shown in the same form.
#
# Source: Cilium 1.17, UpdateController, TriggerController, RemoveController and the ControllerStatus model.

Work = Callable[[], Awaitable[object]]


class _Controller:
    def __init__(self, name: str, owner: str, group: str, work: Work, rules: Rules) -> None:
        self.name = name
        self.group = group
        self.owner = owner
        self.uuid = str(uuid4())
        self.work = work
        self.rules = rules
        self.wake: anyio.Event | None = None
        """Set while it runs or waits; a controller may be created before the event loop runs."""
        self.scope: anyio.CancelScope | None = None
        self.removed = False
        self.successes = self.failures = self.in_a_row = 0
        self.last_error = ""
        self.last_success: float | None = None
        self.last_failure: float | None = None
        self.cached: ControllerState | None = None
        """Its status, created on demand and reused until it changes."""

    def trigger(self) -> None:
        """Run it now, or again after the current run."""
        if self.wake is not None:
            self.wake.set()

    def stop(self) -> None:
        """Stop it, also during a run."""
        self.removed = True
        if self.scope is not None:
            self.scope.cancel()

    def status(self) -> ControllerState:
        if self.cached is None:
            self.cached = ControllerState(
                name=self.name,
                uuid=self.uuid,
                owner=self.owner,
                retries=self.rules.retries,
                retry_base=self.rules.retry_base,
                interval=self.rules.interval,
                successes=self.successes,
                failures=self.failures,
                failures_in_a_row=self.in_a_row,
                last_error=self.last_error,
                last_success=self.last_success,
                last_failure=self.last_failure,
            )
        return self.cached


class Controllers:
    """The controllers of the node, by name.

    Each runs at once and then by its rules, never twice in parallel. A failure degrades the health of its
    name until a run succeeds.
    """

    def __init__(
        self, jobs: Jobs, metrics: JobMetrics, health: Health, tree: HealthTree, log: Logger
    ) -> None:
        self._jobs = jobs
        self._metrics = metrics
        self._health = health
        self._tree = tree
        self._log = log
        self._known: dict[str, _Controller] = {}
        self._owned: dict[str, dict[str, _Controller]] = {}
        self.runs = {"success": Histogram(), "failure": Histogram()}
        """Durations of runs in seconds, including those of removed controllers."""
        self.group_runs: Counter[tuple[str, str]] = Counter()
        """Runs by group and status."""
        self._agent_run = uuid4()
        """Id of this run of the agent, the namespace of the jobs' UUIDs."""
        self._job_statuses: dict[str, tuple[JobStats, bool, ControllerState]] = {}
        """Cached statuses of the hive's other jobs by name, each with its inputs."""

    def update(
        self,
        name: str,
        work: Work,
        rules: Rules = Rules(),  # noqa: B008
        *,
        owner: str = "",
        group: str = "",
    ) -> None:
        """Run ``work`` now and then by the rules; ``group`` is its group in metrics.

        An existing controller of this name gets the new work and rules, and keeps UUID and counters.
        """
        known = self._known.get(name)
        if known is not None:
            known.work, known.rules, known.cached = work, rules, None
            known.trigger()
            return
        controller = self._known[name] = _Controller(name, owner, group or name, work, rules)
        self._owned.setdefault(owner, {})[name] = controller
        self._jobs.one_shot(name, partial(self._loop, controller))

    def trigger(self, name: str) -> bool:
        """Run a controller now, or again after the current run; return whether it exists."""
        known = self._known.get(name)
        if known is not None:
            known.trigger()
        return known is not None

    def remove(self, name: str) -> bool:
        """Stop a controller, also during a run; return whether it existed."""
        known = self._known.pop(name, None)
        if known is not None:
            owned = self._owned[known.owner]
            del owned[name]
            if not owned:
                del self._owned[known.owner]
            known.stop()
        return known is not None

    def remove_of(self, owner: str) -> None:
        """Stop all controllers of an owner."""
        for known in self.of(owner):
            self.remove(known.name)

    def of(self, owner: str) -> tuple[ControllerState, ...]:
        """Return the controllers of an owner, by name."""
        owned = self._owned.get(owner)
        return tuple(owned[name].status() for name in sorted(owned)) if owned else ()

    def all(self) -> tuple[ControllerState, ...]:
        """Return all controllers by name, including the hive's other jobs by the name of their health."""
        found = [known.status() for known in self._known.values()]
        degraded = {each.module for each in self._tree.snapshot() if each.level == "degraded"}
        text: dict[str, tuple[JobStats, bool, ControllerState]] = {}
        for job in self._metrics.snapshot():
            if job.name in self._known:
                continue
            name = f"{job.module}.{job.name}"
            failing = name in degraded
            last = self._job_statuses.get(name)
            if last is None or last[0] is not job or last[1] is not failing:
                last = (job, failing, self._job_status(name, job, failing))
            text[name] = last
            found.append(last[2])
        self._job_statuses = text
        found.sort(key=attrgetter("name"))
        return tuple(found)

    def _job_status(self, name: str, job: JobStats, failing: bool) -> ControllerState:
        """Return the status of a job. A long-running job has recovered if its health is not degraded."""
        return ControllerState(
            name=name,
            uuid=str(uuid5(self._agent_run, name)),
            owner="",
            retries=True,
            retry_base=job.retry_first,
            interval=job.interval,
            successes=job.runs - job.failures,
            failures=job.failures,
            failures_in_a_row=job.failures_in_a_row if failing else 0,
            last_error=job.last_error if failing else "",
            last_success=job.last_succeeded,
            last_failure=job.last_failed,
        )

    async def _loop(self, controller: _Controller) -> None:
        with anyio.CancelScope() as controller.scope:
            while not controller.removed:
                wake = controller.wake = anyio.Event()
                await self._run_once(controller)
                pause = controller.rules.pause(controller.in_a_row)
                with anyio.move_on_after(None if math.isinf(pause) else pause):
                    await wake.wait()

    async def _run_once(self, controller: _Controller) -> None:
        """Run it once, count the result, and catch its exception."""
        health = self._health.child(controller.name)
        began = anyio.current_time()
        try:
            await controller.work()
        except Exception as error:  # noqa: BLE001  # counted, reported in health, and retried
            self.runs["failure"].observe(anyio.current_time() - began)
            self.group_runs[controller.group, "failure"] += 1
            controller.failures += 1
            controller.in_a_row += 1
            before, text = controller.last_error, str(error) or type(error).__name__
            controller.last_failure, controller.last_error = time.time(), text
            pause = controller.rules.pause(controller.in_a_row)
            tried = f"failed {controller.in_a_row} times"
            again = "no retry until triggered" if math.isinf(pause) else f"retrying in {pause:g} s"
            health.degraded(f"{tried}, {again}", error)
            if text != before:  # a repeated failure is logged once
                self._log.warning("controller failed", name=controller.name, error=text)
        else:
            self.runs["success"].observe(anyio.current_time() - began)
            self.group_runs[controller.group, "success"] += 1
            controller.successes += 1
            controller.in_a_row = 0
            controller.last_success, controller.last_error = time.time(), ""
            health.ok()
        controller.cached = None


# Controllers as Cilium's metrics.
#
# Source: Cilium 1.17, cilium_controllers_*.
#
# The hive's other jobs, which the status shows in the same form, count among those that fail; their runs are
# hive_job_runs_total.


def families(controllers: Controllers, groups: Collection[str]) -> Iterator[MetricFamily]:
    """Yield metrics of controllers: runs, runs of ``groups``, durations, and the number of failing ones."""
    yield counter(
        "cilium_controllers_runs_total",
        "Number of times that a controller process was run labeled by completion status",
        {status: spread.count for status, spread in controllers.runs.items()},
        "status",
    )
    yield histogram(
        "cilium_controllers_runs_duration_seconds",
        "Duration in seconds of the controller process labeled by completion status",
        controllers.runs,
        "status",
    )
    counted = {
        (group, status): runs
        for (group, status), runs in sorted(controllers.group_runs.items())
        if "none" not in groups and ("all" in groups or group in groups)
    }
    yield counter(
        "cilium_controllers_group_runs_total",
        "Number of times that a controller process was run labeled by completion status and controller group"
        " name",
        counted,
        "group_name status",
    )
    failing = sum(status.failures_in_a_row > 0 for status in controllers.all())
    yield gauge("cilium_controllers_failing", "Number of failing controllers", failing, fixed=True)


def controller_metrics(controllers: Controllers, settings: ControllerSettings) -> Member[Collector]:
    """Provide the metrics of controllers."""

    async def collect() -> Iterable[MetricFamily]:

        return families(controllers, settings.controller_group_metrics)

    return Collector("controllers", collect)


cell = module(
    "controllers",
    "Named work with retries and counters",
    config(ControllerSettings),
    provide(Controllers, controller_metrics),
)
