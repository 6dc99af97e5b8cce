"""Starts processes that outlive the agent, in sessions of their own, and waits for their end.

Source: pidfd_open(2), posix_spawn(3), setsid(2).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import anyio

__all__ = ["detached", "exit_code", "exit_text", "pidfd_ended", "process_ended"]


def detached(
    program: Path,
    command: list[str],
    environment: Mapping[str, str],
    files: Mapping[int, int] | None = None,
) -> int:
    """Start a program in a new session, and return its process id. Raises OSError.

    ``files`` maps the program's descriptors to the agent's, which must all be higher. It inherits no others;
    0 to 2 default to /dev/null.
    """
    given = files or {}
    null = [(os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in {0, 1, 2} - given.keys()]
    passed = [(os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in given.items()]
    closed = [(os.POSIX_SPAWN_CLOSE, number) for number in _inherited() if number not in given]
    return os.posix_spawn(program, command, environment, file_actions=[*null, *passed, *closed], setsid=True)


def _inherited() -> list[int]:
    """Return the descriptors above 2 that a child process would inherit."""
    found = []
    for number in (int(one.name) for one in Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            if number > 2 and os.get_inheritable(number):
                found.append(number)
    return found


async def process_ended(pid: int) -> None:
    """Wait until the process ends; it need not be a child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await pidfd_ended(handle)
    finally:
        os.close(handle)


async def pidfd_ended(handle: int) -> None:
    """Wait until the process of the pidfd ends."""
    loop = asyncio.get_running_loop()
    over = anyio.Event()
    try:
        loop.add_reader(handle, over.set)
        await over.wait()
    finally:
        loop.remove_reader(handle)


def exit_code(pid: int) -> int | None:
    """Return the exit code of a child; None while it runs, and for other processes."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if ended else None


def exit_text(pid: int) -> str:
    """Return the exit code as ``, status 1``; empty for None."""
    code = exit_code(pid)
    return "" if code is None else f", status {code}"
