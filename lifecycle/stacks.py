"""What a suspended task awaits, frame by frame: for the errors of hooks that hang.

Needs:  nothing.
Gives:  await_stack().
"""

import asyncio
import contextlib
import gc
import inspect
import types
from collections.abc import Iterator

from lifecycle.places import Place

__all__ = ["await_stack"]


def await_stack(task: "asyncio.Task[object]", *, below: frozenset[str]) -> list[str]:
    """The task's frames, outermost first, as ``name at file:line``: those called by code of files `below`."""
    frames = list(_frames(task.get_coro()))
    ours = [number for number, frame in enumerate(frames) if frame.f_code.co_filename in below]
    return [
        f"{frame.f_code.co_qualname} at {Place(frame.f_code.co_filename, frame.f_lineno)}"
        for frame in frames[ours[-1] + 1 if ours else 0 :]
        if frame.f_code.co_filename != contextlib.__file__
    ]


def _frames(awaited: object) -> Iterator[types.FrameType]:
    """Follow what each frame awaits; 64 are enough for a person."""
    for _ in range(64):
        frame: types.FrameType | None
        if inspect.iscoroutine(awaited):
            frame, awaited = awaited.cr_frame, awaited.cr_await
        elif inspect.isgenerator(awaited):
            frame, awaited = awaited.gi_frame, awaited.gi_yieldfrom
        elif inspect.isasyncgen(awaited):
            frame, awaited = awaited.ag_frame, awaited.ag_await
        else:
            # anext() and asend() of an async generator hold it out of reach of attributes
            inner = [
                held
                for held in gc.get_referents(awaited)
                if inspect.isasyncgen(held) or inspect.iscoroutine(held)
            ]
            if not inner or awaited is None or isinstance(awaited, asyncio.Future):
                return
            awaited = inner[0]
            continue
        if frame is not None:
            yield frame
