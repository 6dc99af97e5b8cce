"""OpenTelemetry spans of the start, of runs of jobs and of batches of reconcilers.

Source: OpenTelemetry's API for Python; ``code.function`` and similar attributes are from its semantic
conventions.
"""

import importlib.util
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from lifecycle.errors import HiveError
from lifecycle.hooks.phase import Phase
from lifecycle.hooks.spans import Spans
from lifecycle.injection import Cell, Profile, invoke, module, provide

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider

__all__ = ["Traces", "traces"]

SCOPE = "lifecycle"


class Traces:
    """Opens spans as children of the current span; spans that a job's work opens become their children."""

    def __init__(self, tracer: "Tracer", spans: Spans, phase: Phase, profile: Profile) -> None:
        self._tracer = tracer
        self._phase = phase
        self._profile = profile
        self._unfollow = phase.follow(self._on_phase)
        spans.opener = self._open

    def _open(self, name: str, attributes: Mapping[str, str | int]) -> AbstractContextManager[object]:
        opened: AbstractContextManager[object] = self._tracer.start_as_current_span(
            name, attributes=dict(attributes)
        )
        return opened

    def _on_phase(self) -> None:
        if self._phase.stage in {"running", "stopping", "stopped"}:
            self._unfollow()
            self._show_start(failed=self._phase.stage != "running")

    def _show_start(self, *, failed: bool) -> None:
        """The start, which is over, as a span with one for each constructor and hook."""
        from opentelemetry.trace import StatusCode, set_span_in_context

        offset = time.time_ns() - time.perf_counter_ns()

        def at(seconds: float) -> int:
            return offset + int((self._profile.origin + seconds) * 1e9)

        whole = self._tracer.start_span("start", start_time=at(0.0))
        inside = set_span_in_context(whole)
        for timing in (*self._profile.timings, *self._profile.failed):
            attributes = {"lifecycle.module": timing.module, "lifecycle.step": timing.kind}
            part = self._tracer.start_span(
                f"{timing.kind} {timing.name}",
                context=inside,
                start_time=at(timing.began),
                attributes=attributes,
            )
            if timing in self._profile.failed:
                part.set_status(StatusCode.ERROR)
            part.end(at(timing.began + timing.took))
        if failed:
            whole.set_status(StatusCode.ERROR)
        whole.end()


def traces(provider: "TracerProvider | None" = None) -> Cell:
    """Return the module ``traces``: spans by this provider, or by the process's global one.

    Raises HiveError if OpenTelemetry's API is not installed.
    """
    if importlib.util.find_spec("opentelemetry") is None:
        raise HiveError("traces() needs opentelemetry-api: pip install 'hive-lifecycle[otel]'")
    from opentelemetry.trace import get_tracer

    def make(spans: Spans, phase: Phase, profile: Profile) -> Traces:
        return Traces(get_tracer(SCOPE, tracer_provider=provider), spans, phase, profile)

    return module("traces", "OpenTelemetry spans", provide(make), invoke(Traces))
