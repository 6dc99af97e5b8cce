"""Leaks of a block: tasks, file descriptors, threads."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread
import msgspec

from lifecycle.hooks.stacks import await_stack

__all__ = ["LeakError", "no_leaks"]

_TURNS = 10
"""Turns of the loop in which what has just ended may disappear."""
_PAUSE = 0.01
"""Seconds between two checks."""
_DESCRIPTORS = Path("/proc/self/fd")


class LeakError(AssertionError):
    """Something was left behind; the text names each thing."""


class _Snapshot(msgspec.Struct, frozen=True):
    """The existing tasks, descriptors and threads."""

    tasks: "frozenset[asyncio.Task[object]]"
    threads: frozenset[threading.Thread]
    busy: int
    """Busy workers of anyio. Idle ones are pooled, so they do not count."""
    descriptors: dict[int, str]


@asynccontextmanager
async def no_leaks(patience: float = 0.0) -> AsyncIterator[None]:
    """Raise LeakError if the block leaves a task, a descriptor, a thread or a busy worker behind.

    What existed before may disappear, and late closers have `patience` seconds. A block that raises is not
    checked: its own error is more useful.
    """
    before = _snapshot()
    yield
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    if not list(_left(before)):
        return
    gc.collect()  # reference cycles are no leaks
    await asyncio.sleep(0)
    deadline = time.monotonic() + patience
    while (left := list(_left(before))) and time.monotonic() < deadline:  # noqa: ASYNC110  # they wake no one
        await asyncio.sleep(_PAUSE)
    if left:
        raise LeakError("\n- ".join(("left behind:", *left)))


def _snapshot() -> _Snapshot:
    return _Snapshot(
        frozenset(asyncio.all_tasks()),
        frozenset(filter(_counts, threading.enumerate())),
        anyio.to_thread.current_default_thread_limiter().borrowed_tokens,
        dict(_descriptors()),
    )


def _left(before: _Snapshot) -> Iterator[str]:
    now = _snapshot()
    for task in now.tasks - before.tasks:
        stack = await_stack(task, below=frozenset())
        yield f"task {task.get_name()!r}{f', in {stack[-1]}' if stack else ''}"
    for number, target in now.descriptors.items():
        if before.descriptors.get(number) != target:
            yield f"descriptor {number}, {target}"
    for thread in now.threads - before.threads:
        yield f"thread {thread.name!r}"
    if (busy := now.busy - before.busy) > 0:
        yield "a call in a worker thread" if busy == 1 else f"{busy} calls in worker threads"


def _counts(thread: threading.Thread) -> bool:
    """Whether it is not a pooled worker of anyio or of the loop's executor."""
    return not type(thread).__module__.startswith("anyio") and not thread.name.startswith("asyncio_")


def _descriptors() -> Iterator[tuple[int, str]]:
    try:
        paths = list(_DESCRIPTORS.iterdir())
    except FileNotFoundError:  # not Linux
        return
    for path in paths:
        try:
            yield int(path.name), str(path.readlink())
        except FileNotFoundError:  # the descriptor of this listing
            continue
