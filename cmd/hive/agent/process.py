"""The agent's process, from its settings to its exit code, without what other commands are made of."""

import ctypes
import gc
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lifecycle import Cell, GraphError, Hive, Sources

HELP = {"--help", "-h"}
USAGE, BROKEN = 2, 2

YAML_NAME = "cilium-config.yaml"
"""A file of the config-dir that may hold several settings, an extension of ours."""

ENV_PREFIX = "CILIUM_"
"""Of environment variables, as Cilium's agent has it."""

FILE_FLAG = "config"
"""The flag that may name a YAML file of settings."""

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h


def run_agent(settings: Sequence[str]) -> int:
    """Run the agent until a signal; the exit code."""
    gc.disable()  # importing makes next to no garbage: looking for it takes 10 ms of the start
    share_heap()
    from lifecycle import configure_logging

    configure_logging()
    from hive.agent.preload import preloading

    hive = build(settings, cells=preloading(sources_of(settings, os.environ)))
    gc.freeze()  # what is imported stays: no collection has to look through it again
    gc.enable()
    return run(hive)


def share_heap() -> None:
    """Make all threads allocate from one heap of glibc's, before there is a thread; elsewhere nothing.

    Else each gets one of its own, and keeps what libbpf takes and frees: some 4 MB after a start.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)


def run(hive: "Hive") -> int:
    """Run a hive to its end; the exit code."""
    from lifecycle import GraphError, configure_logging

    try:
        debug = any(one.option.name == "debug" and one.value for one in hive.settings())
    except GraphError as error:
        return refuse(error)
    if debug:
        configure_logging("debug")
    import anyio

    from lifecycle.process import measured_loop

    return anyio.run(hive.run_to_the_end, backend_options={"loop_factory": measured_loop})


def build(
    settings: Sequence[str], environment: Mapping[str, str] = os.environ, cells: "Sequence[Cell]" = ()
) -> "Hive":
    """The hive of the agent with these flags, the environment and the config-dir. Nothing is started.

    Beside the agent it has ``cells``. Its config-dir is that of the whole of Cilium: keys that other programs
    read are passed over, and any other that is unknown is a warning.
    """
    from cells.agent import agent
    from cells.unsupported import OTHERS
    from lifecycle import Hive

    argv = [word for word in settings if word not in HELP]
    sources = sources_of(argv, environment, OTHERS)
    return Hive(agent, *cells, settings=sources, name="hive", refuse_circles=True)


def sources_of(
    settings: Sequence[str], environment: Mapping[str, str], others: Iterable[str] = ()
) -> "Sources":
    """Where the agent has its settings from. ``others``: keys there that other programs read."""
    from lifecycle import Sources

    return Sources(
        settings, environment, prefix=ENV_PREFIX, yaml_name=YAML_NAME, file_flag=FILE_FLAG, others=others
    )


def refuse(error: "GraphError", broken: int = BROKEN) -> int:
    """Say why the hive cannot be: a line per wrong setting, or all faults of the graph; the exit code."""
    from lifecycle import SettingsError

    if not isinstance(error, SettingsError):
        print(f"hive: {error}", file=sys.stderr)
        return broken
    for fault in error.faults:
        print(f"hive: {fault.text}", file=sys.stderr)
    return USAGE
