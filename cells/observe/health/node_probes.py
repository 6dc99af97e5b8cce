"""What of the node may go away under a running agent: its maps' file system, its state directory.

For:   Probes.   Needs: AgentConfig.   Gives: probes of both.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio.to_thread

from cells.config import AgentConfig
from cells.observe.health.probes import Probe
from lifecycle import HiveError, Member


def maps_probe(agent: AgentConfig) -> Member[Probe]:
    """The directory of the maps answers, and is there."""
    return Probe("bpf-maps", partial(_ask, _maps_there, agent.globals_dir))


def state_probe(agent: AgentConfig) -> Member[Probe]:
    """The state directory answers, and can be written."""
    return Probe("state-directory", partial(_ask, _room_left, agent.state))


async def _ask(question: Callable[[Path], None], path: Path) -> None:
    """In a thread, which is left behind if it never comes back."""
    await anyio.to_thread.run_sync(question, path, abandon_on_cancel=True)


def _maps_there(directory: Path) -> None:
    """Raise HiveError when the maps' pins are gone: a restart would begin with empty maps."""
    if not directory.is_dir():
        raise HiveError(f"{directory}: the maps' pins are missing; is the bpf file system still mounted?")


def _room_left(directory: Path) -> None:
    """Raise HiveError when endpoints cannot be saved."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        raise HiveError(f"{directory}: {os.strerror(error.errno or 0)}; pods cannot be added") from error
    if found.f_flag & os.ST_RDONLY:
        raise HiveError(f"{directory}: read-only; pods cannot be added")
    if found.f_bavail == 0 and found.f_blocks:
        raise HiveError(f"{directory}: no space left; pods cannot be added")
