"""Hubble's exporters: run the static flow log of the settings and the dynamic ones of a watched file.

Source: Cilium 1.17, hubble-export-* and hubble-flowlogs-config-path.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup
from msgspec import Meta

from cells.base.metrics import MetricFamily, counter, gauge
from cells.config.drift import file_changes
from cells.hubble.hubble import Hubble
from lifecycle import Health, Jobs, Logger, Settings

if TYPE_CHECKING:  # imported only if Hubble is enabled
    from cells.hubble.export.files import FlowLog, RotatingFile, StandardOutput

STDOUT: Final = "stdout"
MEGABYTE: Final = 1 << 20
SIZE_FOR_ZERO: Final = 100
"""Maximum size in MiB if the setting is 0, the default of lumberjack, which Cilium's exporter uses."""
RETRY: Final = 1.0
"""Seconds between attempts to write to a file."""


class HubbleExportSettings(Settings, frozen=True):
    """Which events are written to files."""

    hubble_export_file_path: str = ""
    """File that events are appended to, or stdout; empty: none."""

    hubble_export_file_max_size_mb: Annotated[int, Meta(ge=0)] = 10
    """Size in MiB at which a file is renamed and another one starts; also of files of flow logs. 0: 100."""

    hubble_export_file_max_backups: Annotated[int, Meta(ge=0)] = 5
    """How many renamed files stay; 0: all."""

    hubble_export_file_compress: bool = False
    """Compress renamed files with gzip."""

    hubble_export_allowlist: str = ""
    """JSON objects of filters with blanks between; an event that matches one is written. Empty: all are."""

    hubble_export_denylist: str = ""
    """JSON objects of filters; an event that matches one is not written."""

    hubble_export_fieldmask: tuple[str, ...] = ()
    """Fields of flows that are written, such as source.pod_name; empty: all."""

    hubble_flowlogs_config_path: str = ""
    """YAML file of further files to write, each with filters; watched for changes. Empty: none."""

    def validate(self) -> None:
        """Refuse invalid filters and masks. Raises ValueError."""
        if self.hubble_export_allowlist or self.hubble_export_denylist or self.hubble_export_fieldmask:
            self.flow_log.check()

    @property
    def flow_log(self) -> FlowLog:
        """Return the flow log of the settings. Raises ValueError (one line)."""
        from cells.hubble.export.files import FlowLog, parse_filters

        return FlowLog(
            "hubble-export",
            self.hubble_export_file_path,
            self.hubble_export_fieldmask,
            tuple(parse_filters("hubble-export-allowlist", self.hubble_export_allowlist)),
            tuple(parse_filters("hubble-export-denylist", self.hubble_export_denylist)),
        )


class Exporters:
    """Runs the static flow log and those of the watched file while Hubble is enabled."""

    def __init__(
        self,
        hubble: Hubble,
        settings: HubbleExportSettings,
        *,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._health = health.child("flow-logs")
        self._log = log
        self._running: dict[str, tuple[FlowLog, CancelScope]] = {}
        self._configured: dict[str, FlowLog] = {}
        self._applied: tuple[int, float] | None = None
        """Hash of the applied contents of the watched file, and the time in seconds since 1970."""
        self._refused = ""
        """Why the current contents of the watched file are invalid."""
        self._failing: dict[str, str] = {}
        """Why a log cannot be written, by its name."""
        self.reconfigurations: Counter[str] = Counter()
        """Number of changes to flow logs by operation: add, update, remove, failure (of the file)."""
        if hubble.observer is None:
            return
        self._flows = hubble.observer
        if settings.hubble_export_file_path:
            jobs.one_shot("export events", self._export)
        if settings.hubble_flowlogs_config_path:
            jobs.one_shot("follow the flow logs' file", self._follow_file)

    @property
    def active(self) -> Mapping[str, bool]:
        """Whether events are being written, for each entry of the watched file."""
        return {name: name in self._running for name in self._configured}

    def families(self) -> Iterator[MetricFamily]:
        """Return the metrics of the watched file's flow logs; none without such a file."""
        if not self._settings.hubble_flowlogs_config_path:
            return
        prefix, active = "hubble_dynamic_exporter", Counter(self.active.values())
        counts = {"active": active[True], "inactive": active[False]}
        yield gauge(f"{prefix}_exporters_total", "Number of configured exporters", counts, "status")
        up = {name: float(on) for name, on in self.active.items()}
        yield gauge(f"{prefix}_up", "Status of individual exporters", up, "name")
        text = "Number of dynamic exporters reconfigurations"
        yield counter(f"{prefix}_reconfigurations_total", text, self.reconfigurations, "op")
        if self._applied is not None:
            digest, applied_at = self._applied
            yield gauge(f"{prefix}_config_hash", "Hash of last applied config", digest)
            yield gauge(f"{prefix}_config_last_applied", "Timestamp of last applied config", applied_at)

    async def _export(self) -> None:
        await self._write(self._settings.flow_log)

    async def _write(self, flow_log: FlowLog) -> None:
        """Write matching events as they arrive. Raises ValueError for invalid filters and masks."""
        from cells.hubble.export.files import RotatingFile, StandardOutput

        lines = flow_log.check()
        target: RotatingFile | StandardOutput = StandardOutput()
        if flow_log.path != STDOUT:
            target = RotatingFile(
                Path(flow_log.path),
                size=(self._settings.hubble_export_file_max_size_mb or SIZE_FOR_ZERO) * MEGABYTE,
                backups=self._settings.hubble_export_file_max_backups,
                compress=self._settings.hubble_export_file_compress,
            )
        try:
            async for batch in self._flows.follow():
                if found := [line for line in map(lines.line, batch) if line]:
                    await self._append(flow_log, target, found)
        finally:
            target.close()
            self._note(flow_log.name, "")

    async def _append(
        self, flow_log: FlowLog, target: RotatingFile | StandardOutput, lines: list[bytes]
    ) -> None:
        """Append lines; retry until all are written."""
        while True:
            wrong = ""
            try:
                await anyio.to_thread.run_sync(target.write, lines)
            except OSError as error:
                wrong = f"{flow_log.name}: {flow_log.path}: {error.strerror}; events wait in Hubble's ring"
            self._note(flow_log.name, wrong)
            if not wrong:
                return
            await anyio.sleep(RETRY)

    def _note(self, name: str, wrong: str) -> None:
        """Report to health why a log cannot be written; empty if it can."""
        if wrong == self._failing.get(name, ""):
            return
        self._failing.pop(name, None)
        if wrong:
            self._failing[name] = wrong
            self._log.warning(wrong)
        self._report()

    def _report(self) -> None:
        if wrong := [self._refused] * bool(self._refused) + list(self._failing.values()):
            self._health.degraded("; ".join(wrong))
        elif self._settings.hubble_flowlogs_config_path:
            self._health.ok(f"{len(self._running)} of {len(self._configured)} flow logs are written")
        else:
            self._health.ok("events are written")

    # Flow logs of the watched file.

    async def _follow_file(self) -> None:
        path = Path(self._settings.hubble_flowlogs_config_path)
        async with anyio.create_task_group() as tasks:
            async for _ in file_changes(path):
                self._read(path, tasks)

    def _read(self, path: Path, tasks: TaskGroup) -> None:
        """Apply the watched file.

        If it is invalid, all flow logs stay as they are; if an entry is, the flow log of its name does.
        """
        from cells.hubble.export.files import parse_flow_logs

        try:
            contents = path.read_bytes()
            parsed = parse_flow_logs(contents.decode())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self.reconfigurations["failure"] += 1
            self._refuse(f"{reason}; flow logs stay as they were")
            return
        wanted: dict[str, FlowLog] = {}
        refused: list[str] = []
        for one in parsed:
            try:
                one.check()
                wanted[one.name] = one
            except ValueError as error:
                refused.append(str(error))
                if one.name in self._configured:
                    wanted[one.name] = self._configured[one.name]
        self._apply(wanted, tasks)
        digest = hashlib.md5(contents, usedforsecurity=False).digest()
        self._applied = int.from_bytes(digest[:8], "little"), time.time()
        self._refuse(f"{'; '.join(refused)}; these flow logs stay as they were" if refused else "")

    def _refuse(self, reason: str) -> None:
        """Report why the watched file is not applied, or not all of it; empty if it is."""
        path = self._settings.hubble_flowlogs_config_path
        self._refused = f"hubble-flowlogs-config-path={path}: {reason}" if reason else ""
        if reason:
            self._log.warning(self._refused)
        self._report()

    def _apply(self, wanted: dict[str, FlowLog], tasks: TaskGroup) -> None:
        for name in self._configured.keys() - wanted.keys():
            self.reconfigurations["remove"] += 1
            self._stop(name)
        for name, one in wanted.items():
            if name not in self._configured:
                self.reconfigurations["add"] += 1
            elif not one.equals(self._configured[name]):
                self.reconfigurations["update"] += 1
                self._stop(name)
            else:
                continue
            if one.end is None or one.end > time.time_ns():
                scope = CancelScope()
                self._running[name] = one, scope
                tasks.start_soon(self._run, one, scope)
        self._configured = wanted

    def _stop(self, name: str) -> None:
        running = self._running.pop(name, None)
        if running is not None:
            running[1].cancel()

    async def _run(self, flow_log: FlowLog, scope: CancelScope) -> None:
        """Run one log of the watched file until its end time, or until the file changes it."""
        seconds = None if flow_log.end is None else max(flow_log.end - time.time_ns(), 0) / 1e9
        with scope, anyio.move_on_after(seconds):
            await self._write(flow_log)
        running = self._running.get(flow_log.name)
        if running is not None and running[1] is scope:
            del self._running[flow_log.name]
            self._report()
