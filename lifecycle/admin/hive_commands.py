"""Commands for a hive: health, graph, start, jobs, logs."""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import anyio.to_thread

from lifecycle.admin.columns import fitted, wrapped
from lifecycle.admin.script import (
    Arguments,
    Command,
    CommandError,
    Commands,
    ConfirmationNeededError,
    Flag,
    State,
)
from lifecycle.errors import HiveError
from lifecycle.hive.switch import Modules
from lifecycle.hive.view import HiveView
from lifecycle.injection import ModuleId
from lifecycle.jobs import JobMetrics
from lifecycle.process import log_level, process_age, set_log_level
from lifecycle.process.health import HealthTree
from lifecycle.settings import Duration
from lifecycle.tables import Tables

__all__ = ["HiveCommands"]

LEVELS = ("debug", "info", "warning", "error", "critical")

_SLOWEST = 20
"""Number of steps of a start that are shown by default."""


class HiveCommands(Commands):
    """Commands about one hive."""

    def __init__(
        self,
        view: HiveView,
        health: HealthTree,
        jobs: JobMetrics,
        modules: Modules,
        tables: Tables,
        *,
        served_by: ModuleId | None = None,
        keeps: Mapping[str, str] | None = None,
    ) -> None:
        self._view, self._health, self._jobs = view, health, jobs
        self._modules, self._tables = modules, tables
        self._served_by = served_by
        self._keeps = keeps or {}
        everything = Flag("all", "All of them, not only the slowest", "switch")
        modular = self._complete_module
        super().__init__(
            Command("status", "How it is, in a few lines", self._status),
            Command(
                "health",
                "The health of each module",
                self._show_health,
                "[module]",
                complete=self._complete_health,
            ),
            Command("hive", "What it is made of", self._graph, "[view] [name]", complete=self._complete_view),
            Command("hive/timeline", "How its start went", self._timeline, flags=(everything,)),
            Command("hive/jobs", "Runs, failures and durations of every job", self._show_jobs),
            Command(
                "hive/disable",
                "Stop a module, and what needs it",
                self._disable,
                "module",
                (Flag("yes", "Do it without being asked", "switch", short="y"),),
                help="Lists what would stop, and asks. What this shell runs on is not stopped.",
                complete=modular,
                changes=self._disabled,
            ),
            Command(
                "hive/enable",
                "Start a module again",
                self._enable,
                "module",
                complete=modular,
                changes=self._disabled,
            ),
            Command(
                "log/level",
                "Show or set from which level on lines are logged",
                self._level,
                f"[{'|'.join(LEVELS)}]",
                complete=lambda before, _: () if before else LEVELS,
                changes=lambda: f"log level {log_level()}",
            ),
        )

    async def _status(self, state: State, _arguments: Arguments) -> None:
        statuses = [status for status in self._health.snapshot() if status.level != "unknown"]
        degraded = [status for status in statuses if status.level == "degraded"]
        jobs = self._jobs.snapshot()
        tables = self._tables.all()
        waiting = [table.name for table in tables if not table.initialized]
        failing = [f"{job.module}: {job.name}" for job in jobs if job.failures_in_a_row]
        lines = {
            "process": f"runs for {Duration(round(process_age()))}",
            "health": f"{len(statuses)} parts, {len(degraded)} degraded",
            "jobs": f"{len(jobs)}, {len(failing)} failing" + "".join(f"\n  {line}" for line in failing),
            "tables": f"{len(tables)}, {len(waiting)} not complete"
            + "".join(f"\n  {name}" for name in waiting),
            "disabled": ", ".join(self._modules.disabled) or "nothing",
            "log level": log_level(),
        }
        width = max(map(len, lines)) + 1
        for name, lines_of in lines.items():
            await state.print(f"{name + ':':{width}} {lines_of}")
        for status in degraded:
            text = f"{status.module}: {status.message}{f' ({status.error})' if status.error else ''}"
            await state.print("".join(wrapped(text, state.width, "  ", "  ")))

    async def _show_health(self, state: State, arguments: Arguments) -> None:
        under = arguments.words[0] if arguments.words else ""
        statuses = self._health.snapshot(under)
        if under and not statuses:
            raise CommandError(f"nothing has reported its health as {under}")
        now = time.time()
        records = [
            {
                "module": status.module,
                "level": status.level,
                "for": str(Duration(max(0, round(now - status.since)))),
                "message": status.message + (f" ({status.error})" if status.error else ""),
            }
            for status in statuses
        ]
        columns = ["module", "level", "for", "message"]
        await state.print(fitted(records, columns, state.width, keep=columns[:3], below="message"))

    async def _graph(self, state: State, arguments: Arguments) -> None:
        from lifecycle.graph.views import show  # not imported during a start

        def view() -> str:  # takes some 10 ms: not on the event loop
            return show(self._view.graph(), *arguments.words)

        try:
            await state.print(await anyio.to_thread.run_sync(view))
        except ValueError as error:
            raise CommandError(str(error)) from None

    async def _timeline(self, state: State, arguments: Arguments) -> None:
        timeline = await anyio.to_thread.run_sync(lambda: self._view.timeline(self._view.graph()))
        spans = sorted(timeline.spans, key=lambda span: -span.took)
        shown = spans if arguments.flags["all"] else spans[:_SLOWEST]
        records = [
            {
                "step": span.kind,
                "took": f"{span.took * 1000:.1f}ms",
                "began": f"{span.began * 1000:.1f}ms",
                "what": span.id,
            }
            for span in shown
        ]
        columns = ["step", "took", "began", "what"]
        await state.print(fitted(records, columns, state.width, keep=columns))
        if len(shown) < len(spans):
            await state.print(f"and {len(spans) - len(shown)} more: --all shows them")

    async def _show_jobs(self, state: State, _arguments: Arguments) -> None:
        records = [
            {
                "module": job.module,
                "job": job.name,
                "kind": job.kind,
                "runs": str(job.runs),
                "failures": str(job.failures),
                "last": f"{job.last_seconds * 1000:.1f}ms",
                "longest": f"{job.longest_seconds * 1000:.1f}ms",
                "error": job.last_error,
            }
            for job in self._jobs.snapshot()
        ]
        columns = ["module", "job", "kind", "runs", "failures", "last", "longest", "error"]
        keep = ["module", "job", "runs", "failures"]
        await state.print(fitted(records, columns, state.width, keep=keep, below="error"))

    async def _disable(self, state: State, arguments: Arguments) -> None:
        module = arguments.words[0]
        try:
            stops = self._modules.affected(module)
        except HiveError as error:
            raise CommandError(str(error)) from None
        if self._served_by in stops:
            raise CommandError(
                f"{module} is not stopped: {self._served_by}, which runs this shell, would stop with it, "
                "and nothing could start them again"
            )
        for running, why in self._keeps.items():
            if running in stops:
                raise CommandError(f"{module} is not stopped: {running} would stop with it, and {why}")
        if not arguments.flags["yes"] and module not in self._modules.disabled:
            count = "1 module" if len(stops) == 1 else f"{len(stops)} modules"
            raise ConfirmationNeededError(
                f"this stops {count}: {', '.join(stops)}\n"
                f"hive/enable {module} starts them again; to stop them, add --yes"
            )
        affected = await self._switched(self._modules.disable, module)
        await state.print(f"stopped: {', '.join(affected) or 'nothing'}")

    async def _enable(self, state: State, arguments: Arguments) -> None:
        affected = await self._switched(self._modules.enable, arguments.words[0])
        await state.print(f"started: {', '.join(affected) or 'nothing'}")

    def _disabled(self) -> str:
        return f"disabled: {', '.join(self._modules.disabled) or 'nothing'}"

    async def _level(self, state: State, arguments: Arguments) -> None:
        if arguments.words:
            try:
                set_log_level(arguments.words[0])
            except ValueError as error:
                raise CommandError(str(error)) from None
        await state.print(log_level())

    async def _switched(self, switch: Callable[[str], Awaitable[list[str]]], module: str) -> list[str]:
        try:
            return await switch(module)
        except HiveError as error:
            raise CommandError(str(error)) from None
        except ExceptionGroup as error:  # hooks that failed
            raise CommandError(str(error)) from error

    def _complete_view(self, before: Sequence[str], _: str) -> Iterable[str]:
        from lifecycle.graph.views import VIEWS

        return () if before else VIEWS

    def _complete_health(self, before: Sequence[str], _: str) -> Iterable[str]:
        return () if before else [status.module for status in self._health.snapshot()]

    def _complete_module(self, before: Sequence[str], _: str) -> Iterable[str]:
        return () if before else self._modules.names
