"""Await stacks of suspended tasks, for the errors of hooks that hang."""

import asyncio
import contextlib
import gc
import inspect
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from itertools import dropwhile

from lifecycle.hints.places import Place

__all__ = ["await_stack", "running_threads"]


def await_stack(task: "asyncio.Task[object]", *, below: frozenset[str]) -> list[str]:
    """Return the frames of a task, outermost first, as ``name at file:line``, of callees of the files
    `below`.

    If it awaits a worker thread, the frames of that thread follow, outermost first.
    """
    frames = list(_frames(task.get_coro()))
    internal = [number for number, frame in enumerate(frames) if frame.f_code.co_filename in below]
    lines = [
        _line(frame)
        for frame in frames[internal[-1] + 1 if internal else 0 :]
        if frame.f_code.co_filename != contextlib.__file__
    ]
    return lines + [f"{line} (worker thread)" for line in _thread(frames)]


def running_threads() -> list[str]:
    """Return the threads that prevent the process from ending, with place: ``thread 'x' in f at y.py:3``."""
    frames = sys._current_frames()  # noqa: SLF001  # the documented way
    lines = []
    for thread in threading.enumerate():
        if thread.daemon or thread is threading.main_thread():
            continue
        frame = frames.get(thread.ident or 0)
        while frame is not None and frame.f_code.co_filename == threading.__file__:
            frame = frame.f_back  # show the caller of the wait in threading
        lines.append(f"thread {thread.name!r}" + (f" in {_line(frame)}" if frame is not None else ""))
    return lines


def _line(frame: types.FrameType) -> str:
    return f"{frame.f_code.co_qualname} at {Place(frame.f_code.co_filename, frame.f_lineno)}"


def _thread(frames: Sequence[types.FrameType]) -> list[str]:
    """Return the frames of the worker thread that the innermost frame awaits, without those of the pool."""
    variables = frames[-1].f_locals.values() if frames else ()
    worker = next((thread for thread in variables if isinstance(thread, threading.Thread)), None)
    frame = sys._current_frames().get(worker.ident or 0) if worker else None  # noqa: SLF001  # the documented way
    running: list[types.FrameType] = []
    while frame is not None:
        running.insert(0, frame)
        frame = frame.f_back
    machinery = {threading.__file__, getattr(sys.modules[type(worker).__module__], "__file__", None)}
    return [*map(_line, dropwhile(lambda frame: frame.f_code.co_filename in machinery, running))]


def _frames(awaited: object) -> Iterator[types.FrameType]:
    """Follow the awaited frames, at most 64."""
    for _ in range(64):
        frame: types.FrameType | None
        if inspect.iscoroutine(awaited):
            frame, awaited = awaited.cr_frame, awaited.cr_await
        elif inspect.isgenerator(awaited):
            frame, awaited = awaited.gi_frame, awaited.gi_yieldfrom
        elif inspect.isasyncgen(awaited):
            frame, awaited = awaited.ag_frame, awaited.ag_await
        else:
            # the awaited generator is not an attribute of anext() and asend()
            inner = [
                referent
                for referent in gc.get_referents(awaited)
                if inspect.isasyncgen(referent) or inspect.iscoroutine(referent)
            ]
            if not inner or awaited is None or isinstance(awaited, asyncio.Future):
                return
            awaited = inner[0]
            continue
        if frame is not None:
            yield frame
