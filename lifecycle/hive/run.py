"""A hive as a process: signals, exit code, messages for the user."""

import asyncio
import contextlib
import gc
import signal
import sys
import traceback
import types
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import anyio

from lifecycle.errors import (
    ExitRequestedError,
    HiveError,
    HookTimeoutError,
    ShutdownRequestedError,
    StartError,
    StopError,
    described,
    exit_code,
    leaves,
    texts,
)
from lifecycle.hive.reload import Reload
from lifecycle.hive.signals import leave, signals
from lifecycle.hooks.shutdown import Shutdown
from lifecycle.process.logs import Logger

__all__ = ["run"]

SWITCH_SECONDS = 0.0005
"""How long a worker thread may hold the interpreter lock while the event loop wants it. Python's default is 5
ms.
"""


YOUNG = 100_000
"""Threshold of the garbage collector's youngest generation during a start, as nearly all objects stay.
Python's default is 700.
"""


class Process(Protocol):
    """The interface of a hive that run() uses."""

    name: str
    log: Logger
    shutdown: Shutdown
    reload: Reload
    left_behind: list[str]

    def started(self) -> AbstractAsyncContextManager[object]:
        """The hive, started; stopped at the end of the block."""
        ...


async def run(hive: Process) -> int:
    """Start the hive, wait for a signal or a Shutdown, stop it. Returns the exit code.

    SIGINT and SIGTERM stop it, and SIGHUP unless something reloads at it; a second signal during the stop
    ends the process with 1, even while code blocks the event loop. On return, earlier signal handlers are
    restored. Raises RuntimeError outside the main thread.
    """

    def stop(number: signal.Signals) -> None:
        hive.log.info("signal: stopping; once more to leave at once", signal=number.name)
        hive.shutdown.request()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with signals(hive.name, stop, hive.reload.request):
            return await _run(hive)
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()


async def _run(hive: Process) -> int:
    gc.freeze()  # imported objects: saves 20 ms in the collection below, while the loop is blocked
    stop_requested = anyio.Event()
    hive.shutdown.listen(stop_requested.set)
    usual = gc.get_threshold()
    gc.set_threshold(YOUNG, *usual[1:])
    try:
        async with hive.started():
            gc.collect()
            gc.freeze()  # objects of the start live as long as the process: exclude them from collections
            gc.set_threshold(*usual)
            hive.log.info("started")
            await stop_requested.wait()
            hive.log.info("stopping")
        hive.log.info("stopped")
    except Exception as error:  # noqa: BLE001  # top of the process: becomes the message and exit code
        return _ended_by(hive, error)
    finally:
        gc.set_threshold(*usual)
    return 0


def _ended_by(hive: Process, error: Exception) -> int:
    """Print why the run ended; return the exit code."""
    code, errors = exit_code(error), list(leaves(error))
    if all(isinstance(leaf, ShutdownRequestedError) for leaf in errors):
        hive.log.info("stopped before it had started")
        return 0
    if code == 0 and all(isinstance(leaf, ExitRequestedError) for leaf in errors):
        hive.log.info("stopped", why=str(errors[0]))
    else:
        sys.stderr.write(_message(hive.name, error))
    if hive.left_behind:
        leave(hive.name, f"leaving with {', '.join(hive.left_behind)} running", code)
    return code


def _message(name: str, error: Exception) -> str:
    """Return one line for each fault that the user can correct.

    For other errors, tracebacks from cells and then what failed.
    """
    if lines := texts(error):
        return "".join(f"{name}: {text}\n" for text in lines)
    raised = [leaf for leaf in leaves(error) if not isinstance(leaf, HiveError | HookTimeoutError)]
    named = str(error) if isinstance(error, HiveError) else described(error)
    last = str(error) if isinstance(error, StartError | StopError) else f"{name}: {named}"
    return "".join([*map(_trace, raised), "\n".join([last, *getattr(error, "__notes__", ())]), "\n"])


def _trace(error: BaseException) -> str:
    """Return a traceback that begins in code of a cell, without the frames of the hive that called it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _is_ours(trace):
        trace = trace.tb_next
    if isinstance(error.__context__, asyncio.CancelledError):  # the run was cancelled because of the error
        error.__suppress_context__ = True
    return "".join(traceback.format_exception(type(error), error, trace))


def _is_ours(trace: types.TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file == contextlib.__file__ or file.startswith(f"{Path(__file__).parents[1]}/")
