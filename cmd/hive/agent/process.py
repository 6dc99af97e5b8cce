"""The agent's process, from its settings to its exit code, without the imports of other commands."""

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
"""Name of the file in the config-dir that may contain several settings, an extension of ours."""

ENV_PREFIX = "CILIUM_"
"""Prefix of environment variables, as in Cilium."""

FILE_FLAG = "config"
"""The flag of a YAML file with settings."""

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h


def run_agent(settings: Sequence[str]) -> int:
    """Run the agent until a signal; return the exit code."""
    gc.disable()  # imports create next to no garbage: collections take 10 ms of the start
    share_heap()
    from lifecycle import configure_logging

    configure_logging()
    from hive.agent.preload import preloading

    hive = build(settings, cells=preloading(sources_of(settings, os.environ)))
    gc.freeze()  # imported objects stay: exclude them from collections
    gc.enable()
    return run(hive)


def share_heap() -> None:
    """Make all threads allocate from one heap of glibc, before threads start; a no-op elsewhere.

    Otherwise each thread has its own heap and retains freed memory of libbpf: some 4 MB after a start.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)


def run(hive: "Hive") -> int:
    """Run a hive to its end; return the exit code."""
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
    """Return the agent's hive with these flags, the environment and the config-dir; nothing is started.

    ``cells`` are added to the agent's. Its config-dir is that of all of Cilium: keys of other programs are
    ignored, other unknown keys are warnings.
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
    """Return the sources of the agent's settings; ``others`` are keys of other programs."""
    from lifecycle import Sources

    return Sources(
        settings, environment, prefix=ENV_PREFIX, yaml_name=YAML_NAME, file_flag=FILE_FLAG, others=others
    )


def refuse(error: "GraphError", broken: int = BROKEN) -> int:
    """Print why the hive cannot be built, a line per invalid setting, or all faults of the graph; return the
    exit code.
    """
    from lifecycle import SettingsError

    if not isinstance(error, SettingsError):
        print(f"hive: {error}", file=sys.stderr)
        return broken
    for fault in error.faults:
        print(f"hive: {fault.text}", file=sys.stderr)
    return USAGE
