"""Spans around starts, stops, jobs and batches, for a tracer; nearly free without one."""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar

__all__ = ["Opener", "Spans", "in_force", "span"]

Opener = Callable[[str, Mapping[str, str | int]], AbstractContextManager[object]]
"""Returns a context for a span of this name with these attributes; an exception marks it as failed."""

_NOTHING = contextlib.nullcontext()


class Spans:
    """The tracer of the hive. A constructor sets it; it applies to all that starts afterwards."""

    __slots__ = ("opener",)

    def __init__(self) -> None:
        self.opener: Opener | None = None


in_force: ContextVar[Spans | None] = ContextVar("spans of the hive around", default=None)


def span(name: str, attributes: Mapping[str, str | int]) -> AbstractContextManager[object]:
    """Open a span around a job's run or a reconciler's batch; takes 0.1 µs without a tracer."""
    spans = in_force.get()
    return _NOTHING if spans is None or spans.opener is None else spans.opener(name, attributes)
