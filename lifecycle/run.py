"""A hive as a process: signals, exit code, what the user is told.

Needs:  a hive.
Gives:  run().
"""

import asyncio
import gc
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

import anyio

from lifecycle.errors import ShutdownRequestedError, exit_code, leaves, texts

if TYPE_CHECKING:
    from lifecycle.hive import Hive

__all__ = ["run"]


async def run(hive: "Hive") -> int:
    """Start, wait for a signal or a Shutdown, stop; the exit code.

    SIGINT and SIGTERM stop it, a second one while it stops ends the process with 1. On its return they have
    Python's handlers again, which end the process another way: whoever leaves then should ignore them first.
    """
    gc.freeze()  # what was imported: 20 ms less to look through below, while the loop stands still
    asked = anyio.Event()
    hive.shutdown.listen(asked.set)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _on_signal, hive, number)
    try:
        async with hive.started():
            gc.collect()
            gc.freeze()  # what the start left behind lives as long as the process: never look again
            hive.log.info("started")
            await asked.wait()
            hive.log.info("stopping")
        hive.log.info("stopped")
    except Exception as error:  # noqa: BLE001  # the top of the process
        if all(isinstance(leaf, ShutdownRequestedError) for leaf in leaves(error)):
            hive.log.info("stopped before it had started")
            return 0
        sys.stderr.write(_told(hive.name, error))
        if hive.left_behind:
            _leave(hive.name, f"leaving with {', '.join(hive.left_behind)} running", exit_code(error))
        return exit_code(error)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        gc.unfreeze()
    return 0


def _told(name: str, error: Exception) -> str:
    """A line for each fault the user can act on; the whole traceback for what only we can."""
    lines = (f"{name}: {text}\n" for text in texts(error))
    return "".join(lines) or "".join(traceback.format_exception(error))


def _on_signal(hive: "Hive", number: signal.Signals) -> None:
    if hive.shutdown.requested:
        _leave(hive.name, "second signal, leaving at once", 1)
    hive.log.info("signal: stopping; once more to leave at once", signal=number.name)
    hive.shutdown.request()


def _leave(name: str, why: str, code: int) -> NoReturn:
    """End the process without waiting for its threads."""
    sys.stderr.write(f"{name}: {why}\n")
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)
